"""Where the words of matrices stand in polynomials (`spu_llm.offline.packed.products`).

Units are products X Y of X [n, k] and Y [k, m]. A polynomial of Y's holds a block of K of its rows,
of S units side by side, all multiplied by X^(D j) for column j. The *stride* D is a power of two,
K S <= D. A polynomial of X's holds R rows of one unit, D R m <= N:

    Y_b  = sum over units s, i < K, columns j   Y_s[b K + i, j] X^(D j + K s - i)
    X_rb = sum over rows t < R, i < K           X_s[r R + t, b K + i] X^(D m t + i)

and sum_b X_rb Y_b has (X_s Y_s)[r R + t, j] as its coefficient D (m t + j) + K s: other units and
other i are never D apart. Divided by X^(K s), the coefficients at multiples of D are wanted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spu_llm.offline.packed import ring
from spu_llm.offline.packed.ring import N

# Rows of X in a polynomial, at most: more make fewer polynomials of X's, and more of Y's. With one,
# a cache's tiles take 33 to 40 % fewer bytes and 1.7 times as long.
_ROWS = 2
_PACKED = 128  # pairs that become one, at most: the error grows with them
_BLOCKS = 32  # polynomials of Y's of a group, at most, unless one column has more: a MB each

CIPHERTEXT_BYTES = 16 * N  # of b_b
ANSWER_BYTES = 8 * N  # of c0


@dataclass(frozen=True)
class Layout:
    """The places of `units` products X [n, k] times Y [k, m] in polynomials. ValueError when Y has
    too many columns.
    """

    units: int
    n: int
    k: int
    m: int
    most_rows: int = _ROWS

    def __post_init__(self) -> None:
        if self.m > N:
            raise ValueError(f"a matrix of {self.m} columns does not fit {N} coefficients")

    @cached_property
    def rows(self) -> int:
        """Return R: rows of X in a polynomial."""
        return min(self.most_rows, self.n, N // self.m)

    @cached_property
    def stride(self) -> int:
        """Return D: how far apart the columns of Y stand in a polynomial."""
        return 1 << (N // (self.rows * self.m)).bit_length() - 1

    @cached_property
    def inner(self) -> int:
        """Return K: rows of Y, of each unit, in a polynomial."""
        return min(self.k, self.stride, ring.MAX_TERMS // self.rows)

    @cached_property
    def together(self) -> int:
        """Return S: units side by side in a polynomial of Y's."""
        return min(self.stride // self.inner, self.units)

    @property
    def groups(self) -> int:
        """Return how many groups there are of units that stand side by side."""
        return math.ceil(self.units / self.together)

    @property
    def blocks(self) -> int:
        """Return how many polynomials of Y's a group has."""
        return math.ceil(self.k / self.inner)

    @property
    def is_scalar(self) -> bool:
        """Return whether a polynomial of X's is one word."""
        return self.n == self.k == 1

    @property
    def pairs(self) -> int:
        """Return how many polynomials X_r Y a unit has."""
        return math.ceil(self.n / self.rows)

    @cached_property
    def packed(self) -> int:
        """Return how many pairs become one: a power of two, D at most."""
        return min(self.stride, _PACKED, 1 << (self.units * self.pairs - 1).bit_length())

    @property
    def blocks_at_once(self) -> int:
        """Return over how many blocks sums may be rounded together."""
        return max(1, ring.MAX_TERMS // (self.rows * self.inner))

    @property
    def answers(self) -> int:
        """Return how many packed polynomials the pairs of all units become."""
        return math.ceil(self.units * self.pairs / self.packed)

    @property
    def apart(self) -> int:
        """Return how far apart the coefficients of an answer are that are wanted."""
        return self.stride // self.packed

    @property
    def ciphertext_bytes(self) -> int:
        """Return the bytes of what the owner sends."""
        return CIPHERTEXT_BYTES * self.groups * self.blocks

    @property
    def answer_bytes(self) -> int:
        """Return the bytes of what the evaluator sends."""
        return ANSWER_BYTES * self.answers

    @property
    def switches(self) -> list[int]:
        """Return the strides of the steps of `PackedProducts._pack`."""
        return [self.stride >> i for i in range(self.packed.bit_length() - 1)]

    def encoded_right(self, y: np.ndarray) -> np.ndarray:
        """Return Y_b of y [units, k, m]: words [groups, blocks, N]."""
        padded = np.zeros(
            (self.groups * self.together, self.blocks * self.inner, self.m), np.uint64
        )
        padded[: self.units, : self.k] = y
        parts = padded.reshape(self.groups, self.together, self.blocks, self.inner, self.m)
        # Upside down, K - 1 places too high.
        parts = parts[:, :, :, ::-1].transpose(0, 2, 4, 1, 3)
        spread = np.zeros((self.groups, self.blocks, self.m, self.stride), np.uint64)
        spread[..., : self.together * self.inner] = parts.reshape(*spread.shape[:3], -1)
        polynomials = np.zeros((self.groups, self.blocks, N), np.uint64)
        polynomials[..., : self.m * self.stride] = spread.reshape(self.groups, self.blocks, -1)
        return ring.lowered(polynomials, self.inner - 1)

    def encoded_left(self, x: np.ndarray, pair: int) -> np.ndarray:
        """Return X_rb of x [n, k] of one unit, for r = `pair`: words [blocks, N]."""
        padded = np.zeros((self.rows, self.blocks * self.inner), np.uint64)
        some = x[pair * self.rows : (pair + 1) * self.rows]
        padded[: len(some), : self.k] = some
        parts = padded.reshape(self.rows, self.blocks, self.inner).swapaxes(0, 1)
        spread = np.zeros((*parts.shape[:2], self.stride * self.m), np.uint64)
        spread[..., : self.inner] = parts
        polynomials = np.zeros((self.blocks, N), np.uint64)
        polynomials[:, : self.rows * self.stride * self.m] = spread.reshape(self.blocks, -1)
        return polynomials

    def units_of(self, group: int) -> range:
        return range(group * self.together, min((group + 1) * self.together, self.units))

    def shift(self, unit: int) -> int:
        """Return K s, with s the place of a unit in its group."""
        return unit % self.together * self.inner

    def decoded(self, wanted: np.ndarray) -> np.ndarray:
        """Return the words [units, n, m] of the coefficients [answers, N packed / D] of packed
        polynomials at multiples of D / packed.
        """
        by_pair = wanted.reshape(self.answers, -1, self.packed).swapaxes(1, 2)
        by_pair = by_pair.reshape(self.answers * self.packed, -1)[: self.units * self.pairs]
        rows = by_pair[:, : self.rows * self.m].reshape(self.units, -1, self.m)
        return rows[:, : self.n]


def columns_apart(units: int, n: int, k: int, m: int) -> list[tuple[slice, Layout]]:
    """Return layouts of units X Y, each with the columns of Y that it is of, in order: all of them
    in one, unless they do not fit, or X is one word and several send less.
    """
    if n == k == 1:
        return _of_words(units, m)
    if m <= N and (whole := Layout(units, n, k, m)).blocks <= _BLOCKS:
        return [(slice(0, m), whole)]
    # Polynomials of Y's that one row of X multiplies hold twice the columns of others.
    width = 1 << min(m, N).bit_length() - 1
    while width > 1 and Layout(units, n, k, width, 1).blocks > _BLOCKS:
        width //= 2
    return [
        (slice(start, min(start + width, m)), Layout(units, n, k, min(width, m - start), 1))
        for start in range(0, m, width)
    ]


def _of_words(units: int, m: int) -> list[tuple[slice, Layout]]:
    """Return the layouts of rows [m] times one word: one, or several that send less, their
    switching keys, which a session sends once, not counted. There D m is N only for a power of two:
    of 576 columns, 512 and 64 fill their polynomials.
    """
    most = min(N, 1 << m.bit_length() - 1)
    best = [(slice(0, m), Layout(units, 1, 1, m))] if m <= N else []
    if most == m:
        return best
    rest = _of_words(units, m - most)
    parts = [
        (slice(0, most), Layout(units, 1, 1, most)),
        *((slice(most + of.start, most + of.stop), layout) for of, layout in rest),
    ]
    return min(
        [layouts for layouts in (best, parts) if layouts],
        key=lambda layouts: sum(
            layout.ciphertext_bytes + layout.answer_bytes for _, layout in layouts
        ),
    )
