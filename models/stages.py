"""A model in pieces, cut around attention, for plaintext parties that each hold a part of the keys
and values, or a part of the blocks. The arithmetic is that of `models.family`, in float32.

A token's way through a block: `ask` returns its query, and its key and value for the party that
stores them; attention is computed elsewhere (`models.partials`); `answer` continues from its
result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from models.cache import Rows, join_heads
from models.family import Layer, ModelConfig, Params, family_of


class AttentionInputs(NamedTuple):
    """Query, key and value of one row per sequence; query heads of a group share key and value."""

    query: Array  # [L, kv head, group, head_dim], scaled
    key: Array  # [L, kv head, head_dim]
    value: Array


class Filled(NamedTuple):
    """Result of a block over whole texts."""

    x: Array  # [L n, d]
    keys: Array  # [L, kv head, n, head_dim]
    values: Array


class Stages(NamedTuple):
    """Compiled pieces of a model. `weights` are folded, `block` is one of their blocks; L is the
    number of sequences.

    embed(weights, tokens [n], positions [n])   -> x [n, d]
    fill(block, x [L n, d], positions [L, n], visible [L, n, n])     -> Filled
    ask(block, x [L, d], positions [L])         -> AttentionInputs
    answer(block, x [L, d], attended [L, kv head, group, head_dim])  -> x [L, d]
    head(weights, x [n, d])                     -> logits [n, vocab]
    """

    embed: Callable[[Params, Any, Any], Array]
    fill: Callable[[Params, Any, Any, Any], Filled]
    ask: Callable[[Params, Any, Any], AttentionInputs]
    answer: Callable[[Params, Any, Any], Array]
    head: Callable[[Params, Any], Array]


@dataclass
class _Asking(Layer):
    """A layer that records the inputs of attention; its result is not used."""

    asked: Any = None
    _written: Any = None

    def write(self, key: Array, value: Array) -> None:
        self._written = key, value

    def attend(self, query: Array) -> Array:
        self.asked = query, *self._written
        return join_heads(jnp.zeros_like(query), self.lanes)


@dataclass
class _Answered(Layer):
    """A layer that is given attention's result."""

    attended: Any = None

    def write(self, key: Array, value: Array) -> None:
        pass

    def attend(self, query: Array) -> Array:
        return join_heads(self.attended.reshape(query.shape), self.lanes)


@functools.lru_cache(maxsize=8)
def stages_of(config: ModelConfig) -> Stages:
    """Return the pieces of a model of this shape; they are compiled once per shape."""
    family, heads = family_of(config), config.kv_heads

    def norm(x: Array) -> Array:
        return config.normalised(x, 0)[0]  # in plaintext all are the same

    def layer(kind: Any, block: Params, rows: Rows, *cache: Array) -> Any:
        keys, values = cache or (jnp.zeros(0), jnp.zeros(0))
        return kind(0, block, config, rows, family.angles(config, rows), None, keys, values)

    def one_row(positions: Array) -> Rows:
        lanes = positions.shape[0]
        return Rows(positions[:, None], jnp.ones((lanes, 1, 0), bool), 0)

    def embed(weights: Params, tokens: Array, positions: Array) -> Array:
        return family.embed(weights, config, tokens, positions)

    def fill(block: Params, x: Array, positions: Array, visible: Array) -> Filled:
        lanes, n = positions.shape
        empty = config.empty_cache(n, lanes)
        at = layer(Layer, block, Rows(positions, visible, 0), empty.keys[0], empty.values[0])
        x = x + family.attention(norm(x), at)
        x = x + family.mlp(norm(x), at)
        shape = lanes, heads, n, config.head_dim
        return Filled(x, at.keys.reshape(shape), at.values.reshape(shape))

    def ask(block: Params, x: Array, positions: Array) -> AttentionInputs:
        at = layer(_Asking, block, one_row(positions))
        family.attention(norm(x), at)
        query, key, value = at.asked
        lanes, size = len(x), config.head_dim
        key, value = (a.reshape(lanes, heads, size) for a in (key, value))
        return AttentionInputs(query.reshape(lanes, heads, -1, size), key, value)

    def answer(block: Params, x: Array, attended: Array) -> Array:
        at = layer(_Answered, block, one_row(jnp.zeros(len(x), jnp.int32)))
        at.attended = attended
        x = x + family.attention(norm(x), at)
        return x + family.mlp(norm(x), at)

    def head(weights: Params, x: Array) -> Array:
        return family.head(weights, norm(x))

    return Stages(*(jax.jit(piece) for piece in (embed, fill, ask, answer, head)))
