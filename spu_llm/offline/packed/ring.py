"""Polynomials modulo X^N + 1 and 2^128, 2^90 or 2^64: what packed products are made of.

A coefficient is a word (uint64) modulo 2^64, else two, the low one first. Floating-point transforms
(`spu_llm.offline.rlwe`) multiply polynomials by their *limbs*: digits of 22 bits, or 18 for 2^90,
balanced around zero. Rounding makes sums of such products exact as long as they are not too
many: their error has a standard deviation of 0.001 (terms)^(1/2), so MAX_TERMS are rounded at once
(tests/offline/test_packed_ring.py measures the margin).

Parameters: N = 8192, log q = 128 at most, uniform ternary secrets, centred binomial noise of
standard deviation 3.24. The homomorphic encryption standard (homomorphicencryption.org, 2018, table
1: ternary secret, sigma = 3.2) allows N = 8192 a log q of 218 for 128 bits of classical security
and of 152 for 192. For log q = 128 the best known attack (primal) reduces blocks of 686: 233 bits
by the standard's measure, 200 by core-SVP.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from spu_llm.offline.rlwe import transform, whole

N = 8192
LIMB = 22  # bits of a limb, modulo 2^64 and 2^128
KEY_LIMB, KEY_BITS = 18, 90  # the same of keys that switch, and their modulus
MAX_TERMS = 2048  # nonzero coefficients of polynomials of words, in one sum
KEY_DROP = KEY_BITS - 64  # bits by which they are finer than what they switch


def limbs_of(bits: int) -> int:
    """Return how many limbs a number of so many bits has."""
    return math.ceil(bits / LIMB)


def limbs(x: np.ndarray, size: int, bits: int) -> np.ndarray:
    """Return transforms [..., ceil(bits / size), N / 2] of the limbs of x modulo 2^bits, the lowest
    first; x: [..., N] for up to 64 bits, else [..., 2, N].
    """
    words = [x] if bits <= 64 else [x[..., 0, :], x[..., 1, :]]
    count = math.ceil(bits / size)
    # Half of every digit is added, and taken away from the digit: balanced, without a carry.
    widths = [min(size, bits - size * i) for i in range(count)]
    half = sum(1 << size * i + w - 1 for i, w in enumerate(widths))
    moved = _plus(words, half)
    parts = np.empty((*words[0].shape[:-1], count, N), np.float64)
    for i, width in enumerate(widths):
        digit = _bits(moved, size * i, width).view(np.int64)
        parts[..., i, :] = digit - np.int64(1 << width - 1)
    return transform(parts)


def _plus(words: list[np.ndarray], constant: int) -> list[np.ndarray]:
    low = words[0] + np.uint64(constant & (1 << 64) - 1)
    if len(words) == 1:
        return [low]
    return [low, words[1] + np.uint64(constant >> 64 & (1 << 64) - 1) + (low < words[0])]


def _bits(words: list[np.ndarray], at: int, width: int) -> np.ndarray:
    index, shift = divmod(at, 64)
    bits = words[index] >> np.uint64(shift)
    if shift + width > 64:
        bits = bits | words[index + 1] << np.uint64(64 - shift)
    return bits & np.uint64((1 << width) - 1)


def wide(sums: np.ndarray) -> np.ndarray:
    """Return the sum of 2^(22 i) sums_i modulo 2^128: words [..., 2, N] of int64 [..., 6, N]."""
    digits, carry = [], np.zeros_like(sums[..., 0, :])
    for i in range(5):
        total = sums[..., i, :] + carry
        digits.append(total.view(np.uint64) & np.uint64((1 << LIMB) - 1))
        carry = total >> np.int64(LIMB)
    top = (sums[..., 5, :] + carry).view(np.uint64)
    low = digits[0] | digits[1] << np.uint64(22) | digits[2] << np.uint64(44)
    high = digits[2] >> np.uint64(20) | digits[3] << np.uint64(2) | digits[4] << np.uint64(24)
    return np.stack([low, high | top << np.uint64(46)], axis=-2)


def times_small(x: np.ndarray, small: np.ndarray, plus: np.ndarray) -> np.ndarray:
    """Return x small + plus modulo 2^128, exact: words [..., 2, N] of x [..., 2, N], the transform
    [N / 2] of a polynomial of coefficients in {-1, 0, 1}, and int64 [..., N].
    """
    sums = whole(limbs(x, LIMB, 128) * small)
    sums[..., 0, :] += plus
    return wide(sums)


def word_times_small(x: np.ndarray, small: np.ndarray) -> np.ndarray:
    """Return x small modulo 2^64, exact: words [..., N] of x [..., N] and the transform [N / 2], or
    [..., 1, N / 2], of polynomials of coefficients in {-1, 0, 1}.
    """
    sums = whole(limbs(x, LIMB, 64) * small)
    product = (
        sums[..., 0, :] + (sums[..., 1, :] << np.int64(22)) + (sums[..., 2, :] << np.int64(44))
    )
    return product.view(np.uint64)


def upper_times(x: np.ndarray, word: np.uint64) -> np.ndarray:
    """Return x word, modulo 2^128, over 2^64, rounded: words [..., N] of x [..., 2, N], of NumPy or
    of JAX.
    """
    half, ones = np.uint64(32), np.uint64(0xFFFFFFFF)
    low, high = x[..., 0, :] & ones, x[..., 0, :] >> half
    word_low, word_high = word & ones, word >> half
    mixed, other = low * word_high, high * word_low
    carry = (low * word_low >> half) + (mixed & ones) + (other & ones) + np.uint64(1 << 31)
    product = x[..., 1, :] * word + high * word_high
    return product + (mixed >> half) + (other >> half) + (carry >> half)


def plus_at(x: np.ndarray, message: np.ndarray, at: int) -> np.ndarray:
    """Return x + 2^at message modulo 2^128, 0 < at < 128: words [..., 2, N] of words [..., N] that
    stand for numbers from -2^63 to 2^63 - 1.
    """
    if at < 64:
        low = x[..., 0, :] + (message << np.uint64(at))
        high = (message.view(np.int64) >> np.int64(64 - at)).view(np.uint64)
    else:
        low, high = x[..., 0, :], message << np.uint64(at - 64)
    return np.stack([low, x[..., 1, :] + high + (low < x[..., 0, :])], axis=-2)


# ---- X -> X^k


@functools.cache
def _permutation(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the coefficients of `mapped` come from, and all ones where they change their
    sign.
    """
    to = np.arange(N) * k % (2 * N)
    source, negative = np.empty(N, np.int64), np.zeros(N, np.uint64)
    source[to % N] = np.arange(N)
    negative[to % N] = np.where(to >= N, np.uint64(2**64 - 1), np.uint64(0))
    return source, negative


def mapped(x: np.ndarray, k: int) -> np.ndarray:
    """Return x(X^k) for odd k: words [..., N]."""
    source, negative = _permutation(k)
    return (x[..., source] ^ negative) - negative


def lowered(x: np.ndarray, k: int) -> np.ndarray:
    """Return x X^-k for 0 <= k < N: words [..., N]."""
    return np.concatenate([x[..., k:], np.uint64(0) - x[..., :k]], axis=-1)
