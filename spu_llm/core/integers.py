"""Exact products of ring words with encoded weights, on floating-point units.

numpy multiplies integer matrices without BLAS, about ten times slower than doubles (one
core, 8 rows by 768 x 3072 take 116 ms as int64, 11 ms here; one row is bound by memory, 13 and 3).
A double holds whole numbers below 2^53 exactly, and sums of them in any order. So the words are cut
into limbs of 22 bits, the top one signed:

    x w = x_0 w + 2^22 x_1 w + 2^44 x_2 w    mod 2^64

Weights at 18 fraction bits are small whole numbers, doubles as they are. The inner dimension is cut
where a sum of |x_i w| could reach 2^53. Words times words need six such products and their limbs
every time; numpy is faster there at the sizes of attention, so it does those.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field

import numpy as np

from spu_llm.core.values import Private, digest, encode

_LIMB = 22
_MASK = np.int64((1 << _LIMB) - 1)
_EXACT = 53  # bits of a double
_MAX_BITS = 25  # of a weight: leaves 64 terms to one sum


@dataclass(frozen=True, eq=False)
class Factor:
    """An encoded matrix [k, m]: doubles that are whole numbers below 2^bits in size, or ring words
    (uint64, `bits` 64) when some are larger than doubles can multiply. Nobody writes into it.
    """

    entries: np.ndarray = field(repr=False)  # the provider's weights
    bits: int

    def __post_init__(self) -> None:
        entries = self.entries.view()  # the caller's own array stays as it is
        entries.setflags(write=False)
        object.__setattr__(self, "entries", entries)

    @functools.cached_property
    def digest(self) -> str:
        """Return the digest of the entries; it stays with the party that has them."""
        return digest(self.entries)


# By the matrix's digest and fraction bits.
_factors: weakref.WeakValueDictionary[tuple[str, int], Factor] = weakref.WeakValueDictionary()


def factor_of(matrix: Private, frac_bits: int) -> Factor:
    """Encode `matrix`, at its owner. There is one encoding for all matrices of equal content,
    dropped with the last of them and of its other users. ValueError as in `encode`.
    """
    if frac_bits not in matrix.encodings:
        assert matrix.value is not None
        key = matrix.digest, frac_bits
        encoded = _factors.get(key)
        if encoded is None:
            encoded = _factors[key] = _encoded(matrix.value, frac_bits)
        matrix.encodings[frac_bits] = encoded
    factor: Factor = matrix.encodings[frac_bits]
    return factor


def _encoded(matrix: np.ndarray, frac_bits: int) -> Factor:
    # In place, since weights are large.
    entries = np.multiply(matrix, 2.0**frac_bits, dtype=np.float64)
    np.round(entries, out=entries)
    largest = max(-float(entries.min()), float(entries.max())) if entries.size else 0.0
    if largest < 2.0**_MAX_BITS:
        return Factor(entries, int(largest).bit_length())
    return Factor(encode(matrix, frac_bits), 64)  # not a number: largest compares false


def equal(a: Factor | None, b: Factor | None) -> bool:
    """Return whether two encodings are of equal content, or both are None."""
    return a is b or (a is not None and b is not None and a.digest == b.digest)


def factor_from(entries: np.ndarray) -> Factor:
    """Make a factor of encoded entries: whole numbers in doubles, or ring words."""
    if entries.dtype == np.uint64:
        return Factor(entries, 64)
    return Factor(entries, int(np.max(np.abs(entries), initial=0.0)).bit_length())


def times_factor(x: np.ndarray, factor: Factor) -> np.ndarray:
    """Multiply words (uint64) x [rows, k] by a factor [k, m], mod 2^64: words [rows, m]."""
    if factor.entries.dtype == np.uint64:
        products: np.ndarray = x @ factor.entries
        return products
    signed = x.view(np.int64)
    limbs = signed & _MASK, (signed >> np.int64(_LIMB)) & _MASK, signed >> np.int64(2 * _LIMB)
    stacked = np.concatenate(limbs).astype(np.float64)
    out = np.zeros((len(x), factor.entries.shape[1]), np.uint64)
    # |x_i w| < 2^(22 + bits), so this many of them stay exact.
    step = 1 << (_EXACT - _LIMB - factor.bits)
    for start in range(0, x.shape[1], step):
        some = slice(start, start + step)
        sums = (stacked[:, some] @ factor.entries[some]).astype(np.int64).view(np.uint64)
        low, middle, top = np.split(sums, 3)
        out += low + (middle << np.uint64(_LIMB)) + (top << np.uint64(2 * _LIMB))
    return out
