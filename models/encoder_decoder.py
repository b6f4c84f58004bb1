"""The forward of models that read a text before they write one: an encoder, and a decoder with
cross-attention to what the encoder made of the text.

The source (the prompt, as the encoder reads it) goes through the encoder once; every decoder block
keeps its keys and values. What is written follows, from a public start token on, as in any other
family. Positions enter as a term of every score that depends on the distance of two rows in the
text alone.

Source: Vaswani et al. 2017; Raffel et al. 2020, section 2.1 (relative positions).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import Block, CacheT, EncoderDecoderCache, Prefix, Rows, rows_after
from models.family import Family, Layer, Outside, Params, Unchecked, family_of, norm_name, one_row
from protocols.functions.norms import rms_norm


class RelativePositions(NamedTuple):
    """Buckets of distances between rows: small ones have one each, large ones share it."""

    buckets: int
    most: int  # distance; larger ones are in the last bucket
    both_ways: bool  # whether rows after a query, which an encoder sees, have buckets of their own

    def check(self) -> None:
        """Raise ValueError for sizes that no model has."""
        least = 4 if self.both_ways else 2
        exact = self.buckets // least
        if self.buckets % least or not 1 <= exact < self.most <= 1_000_000:
            raise ValueError(
                "relative_attention_num_buckets must be a positive multiple of 4, and "
                "relative_attention_max_distance above a half of it"
            )

    def table(self) -> np.ndarray:
        """Return the bucket of every distance from 0 to `most`, int32; of rows after a query, those
        of `after` more.
        """
        return _table(self)

    @property
    def after(self) -> int:
        """Return how much further on the bucket of a row after the query is."""
        return self.buckets // 2 if self.both_ways else 0


@functools.cache
def _table(positions: RelativePositions) -> np.ndarray:
    each = positions.buckets - positions.after
    exact = each // 2
    distance = np.arange(positions.most + 1)
    # In float32, as `transformers` computes it, so that no distance falls into another bucket.
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    scale = np.float32(math.log(positions.most / exact))
    far = exact + (np.log(ratio) / scale * np.float32(each - exact)).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(far, each - 1)).astype(np.int32)


@dataclass(frozen=True)
class EncoderDecoder(Family):
    """Family of models with an encoder and a decoder; see `Family`. Folded weights have the
    encoder's blocks under "encoder" and the tables of relative positions, [bucket, head], under
    "encoder_bias" and "bias". Blocks are numbered through encoder and decoder; norms are two of
    every encoder block, the encoder's last, three of every decoder block, and the last.

    cross_keys(x, layer)        writes keys and values of the encoder's normalised rows x [L m, d].
    cross_attention(x, layer)   -> what cross-attention adds to the residual stream, [L n, d].
    """

    cross_keys: Callable[[Array, Layer], None] = field(kw_only=True)
    cross_attention: Callable[[Array, Layer], Array] = field(kw_only=True)

    def blocks_of(self, weights: Any) -> list[Params]:
        """Return all folded blocks, the encoder's first, each with the table of its stack."""
        stacks = ("encoder", "encoder_bias"), ("blocks", "bias")
        return [
            {**block, "bias": weights[table]} for stack, table in stacks for block in weights[stack]
        ]

    def forward(
        self,
        weights: Params,
        config: Any,
        x: Array,
        rows: Rows,
        cache: CacheT,
        prefix: Prefix | None = None,
        scale: float = 1.0,
        normalise: Callable[..., tuple[Array, Array]] = rms_norm,
        ends: tuple[int, ...] | None = None,
    ) -> tuple[Array, CacheT, Outside]:
        """Run the decoder, as `Family.forward` does, on n rows of every lane; `rows` are about
        these. The first forward on a cache also encodes the source: x [L (m + n), d] then has m
        rows of it before a lane's n rows. Nothing comes before a source: `prefix` is None.
        """
        assert isinstance(cache, EncoderDecoderCache) and prefix is None
        outside: Outside = {}
        if not cache.source.keys:
            lanes, n = rows.positions.shape
            by_lane = x.reshape(lanes, -1, x.shape[-1])
            source, x = (
                part.reshape(-1, x.shape[-1]) for part in (by_lane[:, :-n], by_lane[:, -n:])
            )
            encoded, outside = self.encode(weights, config, source, lanes, normalise)
            cache = cache._replace(source=encoded)
        x, own, of_decoder, unchecked = self._decoded(weights, config, x, rows, cache, normalise)
        if ends is not None:
            x = one_row(x.reshape(rows.positions.shape[0], -1, x.shape[-1]), ends)[:, 0]
        normed, count = config.normalised(x, -1, scale, normalise, unchecked)
        last = norm_name(config.layers, "last norm", unchecked)
        return normed, cache._replace(own=own), outside | of_decoder | {last: count}

    def encode(
        self,
        weights: Params,
        config: Any,
        x: Array,
        lanes: int = 1,
        normalise: Callable[..., tuple[Array, Array]] = rms_norm,
    ) -> tuple[Block, Outside]:
        """Run the encoder on embedded rows x [L m, d], all of which see each other. Return the keys
        and values of cross-attention, of every decoder block, and counts as `forward` does.
        """
        m, blocks = x.shape[0] // lanes, len(weights["encoder"])
        everything = jnp.ones((lanes, m, m), bool)
        order = np.arange(m)
        behind = jnp.asarray(order[:, None] - order[None, :])
        bias = _bias(weights["encoder_bias"], config.positions(True), behind[None], everything)
        rows = Rows(jnp.zeros((lanes, m), jnp.int32), everything, 0, bias)
        empty = jnp.zeros((lanes * config.kv_heads, m, config.head_dim), jnp.float32)
        cache = Block((empty,) * blocks, (empty,) * blocks)
        with jax.named_scope("encoder"):
            x, _, outside, unchecked = self._through(
                weights["encoder"], config, x, rows, cache, None, normalise
            )
            normed, count = config.normalised(x, 2 * blocks, 1.0, normalise, unchecked)
            outside[norm_name(blocks, "last norm of the encoder", unchecked)] = count
            keys, values = [], []
            for i, block in enumerate(weights["blocks"]):
                layer = Layer(blocks + i, block, config, rows, None, None, empty, empty)
                self.cross_keys(normed, layer)
                keys.append(layer.keys)
                values.append(layer.values)
        return Block(tuple(keys), tuple(values)), outside

    def _decoded(
        self,
        weights: Params,
        config: Any,
        x: Array,
        rows: Rows,
        cache: EncoderDecoderCache,
        normalise: Callable[..., tuple[Array, Array]],
    ) -> tuple[Array, Block, Outside, Unchecked | None]:
        """Run the decoder's blocks. Return rows [L n, d] of the residual stream after the last one,
        the decoder's own rows of the cache, counts, and the rows that no norm has checked yet.
        """
        outside: Outside = {}
        unchecked: Unchecked | None = None
        before = len(weights["encoder"])
        lanes, n = rows.positions.shape
        seen = rows.visible if rows.visible.dtype == jnp.bool_ else rows.visible >= 0
        bias = _bias(weights["bias"], config.positions(False), _behind(seen), seen)
        own = rows._replace(bias=bias)
        m = cache.source.positions
        across = Rows(rows.positions, jnp.ones((lanes, n, m), bool), 0)

        def norm(x: Array, block: int, number: int, name: str) -> Array:
            nonlocal unchecked
            site = 2 * before + 1 + 3 * (block - before) + number
            normed, count = config.normalised(x, site, 1.0, normalise, unchecked)
            name = f"norm of {name} in block {block}"
            outside[norm_name(block, name, unchecked)], unchecked = count, None
            return normed

        written = []
        cached = zip(weights["blocks"], *cache.own, *cache.source, strict=True)
        for i, (block, keys, values, source_keys, source_values) in enumerate(cached, before):
            layer = Layer(i, block, config, own, None, None, keys, values)
            source = Layer(i, block, config, across, None, None, source_keys, source_values)
            with jax.named_scope("attention"):
                x = x + self.attention(norm(x, i, 0, "attention"), layer)
            with jax.named_scope("cross-attention"):
                x = x + self.cross_attention(norm(x, i, 1, "cross-attention"), source)
            for name, some in (("attention", layer), ("cross-attention", source)):
                if some.outside is not None:
                    outside[f"sums of {name} in block {i}"] = some.outside
            with jax.named_scope("mlp"):
                x = x + self.mlp(norm(x, i, 2, "feed-forward"), layer)
                unchecked = layer.unchecked
            written.append(layer)
        block = Block(tuple(a.keys for a in written), tuple(a.values for a in written))
        return x, block, outside, unchecked


def _behind(seen: Array) -> Array:
    """Return how many rows of the text each row [lane, n, row] is behind its query: all that the
    query sees after it. Rows stand in the order of the text, and a query sees all rows before it.
    """
    count = seen.astype(jnp.int32)
    return jnp.cumsum(count[..., ::-1], axis=-1)[..., ::-1] - count


def _bias(table: Array, positions: RelativePositions, behind: Array, seen: Array) -> Array:
    """Return what is added to scores, [lane * head, n, row]: of a row so far `behind` its query
    (below 0: after it), where it is `seen`, the entry of its bucket in `table` [bucket, head].
    """
    lanes, n, count = seen.shape
    distance = jnp.minimum(jnp.abs(behind), positions.most)
    bucket = jnp.asarray(positions.table())[distance] + jnp.where(behind < 0, positions.after, 0)
    added = jnp.where(seen[..., None], table[bucket], 0.0)  # [lane, n, row, head]
    return added.transpose(0, 3, 1, 2).reshape(-1, n, count)


def source_length(config: Any, tokens: np.ndarray) -> int:
    """Return how many tokens of a text [n] the encoder reads: those before the last start token.
    ValueError when there is none, or nothing before it.
    """
    starts = np.flatnonzero(np.asarray(tokens) == config.decoder_start_token_id)
    if not starts.size or not starts[-1]:
        raise ValueError("a text of an encoder's has a source, and a start token after it")
    return int(starts[-1])


def encoded(
    config: Any, weights: Params, source: Array, cache: EncoderDecoderCache
) -> EncoderDecoderCache:
    """Return a decoder's cache with the source [m], or of every lane [lane, m], encoded, in
    plaintext.
    """
    family = family_of(config)
    assert isinstance(family, EncoderDecoder)
    lanes, m = jnp.atleast_2d(source).shape
    x = family.embed(weights, config, source.reshape(-1), jnp.tile(jnp.arange(m), lanes))
    return cache._replace(source=family.encode(weights, config, x, lanes)[0])


def source_logits(params: Params, config: Any, source: Array, tokens: Array) -> Array:
    """Return logits [n, vocab], less their mean over the vocabulary, of tokens [n], the start token
    first, after a source [m], without a cache and from parameters that are not folded.
    """
    n, family = tokens.shape[0], family_of(config)
    weights = family.fold(params, config)
    both = jnp.concatenate([source, tokens])
    x = family.embed(weights, config, both, jnp.arange(both.shape[0]))
    rows, _, _ = family.forward(weights, config, x, rows_after(0, n, n), config.empty_cache(n))
    return family.head(weights, rows)
