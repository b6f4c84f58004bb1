"""Rotary positions: pairs of a head turned by angles that grow with the position.

Source: Su et al., "RoFormer" (2021), section 3.4.2, with the halves of a head as pairs, as
`transformers` has LLaMA: (a, b) = (x_i, x_{i+d/2}) becomes (a cos - b sin, b cos + a sin).

On shares cosines and sines are whole numbers of 2^-18, and the four products of a pair are added up
before one truncation. No SPU segment:

public   Both parties know the positions: products with public numbers are local. 2 messages, those
         of the truncation.
hidden   Positions are one party's secret, and so are its cosines and sines, which it looks up in
         the clear. One batched outer product per pair and row, of all heads' (a, b) by (cos, sin),
         opens 2 heads + 2 words each way under masks of a matrix triple (Beaver). 4 messages.

Either way the error is below a unit of 2^-18 and, for rounded cosines and sines, |(a, b)| 2^-18.5;
|(a, b)| < 2^25. Nobody learns anything.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from protocols.arithmetic.narrow import FRAC_BITS
from protocols.arithmetic.product import matmul, times_whole
from protocols.arithmetic.truncate import truncate
from spu_llm.core.approx import approximation


def _rotate(x: Any, cos: Any, sin: Any, *, hidden: bool) -> Any:
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _rotate_on_shares(x: Any, cos: Any, sin: Any, *, hidden: bool) -> Any:
    """Turn pairs on shares. 1. The four products. 2. Their sums, truncated."""
    a, b = jnp.split(x, 2, axis=-1)
    # 1.
    products = _secret_products if hidden else _public_products
    (a_cos, a_sin), (b_cos, b_sin) = products(a, b, cos, sin)
    # 2.
    turned = jnp.concatenate([a_cos - b_sin, b_cos + a_sin], axis=-1)
    return truncate(turned, shift=FRAC_BITS, how="unbiased", bits=64)


def _public_products(a: Any, b: Any, cos: Any, sin: Any) -> Any:
    """Multiply a and b [rows, heads, d/2] by public cos and sin [rows, d/2]: four products of a's
    shape.
    """
    whole = [
        jnp.broadcast_to(jnp.round(x * 2.0**FRAC_BITS).astype(jnp.int32)[:, None], a.shape)
        for x in (cos, sin)
    ]
    return [[times_whole(half, factor) for factor in whole] for half in (a, b)]


def _secret_products(a: Any, b: Any, cos: Any, sin: Any) -> Any:
    """Multiply a and b [rows, heads, d/2] by one party's secret cos and sin [rows, d/2]: four
    products of a's shape.
    """
    rows, heads, pairs = a.shape
    halves = jnp.stack([a, b]).transpose(1, 3, 0, 2).reshape(rows * pairs, 2 * heads, 1)
    factors = jnp.stack([cos, sin], axis=-1).reshape(rows * pairs, 1, 2)
    products = matmul(halves, factors, shift=0).reshape(rows, pairs, 2, heads, 2)
    by_factors = products.transpose(2, 4, 0, 3, 1)  # [half, cos or sin, rows, heads, d/2]
    return [[by_factors[half, factor] for factor in (0, 1)] for half in (0, 1)]


rotate = approximation("rotate", reference=_rotate, on_shares=_rotate_on_shares)
"""Heads x [rows, heads, d] turned by the angles of cos, sin [rows, d/2]; `hidden` says that these
are one party's secret."""
