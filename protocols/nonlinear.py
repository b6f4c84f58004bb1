"""Nonlinear functions in forms that suit fixed-point shares, with their errors.

Measured on SPU 0.9.5, Cheetah, FM64, 18 fraction bits; `tests/protocols/test_nonlinear.py` checks
the errors between two parties.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spu_llm.approx import approximation

# SPU's exponential is (1 + x / 2^8)^(2^8).
EXP_SQUARINGS = 8


def _exp_second_order(x: Array) -> Array:
    """SPU's exponential at x + x^2 / 2^9, so that its base is 1 + y + y^2 / 2 with y = x / 2^8."""
    return jnp.exp(x + (x * x) * 2.0 ** -(EXP_SQUARINGS + 1))


# exp(x) for EXP_FLOOR < x <= 0. SPU's own leaves a normaliser over 4,096 tokens 3 % low; one more
# product brings a row's total variation from 0.012 to 0.001. Below the floor the base grows again:
# whoever cannot rule such an argument out must clamp it. For rows as wide as a vocabulary there is
# `protocols.exponential`.
EXP_FLOOR = -(2.0**EXP_SQUARINGS)
exp_nonpositive = approximation("exp_nonpositive", reference=jnp.exp, on_shares=_exp_second_order)


GELU_REACH = 3.5


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


# P with gelu(x) = x / 2 + P((x / reach)^2) for |x| <= reach, error 3e-4: gelu(x) - x / 2 is even,
# so half the degree is enough (the idea of BOLT and BumbleBee). Chebyshev fit on 4,001 nodes,
# written out because both parties must hold the very same numbers; a test fits it again.
GELU_COEFFICIENTS = np.array(
    [0.00029157041, 4.8564496, -9.4905729, 15.098118, -15.492923, 9.0039377, -2.2261140],
    np.float32,
)


def _gelu_by_polynomial(x: Array) -> Array:
    """0 below -reach, x above reach, an even polynomial plus x / 2 between.

    Powers are made in stacks, so that a level of products costs one exchange.
    """
    z = x * (1.0 / GELU_REACH)
    s1 = z * z
    s2 = s1 * s1
    s3, s4 = jnp.stack([s1, s2]) * s2
    s5, s6 = jnp.stack([s1, s2]) * s4
    powers = jnp.stack([s1, s2, s3, s4, s5, s6], axis=-1)
    even = powers @ GELU_COEFFICIENTS[1:] + GELU_COEFFICIENTS[0]
    below, inside = jnp.stack([x + GELU_REACH, x - GELU_REACH]) < 0
    return jnp.where(below, 0.0, jnp.where(inside, 0.5 * x + even, x))


# GELU (tanh form). SPU's own tanh is off by 0.005, which makes its GELU wrong by up to 0.011;
# this form is within 1e-3.
gelu = approximation("gelu", reference=_gelu, on_shares=_gelu_by_polynomial)


def _rms_norm(x: Array, *, epsilon: float, gain: float) -> tuple[Array, Array]:
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * (jax.lax.rsqrt(mean_square + epsilon) * gain), jnp.int32(0)


rms_norm = approximation("rms_norm", reference=_rms_norm, on_shares=_rms_norm)
