"""Next-token logits of several prompts at a time, in plaintext JAX with a cache of keys and values.

A `Lanes` has fixed shapes: so many prompts, each padded to the same room, one token to all of them
at a step. The row of a prompt depends on that prompt alone: prompts are padded on the right, what
pads is seen by nobody, and each row of every product is computed in the same order of operations
whatever stands in the others. So the logits of reference i are a function of reference i, and those
of the public prompt, which has a `Lanes` of its own, are the same bits whatever the references are.

The head is computed in float32, whatever the weights are stored in, at full precision: at epsilon 1
differences are clipped at 0.08, and bfloat16 has steps of 0.125 there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import Block, Rows
from models.family import ModelConfig, Params, family_of

HEAD = jnp.float32


class Lanes:
    """A model on `lanes` prompts of `room` tokens at most, each followed by up to `new_tokens` new
    ones. ValueError where the model's context is shorter. calls: next-token evaluations so far.
    """

    def __init__(
        self, config: ModelConfig, weights: Any, lanes: int, room: int, new_tokens: int
    ) -> None:
        """Prepare lanes without prompts; weights: folded, as `folded` gives them."""
        if room + new_tokens > config.context:
            raise ValueError(f"{room} + {new_tokens} tokens do not fit {config.context} positions")
        self.lanes, self.room, self.calls = lanes, room, 0
        self._config, self._weights, self._new = config, weights, new_tokens
        self._prefill, self._step, _ = _compiled(config, HEAD)
        self._cache: Any = None
        self._lengths = np.zeros(lanes, np.int32)
        self._at = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Compute logits float32 [lanes, vocab] after the prompts, of one token or more each."""
        if len(prompts) != self.lanes or not all(1 <= len(p) <= self.room for p in prompts):
            raise ValueError(f"there must be {self.lanes} prompts of 1 to {self.room} tokens")
        rows = np.zeros((self.lanes, self.room), np.int32)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = prompt
        self._lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        self._at = 0
        empty = self._config.empty_cache(self.room + self._new, self.lanes)
        logits, self._cache = self._prefill(self._weights, empty, rows, self._lengths)
        self.calls += self.lanes
        return np.asarray(logits)

    def step(self, token: int | Sequence[int]) -> np.ndarray:
        """Return logits float32 [lanes, vocab] after one more token, for all lanes or one each."""
        if self._at >= self._new:
            raise ValueError(f"there is room for {self._new} new tokens")
        logits, self._cache = self._step(
            self._weights,
            self._cache,
            np.broadcast_to(np.asarray(token, np.int32), (self.lanes,)),
            self._lengths,
            np.int32(self.room),
            np.int32(self._at),
        )
        self._at += 1
        self.calls += self.lanes
        return np.asarray(logits)


class Features:
    """Texts as points: the mean over a text's first `room` tokens of what the model's head reads of
    each, of length 1. `lanes` texts at a time.
    """

    def __init__(self, config: ModelConfig, weights: Any, lanes: int, room: int) -> None:
        self._lanes, self._room = lanes, min(room, config.context)
        self._weights, self._config = weights, config
        _, _, self._run = _compiled(config, HEAD)

    def of(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Compute the points float32 [text, width] of token rows; zeros for an empty text."""
        features = [np.zeros((0, self._config.width), np.float32)]
        for start in range(0, len(texts), self._lanes):
            some = [list(text[: self._room]) for text in texts[start : start + self._lanes]]
            rows = np.zeros((self._lanes, self._room), np.int32)
            for row, text in zip(rows, some, strict=False):
                row[: len(text)] = text
            lengths = np.zeros(self._lanes, np.int32)
            lengths[: len(some)] = [len(text) for text in some]
            features.append(np.asarray(self._run(self._weights, rows, lengths))[: len(some)])
        return np.concatenate(features)


def folded(config: ModelConfig, params: Params) -> Any:
    """Fold the weights that `Lanes` computes with; made once for several."""
    return jax.device_put(family_of(config).fold(params, config))


@functools.cache
def _compiled(config: ModelConfig, head: Any) -> tuple[Any, Any, Any]:
    """Compile the three functions below, each once for each of its shapes."""
    return (
        jax.jit(functools.partial(_prefill, config, head)),
        jax.jit(functools.partial(_step, config, head), donate_argnums=1),
        jax.jit(functools.partial(_features, config)),
    )


def _prefill(
    config: ModelConfig,
    head: Any,
    weights: Any,
    cache: Block,
    tokens: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, Block]:
    """Return the logits after each prompt of [lanes, room], padded on the right, and the cache."""
    lanes, room = tokens.shape
    out, written = _forward(
        config, weights, tokens.reshape(-1), _from_start(lanes, room, cache), cache
    )
    last = out.reshape(lanes, room, -1)[jnp.arange(lanes), lengths - 1]
    return _head(config, head, weights, last), written


def _features(
    config: ModelConfig, weights: Any, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    lanes, room = tokens.shape
    cache = config.empty_cache(room, lanes)
    out, _ = _forward(config, weights, tokens.reshape(-1), _from_start(lanes, room, cache), cache)
    inside = jnp.arange(room)[None] < lengths[:, None]
    total = jnp.sum(jnp.where(inside[..., None], out.reshape(lanes, room, -1), 0.0), axis=1)
    return total / jnp.maximum(jnp.linalg.norm(total, axis=1, keepdims=True), 1e-12)


def _from_start(lanes: int, room: int, cache: Block) -> Rows:
    """Return the first `room` rows of every lane, each of which sees those up to itself."""
    seen = jnp.arange(cache.positions)[None] <= jnp.arange(room)[:, None]
    return Rows(
        jnp.tile(jnp.arange(room, dtype=jnp.int32), (lanes, 1)),
        jnp.broadcast_to(seen, (lanes, *seen.shape)),
        0,
    )


def _step(
    config: ModelConfig,
    head: Any,
    weights: Any,
    cache: Block,
    tokens: jax.Array,
    lengths: jax.Array,
    room: jax.Array,
    number: jax.Array,
) -> tuple[jax.Array, Block]:
    """Compute the logits of one new token a lane, after its own prompt, and the cache, in which all
    of these tokens have the row `room + number`.
    """
    columns = jnp.arange(cache.positions)
    at = room + number
    seen = (columns[None] < lengths[:, None]) | ((columns >= room) & (columns <= at))[None]
    rows = Rows((lengths + number)[:, None], seen[:, None], at)
    out, written = _forward(config, weights, tokens, rows, cache)
    return _head(config, head, weights, out), written


def _forward(
    config: ModelConfig, weights: Any, tokens: jax.Array, rows: Rows, cache: Block
) -> tuple[jax.Array, Block]:
    family = family_of(config)
    x = family.embed(weights, config, tokens, rows.positions.reshape(-1))
    out, written, _ = family.forward(weights, config, x, rows, cache)
    return out, written


def _head(config: ModelConfig, kind: Any, weights: Any, rows: jax.Array) -> jax.Array:
    head = jax.tree.map(lambda w: w.astype(kind), weights["head"])
    with jax.default_matmul_precision("highest"):
        logits = family_of(config).head({"head": head}, rows.astype(kind))
    return logits.astype(jnp.float32)
