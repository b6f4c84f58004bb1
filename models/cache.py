"""Key/value cache as owned blocks, and attention over them.

A cache is a list of blocks in position order: a *prefix* whose text the provider knows (its own
text, or text that both parties know; the provider computes it in the clear), and the *shared*
block: the prompt, accepted tokens and, past them, the positions of the current step (a chain or a
tree, as the mask says). Attention goes over each block separately, and the sums over blocks add up
(`protocols.functions.aggregation`). To roll back rejected drafts, the public length of the shared
block is set back: rows at or past it are invisible, and the next step overwrites them. Where the
provider may not learn how many drafts were accepted, the length only grows, the client hides the
rows of rejected drafts, and a full block is packed. Blocks start short and are lengthened as rows
are written, since a step's attention costs the same for every row of a block, visible or not; in a
prefill, what no row can see costs no softmax.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from protocols.arithmetic.cached import append
from protocols.functions.aggregation import OwnedBlock, attention_on_shares, owned_blocks
from protocols.functions.layers import append_rows, lengthen_rows, pick_rows
from spu_llm.core.approx import approximation

# Below every score a trained model produces.
SCORE_FLOOR = -1.0e30
# Says that a position is hidden, where it is a secret; 0 that it is not.
HIDDEN = -1
# Rows of a prefix, at most, that stand in the cache: what is made ahead for a cache has room for
# some that are not its own, and products with them cost nothing then.
FEW = 32


class Block(NamedTuple):
    """Keys and values of consecutive positions, layer by layer: [head, position, head_dim]. With
    several sequences (lanes), all heads of the first sequence come first, then all of the second.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @property
    def positions(self) -> int:
        return int(self.keys[0].shape[1])


class EncoderDecoderCache(NamedTuple):
    """Rows that a decoder keeps: its own, and those of the source that cross-attention looks at.
    The source is encoded once, and its rows never roll back; no layers: it is not encoded yet.
    """

    own: Block
    source: Block

    @property
    def positions(self) -> int:
        return self.own.positions


Cache = Block | EncoderDecoderCache
CacheT = TypeVar("CacheT", Block, EncoderDecoderCache)


class Prefix(NamedTuple):
    """Rows before the text of a cache, the same in every sequence, whose text the provider knows.
    Some of the first rows may hold no text, so that the length of the text is the provider's
    secret.
    """

    block: Block | None  # of all lanes; None: they are the first rows of the cache
    rows: int
    hidden: Array  # int32 [m], of the first m rows, the provider's: HIDDEN where there is no text

    @property
    def inside(self) -> int:
        """Return how many rows of the cache itself belong to the prefix."""
        return self.rows if self.block is None else 0


def padding(hidden: Array) -> Array:
    """Count the rows that hold no text (`hidden` below 0), as int32."""
    return jnp.sum(hidden < 0, dtype=jnp.int32)


class Rows(NamedTuple):
    """Positions and visibility of n further rows of every sequence. A row may see any set of rows:
    in an encoder it also sees rows after it. Positions and visibility are both public, or, where
    the provider may not learn which rows hold text, both the client's secret.
    """

    positions: Array  # int32 [lane, n]: in the text
    # [lane, n, row of the cache's own], itself included: bool; or int32, 0 or HIDDEN
    visible: Array
    at: Array | int  # public: the cache's own row that the first of them is written to
    bias: Array | None = None  # [lane * head, n, row of the cache]: added to scores
    # Whether these are the cache's first rows, and none sees a row after itself.
    causal: bool = False

    def reach(self, before: int) -> tuple[int, ...] | None:
        """Return how many rows each of the n rows sees at most, `before` rows before the cache's
        own included; None: any.
        """
        if not self.causal:
            return None
        assert isinstance(self.at, int) and self.at == 0, "the first rows are written first"
        return tuple(range(before + 1, before + self.positions.shape[1] + 1))

    @property
    def hidden(self) -> bool:
        """Return whether positions and visibility are the client's secret."""
        return self.visible.dtype != jnp.bool_


def lengthened(block: CacheT, positions: int) -> CacheT:
    """Lengthen the block with unwritten rows to `positions` rows in all."""
    if isinstance(block, EncoderDecoderCache):
        return block._replace(own=lengthened(block.own, positions))
    keys, values = (
        tuple(lengthen_rows(rows, positions=positions) for rows in part) for part in block
    )
    return Block(keys, values)


def packed(block: CacheT, kept: Array, positions: int, inside: int = 0) -> CacheT:
    """Return a block with `inside` prefix rows, which are copied from `block`, and `positions` rows
    after them: first the rows number `kept` (int32 [lane, m], counted after the prefix; -1: a row
    of zeros) of `block`, then unwritten rows. All other rows of `block` are dropped. On shares rows
    are off by a unit and noise (`pick_rows`), and `kept` is the client's.
    """
    if isinstance(block, EncoderDecoderCache):
        return block._replace(own=packed(block.own, kept, positions, inside))
    layers, (lanes, m) = len(block.keys), kept.shape
    whole = [*block.keys, *block.values]
    heads, _, head_dim = block.keys[0].shape
    n, each = block.positions - inside, heads // lanes
    # What one layer's heads have of a row stands side by side.
    rows = jnp.stack([part[:, inside:].reshape(lanes, each, n, head_dim) for part in whole])
    rows = rows.transpose(1, 0, 3, 2, 4).reshape(lanes, 2 * layers, n, each * head_dim)
    one_hot = jax.nn.one_hot(kept, n, dtype=jnp.float32)[:, None]
    picked = pick_rows(jnp.broadcast_to(one_hot, (lanes, 2 * layers, m, n)), rows)
    picked = picked.reshape(lanes, 2 * layers, m, each, head_dim).transpose(1, 0, 3, 2, 4)
    parts = list(picked.reshape(2 * layers, heads, m, head_dim))
    if inside:
        parts = [
            jnp.concatenate([old[:, :inside], part], axis=1)
            for old, part in zip(whole, parts, strict=True)
        ]
    room = jnp.zeros((heads, inside + positions, head_dim), jnp.float32)
    written = [append_rows(room, part, 0) for part in parts]
    return Block(tuple(written[:layers]), tuple(written[layers:]))


def layer_blocks(
    prefix: Prefix | None, layer: int, keys: Array, values: Array, visible: Array, groups: int
) -> list[OwnedBlock]:
    """Return the blocks that attention of one layer goes over: the prefix, if there is one, all its
    text visible to every sequence, and the cache's rows `keys`, `values` [lane * head, row,
    head_dim], which may begin with the prefix's rows.

    visible: [lane, n, row after the prefix]. Queries are [lane * head, groups * n, head_dim]:
    `groups` query heads share each head of keys and values.
    """
    lanes, n, rows = visible.shape
    heads = keys.shape[0] // lanes
    seen = jnp.broadcast_to(visible[:, None, None], (lanes, heads, groups, n, rows))
    seen = seen.reshape(lanes * heads, groups * n, rows)
    if prefix is None:
        return [OwnedBlock(keys, values, seen)]
    some = jnp.broadcast_to(prefix.hidden, (lanes * heads, groups * n, len(prefix.hidden)))
    if prefix.block is not None:
        k, v = (part[layer] for part in prefix.block)
        return [OwnedBlock(k, v, some), OwnedBlock(keys, values, seen)]
    others = jnp.zeros((*some.shape[:2], prefix.rows - some.shape[2]), jnp.int32)
    if seen.dtype == jnp.bool_:
        seen = seen.astype(jnp.int32) - 1
    return [OwnedBlock(keys, values, jnp.concatenate([some, others, seen], axis=-1))]


def begun(cache: Block, prefix: Block) -> Block:
    """Write a prefix's rows into the empty `cache` as its first rows; they become shares, whichever
    party knows them.
    """
    keys, values = (
        tuple(append(rows, first, 0) for rows, first in zip(*pair, strict=True))
        for pair in zip(cache, prefix, strict=True)
    )
    return Block(keys, values)


def split_heads(x: Array, lanes: int, heads: int) -> Array:
    """Rearrange x [lane * n, head * d] as [lane * head, n, d]."""
    rows, width = x.shape
    parts = x.reshape(lanes, rows // lanes, heads, width // heads).transpose(0, 2, 1, 3)
    return parts.reshape(lanes * heads, rows // lanes, width // heads)


def join_heads(x: Array, lanes: int) -> Array:
    """Rearrange x [lane * head, n, d] as [lane * n, head * d]."""
    rows, n, d = x.shape
    parts = x.reshape(lanes, rows // lanes, n, d).transpose(0, 2, 1, 3)
    return parts.reshape(lanes * n, rows // lanes * d)


def rows_after(length: Array | int, queries: int, capacity: int) -> Rows:
    """Return `queries` rows of one sequence after the public `length`, in a cache of `capacity`
    rows, where all rows hold text; each sees all rows before it.
    """
    positions = (length + jnp.arange(queries, dtype=jnp.int32))[None]
    return Rows(positions, see(length, queries, capacity)[None], length)


def see(length: Array | int, queries: int, positions: int) -> Array:
    """Return which of `positions` rows each of the `queries` rows written from the public `length`
    on sees, as bool [queries, positions]: all rows before `length`, itself, and the queries before
    it.
    """
    before = jnp.broadcast_to(jnp.arange(positions)[None, :] < length, (queries, positions))
    chain = jnp.tril(jnp.ones((queries, queries), bool))
    return jax.lax.dynamic_update_slice(before, chain, (0, length))


def _attend(
    query: Array,
    *blocks: Array,
    largest_score: float,
    reach: tuple[int, ...] | None = None,  # of no use to plaintext
) -> tuple[Array, Array]:
    """Compute attention block by block in plaintext, all with one shift, the largest visible score,
    so that the masses and numerators of blocks add up.
    """
    owned, bias = owned_blocks(blocks)
    shown = [_shown(b) for b in owned]
    products = [query @ b.keys.transpose(0, 2, 1) for b in owned]
    if bias is not None:
        (product,) = products
        products = [product + bias]
    scores = [jnp.where(s, z, SCORE_FLOOR) for s, z in zip(shown, products, strict=True)]
    shift = jnp.max(jnp.concatenate(scores, axis=-1), axis=-1, keepdims=True)
    weights = [jnp.where(s, jnp.exp(z - shift), 0.0) for s, z in zip(shown, scores, strict=True)]
    masses = [jnp.sum(w, axis=-1, keepdims=True) for w in weights]
    numerators = [w @ b.values for w, b in zip(weights, owned, strict=True)]
    return _total(numerators) / _total(masses), jnp.int32(0)


def _shown(block: OwnedBlock) -> Array:
    """Return which rows of the block each query sees, as bool [head, n, t]."""
    some = block.visible if block.visible.dtype == jnp.bool_ else block.visible >= 0
    others = jnp.ones((*some.shape[:2], block.keys.shape[1] - some.shape[2]), bool)
    return jnp.concatenate([some, others], axis=-1)


def _total(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


_attention = approximation("attention", reference=_attend, on_shares=attention_on_shares)


def attend(
    query: Array,
    blocks: Sequence[OwnedBlock],
    largest_score: float,
    bias: Array | None = None,
    reach: tuple[int, ...] | None = None,
) -> Any:
    """Return attention of `query` [head, query, head_dim] (already scaled) over `blocks`, in the
    shape of `query`, and an int32 that is positive if a value left its range. `bias` [head, query,
    row] is added to the scores of a single block. No visible score may be larger than
    `largest_score` then. `reach`: how many of the first rows each query sees at most, query after
    query, as often as there are queries (`protocols.functions.aggregation`).
    """
    biases = () if bias is None else (bias,)
    arrays = (*(x for b in blocks for x in b), *biases)
    return _attention(query, *arrays, largest_score=largest_score, reach=reach)
