"""Nonlinear functions of a transformer: exact in plaintext, approximate and round-lean on shares.

Each is an approximation (`spu_llm.core.approx`): on shares it is a few ops, most of whose messages
are comparisons. Errors, messages and bytes: `spu-llm bench op` and
tests/protocols/test_nonlinear.py, which asserts what is said here.

                  messages   error
gelu, silu        10         2.0e-3, 2.4e-3 (absolute; `protocols.functions.piecewise.quadratics`)
reciprocal, rsqrt 12         3e-4, 2e-4 (relative; `protocols.functions.piecewise.lines`)
rms_norm          18         9e-4 (relative, of a whole row; 4e-4 but for the smallest rows)
softmax over 64   48         4e-4 (relative)

Reciprocals and norms also return a shared int32 that is positive if an input was out of range,
whatever its 64 bits are, else 0 (`protocols.functions.piecewise.evaluate`); a model adds them up
and lets nothing pass that came of others (`protocols.functions.in_range`). Activations, scores and
logits follow norms through known matrices, so they have bounds: their comparisons are as wide as
the caller's bound needs (`activation_bits`, `score_bits`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from protocols.arithmetic.narrow import FRAC_BITS, narrow
from protocols.arithmetic.product import scale_rows, sum_squares
from protocols.arithmetic.projection import LONGEST, bound, project
from protocols.arithmetic.truncate import truncate
from protocols.bits.mux import mux
from protocols.functions.exponential import SCALE_BITS, scaled_exponential
from protocols.functions.maximum import maximum
from protocols.functions.piecewise import Lines, Quadratics, evaluate, lines, quadratics
from spu_llm.core.approx import approximation

# ---- GELU and SiLU

# Fitted by `python -m protocols.functions.fits`; written out because both parties must hold the
# very same numbers. A test fits them again.
GELU = {
    4: Quadratics(
        (-46, -15, 14, 45),
        ((-1580, -11640, -20339), (22762, 32768, 348), (-1580, 77176, -20339)),
        error=0.0064,
    ),
    6: Quadratics(
        (-52, -20, -9, 10, 22, 51),
        ((-2567, -15770, -24358), (11092, 17202, -4391), (24216, 32768, 110),
         (7497, 55048, -7397), (-2566, 81302, -24354)),
        error=0.002,
    ),
    8: Quadratics(
        (-54, -32, -18, -8, 9, 19, 37, 53),
        ((-2032, -12954, -20726), (-727, -9956, -19888), (13361, 20824, -3018),
         (24532, 32768, 77), (10326, 49835, -5095), (-2335, 80591, -23835),
         (-1509, 75453, -16380)),
        error=0.0014,
    ),
    10: Quadratics(
        (-57, -39, -23, -15, -7, 7, 14, 22, 45, 56),
        ((-1220, -8277, -14076), (-2954, -17427, -26047), (4664, 3825, -11209),
         (16420, 24980, -1683), (25091, 32768, 32), (15683, 41646, -2070),
         (4664, 61711, -11209), (-2962, 82973, -26039), (-714, 70589, -8979)),
        error=0.00069,
    ),
}
SILU = {
    4: Quadratics(
        (-106, -24, 23, 105),
        ((-618, -8584, -29734), (13875, 32768, 636), (-618, 74120, -29734)),
        error=0.0097,
    ),
    6: Quadratics(
        (-118, -47, -19, 18, 46, 117),
        ((-640, -8587, -29143), (1999, 3134, -17403), (14696, 32768, 278),
         (1999, 62402, -17403), (-640, 74123, -29143)),
        error=0.005,
    ),
    8: Quadratics(
        (-131, -68, -31, -13, 15, 33, 97, 130),
        ((-335, -5059, -19264), (-753, -9967, -32528), (6670, 17843, -6298),
         (15143, 32768, 148), (5061, 52327, -9498), (-878, 76213, -33492),
         (-144, 67942, -10206)),
        error=0.0024,
    ),
    10: Quadratics(
        (-147, -86, -36, -22, -9, 12, 25, 41, 86, 146),
        ((-152, -2593, -11124), (-996, -11559, -35041), (3110, 6495, -15132),
         (10499, 26175, -1977), (15538, 32768, 68), (8072, 44519, -4615), (1350, 65760, -21451),
         (-986, 77021, -34910), (-147, 68053, -10841)),
        error=0.0011,
    ),
}  # fmt: skip
LARGEST_ACTIVATION = 1000  # what the products of `protocols.functions.piecewise.quadratics` hold


def activation_bits(largest: float) -> int:
    """Bits of comparisons for |x| <= largest, which is at most LARGEST_ACTIVATION: of x in units of
    2^-4, less a threshold.
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

gelu = _activation("gelu", lambda x: jax.nn.gelu(x, approximate=True), GELU[6])
"""GELU, tanh form; |x| <= 240, or what `bits` = `activation_bits(largest)` holds."""

silu = _activation("silu", jax.nn.silu, SILU[8])
"""SiLU, likewise."""


# ---- reciprocals


def _inverse(x: Any) -> Any:
    return 1 / x


def _inverse_root(x: Any) -> Any:
    return (jnp if isinstance(x, jax.Array) else np).reciprocal(x**0.5)


@functools.cache
def _lines_of(f: Callable[..., Any], low: float, high: float) -> Lines:
    return lines(f, low, high, FRAC_BITS, FRAC_BITS)


def _on_range(name: str, f: Callable[..., Any]) -> Any:
    """f(x), and an int32 that is positive if some x was out of [low, high), else 0."""

    def reference(x: Array, *, low: float, high: float) -> tuple[Array, Array]:
        return f(x), _outside(x, low, high)

    def on_shares(x: Any, *, low: float, high: float) -> tuple[Any, Any]:
        return evaluate(x, _lines_of(f, low, high))

    return approximation(name, reference=reference, on_shares=on_shares)


def _outside(x: Any, low: float, high: float) -> Any:
    return jnp.sum(((x < low) | (x >= high)).astype(jnp.int32))


reciprocal = _on_range("reciprocal", _inverse)
rsqrt = _on_range("rsqrt", _inverse_root)


# ---- norms

# Mean squares of rows, public; a model's own range is narrower (`models.ranges`).
NORM_LOW, NORM_HIGH = 2.0**-11, 2.0**14
_NORM_PIECES = 8  # per octave: half the comparisons for an error that a whole row shares
_NORM_BITS = 31  # of comparisons: what projections need


def norm_high(width: int) -> float:
    """The largest power of two that rows of this width may have for a mean square, or less."""
    return min(NORM_HIGH, 2.0 ** math.floor(math.log2(LONGEST**2 / width)))


def _rms_norm(
    x: Array, *, epsilon: float, gain: float = 1.0, low: float = NORM_LOW, high: float | None = None
) -> tuple[Array, Array]:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    normed = x * (jax.lax.rsqrt(mean_square + epsilon) * gain)
    return normed, _outside(mean_square, low, high or norm_high(x.shape[-1]))


def check_norm(width: int, epsilon: float, low: float, high: float) -> None:
    """ValueError when rows of this width and range cannot be normalised on shares, times some gain
    from 1/8 to 32.
    """
    high = min(high, norm_high(width))
    if not low < high:
        raise ValueError(f"rows of {width} have mean squares below {high:g}, not from {low:g} on")
    for gain in (0.125, 1.0, 32.0):
        bound(width, _norm_lines(width, epsilon, gain, low, high)[0].bits)


@functools.cache
def _norm_lines(
    d: int, epsilon: float, gain: float, low: float, high: float
) -> tuple[Lines, int]:
    """gain / sqrt(s / d + epsilon) of a sum s of squares, and its fraction bits: what leaves the
    smallest result 15 bits.
    """
    position_out = 15 - int(np.floor(np.log2(gain / np.sqrt(high + epsilon))))

    def of_sum(s: np.ndarray) -> np.ndarray:
        return gain / np.sqrt(s / d + epsilon)

    function = lines(
        of_sum, low * d, high * d, 2 * FRAC_BITS, position_out, _NORM_PIECES, _NORM_BITS
    )
    return function, position_out


def _rms_norm_on_shares(
    x: Any, *, epsilon: float, gain: float = 1.0, low: float = NORM_LOW, high: float | None = None
) -> tuple[Any, Any]:
    """1. The sum of squares (unscaled), mod 2^64. 2. Its root's inverse, and whether it and the
    row's projections are in range. 3. Rows times the inverse.
    """
    *_, d = x.shape
    rows, high = x.reshape(-1, d), high or norm_high(d)
    if high > norm_high(d):
        raise ValueError(f"rows of {d} with a mean square up to {high:g}: too long for words")
    # 1.
    total = sum_squares(rows, shift=0)
    # 2.
    function, position = _norm_lines(d, epsilon, gain, low, high)
    limit = bound(d, function.bits)
    projections = project(rows, factor_bits=limit.factor_bits)
    short = narrow(projections.T, drop=64 - limit.bits, bits=limit.bits), limit.units
    factor, outside = evaluate(total, function, short)
    # 3.
    return scale_rows(rows, factor, shift=position).reshape(x.shape), outside


rms_norm = approximation("rms_norm", reference=_rms_norm, on_shares=_rms_norm_on_shares)
"""x [..., d] gain / sqrt(mean(x^2) + epsilon), and an int32 that is positive if some row has a mean
square out of [low, high), else 0. low, high (default: `norm_high`), gain and epsilon are public.

On shares that int32 is right for all 64-bit words, but for a probability of 2^-40 a row at most
(`protocols.arithmetic.projection`). ValueError for a range that words of 64 bits do not hold."""


# ---- softmax

_FINE_BITS = 30  # of scores in units: what exponentials look at, and more
_COARSE = 8  # low bits that comparisons of scores leave out
LARGEST_SCORE = 2.0**18  # what comparisons of narrow words hold
RECIPROCAL_BITS = 26  # fraction bits of the reciprocal of a row's sum


def score_bits(largest: float) -> int:
    """Bits of comparisons for scores |z| <= largest, which is at most LARGEST_SCORE: of differences
    of coarse scores, hidden ones below all others.
    """
    units = 2.0 ** (FRAC_BITS - _COARSE)
    return max(18, 2 + math.ceil(math.log2(2 * largest * units + 4)))


_SCORE_BITS = score_bits(511)


def softmax_weights(
    scores: Any, visible: Any = None, bits: int = _SCORE_BITS
) -> tuple[Any, Any]:
    """Unnormalised weights exp(z - m) [rows, n] of the rows z of scores, from 0 to 1, and m [rows],
    as words of `bits` bits in units of 2^-10.

    scores: [rows, n] shared product words (36 fraction bits; as floats z 2^18); `bits`, from
    `score_bits`, holds |z| where visible. visible: [rows, n], bool and public, or float and one
    party's secret: negative where hidden. Hidden scores weigh exactly nothing.

    m is an upper bound of the row's maximum, 0.004 above it at most: the maximum of coarse scores;
    far below all scores where a row sees none.
    """
    # Half the way to a softmax is free: narrow words need no truncation.
    fine = narrow(scores, drop=FRAC_BITS, bits=_FINE_BITS)
    coarse = _hide(narrow(scores, drop=FRAC_BITS + _COARSE, bits=bits), visible, bits)
    # Either narrow word may be one too low: coarse ones count for two more.
    shift = maximum(coarse, bits=bits) + 2
    bound = jnp.broadcast_to(shift[:, None], coarse.shape)
    weights = _exponentials(fine - bound * (1 << _COARSE), coarse - bound, bits)
    if visible is not None and visible.dtype == jnp.bool_:
        weights = jnp.where(visible, weights, 0.0)
    elif visible is not None:
        weights = mux(visible >= 0, weights)
    return weights, shift


def exponentials_below(coarse: Any, bits: int) -> Any:
    """exp(x) of x <= 0 in the units of the shifts of `softmax_weights`, words of `bits` bits."""
    return _exponentials(coarse * (1 << _COARSE), coarse, bits)


def _exponentials(fine: Any, coarse: Any, bits: int) -> Any:
    scaled = scaled_exponential(fine, coarse, bits=bits, drop=_COARSE)
    return truncate(scaled, shift=SCALE_BITS - FRAC_BITS, how="unbiased", bits=64)


def reciprocal_of_sums(sums: Any, n: int) -> tuple[Any, Any]:
    """Reciprocals [rows] of sums of n weights, the largest of which is one, as words of 26 fraction
    bits, and an int32 that is positive if a sum was out of range, else 0.
    """
    return evaluate(sums, _sum_lines(n))


def _hide(rows: Any, visible: Any, bits: int) -> Any:
    """Scores of `bits` bits with hidden ones below all others."""
    if visible is None:
        return rows
    if visible.dtype == jnp.bool_:
        return jnp.where(visible, rows, -(1 << (bits - 2)))
    return rows + jnp.where(visible >= 0, 0, -(1 << (bits - 2))).astype(rows.dtype)


@functools.cache
def _sum_lines(n: int) -> Lines:
    """1 / s of a sum of n weights, the largest of which is one."""
    return lines(_inverse, 0.9, max(n, 2) + 0.5, FRAC_BITS, RECIPROCAL_BITS)


def _softmax(scores: Array) -> Array:
    return jax.nn.softmax(scores * 2.0**-FRAC_BITS, axis=-1)


def _softmax_on_shares(scores: Any) -> Any:
    weights, _ = softmax_weights(scores)
    # No score leaves a sum out of range.
    inverse, _ = reciprocal_of_sums(jnp.sum(weights, axis=-1), scores.shape[1])
    return scale_rows(weights, inverse, shift=RECIPROCAL_BITS)


softmax_of_product = approximation(
    "softmax_of_product", reference=_softmax, on_shares=_softmax_on_shares
)
"""The softmax of every row of scores [rows, n], given as product words (36 fraction bits)."""
