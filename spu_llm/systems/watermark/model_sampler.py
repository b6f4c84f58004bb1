"""Candidates from a model in plaintext JAX: lanes of one forward, with one cache of the prefix.

The trunk is the prefix, one lane, which follows the text as it grows. Candidates of one token need
no more than the distribution after it; longer ones are lanes that begin with the trunk's rows.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import Block
from models.family import ModelConfig, family_of
from models.scoring import lanes_after
from protocols.verification.distribution import Sampling
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.units import Content

_WIDTH = 16  # tokens that the trunk takes at a time
ANY = -1  # in the place of a given token: the model draws it


class ModelSampler:
    """Token sequences of a model at a temperature (`sampling`). `ends`: tokens that end a text.

    `spread`: candidates share their draws (systematic sampling): at each token, those that are
    alike so far take points u0 + i/g of [0, 1), permuted, in place of independent ones. Each one's
    distribution is the model's as before (§9.2), and fewer are alike. With candidates of one token
    the mark is the stronger for it; of longer ones few are alike anyway.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Any,
        ends: frozenset[int],
        sampling: Sampling,
        prg: Prg | None = None,
        *,
        spread: bool = False,
    ) -> None:
        """Take the model's weights, folded (`models.hf.load_folded`)."""
        self.vocab, self.context = config.vocab_size, config.context
        self._config, self._weights = config, jax.device_put(weights)
        self.ends, self._sampling, self._spread = ends, sampling, spread
        self._prg = prg or Prg.from_os()
        self._run, self._widened = _compiled(config)
        self._trunk = config.empty_cache(config.context + _WIDTH)
        self._seen: list[int] = []

    def sample(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
        return self.completed(prefix, np.full((n, max_tokens), ANY))

    def completed(self, prefix: Content, given: np.ndarray) -> list[Drawn]:
        """Draw candidates of which some tokens are given: int [candidate, place], ANY where the
        model draws, after the prefix and what stands before the place.
        """
        tokens, (n, count) = _tokens(prefix), given.shape
        self._check_room(tokens, count)
        first = self.distribution(prefix)
        drawn = self._draw(np.broadcast_to(first, (n, self.vocab)), np.zeros(n, int))
        made = np.where(given[:, 0] == ANY, drawn, given[:, 0])[:, None]
        if count > 1:
            made = self._go_on(made, len(tokens), given)
        return [self._cut(row) for row in made.tolist()]

    def _check_room(self, tokens: list[int], more: int) -> None:
        if len(tokens) + more > self.context:
            raise InputError(
                f"{len(tokens)} tokens and {more} more do not fit the model's context of "
                f"{self.context}; shorten the prompt, or ask for fewer"
            )

    def distribution(self, prefix: Content) -> np.ndarray:
        """Return the probabilities float64 [vocab] of the next token."""
        return self._sampling.distribution(self._follow(_tokens(prefix)))

    def _follow(self, tokens: list[int]) -> np.ndarray:
        """Return logits [vocab] after the tokens; only those that the trunk lacks are computed."""
        if not tokens:
            raise InputError("the prompt is empty; give at least one character of text")
        same = len(os.path.commonprefix([self._seen, tokens[:-1]]))
        for start in range(same, len(tokens), _WIDTH):
            fresh = tokens[start : start + _WIDTH]
            row = np.pad(np.array(fresh, np.int32), (0, _WIDTH - len(fresh)))[None]
            logits, self._trunk = self._run(
                self._weights, self._trunk, row, np.int32(start), np.int32(len(fresh) - 1)
            )
        self._seen = list(tokens)
        return np.asarray(logits)[0]

    def _go_on(self, made: np.ndarray, at: int, given: np.ndarray) -> np.ndarray:
        """Continue the candidates by tokens as `given`, to as many each, or until all have ended;
        tokens after an end mean nothing.
        """
        n, count = given.shape
        cache = self._widened(self._trunk, n)
        ended = np.isin(made[:, 0], list(self.ends))
        for i in range(1, count):
            if ended.all():
                break
            logits, cache = self._run(
                self._weights,
                cache,
                made[:, -1:].astype(np.int32),
                np.int32(at + i - 1),
                np.int32(0),
            )
            p = np.stack([self._sampling.distribution(row) for row in np.asarray(logits)])
            _, alike = np.unique(made, axis=0, return_inverse=True)
            drawn = self._draw(p, alike.reshape(-1))
            drawn = np.where(given[:, i] == ANY, drawn, given[:, i])
            made = np.concatenate([made, drawn[:, None]], axis=1)
            ended |= np.isin(drawn, list(self.ends))
        return made

    def _draw(self, p: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Draw a token of each row of p [n, vocab]. `group`: which rows share their draws, if any
        do.
        """
        points = self._prg.uniform((len(p),))
        if self._spread:
            points = spread_points(self._prg, group)
        cumulative = np.cumsum(p, axis=1)
        sequences = [
            np.searchsorted(row, point * row[-1], side="right")
            for row, point in zip(cumulative, points, strict=True)
        ]
        return np.minimum(np.array(sequences), self.vocab - 1)

    def _cut(self, row: list[int]) -> Drawn:
        for i, token in enumerate(row):
            if token in self.ends:
                return Drawn(tuple(row[:i]), True)
        return Drawn(tuple(row), False)


def spread_points(prg: Prg, group: np.ndarray) -> np.ndarray:
    """Draw points u0 + i/g of [0, 1), permuted, for the g members of each group [candidate]."""
    points = np.zeros(len(group))
    for number in np.unique(group):
        members = np.flatnonzero(group == number)
        order = np.argsort(prg.words((len(members),)))
        start = float(prg.uniform(()))
        points[members[order]] = (start + np.arange(len(members))) / len(members)
    return points


def _tokens(content: Content) -> list[int]:
    assert not isinstance(content, str)
    return list(content)


@functools.cache
def _compiled(config: ModelConfig) -> tuple[Any, Any]:
    return (jax.jit(functools.partial(_forward, config)), jax.jit(_lanes, static_argnums=1))


def _lanes(trunk: Block, count: int) -> Block:
    """Return so many lanes that begin with the trunk's rows."""
    tiled: Block = jax.tree.map(lambda rows: jnp.tile(rows, (count, 1, 1)), trunk)
    return tiled


def _forward(
    config: ModelConfig,
    weights: Any,
    cache: Block,
    tokens: jax.Array,
    at: jax.Array,
    last: jax.Array,
) -> tuple[jax.Array, Block]:
    """Run tokens [lane, k] after the first `at` rows; return logits [lane, vocab] after number
    `last`, and the cache with all of them.
    """
    out, written = lanes_after(config, weights, tokens, cache, at)
    after = jax.lax.dynamic_index_in_dim(out, last, 1, keepdims=False)
    return family_of(config).head(weights, after), written
