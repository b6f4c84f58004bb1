"""GELU, SiLU and ReLU: exact in plaintext, pieces of quadratics on shares.

              messages   error (absolute)
relu          6          1.0e-3
gelu, silu    10         3.0e-3, 9.8e-3 (`protocols.functions.piecewise.quadratics`, whose dropped
                         bits may add a unit a threshold)
.. times y    14         of the function times |y|, and 2^-14 of either factor

Activations follow norms through known matrices, so they have bounds: their comparisons are as wide
as the caller's bound needs (`activation_bits`). Messages and bytes: `spu-llm bench op`;
tests/protocols/test_nonlinear.py asserts what is said here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from protocols.arithmetic.field_product import field_multiply
from protocols.arithmetic.narrow import FRAC_BITS, narrow, units
from protocols.bits.mux import mux
from protocols.bits.thresholds import below
from protocols.functions.piecewise import (
    MOST_SPARE,
    UNIT_BITS,
    Quadratics,
    narrow_quadratics,
    quadratics,
)
from spu_llm.core.approx import approximation

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
LARGEST_ACTIVATION = 1000  # what `protocols.functions.piecewise.quadratics` holds


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


# Of a function times y, by bounds of weights. The field holds twice as much of factors with 14
# fraction bits, which leaves room for what pieces drop and round.
LARGEST_GATED = 2.0**17


def _gated(name: str, function: Callable[[Any], Any], pieces: Quadratics) -> Any:
    def on_shares(x: Any, y: Any, *, bits: int = _BITS) -> Any:
        gate = narrow_quadratics(x, pieces, bits=bits)
        # Each factor has 14 fraction bits in the field.
        cuts, shift = (MOST_SPARE - gate.spare, MOST_SPARE), FRAC_BITS - gate.spare
        return field_multiply(units(gate.words), y, cuts=cuts, shift=shift)

    return approximation(name, reference=lambda x, y, bits=0: function(x) * y, on_shares=on_shares)


_BITS = activation_bits(240)


def _gelu(x: Any) -> Any:
    return jax.nn.gelu(x, approximate=True)


gelu = _activation("gelu", _gelu, PIECES["gelu"])
"""GELU, tanh form; |x| <= 240, or what `bits` = `activation_bits(largest)` holds."""

silu = _activation("silu", jax.nn.silu, PIECES["silu"])
"""SiLU; |x| <= 240, or what `bits` = `activation_bits(largest)` holds."""

gelu_gated = _gated("gelu_gated", _gelu, PIECES["gelu"])
"""GELU of x times y of the same shape, both shared; x as of `gelu`. |gelu(x) y| < LARGEST_GATED."""

silu_gated = _gated("silu_gated", jax.nn.silu, PIECES["silu"])
"""SiLU of x times y, as `gelu_gated`."""


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
