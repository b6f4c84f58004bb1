"""Nonlinear functions of a transformer: exact in plaintext, approximate and round-lean on shares.

Each is an approximation (`spu_llm.approx`): on shares it is a few ops, most of whose messages are
comparisons. Errors, messages and bytes: `spu-llm bench op` and tests/protocols/test_nonlinear.py,
which asserts what is said here.

                  messages   error
gelu, silu        10         1.8e-3, 2.0e-3 (absolute; `protocols.piecewise.quadratics`)
reciprocal, rsqrt 12         3e-4, 2e-4 (relative; `protocols.piecewise.lines`)
rms_norm          18         9e-4 (relative, of a whole row; 4e-4 but for the smallest rows)
layer_norm        20         the same
softmax over 64   48         4e-4 (relative)

Ranges are the caller's promise. Where it is a promise about activations, the function also returns
a shared int32, zero unless it was broken (`protocols.lookup.out_of_range`), for the model to add up
and to test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from protocols.exponential import SCALE_BITS, scaled_exponential
from protocols.lookup import out_of_range
from protocols.maximum import maximum
from protocols.mux import mux
from protocols.narrow import FRAC_BITS, narrow
from protocols.piecewise import Lines, Quadratics, evaluate, lines, quadratics
from protocols.product import scale_rows, square
from protocols.truncate import truncate
from spu_llm.approx import approximation

# ---- GELU and SiLU

# Fitted by `python -m protocols.fits`; written out because both parties must hold the very same
# numbers. A test fits them again.
GELU = {
    4: Quadratics(
        (-185, -60, 59, 184),
        ((-1782, -12459, -21105), (22762, 32768, 348), (-1782, 77995, -21105)),
        error=0.0054,
    ),
    6: Quadratics(
        (-207, -77, -30, 43, 92, 206),
        ((-2583, -15839, -24428), (12223, 19129, -3609), (24216, 32768, 110),
         (6789, 56602, -8219), (-2583, 81375, -24428)),
        error=0.0018,
    ),
    8: Quadratics(
        (-218, -136, -77, -38, 37, 76, 135, 217),
        ((-1761, -11422, -18595), (-1853, -13566, -22721), (10685, 16223, -4925),
         (24681, 32768, 63), (10685, 49313, -4925), (-1853, 79102, -22721),
         (-1761, 76958, -18595)),
        error=0.001,
    ),
    10: Quadratics(
        (-231, -163, -91, -60, -31, 30, 59, 91, 178, 230),
        ((-981, -6797, -11806), (-3039, -17757, -26361), (4310, 2917, -11780),
         (15307, 23321, -2278), (25153, 32768, 29), (15307, 42215, -2278), (4166, 62939, -11955),
         (-3042, 83306, -26375), (-710, 70577, -8981)),
        error=0.00044,
    ),
}  # fmt: skip
SILU = {
    4: Quadratics(
        (-422, -93, 93, 421),
        ((-618, -8584, -29734), (13960, 32768, 592), (-628, 74205, -29891)),
        error=0.0091,
    ),
    6: Quadratics(
        (-473, -191, -77, 77, 192, 472),
        ((-623, -8399, -28645), (1710, 1916, -18626), (14618, 32768, 306),
         (1604, 64052, -19045), (-618, 73878, -28490)),
        error=0.0047,
    ),
    8: Quadratics(
        (-535, -284, -126, -56, 60, 132, 378, 534),
        ((-289, -4470, -17426), (-852, -10578, -33436), (6027, 15966, -7610),
         (15247, 32768, 124), (5238, 51843, -9186), (-910, 76456, -33921), (-147, 67995, -10430)),
        error=0.002,
    ),
    10: Quadratics(
        (-587, -345, -170, -102, -49, 50, 103, 173, 344, 586),
        ((-148, -2531, -10889), (-992, -11527, -34979), (1244, -662, -21896),
         (8220, 21334, -4453), (15569, 32768, 63), (7919, 44917, -4865), (1042, 67047, -22773),
         (-989, 77037, -34923), (-148, 68067, -10889)),
        error=0.00098,
    ),
}  # fmt: skip
# Of x in units of 2^-6, thresholds included: |x| < 500. A norm bounds what follows it: by
# Cauchy-Schwarz |x_j| <= sqrt(d) |column j of the matrix| + |bias_j|.
ACTIVATION_BITS = 16


def _activation(name: str, function: Callable[[Any], Any], pieces: Quadratics) -> Any:
    return approximation(
        name, reference=function, on_shares=lambda x: quadratics(x, pieces, bits=ACTIVATION_BITS)
    )


gelu = _activation("gelu", lambda x: jax.nn.gelu(x, approximate=True), GELU[6])
"""GELU, tanh form; |x| < 500."""

silu = _activation("silu", jax.nn.silu, SILU[8])
"""SiLU; |x| < 500."""


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
        y, ones = evaluate(x, _lines_of(f, low, high))
        return y, out_of_range(ones)

    return approximation(name, reference=reference, on_shares=on_shares)


def _outside(x: Any, low: float, high: float) -> Any:
    return jnp.sum(((x < low) | (x >= high)).astype(jnp.int32))


reciprocal = _on_range("reciprocal", _inverse)
rsqrt = _on_range("rsqrt", _inverse_root)


# ---- norms

# Mean squares of rows, public: from a small model's embedding to a large one's outliers.
NORM_LOW, NORM_HIGH = 2.0**-11, 2.0**14
_NORM_PIECES = 8  # per octave: half the comparisons for an error that a whole row shares


def _rms_norm(
    x: Array, *, epsilon: float, gain: float = 1.0, low: float = NORM_LOW, high: float = NORM_HIGH
) -> tuple[Array, Array]:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    normed = x * (jax.lax.rsqrt(mean_square + epsilon) * gain)
    return normed, _outside(mean_square, low, high)


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

    function = lines(of_sum, low * d, high * d, 2 * FRAC_BITS, position_out, _NORM_PIECES)
    return function, position_out


def _rms_norm_on_shares(
    x: Any, *, epsilon: float, gain: float = 1.0, low: float = NORM_LOW, high: float = NORM_HIGH
) -> tuple[Any, Any]:
    """1. Squares (unscaled) and their sum. 2. Its root's inverse. 3. Rows times that."""
    *_, d = x.shape
    rows = x.reshape(-1, d)
    # 1.
    total = jnp.sum(square(rows, shift=0), axis=-1)
    # 2.
    function, position = _norm_lines(d, epsilon, gain, low, high)
    factor, ones = evaluate(total, function)
    # 3.
    return scale_rows(rows, factor, shift=position).reshape(x.shape), out_of_range(ones)


rms_norm = approximation("rms_norm", reference=_rms_norm, on_shares=_rms_norm_on_shares)
"""x [..., d] gain / sqrt(mean(x^2) + epsilon), and an int32 that is positive if some row has a mean
square out of [low, high), else 0. low, high, gain and epsilon are public. |x|^2 < 2^26."""


def _layer_norm(
    x: Array, *, epsilon: float, low: float = NORM_LOW, high: float = NORM_HIGH
) -> tuple[Array, Array]:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return _rms_norm(centred, epsilon=epsilon, low=low, high=high)


_MEAN_BITS = 20


def _layer_norm_on_shares(
    x: Any, *, epsilon: float, low: float = NORM_LOW, high: float = NORM_HIGH
) -> tuple[Any, Any]:
    """The mean is the sum times a whole number of 2^-20, truncated: one word per row."""
    total = jnp.sum(x, axis=-1, keepdims=True) * float(round(2.0**_MEAN_BITS / x.shape[-1]))
    mean = truncate(total, shift=_MEAN_BITS, how="unbiased", bits=64)
    centred = x - jnp.broadcast_to(mean, x.shape)
    return _rms_norm_on_shares(centred, epsilon=epsilon, low=low, high=high)


layer_norm = approximation("layer_norm", reference=_layer_norm, on_shares=_layer_norm_on_shares)
"""(x - mean) / sqrt(variance + epsilon) of every row of x [..., d], without gain and bias, and
what `rms_norm` says of its rows."""


# ---- softmax

SCORE_BITS = 30  # of differences of scores in a row: below 2,048 nats
_COARSE = 8  # low bits that comparisons of scores leave out
RECIPROCAL_BITS = 26  # fraction bits of the reciprocal of a row's sum


def softmax_parts(scores: Any, visible: Any = None) -> tuple[Any, Any]:
    """Unnormalised weights exp(z - m) [rows, n] of the rows z of scores, from 0 to 1, and the
    reciprocals [rows] of their sums, as words of 26 fraction bits.

    scores: [rows, n] shared product words (36 fraction bits; as floats z 2^18), |z| < 512 where
    visible. visible: [rows, n], bool and public, or float and one party's secret: negative where
    hidden. Hidden scores weigh exactly nothing, and every row must see one.

    m is an upper bound of the row's maximum, 0.004 above it at most: the maximum of coarse scores.
    Whoever multiplies weights with rows normalises the products: `normalised`.
    """
    # Half the way to a softmax is free: narrow words need no truncation.
    rows = narrow(scores, drop=FRAC_BITS, bits=SCORE_BITS)
    coarse = narrow(scores, drop=FRAC_BITS + _COARSE, bits=SCORE_BITS - _COARSE)
    largest = maximum(_hide(coarse, visible, SCORE_BITS - _COARSE), bits=SCORE_BITS - _COARSE)
    # Either narrow word may be one too low: coarse ones count for two more.
    bound = largest * (1 << _COARSE) + (2 << _COARSE)
    scaled = scaled_exponential(
        _hide(rows, visible, SCORE_BITS) - jnp.broadcast_to(bound[:, None], rows.shape),
        bits=SCORE_BITS, drop=_COARSE,
    )  # fmt: skip
    weights = truncate(scaled, shift=SCALE_BITS - FRAC_BITS, how="unbiased", bits=64)
    if visible is not None and visible.dtype == jnp.bool_:
        weights = jnp.where(visible, weights, 0.0)
    elif visible is not None:
        weights = mux(visible >= 0, weights)
    factor, _ = evaluate(jnp.sum(weights, axis=-1), _sum_lines(rows.shape[1]))
    return weights, factor


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


def normalised(products: Any, factor: Any) -> Any:
    """Rows [rows, d] that were made with the weights of `softmax_parts`, times its reciprocals."""
    return scale_rows(products, factor, shift=RECIPROCAL_BITS)


def _softmax(scores: Array) -> Array:
    return jax.nn.softmax(scores * 2.0**-FRAC_BITS, axis=-1)


softmax_of_product = approximation(
    "softmax_of_product", reference=_softmax, on_shares=lambda x: normalised(*softmax_parts(x))
)
"""The softmax of every row of scores [rows, n], given as product words (36 fraction bits)."""
