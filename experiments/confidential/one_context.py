"""A model that scores many texts with one context, whose keys and values it keeps once.

`models.scoring.Scorer` keeps those of the context for every text, and takes twice the texts where
there is one more than a power of two: 512 fakes of a secret under a model of 135 million parameters
would take 7 GB there. Log-probabilities are the same, up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import HIDDEN, Block, Prefix, Rows
from models.family import ModelConfig, Params, family_of
from models.hf import load_model
from models.scoring import Scored, Scorer, lanes_after

# Texts that go through the model together. 512 fakes and the target are three times the last.
_AT_ONCE = (1, 16, 171)


class OneContext(Scorer):
    """A scorer of texts of one context. before, after: the most positions of the context, and of
    what is added to it. ValueError where a text has more.
    """

    def __init__(self, directory: Path, before: int, after: int) -> None:
        config, params = load_model(directory)
        super().__init__(config, params, before)
        self._after = after
        self._fill = jax.jit(functools.partial(_filled, config))
        self._step = jax.jit(functools.partial(_stepped, config))

    def begin(self, context: Sequence[int]) -> Scored:
        if len(context) > self._room:
            raise ValueError(f"{len(context)} tokens do not fit the {self._room} of a context")
        tokens = np.zeros((1, self._room), np.int32)
        tokens[0, : len(context)] = context
        after, block = self._fill(self._weights, tokens, np.int32(len(context)))
        self._context, self._length = block, len(context)
        config = self._config
        shape = (1, 2 * config.layers, config.kv_heads, self._after, config.head_dim)
        rows = np.zeros(shape, np.float32)
        return Scored(np.asarray(context)[None], np.zeros(1), np.asarray(after), rows)

    def extended(self, texts: Scored, parents: np.ndarray, tokens: np.ndarray) -> Scored:
        for column in tokens.T:
            texts = self._longer(texts, parents, column)
            parents = np.arange(len(column))
        return texts

    def chosen(self, texts: Scored, numbers: np.ndarray) -> Scored:
        return Scored(
            texts.tokens[numbers], texts.total[numbers], texts.next[numbers], texts._cache[numbers]
        )

    def _longer(self, texts: Scored, parents: np.ndarray, tokens: np.ndarray) -> Scored:
        """Extend the texts number `parents` [m] by a token each."""
        m, at = len(tokens), texts.tokens.shape[1] - self._length
        if at >= self._after:
            raise ValueError(f"{at + 1} tokens do not fit the {self._after} after a context")
        rows = texts._cache[parents]
        after = np.empty((m, self.vocab_size), np.float32)
        few = next((size for size in _AT_ONCE if m <= size), _AT_ONCE[-1])
        for start in range(0, m, few):
            part = slice(start, min(start + few, m))
            more = few - (part.stop - start)
            logs, written = self._step(
                self._weights,
                self._context,
                np.int32(self._length),
                np.pad(rows[part], [(0, more), *[(0, 0)] * 4]),
                np.pad(tokens[part].astype(np.int32), (0, more)),
                np.int32(at),
            )
            after[part] = logs[: few - more]
            rows[part, :, :, at] = written[: few - more]
        total = texts.total[parents] + texts.next[parents, tokens].astype(np.float64)
        whole = np.concatenate([texts.tokens[parents], tokens[:, None]], axis=1)
        return Scored(whole, total, after, rows)


def _filled(
    config: ModelConfig, weights: Params, tokens: jax.Array, length: jax.Array
) -> tuple[jax.Array, Block]:
    """Run a context [1, n], of which the first `length` tokens count. Return log-probabilities of
    the token after it [1, vocab], and its keys and values.
    """
    empty = config.empty_cache(tokens.shape[1])
    out, block = lanes_after(config, weights, tokens, empty, jnp.int32(0))
    last = jax.lax.dynamic_index_in_dim(out, length - 1, 1, keepdims=False)
    return jax.nn.log_softmax(family_of(config).head(weights, last)), block


def _stepped(
    config: ModelConfig,
    weights: Params,
    context: Block,
    length: jax.Array,
    rows: jax.Array,
    tokens: jax.Array,
    at: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run one token [m] of each text after `length` rows of the context and `at` of its own rows
    [m, 2 layer, kv head, row, head_dim]: the layers' keys, then their values. Return
    log-probabilities of the next token [m, vocab], and the token's own row
    [m, 2 layer, kv head, head_dim].
    """
    family, (m, _, heads, own, size) = family_of(config), rows.shape
    parts = [rows[:, i].reshape(m * heads, own, size) for i in range(rows.shape[1])]
    cache = Block(tuple(parts[: config.layers]), tuple(parts[config.layers :]))
    # The context's rows past its length are hidden.
    hidden = jnp.where(jnp.arange(context.positions) < length, 0, HIDDEN).astype(jnp.int32)
    same = jax.tree.map(lambda part: jnp.tile(part, (m, 1, 1)), context)
    prefix = Prefix(same, context.positions, hidden)
    positions = jnp.full((m, 1), length + at, jnp.int32)
    seen = jnp.broadcast_to(jnp.arange(own) <= at, (m, 1, own))
    x = family.embed(weights, config, tokens, positions.reshape(-1))
    out, written, _ = family.forward(
        weights, config, x, Rows(positions, seen, at), cache, prefix=prefix
    )
    fresh = [
        jax.lax.dynamic_index_in_dim(part, at, 1, keepdims=False).reshape(m, heads, size)
        for part in (*written.keys, *written.values)
    ]
    return jax.nn.log_softmax(family.head(weights, out)), jnp.stack(fresh, axis=1)
