"""Polynomials modulo X^n + 1 and what RLWE draws of them: common to silent and packed products."""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from spu_llm.core.prg import Prg

NOISE_PAIRS = 21  # of coins: the variance of the noise is half of it
_COINS = np.uint64((1 << NOISE_PAIRS) - 1)
_ELEVEN, _SHIFT_11 = np.uint64((1 << 11) - 1), np.uint64(11)
_TERNARY = np.arange(255) % 3 - 1.0  # by byte: looking up is faster than dividing
_ONES = np.array([bin(i).count("1") for i in range(1 << 11)], np.int8)


def public(label: str, start: int, count: int, words: int) -> np.ndarray:
    """Return words [count, words] number start.. of a public string that nobody chose
    (`public_stream`).
    """
    made = np.empty((count, words), np.uint64)
    for i in range(count):
        made[i] = public_stream(label, start + i).words((words,))
    return made


def public_stream(label: str, number: int) -> Prg:
    """Return a stream that nobody chose: AES-256 in counter mode, the key SHA-256 of the label and
    the number. Labels that differ give independent streams: the number is what follows the last
    space.
    """
    return Prg(hashlib.sha256(f"{label} {number}".encode()).digest())


def ternary(prg: Prg, count: int, n: int) -> np.ndarray:
    """Draw uniform coefficients -1, 0, 1, by rejection: float64 [count, n]."""
    wanted = count * n
    coefficients = np.empty(0, np.uint8)
    while coefficients.size < wanted:
        drawn = prg.words((wanted // 7,)).view(np.uint8)
        coefficients = np.concatenate([coefficients, drawn[drawn < 255]])
    return _TERNARY[coefficients[:wanted]].reshape(count, n)


def noise(prg: Prg, shape: tuple[int, ...]) -> np.ndarray:
    """Draw centred binomial noise, -21 to 21, of standard deviation 3.24: int64 of `shape`."""
    drawn = prg.words(shape)
    heads = _count(drawn & _COINS) - _count((drawn >> np.uint64(NOISE_PAIRS)) & _COINS)
    return heads.astype(np.int64)


def _count(coins: np.ndarray) -> np.ndarray:
    """Return how many bits are one in each of words below 2^22."""
    return _ONES[coins & _ELEVEN] + _ONES[coins >> _SHIFT_11]


def transform(x: np.ndarray) -> np.ndarray:
    """Return the transforms of real polynomials [..., n]: complex [..., n / 2]. Products of
    transforms are the transforms of the polynomials' products.

    Coefficients i and i + n/2 are one complex number, twisted by exp(i pi i / n), so that the
    cyclic convolution of scipy.fft becomes a negacyclic one.
    """
    import scipy.fft  # takes a third of a second, and supervisors transform nothing

    n = x.shape[-1]
    half = np.empty((*x.shape[:-1], n // 2), np.complex128)
    half.real, half.imag = x[..., : n // 2], x[..., n // 2 :]
    half *= twist(n)[0]
    return scipy.fft.fft(half, overwrite_x=True)


def inverse(z: np.ndarray) -> np.ndarray:
    """Return the real polynomials [..., n] of transforms [..., n / 2], which it may overwrite."""
    y = _untwisted(z)
    return np.concatenate([y.real, y.imag], axis=-1)


def whole(z: np.ndarray) -> np.ndarray:
    """Return the polynomials [..., n] of transforms [..., n / 2], which it may overwrite, rounded:
    int64.
    """
    y = _untwisted(z)
    parts = y.view(np.float64)
    np.rint(parts, out=parts)
    coefficients = np.empty((*y.shape[:-1], 2 * y.shape[-1]), np.int64)
    coefficients[..., : y.shape[-1]], coefficients[..., y.shape[-1] :] = y.real, y.imag
    return coefficients


def _untwisted(z: np.ndarray) -> np.ndarray:
    import scipy.fft

    y = scipy.fft.ifft(z, overwrite_x=True)
    y *= twist(2 * z.shape[-1])[1]
    return y


@functools.cache
def twist(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the twist, and what takes it away: complex [n / 2] each."""
    twist = np.exp(1j * np.pi * np.arange(n // 2) / n)
    return twist, twist.conj()
