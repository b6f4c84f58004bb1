"""Tables read with comparison bits: b_j = [x < t_j] for rising t_j give the pieces of functions.

One conversion (`protocols.bits.convert`, one message each way and one bit per bit) makes integers
of shared bits; every table's entry is then a sum of these times public words, which each party
takes alone:

    table(x) = base + sum_j b_j step_j

Several tables cost one conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from protocols.arithmetic.narrow import FRAC_BITS, units


@dataclass(frozen=True)
class Table:
    """Words of the pieces, from the top: `base` beyond the last threshold and, for each threshold,
    what is added below it (`steps`). Each has at most 24 significant bits, as float32 holds them.
    """

    base: int
    steps: tuple[int, ...]

    @staticmethod
    def of(words: Sequence[int]) -> Table:
        """Return the table of the words of the pieces, lowest piece first, one more than
        thresholds, rounded to what a `Table` can hold: `entries` says what it gives.
        """
        base = _float32(words[-1])
        steps = [_float32(a - b) for a, b in zip(words[:-1], words[1:], strict=True)]
        return Table(base, tuple(steps))

    def entries(self) -> list[int]:
        """Return the words that the table gives, lowest piece first."""
        entries = [self.base]
        for step in reversed(self.steps):
            entries.append(entries[-1] + step)
        return entries[::-1]


def _float32(word: int) -> int:
    return int(np.float32(word))


def lookup(ones: Any, tables: Sequence[Table]) -> Any:
    """Return the entries [tables, ...] as floats, words of 2^-18, for bits [thresholds, ...] given
    as integers: `to_arith` of what `protocols.bits.compare.sign` gives.
    """
    shape = ones.shape[1:]
    ones = units(ones)
    steps = spread(np.array([t.steps for t in tables], np.float32), shape)
    base = np.array([t.base for t in tables], np.float64) * 2.0**-FRAC_BITS
    scaled = jnp.broadcast_to(ones[None], steps.shape) * steps
    return jnp.sum(scaled, axis=1) + spread(base.astype(np.float32), shape)


def spread(numbers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return `numbers` [...] as constants [..., *shape]: of the full shape, so that a product with
    whole numbers, or a sum, is local work, without a message or a truncation.
    """
    narrow = numbers.reshape(*numbers.shape, *(1 for _ in shape))
    return np.array(np.broadcast_to(narrow, (*numbers.shape, *shape)))
