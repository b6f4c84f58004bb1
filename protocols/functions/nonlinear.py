"""Nonlinear functions of a transformer: exact in plaintext, approximate and round-lean on shares.

Each is an approximation (`spu_llm.core.approx`): on shares it is a few ops, most of whose messages
are comparisons. Errors, messages and bytes: `spu-llm bench op` and
tests/protocols/test_nonlinear.py, which asserts what is said here.

                  messages   error
relu              6          1.0e-3 (absolute)
gelu, silu        10         3.0e-3, 9.8e-3 (absolute; `protocols.functions.piecewise.quadratics`,
                             whose dropped bits may add a unit a threshold)
reciprocal, rsqrt 10         3e-4, 2e-4 (relative; `protocols.functions.piecewise.lines`)
rms_norm          16         9e-4 (relative, of a whole row; 4e-4 but for the smallest rows)
softmax over 64   46         4e-4 (relative), 2^-14.7

Reciprocals and norms also return a shared int32 that is positive if an input was out of range,
whatever its 64 bits are, else 0 (`protocols.functions.piecewise.evaluate`); a model adds them up
and lets nothing pass that came of others (`protocols.functions.in_range`). Activations, scores and
logits follow norms through known matrices, so they have bounds: their comparisons are as wide as
the caller's bound needs (`activation_bits`, `score_bits`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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
from protocols.bits.mux import mux
from protocols.bits.thresholds import below
from protocols.functions.exponential import (
    COARSE,
    FINE_BITS,
    LEAST_COARSE_BITS,
    REACH,
    TOO_LOW,
    bound_of,
    exponentials_below,
)
from protocols.functions.in_range import count_outside
from protocols.functions.piecewise import (
    UNIT_BITS,
    Lines,
    Quadratics,
    Untruncated,
    evaluate,
    lines,
    quadratics,
)
from protocols.functions.ragged import Ragged
from spu_llm.core import field
from spu_llm.core.approx import approximation

# ---- GELU and SiLU

# Fitted by `python -m protocols.functions.fits`; written out because both parties must hold the
# very same numbers. A test fits them again.
GELU = {
    4: Quadratics(
        (-53, -16, 15, 52),
        ((-2350, -14727, -23174), (22837, 32768, 314), (-2350, 80263, -23174)),
        error=0.012,
    ),
    6: Quadratics(
        (-50, -21, -10, 9, 20, 49),
        (
            (-2812, -16819, -25423),
            (9586, 14301, -5736),
            (24751, 32768, 53),
            (9586, 51235, -5736),
            (-2812, 82355, -25423),
        ),
        error=0.003,
    ),
    8: Quadratics(
        (-54, -35, -20, -10, 9, 19, 34, 53),
        (
            (-1787, -11491, -18587),
            (-2166, -14652, -23639),
            (10316, 15540, -5232),
            (24751, 32768, 53),
            (10316, 49996, -5232),
            (-2166, 80188, -23639),
            (-1787, 77027, -18587),
        ),
        error=0.0021,
    ),
    10: Quadratics(
        (-59, -44, -23, -15, -8, 7, 14, 22, 43, 58),
        (
            (-736, -5219, -9283),
            (-3104, -18015, -26608),
            (4621, 3645, -11358),
            (15712, 23853, -2109),
            (25237, 32768, 22),
            (15712, 41683, -2109),
            (4621, 61891, -11358),
            (-3104, 83551, -26608),
            (-736, 70755, -9283),
        ),
        error=0.0011,
    ),
}
SILU = {
    4: Quadratics(
        (-112, -24, 23, 111),
        ((-753, -9653, -31546), (14184, 32768, 457), (-753, 75189, -31546)),
        error=0.018,
    ),
    6: Quadratics(
        (-105, -32, -15, 14, 31, 104),
        (
            (-894, -10831, -33813),
            (5815, 15241, -8196),
            (15429, 32768, 81),
            (5815, 50295, -8196),
            (-894, 76367, -33813),
        ),
        error=0.0098,
    ),
    8: Quadratics(
        (-136, -85, -33, -15, 14, 32, 84, 135),
        (
            (-207, -3306, -13385),
            (-992, -11510, -34915),
            (5563, 14570, -8623),
            (15429, 32768, 81),
            (5563, 50966, -8623),
            (-992, 77046, -34915),
            (-207, 68842, -13385),
        ),
        error=0.0037,
    ),
    10: Quadratics(
        (-132, -81, -38, -24, -12, 11, 23, 37, 80, 131),
        (
            (-249, -3863, -15211),
            (-1067, -12073, -35933),
            (2294, 3413, -18000),
            (8990, 22965, -3623),
            (15757, 32768, 35),
            (8990, 42571, -3623),
            (2294, 62123, -18000),
            (-1067, 77609, -35933),
            (-249, 69399, -15211),
        ),
        error=0.0023,
    ),
}
# What models compute with. Most inputs are within 4, where more thresholds of SiLU add nothing: for
# a normal density of deviation 1.5 the root mean square error of SILU[6] and of SILU[8] is 1.1e-3;
# for one of deviation 3 it is 1.7e-3 and 1.0e-3.
PIECES = {"gelu": GELU[6], "silu": SILU[6]}
LARGEST_ACTIVATION = 1000  # what `widen` of `protocols.functions.piecewise.quadratics` holds


def activation_bits(largest: float) -> int:
    """Return the bits of comparisons for |x| <= largest, which is at most LARGEST_ACTIVATION: of x
    in units of 2^-4, less a threshold.
    """
    thresholds = [t for table in (GELU, SILU) for f in table.values() for t in f.thresholds]
    return 1 + math.ceil(math.log2(16 * largest + max(map(abs, thresholds)) + 1))


def _activation(name: str, function: Callable[[Any], Any], pieces: Quadratics) -> Any:
    return approximation(
        name,
        reference=lambda x, bits=0: function(x),
        on_shares=lambda x, bits=_BITS: quadratics(x, pieces, bits=bits),
    )


_BITS = activation_bits(240)

gelu = _activation("gelu", lambda x: jax.nn.gelu(x, approximate=True), PIECES["gelu"])
"""GELU, tanh form; |x| <= 240, or what `bits` = `activation_bits(largest)` holds."""

silu = _activation("silu", jax.nn.silu, PIECES["silu"])
"""SiLU; |x| <= 240, or what `bits` = `activation_bits(largest)` holds."""


RELU_BITS = 6  # fraction bits of a comparison with zero, more than activations' 4
RELU_ERROR = 2.0 ** -(UNIT_BITS + RELU_BITS)


def _relu_on_shares(x: Any, *, bits: int = _BITS) -> Any:
    """Compute x less x where x < 0: the sign of narrow x, then bits times words."""
    bits += RELU_BITS
    top = narrow(x, drop=FRAC_BITS - UNIT_BITS - RELU_BITS, bits=bits)
    (negative,) = below(top[..., None], thresholds=((0,),), bits=bits)
    return x - mux(negative, x)


relu = approximation("relu", reference=lambda x, bits=0: jax.nn.relu(x), on_shares=_relu_on_shares)
"""ReLU, off by 2^-10 at most, where x is as near to zero; |x| <= 240, or what `bits` =
`activation_bits(largest)` holds."""


# ---- reciprocals


def _inverse(x: Any) -> Any:
    return 1 / x


def _inverse_root(x: Any) -> Any:
    return (jnp if isinstance(x, jax.Array) else np).reciprocal(x**0.5)


@functools.cache
def _lines_of(f: Callable[..., Any], low: float, high: float) -> Lines:
    return lines(f, low, high, FRAC_BITS, FRAC_BITS)


def _on_range(name: str, f: Callable[..., Any]) -> Any:
    """Approximate f(x), and give an int32, positive if some x was out of [low, high), else 0."""

    def reference(x: Array, *, low: float, high: float) -> tuple[Array, Array]:
        return f(x), _outside(x, low, high)

    def on_shares(x: Any, *, low: float, high: float) -> tuple[Any, Any]:
        y, outside = evaluate(x, _lines_of(f, low, high))
        return y.truncated(), outside

    return approximation(name, reference=reference, on_shares=on_shares)


def _outside(x: Any, low: float, high: float) -> Any:
    return jnp.sum(((x < low) | (x >= high)).astype(jnp.int32))


reciprocal = _on_range("reciprocal", _inverse)
rsqrt = _on_range("rsqrt", _inverse_root)


# ---- norms

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
    outside = _outside(mean_square, low, high or norm_high(x.shape[-1]))
    for rows, most in zip(others, longest, strict=True):
        outside = outside + _longer(rows, longest=most)
    return normed, outside


def _longer(rows: Array, *, longest: float) -> Array:
    return _outside(jnp.sum(rows * rows, axis=-1), 0.0, longest**2)


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


# ---- softmax

LARGEST_SCORE = 2.0**18  # what comparisons of narrow words hold
RECIPROCAL_BITS = 26  # fraction bits of the reciprocal of a row's sum


def score_bits(largest: float, secret: bool = False) -> int:
    """Return the bits of comparisons for scores |z| <= largest, which is at most LARGEST_SCORE: of
    differences of coarse scores, hidden ones below all others; more than 2 REACH below, where it is
    `secret` which scores are hidden. They are as many as exponents take in any case.
    """
    units, more = 2.0 ** (FRAC_BITS - COARSE), REACH if secret else 0
    needed = 2 + math.ceil(math.log2(2 * (largest + more) * units + 4))
    return max(LEAST_COARSE_BITS, needed)


_SCORE_BITS = score_bits(511)


def softmax_weights(scores: Any, visible: Any = None, bits: int = _SCORE_BITS) -> tuple[Any, Any]:
    """Compute unnormalised weights exp(z - m) [rows, n] of the rows z of scores, from 0 to 1, and m
    [rows], as words of `bits` bits in units of 1/16.

    scores: [rows, n] shared product words (36 fraction bits; as floats z 2^18); `bits`, from
    `score_bits`, holds |z| where visible, and wherever that is a secret. visible: [rows, n], bool
    and public; or a secret, the parties' or one's own, as int32: 0, or -1 where hidden. Hidden
    scores weigh exactly nothing, and nothing is sent for it: 2^(bits - 2) is taken from them, m is
    no less than -2^(bits - 3), and so they are REACH below it, where exponentials are zero.

    m is an upper bound of the row's maximum, 3/16 above it at most: the maximum of coarse scores;
    far below all scores where a row sees none.
    """
    fine, coarse = _narrowed(scores, visible, bits)
    competing = coarse
    if _is_secret(visible):
        least = jnp.full((len(coarse), 1), _least(bits), coarse.dtype)
        competing = jnp.concatenate([coarse, least], axis=1)
    shift = bound_of(competing, bits=bits)
    bound = jnp.broadcast_to(shift[:, None], coarse.shape)
    return _weights_below(bound, fine, coarse, visible, bits), shift


def causal_weights(scores: Any, visible: Any, lengths: tuple[int, ...], bits: int) -> Any:
    """Compute `softmax_weights` of scores [k, n, width] of which row i of n sees the first
    `lengths[i]` at most: what comes after them weighs nothing and costs nothing. `visible`, of the
    scores' shape, says which of them it sees.
    """
    rows = Ragged(lengths)
    visible = rows.flat(visible)
    fine, coarse = _narrowed(rows.flat(scores), visible, bits)
    longer, competing = rows, coarse
    if _is_secret(visible):
        longer, competing = rows.with_last(coarse, _least(bits))
    shift = longer.maxima(competing, bits=bits) + TOO_LOW
    weights = _weights_below(rows.spread(shift), fine, coarse, visible, bits)
    return rows.padded(weights, scores.shape[2])


def _narrowed(scores: Any, visible: Any, bits: int) -> tuple[Any, Any]:
    """Return scores in units, and coarse ones, hidden ones below all others."""
    # Half the way to a softmax is free: narrow words need no truncation.
    fine = narrow(scores, drop=FRAC_BITS, bits=FINE_BITS)
    coarse = narrow(scores, drop=FRAC_BITS + COARSE, bits=bits)
    return fine, coarse if visible is None else _hide(coarse, visible, bits)


def _is_secret(visible: Any) -> bool:
    return visible is not None and visible.dtype != jnp.bool_


def _least(bits: int) -> int:
    """Return what competes in a row that may see no score: less than all scores that are seen."""
    return -(1 << (bits - 3))


def _weights_below(bound: Any, fine: Any, coarse: Any, visible: Any, bits: int) -> Any:
    """Compute the weights of scores below bounds in coarse units."""
    weights = exponentials_below(fine - bound * (1 << COARSE), coarse - bound, bits=bits)
    if visible is not None and not _is_secret(visible):  # of a row that sees nothing, too
        weights = jnp.where(visible, weights, 0.0)
    return weights


def reciprocal_of_sums(sums: Any, n: int) -> tuple[Untruncated, Any]:
    """Compute reciprocals [rows] of sums of n weights, the largest of which is from exp(-3/16) to
    one, as words of 26 fraction bits when they are truncated, and an int32, positive if a sum was
    out of range, else 0.
    """
    return evaluate(sums, _sum_lines(n))


def _hide(rows: Any, visible: Any, bits: int) -> Any:
    """Return scores of `bits` bits with hidden ones below all others."""
    far = 1 << (bits - 2)
    if visible.dtype == jnp.bool_:
        return jnp.where(visible, rows, -far)
    return rows + (visible * far).astype(rows.dtype)


@functools.cache
def _sum_lines(n: int) -> Lines:
    """Return lines for 1 / s of a sum of n weights, the largest of them from exp(-3/16) to one."""
    return lines(_inverse, 0.8, max(n, 2) + 0.5, FRAC_BITS, RECIPROCAL_BITS)


def _softmax(scores: Array) -> Array:
    return jax.nn.softmax(scores * 2.0**-FRAC_BITS, axis=-1)


def _softmax_on_shares(scores: Any) -> Any:
    weights, _ = softmax_weights(scores)
    # No score leaves a sum out of range.
    inverse, _ = reciprocal_of_sums(jnp.sum(weights, axis=-1), scores.shape[1])
    cuts, shift = (3, inverse.shift + 3), inverse.shift + RECIPROCAL_BITS
    return field_scale_rows(weights, inverse.words, cuts=cuts, shift=shift)


softmax_of_product = approximation(
    "softmax_of_product", reference=_softmax, on_shares=_softmax_on_shares
)
"""The softmax of every row of scores [rows, n], given as product words (36 fraction bits)."""
