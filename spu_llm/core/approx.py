"""Functions with a form of their own on shares: exact in plaintext, approximate on shares.

An approximation is not a protocol op: it says what to compute on shares, in ordinary JAX with ops
inside, while plaintext (reference, drafting, training, one party's own work) keeps the exact
function. Nobody learns anything from it beyond what its ops give. A program may also leave the
exact function to SPU (`reference_of`), which has approximations of its own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from spu_llm.core._jax import (
    ClosedJaxpr,
    JaxprEqn,
    flat_jaxpr,
    make_differentiable,
    make_primitive,
    shape_of,
    widest_integers,
)
from spu_llm.core.op import op_of


class _Forms(NamedTuple):
    reference: Callable[..., Any]
    on_shares: Callable[..., Any]


_FORMS: dict[Any, _Forms] = {}  # by primitive


def approximation(
    name: str, *, reference: Callable[..., Any], on_shares: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the function `reference(*arrays, **static)`, computed as `on_shares` where what comes
    in belongs to both parties. It is differentiable and batchable as the reference is.

    Raise ValueError when the name is taken.
    """
    if any(primitive.name == name for primitive in _FORMS):
        raise ValueError(f"there is an approximation {name} already")
    primitive = make_primitive(name, reference)
    make_differentiable(primitive, reference)
    _FORMS[primitive] = _Forms(reference, on_shares)

    @functools.wraps(reference)
    def apply(*arrays: Any, **static: Any) -> Any:
        out = primitive.bind(*arrays, **static)
        return out[0] if len(out) == 1 else tuple(out)

    return apply


def form_on_shares(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return what an approximation's equation becomes where shares come in, in a name scope of the
    approximation's name; None for other equations.
    """
    forms = _FORMS.get(eqn.primitive)
    return None if forms is None else _formed(eqn, forms.on_shares)


def reference_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the exact function in place of an approximation's equation, or of the equation of an
    op that is of a model's forward, in a name scope of its name; None for other equations.
    """
    forms, op = _FORMS.get(eqn.primitive), op_of(eqn.primitive)
    if forms is not None:
        return _formed(eqn, forms.reference)
    return _formed(eqn, op.reference) if op is not None and op.of_forward else None


def _formed(eqn: JaxprEqn, form: Callable[..., Any]) -> ClosedJaxpr:
    shapes = tuple(shape_of(v) for v in eqn.invars)
    name, static = eqn.primitive.name, tuple(eqn.params.items())
    with _forming:
        return _traced(form, name, shapes, static, widest_integers())


# Both parties may be threads of one process, and must come to the same program.
_forming = threading.Lock()


@functools.lru_cache(maxsize=1 << 10)  # every block of a model has the same ones
def _traced(
    form: Callable[..., Any],
    name: str,
    shapes: tuple[Any, ...],
    static: tuple[tuple[str, Any], ...],
    integers: Any,
) -> ClosedJaxpr:
    """Trace a form; `integers`, the widest dtype, is for the cache."""
    return flat_jaxpr(jax.named_scope(name)(functools.partial(form, **dict(static))), shapes)
