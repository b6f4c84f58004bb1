"""Functions on shares by pieces: which piece is a matter of comparisons, all of them at once.

quadratics  Few pieces, many values. With T = x^2 unscaled and whole-number coefficients, every
            piece p_j = a_j T + b_j x + c_j is local work, and so are their differences:
                f(x) = x + sum_j [x < t_j] (p_j - p_{j+1})(x),    the last piece being x.
              1. T (three rounds, by way of the field), while 2. [x < t_j] for all j, of narrow x
              (two rounds).
              3. Bits times differences (`protocols.bits.mux`, one round), of which each party drops
              the fraction bits that were too many, alone: mod 2^24 where three bytes hold x and 14
              fraction bits or more, else mod 2^30 with 18. 4. `widen`, or straight into the field.
            A difference may overflow: mod 2^24 it is zero all the same where its bit is zero, and
            where all bits are set the sum of all differences, -x, has no overflow.
            Dropping costs a unit in the mean, between none and two; it is added before.
lines       Few values, many pieces. Thresholds in geometric progression over a public range; slope
            and intercept of a piece from one look-up (`protocols.functions.lookup`).
              1. [x < t_j] for all j, and whether x is in range, while 2. x is truncated to what the
              slopes are worth. 3. The look-up (one round). 4. Slope times x. 5. One truncation, or
              the way into the field, which is one, too.

Comparisons are of `protocols.arithmetic.narrow` words, so a piece may still be taken within one
unit beyond its end: the fits allow for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from protocols.arithmetic.field_product import field_square
from protocols.arithmetic.narrow import FRAC_BITS, MAX_BITS, narrow, units, widen
from protocols.arithmetic.product import multiply
from protocols.arithmetic.truncate import truncate
from protocols.bits.convert import to_arith
from protocols.bits.mux import mux
from protocols.bits.thresholds import below
from protocols.functions.in_range import count_outside
from protocols.functions.lookup import Table, lookup

UNIT_BITS = 4  # fraction bits of a threshold of `Quadratics`
COEFFICIENT_BITS = 16
_THREE_BYTES = 24
MOST_SPARE = 4
_LARGEST = 60  # bits of a word before a truncation, which takes 62


def _truncated(x: Any, shift: int) -> Any:
    return truncate(x, shift=shift, how="unbiased", bits=64) if shift else x


# ---- few pieces, many values


@dataclass(frozen=True)
class Quadratics:
    """0 below the first of `thresholds` (in units of 2^-4), x from the last one on; between them
    `pieces` a x^2 + b x + c, whole numbers of 2^-16. `error`: the largest difference from what was
    fitted, at any x.
    """

    thresholds: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]
    error: float

    def all_pieces(self) -> tuple[tuple[int, int, int], ...]:
        return ((0, 0, 0), *self.pieces, (0, 1 << COEFFICIENT_BITS, 0))


# Of x before it is squared: rounded to 14 fraction bits, |x| < 2^9 has a square in the field. The
# square of any other x is wrong, and counts for nothing: beyond all thresholds a is zero.
_SQUARE_CUT = 4


def quadratics(x: Any, function: Quadratics, *, bits: int) -> Any:
    """Compute the function of float x [...], shared. x - t fits `bits` bits, 4 of them fraction:
    |x| is below 2^(bits-5) less the largest threshold. |x| < 2^10 in any case, for `widen`.
    """
    value = narrow_quadratics(x, function, bits=bits)
    # 4.
    return units(widen(value.words) * (1 << value.spare))


class Narrow(NamedTuple):
    """Narrow words with `spare` fraction bits fewer than words have, and room for `widen` or the
    way into the field.
    """

    words: Any
    spare: int


def narrow_quadratics(x: Any, function: Quadratics, *, bits: int) -> Narrow:
    """Compute `quadratics` as narrow words (steps 1 to 3)."""
    spare, width = _result(bits)
    # 1. 36 fraction bits, of which the last 8 are zero.
    squared = field_square(x, cuts=(_SQUARE_CUT,), shift=0)
    # 2.
    top = narrow(x, drop=FRAC_BITS - UNIT_BITS, bits=bits)
    taken = below(top[..., None], thresholds=(function.thresholds,), bits=bits)
    # 3.
    pieces = function.all_pieces()
    unit = 1 << spare  # of results, in words; of steps it is 2^drop
    steps = [
        _piece(x, squared, (a0 - a1, b0 - b1, c0 - c1)) + float(unit << COEFFICIENT_BITS)
        for (a0, b0, c0), (a1, b1, c1) in itertools.pairwise(pieces)
    ]
    drop = FRAC_BITS + COEFFICIENT_BITS + spare
    chosen = jnp.sum(mux(taken, narrow(jnp.stack(steps), drop=drop, bits=width)), axis=0)
    # The last piece is x itself.
    rounded = x + unit * 2.0**-FRAC_BITS if spare else x
    last = narrow(rounded, drop=spare, bits=width)
    return Narrow(last + chosen, spare)


def _result(bits: int) -> tuple[int, int]:
    """Return the fraction bits that results lack, MOST_SPARE at most, and a width that holds
    |x| < 2^(bits-5) twice over, as `widen` and the field need it.
    """
    spare = max(0, FRAC_BITS + bits - 3 - _THREE_BYTES)
    return (spare, _THREE_BYTES) if spare <= MOST_SPARE else (0, 64 - FRAC_BITS - COEFFICIENT_BITS)


def _piece(x: Any, squared: Any, coefficients: tuple[int, int, int]) -> Any:
    """Compute a x^2 + b x + c in words of 52 fraction bits, from x^2 in words of 36."""
    a, b, c = coefficients
    return squared * float(a) + x * float(b << FRAC_BITS) + float(c << FRAC_BITS)


# ---- few values, many pieces


@dataclass(frozen=True)
class Lines:
    """A function f > 0 on [low, high) by pieces of lines, for words w of x = w 2^-position.

    thresholds: in units of 2^drop words, both ends included; differences fit `bits` bits.
    cut: bits truncated from w before the product. slopes, intercepts: words of the pieces for
    results of `position_out` + `shift` fraction bits, of which `shift` are truncated.
    error: the largest relative difference from f.
    """

    drop: int
    bits: int
    thresholds: tuple[int, ...]
    cut: int
    slopes: Table
    intercepts: Table
    shift: int
    error: float

    @property
    def above(self) -> tuple[tuple[int, int], ...]:
        """Return (bits to drop, u) of narrow words that hold the bits above those of the
        thresholds, up to bit 63: such a word of a value in range is in [-1, u).

        Each has three bits in common with the one below it, so that a word which the one above lets
        pass is the only one with its narrow word below.
        """
        narrow, last, covered = [], self.thresholds[-1] << self.drop, self.drop + self.bits
        while covered < 64:
            drop = min(64 - self.bits, covered - 3)
            narrow.append((drop, (last >> drop) + 1))
            covered = drop + self.bits
        return tuple(narrow)


Function = Callable[[np.ndarray], np.ndarray]

MAX_ERROR = 2e-3
_TOP_BITS = 8  # of the lower end, in units; fewer for a range that needs more


def lines(
    f: Function,
    low: float,
    high: float,
    position: int,
    position_out: int,
    per_octave: int = 16,
    least_bits: int = 9,
) -> Lines:
    """Fit lines to a convex, falling f. With 16 per octave the error is about 1e-4 of 1/sqrt(x) and
    2.5e-4 of 1/x, plus what `position_out` fraction bits leave of the smallest result. Comparisons
    have `least_bits` bits at least.

    Raise ValueError when the range is too wide for words of 64 bits, or comparisons of 32, or when
    the error is above MAX_ERROR.
    """
    too_wide = f"no lines from {low} to {high} in words of 64 bits, comparisons of {MAX_BITS}"
    octaves = np.log2(high / low)
    top_bits = min(_TOP_BITS, MAX_BITS - 1 - int(np.ceil(octaves)))
    if high * 2.0**position >= 2.0**62 or top_bits < 4:
        raise ValueError(too_wide)
    # Thresholds.
    drop = max(0, int(np.ceil(np.log2(low))) + position - top_bits)
    drop = min(drop, 64 - least_bits)
    unit = 2.0 ** (drop - position)
    count = int(np.ceil(per_octave * octaves))
    ends = low * (high / low) ** (np.arange(count + 1) / count)
    thresholds = tuple(np.unique(np.round(ends / unit).astype(np.int64)).tolist())
    bits = min(64 - drop, max(least_bits, (thresholds[-1] - 1).bit_length() + 1))
    # Scales: errors of the truncated x and of rounded slopes are balanced.
    edges = np.array(thresholds) * unit
    fall = np.log2(f(edges[:1])[0] / f(edges[-1:])[0])
    scale = int(np.floor(_LARGEST - np.log2(f(edges[:1])[0])))  # fraction bits of the product
    places = min(position + np.log2(low), (_LARGEST - fall - octaves) / 2)
    cut = max(0, int(np.ceil(position + np.log2(low) - places)))
    shift = scale - position_out
    if bits > MAX_BITS or not 0 < shift < 63:
        raise ValueError(too_wide)
    # Pieces: the chord from an edge to one unit beyond the next, moved to the middle of its error.
    slopes, intercepts = [], []
    step = 2.0 ** (cut - position)  # of a truncated x
    for a, b in zip(edges[:-1], edges[1:] + unit, strict=True):
        x = np.linspace(a, b, 65)
        slope = (f(x[-1:])[0] - f(x[:1])[0]) / (b - a)
        chord = f(x[:1])[0] + slope * (x - a)
        centre = 2 / (1 + np.max(chord / f(x)))
        words = int(np.round(slope * centre * step * 2.0**scale))
        middle = (a + b) / 2
        value = centre * (f(x[:1])[0] + slope * (middle - a))
        slopes.append(words)
        intercepts.append(int(np.round(value * 2.0**scale)) - int(np.round(words * middle / step)))
    # Below the range and above it, the nearest piece.
    fitted = Lines(
        drop,
        bits,
        thresholds,
        cut,
        Table.of([slopes[0], *slopes, slopes[-1]]),
        Table.of([intercepts[0], *intercepts, intercepts[-1]]),
        shift,
        0.0,
    )
    error = _error(fitted, f, position, position_out)
    if error > MAX_ERROR:
        raise ValueError(f"{too_wide}: they would be off by {error:.1%}")
    return replace(fitted, error=error)


def _error(fitted: Lines, f: Function, position: int, position_out: int) -> float:
    """Return the largest relative error, one unit beyond a piece's end included, with a truncated x
    that is off by one and a result that is off by one unit.
    """
    worst = 0.0
    unit, step = 2.0 ** (fitted.drop - position), 2.0 ** (fitted.cut - position)
    scale = 2.0 ** (position_out + fitted.shift)
    edges = np.array(fitted.thresholds) * unit
    pieces = zip(
        fitted.slopes.entries()[1:-1],
        fitted.intercepts.entries()[1:-1],
        edges[:-1],
        edges[1:] + unit,
        strict=True,
    )
    for slope, intercept, a, b in pieces:
        x = np.linspace(a, b, 65)
        off = np.abs((slope * (x / step) + intercept) / scale - f(x))
        off += (abs(slope) / scale if fitted.cut else 0.0) + 2.0**-position_out
        worst = max(worst, float(np.max(off / f(x))))
    return worst


class Untruncated(NamedTuple):
    """Shared words of which the last `shift` bits are still to be truncated: by `truncated`, or by
    what they cross into the field with, in the same round.
    """

    words: Any
    shift: int

    def truncated(self) -> Any:
        return _truncated(self.words, self.shift)


def evaluate(
    x: Any, function: Lines, short: Sequence[tuple[Any, int]] = ()
) -> tuple[Untruncated, Any]:
    """Compute the function of shared words x [...] (floats by type) in words that will have
    `position_out` fraction bits, and a shared int32 that is zero if every x is in [low, high), for
    all 64-bit words x: up to a unit of the thresholds, a word out of that range makes it positive.

    short: narrow words [m, ...] of `function.bits` bits, each with its u, to be in [-u, u), too:
    compared in the same messages, and counted with the others.
    """
    # 1.
    near = narrow(x, drop=function.drop, bits=function.bits)
    columns, thresholds = [near], [function.thresholds]
    for drop, u in function.above:
        columns.append(narrow(x, drop=drop, bits=function.bits))
        thresholds.append((-1, u))
    for words, most in short:
        columns += list(words)
        thresholds += [(-most, most)] * len(words)
    taken = below(jnp.stack(columns, -1), thresholds=tuple(thresholds), bits=function.bits)
    # 2.
    value = _truncated(x, function.cut)
    # 3.
    ones = to_arith(taken)
    pieces, others = jnp.split(ones, [len(function.thresholds)])
    slope, intercept = lookup(pieces, [function.slopes, function.intercepts])
    # 4.
    y = Untruncated(multiply(slope, value, shift=0) + intercept, function.shift)
    sides = others.reshape(-1, 2, *x.shape)
    return y, count_outside([pieces[0], sides[:, 0]], [pieces[-1], sides[:, 1]])
