"""The prime field F_p of products in slots: p = 2^48 - 2^20 + 1.

An element is a uint64 below p, six bytes in a message. p is 1 modulo 2^20, so that shares modulo p
are truncated by up to 20 bits without a bias, and modulo 2^14, so that polynomials of degree below
8192 have that many slots.
"""

from __future__ import annotations

import numpy as np

from spu_llm.core.prg import Prg

P = (1 << 48) - (1 << 20) + 1
BITS = 48  # of an element in a message: whole bytes
MAX_SHIFT = 20  # p is one modulo 2^20

_P, _SIGNED_P = np.uint64(P), np.int64(P)


def reduced(words: np.ndarray) -> np.ndarray:
    """Return words (uint64) modulo p."""
    return np.asarray(words % _P)


def of_integers(x: np.ndarray) -> np.ndarray:
    """Return integers (int64) modulo p."""
    return np.asarray(x % _SIGNED_P).view(np.uint64)


def added(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x + y of elements."""
    total = x + y
    return np.asarray(np.minimum(total, total - _P))


def subtracted(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x - y of elements."""
    difference = x - y
    return np.asarray(np.minimum(difference, difference + _P))


def multiplied(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x y of elements: the quotient of doubles is off by one at most, and words wrap around
    in what is left.
    """
    a, b = np.asarray(x).view(np.int64), np.asarray(y).view(np.int64)
    quotient = (a.astype(np.float64) * b.astype(np.float64) * (1.0 / P)).astype(np.int64)
    return of_integers(a * b - quotient * _SIGNED_P)


def uniform(prg: Prg, shape: tuple[int, ...], prime: int = P) -> np.ndarray:
    """Draw uniform elements, or residues modulo another prime, by rejection."""
    drop = np.uint64(64 - prime.bit_length())
    drawn = prg.words(shape) >> drop
    while (again := drawn >= np.uint64(prime)).any():
        drawn = np.where(again, prg.words(shape) >> drop, drawn)
    return drawn
