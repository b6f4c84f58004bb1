"""Scoring: log-probabilities of many texts with a common beginning, in plaintext, on one cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import Block, Rows
from models.family import ModelConfig, Params, family_of

_AT_ONCE = 64  # texts whose distributions over the vocabulary are in memory at a time


@dataclass(frozen=True)
class Scored:
    """Texts of the same length, scored by a model."""

    tokens: np.ndarray  # int32 [m, n]
    total: np.ndarray  # float64 [m]: log-probability of what was added to the context
    next: np.ndarray  # float32 [m, vocab]: log-probabilities of the next token
    _cache: Any  # Block, of m lanes filled up to a power of two


class Scorer:
    """A model that scores texts. `room`: the largest number of positions of a text."""

    def __init__(self, config: ModelConfig, params: Params, room: int | None = None) -> None:
        self._config, self._room = config, min(room or config.context, config.context)
        self._weights = jax.device_put(family_of(config).fold(params, config))
        self._run = jax.jit(functools.partial(_run, config))
        self._chosen = jax.jit(functools.partial(picked_lanes, config.kv_heads))

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def begin(self, context: Sequence[int]) -> Scored:
        """Return a single text, the context (one token or more), with log-probability 0."""
        empty = Scored(
            np.zeros((1, 0), np.int32),
            np.zeros(1),
            np.zeros((1, self.vocab_size), np.float32),
            self._config.empty_cache(self._room),
        )
        begun = self.extended(empty, np.zeros(1, int), np.asarray(context, np.int32)[None])
        return Scored(begun.tokens, np.zeros(1), begun.next, begun._cache)

    def extended(self, texts: Scored, parents: np.ndarray, tokens: np.ndarray) -> Scored:
        """Extend the texts number `parents` [m] (which may repeat) by `tokens` [m, k]. ValueError
        when the result has more positions than there is room for.
        """
        m, k = tokens.shape
        at = texts.tokens.shape[1]
        if at + k > self._room:
            raise ValueError(f"{at + k} tokens do not fit the {self._room} positions there are")
        # Few shapes: each is compiled once. Rows that only fill up come last, and are written over.
        lanes, width = _power(m), min(_power(k), self._room - at)
        rows = np.pad(tokens.astype(np.int32), [(0, lanes - m), (0, width - k)])
        inside, after, cache = self._run(
            self._weights, texts._cache, np.pad(parents, (0, lanes - m)), rows, at, np.int32(k - 1)
        )
        inside, after = np.asarray(inside)[:m, : k - 1], np.asarray(after)[:m]
        first = texts.next[parents, tokens[:, 0]].astype(np.float64)
        total = texts.total[parents] + first + inside.astype(np.float64).sum(axis=1)
        whole = np.concatenate([texts.tokens[parents], tokens.astype(np.int32)], axis=1)
        return Scored(whole, total, after, cache)

    def chosen(self, texts: Scored, numbers: np.ndarray) -> Scored:
        """Select the texts with these numbers [m]."""
        lanes = np.pad(numbers, (0, _power(len(numbers)) - len(numbers)))
        return Scored(
            texts.tokens[numbers],
            texts.total[numbers],
            texts.next[numbers],
            self._chosen(texts._cache, lanes),
        )

    def log_probability(self, context: Sequence[int], rest: np.ndarray) -> np.ndarray:
        """Return the log-probability, float64 [m], of each row of tokens `rest` [m, k] after the
        context.
        """
        return self.extended(self.begin(context), np.zeros(len(rest), int), rest).total


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def picked_lanes(heads: int, cache: Block, parents: jax.Array) -> Block:
    """Select the sequences number `parents` of a cache, which may repeat."""

    def of(rows: jax.Array) -> jax.Array:
        by_lane = rows.reshape(-1, heads, *rows.shape[1:])
        return by_lane[parents].reshape(-1, *rows.shape[1:])

    return jax.tree.map(of, cache)  # type: ignore[no-any-return]


def _run(
    config: ModelConfig,
    weights: Params,
    cache: Block,
    parents: jax.Array,
    tokens: jax.Array,
    at: jax.Array,
    last: jax.Array,
) -> tuple[jax.Array, jax.Array, Block]:
    """Score tokens [m, k] after the first `at` rows of the cached sequences `parents`. Return the
    log-probabilities of all tokens but the first, [m, k - 1]; of the token after token number
    `last`, [m, vocab]; and the cache of the m sequences.
    """
    m, k = tokens.shape
    few = min(m, _AT_ONCE)

    def in_parts(a: jax.Array) -> jax.Array:
        return a.reshape(m // few, -1, *a.shape[1:])

    def whole(a: jax.Array) -> jax.Array:
        return a.reshape(a.shape[0] * a.shape[1], *a.shape[2:])

    chosen = jax.tree.map(in_parts, picked_lanes(config.kv_heads, cache, parents))
    scored = jax.lax.map(
        lambda part: _forward(config, weights, part[0], part[1], at, last),
        (in_parts(tokens), chosen),
    )
    return jax.tree.map(whole, scored)  # type: ignore[no-any-return]


def lanes_after(
    config: ModelConfig,
    weights: Params,
    tokens: jax.Array,
    cache: Block,
    at: jax.Array,
    starts: jax.Array | None = None,
) -> tuple[jax.Array, Block]:
    """Run tokens [lane, k] after the first `at` rows of every sequence (lane) of the cache. Return
    normalised rows [lane, k, d] for the head, and the cache with the tokens' rows. Padding tokens
    may stand past the context. starts: int32 [lane], the row that each sequence begins with; rows
    before it are padding.
    """
    family, (lanes, k) = family_of(config), tokens.shape
    columns, places = jnp.arange(cache.positions), at + jnp.arange(k, dtype=jnp.int32)
    seen = jnp.broadcast_to(columns[None] <= places[:, None], (lanes, k, cache.positions))
    positions = jnp.tile(jnp.minimum(places, config.context - 1), (lanes, 1))
    if starts is not None:
        # A padding row sees itself alone, since every row has to see one.
        itself = columns[None] == places[:, None]
        seen = seen & (columns >= starts[:, None, None]) | itself
        positions = jnp.maximum(positions - starts[:, None], 0)
    rows = Rows(positions, seen, at)
    x = family.embed(weights, config, tokens.reshape(-1), rows.positions.reshape(-1))
    out, written, _ = family.forward(weights, config, x, rows, cache)
    return out.reshape(lanes, k, -1), written


def _forward(
    config: ModelConfig,
    weights: Params,
    tokens: jax.Array,
    cache: Block,
    at: jax.Array,
    last: jax.Array,
) -> tuple[jax.Array, jax.Array, Block]:
    """Score a few sequences at once after the first `at` rows of `cache`; see `_run`."""
    m, k = tokens.shape
    out, written = lanes_after(config, weights, tokens, cache, at)
    logits = family_of(config).head(weights, out.reshape(m * k, -1))
    logs = jax.nn.log_softmax(logits.reshape(m, k, -1), axis=-1)
    which = jax.nn.one_hot(tokens[:, 1:], config.vocab_size, dtype=bool)
    inside = jnp.sum(jnp.where(which, logs[:, :-1], 0.0), axis=-1)
    return inside, jax.lax.dynamic_index_in_dim(logs, last, 1, keepdims=False), written
