"""Functions with a form of their own for SPU: exact in plaintext, approximate on shares.

An approximation is not a protocol op: SPU compiles it as part of a segment, and nobody learns
anything from it. It says what to compute on shares where SPU's own expansion is dear or coarse,
while plaintext (reference, drafting, training, one party's own work) keeps the exact function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import Array

from spu_llm._jax import make_differentiable, make_primitive

APPROXIMATIONS: set[str] = set()


def approximation(
    name: str, *, reference: Callable[[Array], Array], spu_form: Callable[[Array], Array]
) -> Callable[[Array], Array]:
    """The function `reference` of one array, computed as `spu_form` inside SPU segments.

    ValueError when the name is taken. Under `jax.vmap` the function must be elementwise.
    """
    if name in APPROXIMATIONS:
        # Executables are cached by name: one name must not mean two programs.
        raise ValueError(f"there is an approximation {name} already")
    APPROXIMATIONS.add(name)
    primitive = make_primitive(name, reference, spu_form)
    make_differentiable(primitive, reference)

    def apply(x: Array) -> Any:
        return primitive.bind(x)[0]

    apply.__doc__ = reference.__doc__
    return apply
