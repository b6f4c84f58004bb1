"""Next-token logits of several prompts at a time, in plaintext JAX with a cache of keys and values.

A `Lanes` has fixed shapes: so many prompts, each padded to the same room, one token to all of them
at a step. The row of a prompt depends on that prompt alone: prompts are padded on the right, what
pads is seen by nobody, and each row of every product is computed in the same order of operations
whatever stands in the others; the words that all prompts begin with are computed once. So the
logits of reference i are a function of reference i, and those of the public prompt, which has a
`Lanes` of its own, are the same bits whatever the references are.

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
    ones. prefix: tokens that every prompt begins with, which are computed once. ValueError where
    the model's context is shorter. calls: next-token evaluations so far.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Any,
        lanes: int,
        room: int,
        new_tokens: int,
        prefix: Sequence[int] = (),
    ) -> None:
        """Prepare lanes without prompts; weights: folded, as `folded` gives them."""
        if room + new_tokens > config.context:
            raise ValueError(f"{room} + {new_tokens} tokens do not fit {config.context} positions")
        self.lanes, self.room, self.calls = lanes, room, 0
        self._config, self._weights, self._new = config, weights, new_tokens
        self._begin, self._prefill, self._step, *_ = _compiled(config, HEAD)
        self._prefix, self._of_prefix = list(prefix), None
        self._cache: Any = None
        self._lengths = np.zeros(lanes, np.int32)
        self._at = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Compute logits float32 [lanes, vocab] after the prompts, of one token or more each after
        the prefix.
        """
        start = len(self._prefix)
        if len(prompts) != self.lanes or not all(start < len(p) <= self.room for p in prompts):
            raise ValueError(f"there must be {self.lanes} prompts of {start + 1} to {self.room}")
        if any(list(prompt[:start]) != self._prefix for prompt in prompts):
            raise ValueError("a prompt does not begin with the prefix of all")
        rows = np.zeros((self.lanes, self.room - start), np.int32)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt) - start] = prompt[start:]
        self._lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        self._at, self._cache = 0, None
        logits, self._cache = self._prefill(
            self._weights, self._begun(), rows, self._lengths, start=start
        )
        self.calls += self.lanes
        return np.asarray(logits)

    def end(self) -> None:
        """Forget the prompts, whose cache is most of what lanes keep in memory."""
        self._cache = self._of_prefix = None

    def _begun(self) -> Block:
        """Return a cache of all lanes that has the prefix."""
        positions = self.room + self._new
        if not self._prefix:
            return self._config.empty_cache(positions, self.lanes)
        if self._of_prefix is None:
            empty = self._config.empty_cache(positions, 1)
            self._of_prefix = self._begin(self._weights, empty, np.array(self._prefix, np.int32))
        return jax.tree.map(lambda rows: jnp.tile(rows, (self.lanes, 1, 1)), self._of_prefix)

    def step(self, token: int | Sequence[int] | np.ndarray) -> np.ndarray:
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
        self._run = _compiled(config, HEAD)[3]

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


class Nats:
    """Surprise of texts after one context, which is computed once: `lanes` texts at a time, of
    `room` tokens at most.
    """

    def __init__(
        self, config: ModelConfig, weights: Any, lanes: int, context: Sequence[int], room: int
    ) -> None:
        self._config, self._weights, self._lanes, self._room = config, weights, lanes, room
        self._last, positions = context[-1], len(context) - 1 + room
        begin, self._run = _compiled(config, HEAD)[0], _compiled(config, HEAD)[-1]
        before, empty = np.array(context[:-1], np.int32), config.empty_cache(positions, 1)
        one = begin(weights, empty, before) if len(before) else empty
        self._cache = jax.tree.map(lambda rows: jnp.tile(rows, (lanes, 1, 1)), one)

    def of(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the nats of each text's tokens together, float64 [text]; 0 for an empty one."""
        nats = np.zeros(len(texts))
        for start in range(0, len(texts), self._lanes):
            some = [list(text[: self._room]) for text in texts[start : start + self._lanes]]
            rows = np.zeros((self._lanes, 1 + self._room), np.int32)
            rows[:, 0] = self._last
            for row, text in zip(rows, some, strict=False):
                row[1 : 1 + len(text)] = text
            of_tokens = np.asarray(self._run(self._weights, self._cache, rows), np.float64)
            for i, text in enumerate(some):
                nats[start + i] = of_tokens[i, : len(text)].sum()
        return nats


def folded(config: ModelConfig, params: Params) -> Any:
    """Fold the weights that `Lanes` computes with; made once for several."""
    return jax.device_put(family_of(config).fold(params, config))


@functools.cache
def _compiled(config: ModelConfig, head: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Compile the five functions below, each once for each of its shapes."""
    return (
        jax.jit(functools.partial(_begin, config)),
        jax.jit(functools.partial(_prefill, config, head), static_argnames="start"),
        jax.jit(functools.partial(_step, config, head), donate_argnums=1),
        jax.jit(functools.partial(_features, config)),
        jax.jit(functools.partial(_nats, config, head)),
    )


def _begin(config: ModelConfig, weights: Any, cache: Block, tokens: jax.Array) -> Block:
    """Return the cache of one lane with the first tokens in it."""
    return _forward(config, weights, tokens, _following(0, 1, len(tokens), cache), cache)[1]


def _prefill(
    config: ModelConfig,
    head: Any,
    weights: Any,
    cache: Block,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    start: int,
) -> tuple[jax.Array, Block]:
    """Return the logits after each prompt, and the cache. tokens: [lanes, room], those from `start`
    on, padded on the right; lengths: of whole prompts.
    """
    lanes, room = tokens.shape
    rows = _following(start, lanes, room, cache)
    out, written = _forward(config, weights, tokens.reshape(-1), rows, cache)
    last = out.reshape(lanes, room, -1)[jnp.arange(lanes), lengths - start - 1]
    return _head(config, head, weights, last), written


def _features(
    config: ModelConfig, weights: Any, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    lanes, room = tokens.shape
    cache = config.empty_cache(room, lanes)
    out, _ = _forward(config, weights, tokens.reshape(-1), _following(0, lanes, room, cache), cache)
    inside = jnp.arange(room)[None] < lengths[:, None]
    total = jnp.sum(jnp.where(inside[..., None], out.reshape(lanes, room, -1), 0.0), axis=1)
    return total / jnp.maximum(jnp.linalg.norm(total, axis=1, keepdims=True), 1e-12)


def _nats(
    config: ModelConfig, head: Any, weights: Any, cache: Block, tokens: jax.Array
) -> jax.Array:
    """Return the surprise of each token but a row's first, float32 [lanes, room]."""
    lanes, room = tokens.shape[0], tokens.shape[1] - 1
    rows = _following(cache.positions - room, lanes, room, cache)
    out, _ = _forward(config, weights, tokens[:, :-1].reshape(-1), rows, cache)
    logs = jax.nn.log_softmax(_head(config, head, weights, out), axis=-1)
    return -jnp.take_along_axis(logs, tokens[:, 1:].reshape(-1, 1), axis=1).reshape(lanes, room)


def _following(start: int, lanes: int, room: int, cache: Block) -> Rows:
    """Return `room` rows of every lane from `start` on, each of which sees those up to itself."""
    at = jnp.arange(start, start + room, dtype=jnp.int32)
    seen = jnp.arange(cache.positions)[None] <= at[:, None]
    return Rows(jnp.tile(at, (lanes, 1)), jnp.broadcast_to(seen, (lanes, *seen.shape)), start)


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
