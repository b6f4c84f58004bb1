"""1 / x and 1 / sqrt(x) of a public range: exact in plaintext, pieces of lines on shares.

Both take 10 messages, and are off by 3e-4 and 2e-4, relative (tests/protocols/test_nonlinear.py).
They also return a shared int32 that is positive if an input was out of range, whatever its 64 bits
are, else 0 (`protocols.functions.piecewise.evaluate`); a model adds such counts up and lets nothing
pass that came of others (`protocols.functions.in_range`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from protocols.arithmetic.narrow import FRAC_BITS
from protocols.functions.piecewise import Lines, evaluate, lines
from spu_llm.core.approx import approximation


def inverse(x: Any) -> Any:
    """Compute 1 / x."""
    return 1 / x


def inverse_root(x: Any) -> Any:
    """Compute 1 / sqrt(x)."""
    return (jnp if isinstance(x, jax.Array) else np).reciprocal(x**0.5)


@functools.cache
def _lines_of(f: Callable[..., Any], low: float, high: float) -> Lines:
    return lines(f, low, high, FRAC_BITS, FRAC_BITS)


def _on_range(name: str, f: Callable[..., Any]) -> Any:
    """Approximate f(x), and give an int32, positive if some x was out of [low, high), else 0."""

    def reference(x: Array, *, low: float, high: float) -> tuple[Array, Array]:
        return f(x), outside_of(x, low, high)

    def on_shares(x: Any, *, low: float, high: float) -> tuple[Any, Any]:
        y, outside = evaluate(x, _lines_of(f, low, high))
        return y.truncated(), outside

    return approximation(name, reference=reference, on_shares=on_shares)


def outside_of(x: Any, low: float, high: float) -> Any:
    """Count, in plaintext, which x are out of [low, high): an int32."""
    return jnp.sum(((x < low) | (x >= high)).astype(jnp.int32))


reciprocal = _on_range("reciprocal", inverse)
rsqrt = _on_range("rsqrt", inverse_root)
