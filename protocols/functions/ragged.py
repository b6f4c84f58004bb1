"""Rows of public lengths of their own, one after the other in one flat array: no work for the rest.

In a causal forward a row of scores has one visible number more than the row before it. What none of
the parties' secrets can make visible is left out of comparisons and products. Moving words by
public places is each party's own work: nothing is sent, and nobody learns anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from protocols.functions.maximum import fan_ins, maximum


@dataclass(frozen=True)
class Ragged:
    """The lengths of rows [n], public, each at least 1."""

    lengths: tuple[int, ...]

    @property
    def _starts(self) -> np.ndarray:
        """Return where each row begins, and where the last one ends, int [n + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def flat(self, rows: Any) -> Any:
        """Return the flat rows [k, sum of lengths] of rows [k, n, width], cut to their lengths."""
        k, n, width = rows.shape
        assert n == len(self.lengths) and max(self.lengths) <= width, (rows.shape, self.lengths)
        places = [row * width + np.arange(length) for row, length in enumerate(self.lengths)]
        return _take(rows.reshape(k, n * width), np.concatenate(places))

    def padded(self, flat: Any, width: int) -> Any:
        """Return rows [k, n, width] of the flat rows, zeros after their ends."""
        k, size = flat.shape
        places = np.full((len(self.lengths), width), size)
        for row, length in enumerate(self.lengths):
            places[row, :length] = self._starts[row] + np.arange(length)
        zero = jnp.zeros((k, 1), flat.dtype)
        return _take(jnp.concatenate([flat, zero], axis=1), places)

    def spread(self, numbers: Any) -> Any:
        """Return numbers of rows [k, n] as flat rows, each all along its row."""
        return _take(numbers, np.repeat(np.arange(len(self.lengths)), self.lengths))

    def with_last(self, flat: Any, number: int) -> tuple[Ragged, Any]:
        """Return rows that end with one more number, the public `number`."""
        k, size = flat.shape
        ends = [
            np.append(np.arange(first, last), size)
            for first, last in zip(self._starts, self._starts[1:], strict=False)
        ]
        last = jnp.full((k, 1), number, flat.dtype)
        whole = _take(jnp.concatenate([flat, last], axis=1), np.concatenate(ends))
        return Ragged(tuple(length + 1 for length in self.lengths)), whole

    def maxima(self, flat: Any, *, bits: int) -> Any:
        """Compute the maxima [k, n] of flat rows, whose differences fit `bits` signed bits, by the
        matches of `protocols.functions.maximum`: as many messages as for the longest row alone.
        """
        rows, most = self, max(self.lengths)
        for fan_in in fan_ins(len(flat) * len(self.lengths), most, bits, bits):
            rows, flat = rows._level(flat, fan_in, bits)
        return flat

    def _level(self, flat: Any, fan_in: int, bits: int) -> tuple[Ragged, Any]:
        """Return the winners of matches of `fan_in` words, row by row. A row of one word has
        none.
        """
        k = len(flat)
        left = Ragged(tuple(-(-length // fan_in) for length in self.lengths))
        played: list[np.ndarray] = []
        order: list[np.ndarray] = []
        for first, length, matches in zip(self._starts, self.lengths, left.lengths, strict=False):
            if length == 1:
                order.append(np.array([-1 - first]))
                continue
            order.append(len(played) + np.arange(matches))
            places = np.arange(matches * fan_in).reshape(matches, fan_in)
            # A short last match is filled up with the row's last word.
            played += list(first + np.minimum(places, length - 1))
        matches = _take(flat, np.stack(played))
        winners = maximum(matches.reshape(-1, fan_in), bits=bits).reshape(k, len(played))
        places = np.concatenate(order)
        if (places >= 0).all():
            return left, winners
        both = jnp.concatenate([winners, flat], axis=1)
        return left, _take(both, np.where(places < 0, len(played) - 1 - places, places))


def _take(rows: Any, places: np.ndarray) -> Any:
    """Return the numbers at these places [...] of every row [k, size], as [k, ...]."""
    return jnp.take(rows, places.astype(np.int32), axis=1, mode="clip")
