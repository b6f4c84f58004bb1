"""RMSNorm, and whether rows are too long: exact in plaintext, by squares and lines on shares.

A norm takes 16 messages, and a whole row is off by 9e-4, relative (4e-4 but for the smallest rows;
tests/protocols/test_nonlinear.py). It also returns a shared int32 that is positive if an input was
out of range, whatever its 64 bits are, else 0; a model adds such counts up and lets nothing pass
that came of others (`protocols.functions.in_range`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from protocols.arithmetic.field import LIMIT_BITS
from protocols.arithmetic.field_product import field_scale_rows
from protocols.arithmetic.narrow import FRAC_BITS, narrow
from protocols.arithmetic.product import scale_rows, sum_squares
from protocols.arithmetic.projection import LONGEST, bound, least_bits, project
from protocols.bits.convert import to_arith
from protocols.bits.thresholds import below
from protocols.functions.in_range import count_outside
from protocols.functions.piecewise import Lines, Untruncated, evaluate, lines
from protocols.functions.reciprocals import outside_of
from spu_llm.core import field
from spu_llm.core.approx import approximation

# Mean squares of rows, public; a model's own range is narrower (`models.ranges`).
NORM_LOW, NORM_HIGH = 2.0**-11, 2.0**14
_NORM_PIECES = 8  # per octave: half the comparisons for an error that a whole row shares
_LEAST_SUM = 2.0**20  # in words, of which 2^12 are noise (`protocols.arithmetic.product`)


def norm_high(width: int) -> float:
    """Return the largest power of two, NORM_HIGH at most, that rows of this width may have for a
    mean square.
    """
    return min(NORM_HIGH, 2.0 ** math.floor(math.log2(LONGEST**2 / width)))


def _rms_norm(
    x: Array,
    *others: Array,
    epsilon: float,
    gain: float = 1.0,
    low: float = NORM_LOW,
    high: float | None = None,
    longest: Sequence[float] = (),
) -> tuple[Array, Array]:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    normed = x * (jax.lax.rsqrt(mean_square + epsilon) * gain)
    outside = outside_of(mean_square, low, high or norm_high(x.shape[-1]))
    for rows, most in zip(others, longest, strict=True):
        outside = outside + _longer(rows, longest=most)
    return normed, outside


def _longer(rows: Array, *, longest: float) -> Array:
    return outside_of(jnp.sum(rows * rows, axis=-1), 0.0, longest**2)


@functools.cache
def check_norm(width: int, epsilon: float, low: float, high: float) -> None:
    """Raise ValueError when rows of this width and range cannot be normalised on shares, times some
    gain from 1/8 to 32.
    """
    high = min(high, norm_high(width))
    if not low < high:
        raise ValueError(f"rows of {width} have mean squares below {high:g}, not from {low:g} on")
    if low * width * 2.0 ** (2 * FRAC_BITS) < _LEAST_SUM:
        raise ValueError(f"sums of {width} squares of {low:g} in the mean are lost in their noise")
    for gain in (0.125, 1.0, 32.0):
        bound(width, norm_lines(width, epsilon, gain, low, high)[0].bits)


@functools.cache
def norm_lines(
    d: int, epsilon: float, gain: float, low: float, high: float, bits: int = 0
) -> tuple[Lines, int]:
    """Return lines for gain / sqrt(s / d + epsilon) of a sum s of squares, and the fraction bits of
    their results: what leaves the smallest result 15 bits. Comparisons have `bits` bits at least.
    """
    position_out = 15 - int(np.floor(np.log2(gain / np.sqrt(high + epsilon))))

    def of_sum(s: np.ndarray) -> np.ndarray:
        return gain / np.sqrt(s / d + epsilon)

    function = lines(
        of_sum,
        low * d,
        high * d,
        2 * FRAC_BITS,
        position_out,
        _NORM_PIECES,
        max(bits, least_bits(d)),
    )
    return function, position_out


def _rms_norm_on_shares(
    x: Any,
    *others: Any,
    epsilon: float,
    gain: float = 1.0,
    low: float = NORM_LOW,
    high: float | None = None,
    longest: Sequence[float] = (),
) -> tuple[Any, Any]:
    """Normalise rows on shares. 1. The sum of squares (unscaled), mod 2^64. 2. Its root's inverse,
    and whether it and the projections of all rows are in range. 3. Rows times the inverse.
    """
    *_, d = x.shape
    rows, high = x.reshape(-1, d), high or norm_high(d)
    if high > norm_high(d):
        raise ValueError(f"rows of {d} with a mean square up to {high:g}: too long for words")
    # 1.
    total = sum_squares(rows, shift=0)
    # 2.
    wide = [
        (other.reshape(len(rows), -1), most) for other, most in zip(others, longest, strict=True)
    ]
    bits = max((least_bits(other.shape[1], most) for other, most in wide), default=0)
    function, position = norm_lines(d, epsilon, gain, low, high, bits)
    short = [_projected(some, most, function.bits) for some, most in [(rows, LONGEST), *wide]]
    factor, outside = evaluate(total, function, short)
    # 3.
    longest_row = gain * math.sqrt(d)
    return _times_factors(rows, factor, position, longest_row).reshape(x.shape), outside


_MOST_CUT = 3  # bits of a norm's factors, of which the smallest have 15
_SLACK = 1.02  # factors are off by `MAX_ERROR`, and words by a unit


def _times_factors(rows: Any, factors: Untruncated, position: int, longest: float) -> Any:
    """Compute rows [rows, d] times factors of `position` fraction bits, none of them longer than
    `longest` in the end: in the field where it holds them.
    """
    held = LIMIT_BITS - FRAC_BITS - math.ceil(math.log2(longest * _SLACK))
    cut = max(0, position - held, position - field.MAX_SHIFT)
    if cut > _MOST_CUT:
        return scale_rows(rows, factors.truncated(), shift=position)
    cuts, shift = (0, factors.shift + cut), factors.shift + position
    return field_scale_rows(rows, factors.words, cuts=cuts, shift=shift)


def _projected(rows: Any, longest: float, bits: int) -> tuple[Any, int]:
    """Return projections as narrow words [PROJECTIONS, rows] of `bits` bits, and what they are
    within for short rows.
    """
    limit = bound(rows.shape[1], bits, longest)
    projections = project(rows, factor_bits=limit.factor_bits)
    return narrow(projections.T, drop=64 - limit.bits, bits=limit.bits), limit.units


def _longer_on_shares(rows: Any, *, longest: float) -> Any:
    rows = rows.reshape(-1, rows.shape[-1])
    bits = least_bits(rows.shape[1], longest)
    words, most = _projected(rows, longest, bits)
    columns = jnp.moveaxis(words, 0, -1)
    taken = to_arith(below(columns, thresholds=((-most, most),) * len(words), bits=bits))
    sides = taken.reshape(len(words), 2, *columns.shape[:-1])
    return count_outside([sides[:, 0]], [sides[:, 1]])


longer = approximation("longer", reference=_longer, on_shares=_longer_on_shares)
"""An int32 that is positive if some row [..., k] is as long as `longest`, else 0; on shares, if it
is GAP times as long (`protocols.arithmetic.projection`), for all 64-bit words, but for a
probability of 2^-40 a row at most."""


rms_norm = approximation("rms_norm", reference=_rms_norm, on_shares=_rms_norm_on_shares)
"""x [..., d] gain / sqrt(mean(x^2) + epsilon), and an int32 that is positive if some row has a mean
square out of [low, high), or some row of the other arrays [..., k] is too long (`longer`, with its
number of `longest`), else 0. low, high (default: `norm_high`), gain and epsilon are public. Other
rows cost comparisons, and no message.

On shares that int32 is right for all 64-bit words, but for a probability of 2^-40 a row at most
(`protocols.arithmetic.projection`). ValueError for a range that words of 64 bits do not hold."""
