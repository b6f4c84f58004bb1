"""Drawing tokens and noise from a cryptographic stream (`spu_llm.core.prg`).

`draw` is exact: weights are taken as the rational numbers that their float64 words are, and a
uniform integer below their sum picks one. No probability becomes zero, none is cut off, so that
nothing is added to the range of a token's privacy loss. (An inverse CDF in float64, or Gumbel noise
of 53 random bits, gives probability zero to what is rarer than 2^-53: an infinite loss.)

`laplace` and `gaussian` are float64 noise for the baselines, where a comparison or a ranking is all
that comes out; they are not hardened against the gaps of floating point (Mironov 2012).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from spu_llm.core.prg import Prg

_WORD = 64
_MANTISSA = 53


def draw(weights: np.ndarray, prg: Prg) -> int:
    """Draw an index with probability weights[i] / sum exactly. weights: float64 [m], all above zero
    and finite; ValueError otherwise.
    """
    if not len(weights) or not np.all(np.isfinite(weights)) or not np.all(weights > 0):
        raise ValueError("weights must be finite and above zero")
    ends = list(itertools.accumulate(as_integers(weights)))
    return bisect.bisect_right(ends, below(ends[-1], prg))


def as_integers(weights: np.ndarray) -> list[int]:
    """Return integers in the very proportions of float64 weights above zero."""
    mantissas, exponents = np.frexp(np.asarray(weights, np.float64))
    whole = np.ldexp(mantissas, _MANTISSA).astype(np.int64)
    shifts = exponents - exponents.min()
    return [int(m) << int(s) for m, s in zip(whole, shifts, strict=True)]


def below(bound: int, prg: Prg) -> int:
    """Draw a uniform integer in [0, bound), of any size, by rejection."""
    bits = (bound - 1).bit_length()
    count = -(-bits // _WORD)
    while True:
        number = int.from_bytes(prg.words((count,)).tobytes(), "little")
        number >>= count * _WORD - bits
        if number < bound:
            return number


def laplace(scale: float, prg: Prg) -> float:
    """Draw from Lap(scale): density e^(-|x| / scale) / (2 scale)."""
    sign = 1.0 if int(prg.words((1,))[0]) & 1 else -1.0
    return sign * scale * float(-np.log(_open_uniform((1,), prg))[0])


def gaussian(shape: Sequence[int], prg: Prg) -> np.ndarray:
    """Draw standard normal numbers, float64 (Box and Muller)."""
    radius = np.sqrt(-2 * np.log(_open_uniform(tuple(shape), prg)))
    normal: np.ndarray = radius * np.cos(2 * np.pi * prg.uniform(tuple(shape)))
    return normal


def _open_uniform(shape: tuple[int, ...], prg: Prg) -> np.ndarray:
    """Draw numbers uniform in (0, 1]."""
    return 1.0 - prg.uniform(shape)
