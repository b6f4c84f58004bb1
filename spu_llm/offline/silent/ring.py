"""Polynomials modulo X^N + 1 and q = 2^54: what silent products with weights are made of.

A coefficient stands in the top 54 bits of a word (uint64), so that words wrap as q does and the low
10 bits are zero. Products with polynomials of small coefficients are taken by floating-point
transforms: a real polynomial of degree N is N/2 complex numbers, coefficients n and n + N/2 as one,
twisted by exp(i pi n / N) so that the cyclic convolution of scipy.fft becomes a negacyclic one.

Parameters: N = 2048, q = 2^54, uniform ternary secrets, centred binomial noise of standard
deviation 3.24. This is the row "128 bits, classical, ternary secret" of the homomorphic encryption
standard (homomorphicencryption.org, 2018, table 1: N = 2048, log q = 54, sigma = 3.2). What 128
means depends on the measure. The best known attack (primal) reduces a lattice of dimension 3937 in
blocks of 337. The standard's measure of that, 2^(0.292 * 337 + 16.4 + log2(8 * 3937)), is 130 bits.
The more cautious core-SVP counts one sieve, 2^(0.292 * 337): 98 bits, and 89 with a quantum
computer (0.265 for 0.292). N = 4096 with q = 2^64 would have 233, 201 and 182 bits.
"""

from __future__ import annotations

import hashlib

import numpy as np
import scipy.fft

from spu_llm.core.prg import Prg

N = 2048
MODULUS_BITS = 54
SPARE_BITS = 64 - MODULUS_BITS  # zeros below a coefficient
NOISE_PAIRS = 21  # of coins: the variance of the noise is half of it
_SPARE = np.uint64(SPARE_BITS)
_LIMB = MODULUS_BITS // 2
_TWIST = np.exp(1j * np.pi * np.arange(N // 2) / N)
_UNTWIST = _TWIST.conj()
_COINS = np.uint64((1 << NOISE_PAIRS) - 1)
_ELEVEN, _SHIFT_11 = np.uint64((1 << 11) - 1), np.uint64(11)
_ONES = np.array([bin(i).count("1") for i in range(1 << 11)], np.int8)


def public(label: str, start: int, count: int) -> np.ndarray:
    """Polynomials number start.. of a public string that nobody chose: words [count, N], SHAKE128
    of the label and the number. Labels that differ give independent strings: the number is what
    follows the last space.
    """
    streams = [
        hashlib.shake_128(f"{label} {i}".encode()).digest(8 * N)
        for i in range(start, start + count)
    ]
    words = np.frombuffer(b"".join(streams), np.uint64).reshape(count, N)
    return words >> _SPARE << _SPARE


def ternary(prg: Prg, count: int) -> np.ndarray:
    """Uniform coefficients -1, 0, 1, by rejection: float64 [count, N]."""
    wanted = count * N
    found = np.empty(0, np.uint8)
    while found.size < wanted:
        drawn = prg.words((wanted // 7,)).view(np.uint8)
        found = np.concatenate([found, drawn[drawn < 255]])
    return (found[:wanted] % np.uint8(3)).astype(np.float64).reshape(count, N) - 1.0


def noise(prg: Prg, shape: tuple[int, ...]) -> np.ndarray:
    """Centred binomial noise, -21 to 21, in place of a coefficient: words of `shape`."""
    drawn = prg.words(shape)
    heads = _count(drawn & _COINS) - _count((drawn >> np.uint64(NOISE_PAIRS)) & _COINS)
    return heads.astype(np.int64).view(np.uint64) << _SPARE


def _count(coins: np.ndarray) -> np.ndarray:
    """Ones of words below 2^22."""
    return _ONES[coins & _ELEVEN] + _ONES[coins >> _SHIFT_11]


def transform(x: np.ndarray) -> np.ndarray:
    """Of real polynomials [..., N]: complex [..., N / 2]."""
    half = x[..., : N // 2] + 1j * x[..., N // 2 :]
    half *= _TWIST
    return scipy.fft.fft(half, overwrite_x=True)


def _inverse(z: np.ndarray) -> np.ndarray:
    y = scipy.fft.ifft(z, overwrite_x=True)
    y *= _UNTWIST
    return np.concatenate([y.real, y.imag], axis=-1)


def exact_product(words: np.ndarray, small: np.ndarray) -> np.ndarray:
    """Words [rows, N] times polynomials of coefficients in {-1, 0, 1}, given by their transform
    [N / 2] or [rows, N / 2]: words. Two limbs of 27 bits keep all sums below 2^38, so that a
    double is off by some 2^-17 and rounding makes it exact.
    """
    signed = words.view(np.int64) >> np.int64(SPARE_BITS)
    low = signed & np.int64((1 << _LIMB) - 1)
    high = (signed - low) >> np.int64(_LIMB)
    out = [
        np.rint(_inverse(transform(limb.astype(np.float64)) * small)).astype(np.int64)
        for limb in (low, high)
    ]
    return (out[0] + (out[1] << np.int64(_LIMB))).view(np.uint64) << _SPARE


def product(transformed: np.ndarray, small: np.ndarray) -> np.ndarray:
    """The same, from the transform of `fractions`: words of 64 bits, off by some 2^16 and less than
    2^20.
    """
    y = _inverse(transformed * small)
    y -= np.rint(y)
    return np.rint(y * 2.0**63).astype(np.int64).view(np.uint64) << np.uint64(1)


def fractions(words: np.ndarray) -> np.ndarray:
    """Words as parts of 2^64, in [-1/2, 1/2)."""
    return words.view(np.int64).astype(np.float64) * 2.0**-64
