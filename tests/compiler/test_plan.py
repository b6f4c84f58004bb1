"""The cut: owners, order, what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spu_llm.compiler.plan import OpCall, Run, make_plan
from spu_llm.core.reveal import reveal
from spu_llm.core.values import Owner

C, P, J, X = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT, Owner.PUBLIC
F32 = np.float32


def shape(*dims: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def owners(plan: Any) -> list[str]:
    return [s.op.name if isinstance(s, OpCall) else s.owner.value for s in plan.steps]


def test_work_of_one_owner_stays_in_the_clear() -> None:
    def fn(x: Any, w: Any, c: Any) -> list[Any]:
        return [(jnp.tanh(x) * c) @ (w * 2.0 * c.sum())]

    plan = make_plan(fn, [shape(2, 3), shape(3, 4), shape(3)], [C, P, X])
    assert owners(plan) == ["public", "client", "provider", "joint"]
    (segment,) = [s for s in plan.steps if isinstance(s, Run) and s.owner is J]
    assert [e.primitive.name for e in segment.jaxpr.jaxpr.eqns] == ["dot_general"]
    assert plan.output_owners == (J,)


def test_op_inside_jit_is_seen_and_order_follows_data() -> None:
    def fn(x: Any, w: Any) -> list[Any]:
        y = x @ w
        bits = jax.jit(lambda v: reveal(v < 0, to=C, label="signs"))(y)
        chosen = jnp.where(bits[..., None].any(-1), 1.0, 0.0)  # the client's own
        return [reveal(chosen * y, to=X, label="result")]

    plan = make_plan(fn, [shape(2, 3), shape(3, 4)], [C, P])
    steps = [o for o in owners(plan) if o != "public"]  # constants are made by both
    assert steps == ["joint", "reveal", "client", "joint", "reveal"]
    assert plan.output_owners == (X,)


@pytest.mark.parametrize("name", ["scan", "cond", "while"])
def test_op_inside_control_flow_is_refused(name: str) -> None:
    def opened(v: Any) -> Any:
        return reveal(v, to=X, label="v")

    programs = {
        "scan": lambda v: jax.lax.scan(lambda c, _: (opened(c), None), v, None, length=2)[0],
        "cond": lambda v: jax.lax.cond(v.sum() > 0, opened, lambda u: u, v),
        "while": lambda v: jax.lax.while_loop(lambda u: u.sum() > 0, opened, v),
    }
    with pytest.raises(NotImplementedError, match=f"inside `{name}`"):
        make_plan(lambda v: [programs[name](v)], [shape(3)], [J])


def test_op_refuses_vmap_rather_than_changing_meaning() -> None:
    with pytest.raises(NotImplementedError):
        jax.vmap(lambda v: reveal(v, to=X, label="v"))(jnp.ones((2, 3)))


def test_digest_tells_programs_apart() -> None:
    def plan(scale: float, owner: Owner, to: Owner = C) -> str:
        return make_plan(
            lambda x, w: [reveal(x @ w * scale, to=to, label="y")],
            [shape(2, 3), shape(3, 4)],
            [owner, P],
        ).digest

    same = {plan(1.5, C), plan(1.5, C)}
    assert len(same) == 1
    assert len(same | {plan(1.25, C), plan(1.5, J), plan(1.5, C, X)}) == 4


def test_closed_over_arrays_are_part_of_the_program() -> None:
    def plan(constant: Any) -> Any:
        return make_plan(lambda x: [x * constant, x], [shape(2)], [C])

    one, two = plan(np.ones(2, np.float32)), plan(np.zeros(2, np.float32))
    assert one.digest != two.digest
    assert one.output_owners == (C, C)


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("top_k", lambda x, w: jax.lax.top_k(x @ w, 2)[0]),
        ("scan", lambda x, w: jax.lax.scan(lambda c, r: (c + r, r), (x @ w)[0], x @ w)[0]),
        ("cond", lambda x, w: jax.lax.cond((x @ w).sum() > 0, jnp.sin, jnp.cos, x @ w)),
        (
            "dynamic_slice",
            lambda x, w: jax.lax.dynamic_slice(x @ w, (jnp.argmax(x @ w), 0), (1, 1)),
        ),
        ("gather", lambda x, w: (x @ w)[jnp.argmax(x @ w, axis=1)]),
        ("shift_right_arithmetic", lambda x, w: jnp.int32(8) >> (x @ w).astype(jnp.int32)),
    ],
)
def test_segments_hold_only_what_spu_computes_without_opening(name: str, fn: Any) -> None:
    with pytest.raises(NotImplementedError, match=name):
        make_plan(lambda x, w: [fn(x, w)], [shape(2, 3), shape(3, 4)], [C, P])
    # On one party's own values the same function is plaintext work.
    assert owners(make_plan(lambda x, w: [fn(x, w)], [shape(2, 3), shape(3, 4)], [C, X]))


def test_printing_a_plan_shows_the_program() -> None:
    plan = make_plan(lambda x, w: [x @ w], [shape(2, 3), shape(3, 4)], [C, P])
    assert str(plan) == "  0 segment: 1 equations -> float32[2,4]"
