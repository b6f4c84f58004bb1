"""Private attention aggregation: attention over blocks of keys and values of different owners.

Each block gives a partial result, and the partials are merged by the sum over blocks of Theorem 4.1
("Confidential Prompting"): with shifts m_b, masses s_b = sum exp(z - m_b) and numerators
N_b = sum exp(z - m_b) v, of a block's scores z and values v,

    A = (sum_b exp(m_b - m) N_b) / (sum_b exp(m_b - m) s_b),    m = max_b m_b.

Queries are shared. Keys and values are, too, as rows of a cache that grows
(`protocols.arithmetic.cached`), or the provider's own, which it has made in the clear
(`protocols.arithmetic.known_rows`). Nobody learns anything beyond what the ops give.

with_one_maximum   m_b = m for all blocks: one product gives their scores, one comparison finds the
                   maximum and one pass the exponentials, and one product adds up numerators.
with_own_maxima    Partials that were made apart, each with a maximum of its own, meet in `merge`:
                   for blocks that are not there at the same time, or not in the same place.

Both give the same numbers. One maximum takes fewer messages and bytes for blocks that are there
(`spu-llm experiment exact` has both), so a model's forward uses that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from protocols.arithmetic.cached import times_columns, times_rows
from protocols.arithmetic.field_product import field_scale_rows
from protocols.arithmetic.narrow import FRAC_BITS
from protocols.arithmetic.product import multiply, scale_rows
from protocols.functions.exponential import COARSE, exponentials_below
from protocols.functions.maximum import maximum
from protocols.functions.piecewise import Untruncated
from protocols.functions.softmax import (
    RECIPROCAL_BITS,
    causal_weights,
    reciprocal_of_sums,
    score_bits,
    softmax_weights,
)


class OwnedBlock(NamedTuple):
    """Keys and values [head, t, d], and what each query sees of the first m of them, [head, n, m]:
    bool and public; or int32 and secret, one's or the parties', -1 where hidden and else 0. All see
    the others.
    """

    keys: Any
    values: Any
    visible: Any


class SharedPartial(NamedTuple):
    """Attention over one block, unnormalised, of rows = head * n queries."""

    shift: Any  # [rows]: an upper bound of the scores, in coarse units of `softmax_weights`
    mass: Any  # [rows]
    numerator: Any  # [rows, d]


LARGEST_VALUE = 2.0**13  # of attention: less than what the field holds of its rows
_CUTS = (6, 6)  # numerators are rounded to 12 fraction bits, factors to 20
_MOST_IN_FIELD = 1024  # values in a mean: of more, rounded factors would be too coarse


def tile_for(positions: int) -> int:
    """Return the `tile` of products with caches (`protocols.arithmetic.cached`) of so many rows
    in all: a small one wastes less, a large one is cheaper to make per position.
    """
    return 64 if positions <= 64 else 128


def attention_on_shares(
    query: Any, *blocks: Any, largest_score: float, reach: tuple[int, ...] | None = None
) -> tuple[Any, Any]:
    """Compute the attention [head, n, d] of shared queries [head, n, d] over `OwnedBlock`s, given
    field by field, and an int32 that is positive if a sum left its range. After a single block may
    come what is added to its scores. No visible score is larger than the public `largest_score`.
    `reach`: how many of the first rows of all blocks each of m queries sees at most, n a multiple
    of m; the others cost no softmax. None: any.
    """
    owned, bias = owned_blocks(blocks)
    secret = any(block.visible.dtype != jnp.bool_ for block in owned)
    return with_one_maximum(query, owned, score_bits(largest_score, secret), bias, reach)


def owned_blocks(fields: Sequence[Any]) -> tuple[list[OwnedBlock], Any]:
    """Return the blocks that are given field by field, and what is added to scores, [head, n, t],
    if it comes after the fields; else None.
    """
    whole = len(fields) // 3 * 3
    blocks = [OwnedBlock(*fields[i : i + 3]) for i in range(0, whole, 3)]
    return blocks, fields[whole] if len(fields) > whole else None


def with_one_maximum(
    query: Any,
    blocks: Sequence[OwnedBlock],
    bits: int,
    bias: Any = None,
    reach: tuple[int, ...] | None = None,
) -> tuple[Any, Any]:
    """Compute the attention over all blocks with one maximum. 1. Scores of all blocks, not
    truncated, plus `bias` [head, n, t], which is one's own or the parties' and costs no message.
    2. Weights under one maximum, and the inverse of their sum. 3. Numerators, while the inverse is
    under way. 4. Normalised. `reach`: as for `attention_on_shares`.
    """
    heads, n, d = query.shape
    # 1.
    scores = _scores(query, blocks)
    if bias is not None:
        scores = scores + bias * float(1 << FRAC_BITS)
    seen, most = _seen(blocks), scores.shape[2]
    # 2.
    if reach is None:
        weights, _ = softmax_weights(scores.reshape(heads * n, most), seen, bits)
    else:
        assert n % len(reach) == 0, (n, reach)
        each = -1, len(reach), most
        weights = causal_weights(scores.reshape(each), seen.reshape(each), reach, bits)
        most = max(reach)
    weights = weights.reshape(scores.shape)
    inverse, outside = reciprocal_of_sums(jnp.sum(weights, axis=-1).reshape(-1), most)
    # 3.
    total = _numerators(weights, blocks)
    # 4.
    out = _normalised(total.reshape(heads * n, d), inverse, most)
    return out.reshape(heads, n, d), outside


def with_own_maxima(query: Any, blocks: Sequence[OwnedBlock], bits: int) -> tuple[Any, Any]:
    """Compute each block's partial by itself, then `merge` them."""
    queries = [partial(query, block, bits) for block in blocks]
    out, outside = merge(queries, bits, sum(b.values.shape[1] for b in blocks))
    return out.reshape(query.shape), outside


def partial(query: Any, block: OwnedBlock, bits: int) -> SharedPartial:
    """Compute one block's part of the attention of shared queries [head, n, d]."""
    heads, n, d = query.shape
    scores = _scores(query, [block]).reshape(heads * n, -1)
    weights, shift = softmax_weights(scores, _seen([block]), bits)
    numerator = _numerators(weights.reshape(heads, n, -1), [block])
    return SharedPartial(shift, jnp.sum(weights, axis=-1), numerator.reshape(heads * n, d))


def merge(partials: Sequence[SharedPartial], bits: int, positions: int) -> tuple[Any, Any]:
    """Merge partials by Theorem 4.1: attention [rows, d] over all blocks together, `positions` in
    all, and an int32 that is positive if a sum left its range. `bits`: of the shifts.

    1. m, the largest shift. 2. exp(m_b - m). 3. The masses' sum, and its inverse. 4. Numerators
    times exp(m_b - m) / sum, added up.
    """
    # 1.
    shifts = jnp.stack([p.shift for p in partials], axis=-1)
    top = jnp.broadcast_to(maximum(shifts, bits=bits)[:, None], shifts.shape)
    # 2.
    below = shifts - top
    scales = exponentials_below(below * (1 << COARSE), below, bits=bits)
    # 3.
    masses = jnp.stack([p.mass for p in partials], axis=-1)
    inverse, outside = reciprocal_of_sums(jnp.sum(multiply(scales, masses), axis=-1), positions)
    # 4.
    cuts, shift = (0, inverse.shift), inverse.shift + FRAC_BITS
    factors = field_scale_rows(scales, inverse.words, cuts=cuts, shift=shift)
    parts = [
        _normalised(p.numerator, Untruncated(factors[:, i], 0), positions)
        for i, p in enumerate(partials)
    ]
    return sum(parts[1:], parts[0]), outside


def _normalised(numerators: Any, factors: Untruncated, n: int) -> Any:
    """Compute rows [rows, d] times factors [rows] of 26 fraction bits: means of n values, below
    `LARGEST_VALUE`. Of few values in the field: off by n 2^-20 of a mean, which is 2^-10 at most,
    and by 2^-12.
    """
    if n > _MOST_IN_FIELD:
        return scale_rows(numerators, factors.truncated(), shift=RECIPROCAL_BITS)
    cuts = _CUTS[0], factors.shift + _CUTS[1]
    shift = factors.shift + RECIPROCAL_BITS
    return field_scale_rows(numerators, factors.words, cuts=cuts, shift=shift)


def _scores(query: Any, blocks: Sequence[OwnedBlock]) -> Any:
    """Compute the scores [head, n, t] of all blocks, not truncated."""
    return times_rows(query, *(b.keys for b in blocks), tile=_tile(blocks), shift=0)


def _numerators(weights: Any, blocks: Sequence[OwnedBlock]) -> Any:
    """Compute the numerators [head, n, d] of weights [head, n, t], the sum over all blocks."""
    return times_columns(weights, *(b.values for b in blocks), tile=_tile(blocks))


def _tile(blocks: Sequence[OwnedBlock]) -> int:
    return tile_for(sum(b.keys.shape[1] for b in blocks))


def _seen(blocks: Sequence[OwnedBlock]) -> Any:
    """Return what the rows see of all columns."""
    parts = [part.reshape(-1, part.shape[-1]) for b in blocks for part in _parts(b)]
    if any(part.dtype != jnp.bool_ for part in parts):
        parts = [_as_mask(part) for part in parts]
    return jnp.concatenate(parts, axis=-1)


def _parts(block: OwnedBlock) -> list[Any]:
    heads, n, some = block.visible.shape
    others = jnp.ones((heads, n, block.keys.shape[1] - some), bool)
    return [part for part in (block.visible, others) if part.shape[-1]]


def _as_mask(visible: Any) -> Any:
    return visible.astype(jnp.int32) - 1 if visible.dtype == jnp.bool_ else visible
