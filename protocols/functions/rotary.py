"""Rotary positions: pairs of a head turned by angles that grow with the position.

Source: Su et al., "RoFormer" (2021), section 3.4.2, with the halves of a head as pairs, as
`transformers` has LLaMA: (a, b) = (x_i, x_{i+d/2}) becomes (a cos - b sin, b cos + a sin).

On shares cosines and sines are whole numbers of 2^-18, and the four products of a pair are added up
before one truncation. No SPU segment:

public   Both parties know the positions: products with public numbers are local. 2 messages, those
         of the truncation.
hidden   Positions are one party's secret, the client's, and so are its cosines and sines, which it
         looks up in the clear. Products with them are `known_factors`: pair by pair and row by row,
         all heads' (a, b) by (cos, sin). The provider opens 2 heads words under masks of its own,
         and the client (cos, sin) in the first product of a unit. 3 messages, 4 in the first.

Either way the error is below a unit of 2^-18, of hidden positions 1 + 2^-7 units, and for rounded
cosines and sines |(a, b)| 2^-18.5; |(a, b)| < 2^25. Nobody learns anything.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from protocols.arithmetic.known_factors import times_factors
from protocols.arithmetic.narrow import FRAC_BITS
from protocols.arithmetic.product import times_whole
from protocols.arithmetic.truncate import truncate
from spu_llm.core.approx import approximation


def _rotate(x: Any, turns: Any, *, hidden: bool, uses: int = 1) -> Any:
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = turns[:, None, :, 0, 0], turns[:, None, :, 1, 0]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _rotate_on_shares(x: Any, turns: Any, *, hidden: bool, uses: int = 1) -> Any:
    """Turn pairs on shares. 1. The four products. 2. Their sums, truncated."""
    a, b = jnp.split(x, 2, axis=-1)
    # 1.
    products = _secret_products(a, b, turns, uses) if hidden else _public_products(a, b, turns)
    (a_cos, a_sin), (b_cos, b_sin) = products
    # 2.
    turned = jnp.concatenate([a_cos - b_sin, b_cos + a_sin], axis=-1)
    return truncate(turned, shift=FRAC_BITS, how="unbiased", bits=64)


def _public_products(a: Any, b: Any, turns: Any) -> Any:
    """Multiply a and b [rows, heads, d/2] by public turns [rows, d/2, 2, 1]: four products of a's
    shape.
    """
    whole = jnp.round(turns * 2.0**FRAC_BITS).astype(jnp.int32)[:, None]
    factors = [jnp.broadcast_to(whole[..., i, 0], a.shape) for i in (0, 1)]
    return [[times_whole(half, factor) for factor in factors] for half in (a, b)]


def _secret_products(a: Any, b: Any, turns: Any, uses: int) -> Any:
    """Multiply a and b [rows, heads, d/2] by the client's turns [rows, d/2, 2, 1]: four products of
    a's shape.
    """
    rows, heads, pairs = a.shape
    halves = jnp.stack([a, b]).transpose(1, 3, 0, 2).reshape(rows, pairs, 1, 2 * heads)
    products = times_factors(halves, turns, uses=uses, shift=0)
    by_factors = products.reshape(rows, pairs, 2, 2, heads).transpose(3, 2, 0, 4, 1)
    return [[by_factors[half, factor] for factor in (0, 1)] for half in (0, 1)]


rotate = approximation("rotate", reference=_rotate, on_shares=_rotate_on_shares)
"""Heads x [rows, heads, d] turned by angles: turns [rows, d/2, 2, 1] has a cosine and a sine for
each pair, one below the other. `hidden` says that they are the client's secret; then
`known_factors` serve `uses` calls with the same turns."""
