"""Nonlinear functions of a transformer: exact in plaintext, approximate and round-lean on shares.

Each is an approximation (`spu_llm.approx`): on shares it is a few ops, most of whose messages are
comparisons. Errors, messages and bytes: `spu-llm bench op` and tests/protocols/test_nonlinear.py,
which asserts what is said here.

                  messages   error
gelu, silu        10         2.0e-3, 2.4e-3 (absolute; `protocols.piecewise.quadratics`)
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
# Of x in units of 2^-4, less a threshold: |x| < 247. A norm bounds what follows it: by
# Cauchy-Schwarz |x_j| <= sqrt(d) |column j of the matrix| + |bias_j|, which the provider can check.
ACTIVATION_BITS = 13
LARGEST_ACTIVATION = 247


def _activation(name: str, function: Callable[[Any], Any], pieces: Quadratics) -> Any:
    return approximation(
        name, reference=function, on_shares=lambda x: quadratics(x, pieces, bits=ACTIVATION_BITS)
    )


gelu = _activation("gelu", lambda x: jax.nn.gelu(x, approximate=True), GELU[6])
"""GELU, tanh form; |x| < 247."""

silu = _activation("silu", jax.nn.silu, SILU[8])
"""SiLU; |x| < 247."""


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
LARGEST_SCORE = 511  # so that a hidden one lies below all others
_COARSE = 8  # low bits that comparisons of scores leave out
RECIPROCAL_BITS = 26  # fraction bits of the reciprocal of a row's sum


def softmax_parts(scores: Any, visible: Any = None) -> tuple[Any, Any]:
    """Unnormalised weights exp(z - m) [rows, n] of the rows z of scores, from 0 to 1, and the
    reciprocals [rows] of their sums, as words of 26 fraction bits.

    scores: [rows, n] shared product words (36 fraction bits; as floats z 2^18), |z| < LARGEST_SCORE
    where visible. visible: [rows, n], bool and public, or float and one party's secret: negative
    where hidden. Hidden scores weigh exactly nothing, and every row must see one.

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
