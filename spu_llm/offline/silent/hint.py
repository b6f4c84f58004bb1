"""Hints: what a client needs of the provider's weights for silent products (`silent.products`).

A hint is the same for every client, for as long as a version of the model is served: rows of N
coefficients, one row per column of a matrix, that hide the column under RLWE (step 1 of
`silent.products`). Of a coefficient's 54 bits the top 40 are kept, as 5 bytes. What rounding leaves
out is uniform in +-2^23 of 2^64; times s, it is noise of standard deviation 2^27.4 in a result.

The provider makes hints once per version and matrix and keeps them. It names them to a client by
their SHA-256; the client asks for what it lacks, and keeps them, too. Both keep them as files when
they have a directory, else in memory. The SHA-256 finds damage. It comes from the provider, so it
says nothing of whether a hint is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spu_llm.core.integers import Factor, times_factor
from spu_llm.core.parallel import for_each
from spu_llm.core.prg import Prg
from spu_llm.offline import versions
from spu_llm.offline.silent import ring
from spu_llm.offline.silent.ring import N

# Separates the domains of all strings. Another number whenever a hint would come out otherwise: two
# hints of one name and one u must be equal.
VERSION = versions.SILENT
BYTES = 5  # of a coefficient that are kept
ROW_BYTES = BYTES * N
ROWS = 64  # polynomials worked on together: they fit the cache
_DROPPED = np.uint64(64 - 8 * BYTES)
_INPUTS, _OUTPUTS = 1024, 64 * ROWS  # polynomials of `make` held at a time


@dataclass(frozen=True)
class Matrix:
    """A matrix [inputs, outputs] of the provider's, by the name that both parties give it."""

    name: str
    inputs: int
    outputs: int

    @property
    def hint_bytes(self) -> int:
        return self.outputs * ROW_BYTES


def public_inputs(matrix: Matrix, start: int, count: int) -> np.ndarray:
    """Return a_j of inputs j = start..: words [count, N]."""
    return ring.public(f"{VERSION}: a, {matrix.name}", start, count)


def public_key_base() -> np.ndarray:
    """Return p: words [N]. Fixed: a p of somebody's choice, zero for one, would show the
    weights.
    """
    return ring.public(f"{VERSION}: p", 0, 1)[0]


def slices(count: int) -> Iterator[slice]:
    return (slice(i, min(i + ROWS, count)) for i in range(0, count, ROWS))


class Secrets:
    """The provider's polynomials u_o and e'_o of one matrix: streams under its key, other ones for
    every matrix and version of the weights. Two hints that share a u differ by what the weights do.
    """

    def __init__(self, key: bytes, matrix: Matrix, weights: str) -> None:
        """Take `key`, of the version of the model (`silent.store`), and `weights`, the digest of
        what the matrix holds.
        """
        self._prg = Prg(key).child(f"{VERSION}: {matrix.name}, {weights}")
        self.name = self._prg.child("name").words((4,)).tobytes().hex()  # of the hint

    def small(self, rows: slice) -> np.ndarray:
        """Return u_o of one of `slices`: float64 [rows, N], -1, 0 or 1."""
        return ring.ternary(self._prg.child(f"u {rows.start}"), rows.stop - rows.start)

    def noise(self, rows: slice) -> np.ndarray:
        """Return e'_o of one of `slices`: words [rows, N]."""
        return ring.noise(self._prg.child(f"e {rows.start}"), (rows.stop - rows.start, N))


def make(matrix: Matrix, factor: Factor, own: Secrets, jobs: int = 1) -> np.ndarray:
    """Make the hint: bytes [outputs, N, 5] of A_o + p u_o + e'_o, A = W^T a; on `jobs` cores.

    p u_o + e'_o is an RLWE sample: one under each u_o, which is uniform ternary and known to nobody
    else.
    """
    base = public_key_base()[None]
    kept = np.empty((matrix.outputs, N, BYTES), np.uint8)
    half = np.uint64(1) << (_DROPPED - np.uint64(1))

    def work(first: int) -> None:
        hidden = _times_inputs(matrix, factor, slice(first, first + _OUTPUTS))
        for rows in slices(len(hidden)):
            own_rows = slice(first + rows.start, first + rows.stop)
            masked = hidden[rows] + own.noise(own_rows)
            masked += ring.exact_product(base, ring.transform(own.small(own_rows)))
            rounded = np.ascontiguousarray((masked + half) >> _DROPPED)
            kept[own_rows] = rounded.view(np.uint8).reshape(-1, N, 8)[..., :BYTES]

    for_each(jobs, work, range(0, matrix.outputs, _OUTPUTS))
    return kept


def _times_inputs(matrix: Matrix, factor: Factor, outputs: slice) -> np.ndarray:
    """Return A_o of some outputs: words [outputs, N]."""
    total = np.zeros((N, 1), np.uint64)
    for start in range(0, matrix.inputs, _INPUTS):
        some = slice(start, min(start + _INPUTS, matrix.inputs))
        a = public_inputs(matrix, some.start, some.stop - some.start)
        part = Factor(factor.entries[some, outputs], factor.bits)
        total = total + times_factor(np.ascontiguousarray(a.T), part)
    return total.T


def times(kept: np.ndarray, small: np.ndarray) -> np.ndarray:
    """Multiply rows of a hint (bytes [rows, N, 5]) by `ring.columns` [N, count] of a polynomial of
    coefficients in {-1, 0, 1}: words [rows, count], exact.
    """
    # A word that ends with each coefficient: what stands below it is shifted out.
    behind = 8 - BYTES
    data = np.zeros(behind + kept.size, np.uint8)
    data[behind:] = kept.reshape(-1)
    words: np.ndarray = np.ndarray((len(kept), N), "<i8", data.data, 0, (ROW_BYTES, BYTES))
    # Whole numbers of at most 2^39 in size, N of which add up to less than 2^53.
    numbers = (words >> np.int64(8 * behind)).astype(np.float64)
    return (numbers @ small).astype(np.int64).view(np.uint64) << _DROPPED
