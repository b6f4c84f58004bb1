"""Key/value cache as owned blocks, and attention over them.

A cache is a list of blocks in position order: a *prefix* that the provider knows in the clear
(a public prompt prefix run through its own weights), the *shared* block (prompt and accepted
tokens) and the *draft* block (the positions of the current step). Attention visits each block by
itself; the partial results meet in `merge`. Rolling back rejected drafts is moving the public
length of the shared block: rows at or past it are invisible and overwritten by the next step.

Source: "Confidential Prompting", Theorem 4.1 (attention over concatenated keys from per-block
results).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from protocols.mux import mux
from protocols.nonlinear import exp_nonpositive

# Below every score a trained model produces, and far inside the fixed-point range.
SCORE_FLOOR = -1024.0
# Added to a score that only the client knows to be hidden, so that it is not the maximum. While the
# scores of a query differ by less, the exponential on shares does not grow again (EXP_FLOOR).
HIDDEN = -128.0


class Block(NamedTuple):
    """Keys and values of consecutive positions, all layers: [layer, head, position, head_dim]."""

    keys: Array
    values: Array

    @property
    def positions(self) -> int:
        return int(self.keys.shape[2])


class LayerBlock(NamedTuple):
    """One layer's view of a block with the queries' visibility of its positions."""

    keys: Array  # [head, position, head_dim]
    values: Array  # [head, position, head_dim]
    visible: Array  # [query, position]: bool, public; or float, the client's: 0 or HIDDEN


class Partial(NamedTuple):
    """Attention over one block, unnormalised.

    `lse` = shift + log(mass) and `A` = numerator / mass are the pair of Theorem 4.1. Under secure
    computation the logarithm and the per-block division are dear, so the three terms are carried
    as they are and divided once, after the merge.
    """

    shift: Array  # [head, query, 1]
    mass: Array  # sum of exp(score - shift), [head, query, 1]
    numerator: Array  # sum of exp(score - shift) * value, [head, query, head_dim]

    @property
    def lse(self) -> Array:
        return self.shift + jnp.log(self.mass)

    @property
    def A(self) -> Array:  # noqa: N802 - the paper's symbol
        return self.numerator / self.mass


def empty_block(layers: int, heads: int, positions: int, head_dim: int) -> Block:
    """A block of zeros (float32)."""
    zeros = jnp.zeros((layers, heads, positions, head_dim), jnp.float32)
    return Block(zeros, zeros)


def write_rows(block: Block, rows: Block, start: Array) -> Block:
    """`block` with `rows` written at position `start` (public int32 scalar).

    The caller keeps `start + rows.positions <= block.positions`.
    """
    at = (0, 0, start, 0)
    return Block(
        jax.lax.dynamic_update_slice(block.keys, rows.keys, at),
        jax.lax.dynamic_update_slice(block.values, rows.values, at),
    )


def visible_below(length: Array, queries: int, positions: int) -> Array:
    """bool [queries, positions]: the positions before the public `length`."""
    return jnp.broadcast_to(jnp.arange(positions)[None, :] < length, (queries, positions))


def hidden_below(visible: Array, queries: int) -> Array:
    """float [queries, positions] of the client's bool [positions]: 0, or HIDDEN where False."""
    return jnp.broadcast_to(jnp.where(visible, 0.0, HIDDEN), (queries, visible.shape[0]))


def causal(queries: int) -> Array:
    """bool [queries, queries]: each draft position sees itself and those before it (a chain)."""
    return jnp.tril(jnp.ones((queries, queries), bool))


def partials_with_common_shift(query: Array, blocks: Sequence[LayerBlock]) -> list[Partial]:
    """Attention of `query` [query, head, head_dim] (already scaled) over each block.

    All blocks share one shift, the maximum visible score, so that the comparisons and the
    exponential of every block run stacked in the same messages.
    """
    scores = [_masked(jnp.einsum("nhd,htd->hnt", query, b.keys), b.visible) for b in blocks]
    masked = jnp.concatenate(scores, axis=-1)
    shift = jnp.max(masked, axis=-1, keepdims=True)
    weights = exp_nonpositive(masked - shift)
    ends = [sum(b.keys.shape[1] for b in blocks[: i + 1]) for i in range(len(blocks) - 1)]
    partials = []
    for w, b in zip(jnp.split(weights, ends, axis=-1), blocks, strict=True):
        # On shares the exponential of a hidden score is noise; this discards it exactly.
        if b.visible.dtype == jnp.bool_:
            w = jnp.where(b.visible, w, 0.0)
        else:
            w = mux(jnp.broadcast_to(b.visible > HIDDEN, w.shape), w)
        numerator = jnp.einsum("hnt,htd->hnd", w, b.values)
        partials.append(Partial(shift, jnp.sum(w, axis=-1, keepdims=True), numerator))
    return partials


def _masked(scores: Array, visible: Array) -> Array:
    """Scores [head, query, position] with hidden ones far below."""
    if visible.dtype == jnp.bool_:
        return jnp.where(visible, scores, SCORE_FLOOR)
    return scores + visible


def merge(partials: Sequence[Partial]) -> Array:
    """The attention output [head, query, head_dim] over all blocks together (Theorem 4.1).

    Partials that carry the same shift add up directly; others are rescaled to the largest one.
    """
    first = partials[0]
    if all(p.shift is first.shift for p in partials):
        return _total([p.numerator for p in partials]) / _total([p.mass for p in partials])
    shift = first.shift
    for p in partials[1:]:
        shift = jnp.maximum(shift, p.shift)
    scales = [exp_nonpositive(p.shift - shift) for p in partials]
    numerator = _total([p.numerator * s for p, s in zip(partials, scales, strict=True)])
    mass = _total([p.mass * s for p, s in zip(partials, scales, strict=True)])
    return numerator / mass


def _total(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def attend(query: Array, blocks: Sequence[LayerBlock]) -> Array:
    """Attention of `query` [query, head, head_dim] over `blocks`: [query, head * head_dim]."""
    out = merge(partials_with_common_shift(query, blocks))
    heads, queries, head_dim = out.shape
    return out.transpose(1, 0, 2).reshape(queries, heads * head_dim)
