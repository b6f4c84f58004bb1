"""Functions with a form of their own on shares: exact in plaintext, approximate on shares.

An approximation is not a protocol op: it says what to compute on shares, in ordinary JAX with ops
inside, while plaintext (reference, drafting, training, one party's own work) keeps the exact
function. Nobody learns anything from it beyond what its ops give.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

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

_ON_SHARES: dict[Any, Callable[..., Any]] = {}  # by primitive


def approximation(
    name: str, *, reference: Callable[..., Any], on_shares: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the function `reference(*arrays, **static)`, computed as `on_shares` where what comes
    in belongs to both parties. It is differentiable and batchable as the reference is.

    Raise ValueError when the name is taken.
    """
    if any(primitive.name == name for primitive in _ON_SHARES):
        raise ValueError(f"there is an approximation {name} already")
    primitive = make_primitive(name, reference)
    make_differentiable(primitive, reference)
    _ON_SHARES[primitive] = on_shares

    @functools.wraps(reference)
    def apply(*arrays: Any, **static: Any) -> Any:
        out = primitive.bind(*arrays, **static)
        return out[0] if len(out) == 1 else tuple(out)

    return apply


def form_on_shares(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return what an approximation's equation becomes where shares come in, in a name scope of the
    approximation's name; None for other equations.
    """
    if eqn.primitive not in _ON_SHARES:
        return None
    shapes = tuple(shape_of(v) for v in eqn.invars)
    with _forming:
        return _form(eqn.primitive, shapes, tuple(eqn.params.items()), widest_integers())


# Both parties may be threads of one process, and must come to the same program.
_forming = threading.Lock()


@functools.lru_cache(maxsize=1 << 10)  # every block of a model has the same ones
def _form(
    primitive: Any, shapes: tuple[Any, ...], static: tuple[tuple[str, Any], ...], integers: Any
) -> ClosedJaxpr:
    """Trace an approximation's form on shares; `integers`, the widest dtype, is for the cache."""
    form = functools.partial(_ON_SHARES[primitive], **dict(static))
    return flat_jaxpr(jax.named_scope(primitive.name)(form), shapes)
