"""Wide rows in groups: what bounds the memory of an op on many numbers."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

NUMBERS_AT_ONCE = 1 << 19


def by_rows(function: Callable[[Array], Array], x: Array) -> Array:
    """`function` of rows [rows, n] -> [rows, ...], on groups of rows of about `NUMBERS_AT_ONCE`
    numbers, one group after the other.
    """
    rows = max(1, NUMBERS_AT_ONCE // x.shape[1])
    parts = [function(x[i : i + rows]) for i in range(0, x.shape[0], rows)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
