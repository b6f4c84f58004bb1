"""Wide rows in groups: what bounds the memory of an op on many numbers."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

# Nine rows of 32,000 tokens at once, two of 151,936: with these, a party stays at about 1 GiB.
NUMBERS_AT_ONCE = 310_000


def by_rows(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply `function` to rows [rows, n] -> [rows, ...], on groups of rows of up to
    `NUMBERS_AT_ONCE` numbers (or of one row), one group after the other.
    """
    rows = max(1, NUMBERS_AT_ONCE // x.shape[1])
    parts = [function(x[i : i + rows]) for i in range(0, x.shape[0], rows)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
