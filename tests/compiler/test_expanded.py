"""Equations replaced by the equations of a body: same results, scopes, constants."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spu_llm.compiler.plan import OpCall, Run, make_plan
from spu_llm.core._jax import as_function, digest_of, expanded, flat_jaxpr, scope_of
from spu_llm.core.approx import approximation, form_on_shares
from spu_llm.core.op import protocol_op
from spu_llm.core.settings import OWN, SPU
from spu_llm.core.values import Owner

VECTOR = jax.ShapeDtypeStruct((3,), np.float32)
X = np.array([0.5, -1.0, 2.0], np.float32)
TABLE = np.array([1.0, 2.0, 4.0], np.float32)


def _inner(x: Any) -> Any:
    with jax.named_scope("deep"):
        return x * TABLE


inner = approximation("toy inner", reference=lambda x: x, on_shares=_inner)


def _outer(x: Any, y: Any) -> tuple[Any, Any]:
    return inner(x) + y, x  # one result is an operand


outer = approximation("toy outer", reference=lambda x, y: (x + y, x), on_shares=_outer)


def spelt_out(fn: Any) -> Any:
    closed = flat_jaxpr(fn, [VECTOR])
    while (form := expanded(closed, form_on_shares)) is not closed:
        closed = form
    return closed


def used_twice(x: Any) -> list[Any]:
    first, same = outer(x, 3.0)
    with jax.named_scope("second"):
        second, _ = outer(same, first)
    return [first, second, same]


def test_a_body_stands_for_its_equation() -> None:
    closed = spelt_out(used_twice)
    first = X * TABLE + 3
    for got, wanted in zip(as_function(closed)(X), [first, X * TABLE + first, X], strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert closed.jaxpr.outvars[2] is closed.jaxpr.invars[0]


def test_its_equations_keep_scopes_within_the_equations() -> None:
    products = [e for e in spelt_out(used_twice).jaxpr.eqns if e.primitive.name == "mul"]
    within = "toy outer/toy inner/deep"
    assert list(map(scope_of, products)) == [within, f"second/{within}"]


def test_a_constant_of_a_body_is_there_once() -> None:
    closed = spelt_out(used_twice)
    assert [np.asarray(c).tolist() for c in closed.consts] == [TABLE.tolist()]


def test_no_variable_is_made_twice() -> None:
    closed = spelt_out(lambda x: [*used_twice(x), *used_twice(jnp.sin(x))])
    made = [v for e in closed.jaxpr.eqns for v in e.outvars]
    assert len(made) == len(set(made)) and not {*made} & {*closed.jaxpr.invars}


def test_calls_are_inlined_to_the_bottom() -> None:
    def fn(x: Any) -> list[Any]:
        return [jax.jit(lambda y: jax.jit(jnp.sin)(y) + jax.nn.relu(y))(x)]

    closed = flat_jaxpr(fn, [VECTOR])
    assert {e.primitive.name for e in closed.jaxpr.eqns} == {"sin", "max", "add"}
    np.testing.assert_allclose(as_function(closed)(X)[0], fn(X)[0], rtol=1e-6)


def test_the_digest_is_that_of_the_same_program_traced_again() -> None:
    assert digest_of(spelt_out(used_twice)) == digest_of(spelt_out(used_twice))
    assert digest_of(spelt_out(used_twice)) != digest_of(spelt_out(lambda x: [outer(x, 2.0)[0]]))


def test_types_of_64_bits_have_a_form_of_their_own() -> None:
    flat = spelt_out(used_twice)
    with jax.experimental.enable_x64():
        wide = jax.ShapeDtypeStruct((3,), np.float64)
        closed = flat_jaxpr(lambda x: [outer(x, 3.0)[0]], [wide])
        (result,) = as_function(expanded(closed, form_on_shares))(X.astype(np.float64))
    assert result.dtype == np.float64
    assert as_function(flat)(X)[0].dtype == np.float32


def test_a_form_of_another_shape_is_refused() -> None:
    longer = approximation(
        "toy longer", reference=lambda x: x, on_shares=lambda x: jnp.concatenate([x, x])
    )
    with pytest.raises(AssertionError, match="toy longer gives"):
        spelt_out(lambda x: [longer(x)])


def test_spu_computes_a_forward_by_its_exact_functions() -> None:
    """Approximations and ops of a forward give way to what they mean; other ops stay."""

    def op(name: str, of_forward: bool) -> Any:
        return protocol_op(
            name,
            reference=lambda x: 2 * x,
            two_party=lambda party, x: x,
            cost=lambda x: None,  # type: ignore[arg-type,return-value]
            simulate=lambda *views, **static: None,  # type: ignore[arg-type,return-value]
            of_forward=of_forward,
        )

    doubled, kept = op("toy doubled", True), op("toy kept", False)

    def fn(x: Any) -> list[Any]:
        return [kept(doubled(outer(x, x)[0]))]

    def named(backend: str) -> list[str]:
        plan = make_plan(fn, [VECTOR], [Owner.JOINT], backend=backend)
        return [s.op.name for s in plan.steps if isinstance(s, OpCall)]

    assert named(OWN) == ["toy doubled", "toy kept"]
    assert named(SPU) == ["toy kept"]
    plan = make_plan(fn, [VECTOR], [Owner.JOINT], backend=SPU)
    (run,) = [s for s in plan.steps if isinstance(s, Run)]
    np.testing.assert_allclose(as_function(run.jaxpr)(X)[0], 4 * X)
