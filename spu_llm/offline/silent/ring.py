"""Polynomials modulo X^N + 1 and q = 2^54: what silent products with weights are made of.

A coefficient stands in the top 54 bits of a word (uint64), so that words wrap as q does and the low
10 bits are zero. Whole products with polynomials of small coefficients are taken by floating-point
transforms (`spu_llm.offline.rlwe`), a few coefficients of them by products of matrices: all are
exact.

Parameters: N = 2048, q = 2^54, uniform ternary secrets, centred binomial noise of standard
deviation 3.24. This is the row "128 bits, classical, ternary secret" of the homomorphic encryption
standard (homomorphicencryption.org, 2018, table 1: N = 2048, log q = 54, sigma = 3.2). What 128
means depends on the measure. The best known attack (primal) reduces a lattice of dimension 3937 in
blocks of 337. The standard's measure of that, 2^(0.292 * 337 + 16.4 + log2(8 * 3937)), is 129.8
bits. Under the later cost model of MATZOV (2022) it is some 125. The more cautious core-SVP counts
one sieve, 2^(0.292 * 337): 98.4 bits, and 89 with a quantum computer (0.265 for 0.292). N = 4096
with q = 2^64 would have 233, 201 and 182 bits.

q = 2^53 would have blocks of 346: 132.4 bits by the standard's measure, 127.3 by MATZOV's, 101.0 by
core-SVP. It is within reach: masks would leave 11 bits of a word open, and `linear` lifts its
inputs by 12 or more. Its price is twice the noise of masks, 1.62 |w| units of a result's last place
for 0.81 |w| (`silent.products`), or a lift of 13, which halves the largest result to 2^12. Noise
doubles wherever it stands in the place of a coefficient, so e'' needs 26 bits, and all hints would
be made and sent again. It is not done, since it stays below 128 bits by MATZOV's measure.
"""

from __future__ import annotations

import numpy as np

from spu_llm.core.prg import Prg
from spu_llm.offline import rlwe
from spu_llm.offline.rlwe import transform, whole

N = 2048
MODULUS_BITS = 54
SPARE_BITS = 64 - MODULUS_BITS  # zeros below a coefficient
_SPARE = np.uint64(SPARE_BITS)
_LIMB = MODULUS_BITS // 2


def public(label: str, start: int, count: int) -> np.ndarray:
    """Return polynomials number start.. of a public string: words [count, N] (`rlwe.public`)."""
    return rlwe.public(label, start, count, N) >> _SPARE << _SPARE


def ternary(prg: Prg, count: int) -> np.ndarray:
    """Draw uniform coefficients -1, 0, 1: float64 [count, N]."""
    return rlwe.ternary(prg, count, N)


def noise(prg: Prg, shape: tuple[int, ...]) -> np.ndarray:
    """Draw `rlwe.noise` in place of a coefficient: words of `shape`."""
    return rlwe.noise(prg, shape).view(np.uint64) << _SPARE


def exact_product(words: np.ndarray, small: np.ndarray) -> np.ndarray:
    """Return words [rows, N] times polynomials of coefficients in {-1, 0, 1}, given by their
    transform [N / 2] or [rows, N / 2]: words. Two limbs of 27 bits keep all sums below 2^38, so
    that a double is off by some 2^-17 and rounding makes it exact.
    """
    signed = words.view(np.int64) >> np.int64(SPARE_BITS)
    low = signed & np.int64((1 << _LIMB) - 1)
    high = (signed - low) >> np.int64(_LIMB)
    out = [whole(transform(limb.astype(np.float64)) * small) for limb in (low, high)]
    return (out[0] + (out[1] << np.int64(_LIMB))).view(np.uint64) << _SPARE


# ---- some coefficients of products: y x is y @ columns(x)


def columns(x: np.ndarray, window: slice) -> np.ndarray:
    """Return the matrix [N, count] that makes of the coefficients of a polynomial those of its
    product with x [N] (words or doubles) at the places `window`.
    """
    turned = np.concatenate([x, np.zeros_like(x) - x])  # X^N is -1
    places = np.arange(window.start, window.stop) - np.arange(N)[:, None]
    return turned[places % (2 * N)]


def words_times(x: np.ndarray, small: np.ndarray) -> np.ndarray:
    """Multiply words [rows, N] by `columns` [N, count] of a polynomial of coefficients in
    {-1, 0, 1}: words [rows, count].
    """
    return _from_halves(halves(x) @ small)


def small_times(x: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Multiply coefficients in {-1, 0, 1}, float64 [rows, N], by `columns` of words, given by their
    `halves` [2, N, count]: words [rows, count].
    """
    return _from_halves(x @ words)


def halves(x: np.ndarray) -> np.ndarray:
    """Return the low and the high half of words: float64 [2, ...]. N of them add up to less than
    2^53, so that sums are exact in any order.
    """
    parts = np.ascontiguousarray(x).view(np.uint32).reshape(*x.shape, 2)
    made = np.empty((2, *x.shape))
    made[0], made[1] = parts[..., 0], parts[..., 1]
    return made


def _from_halves(sums: np.ndarray) -> np.ndarray:
    low, high = sums.astype(np.int64).view(np.uint64)
    return low + (high << np.uint64(32))
