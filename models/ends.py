"""The client's layers of a split model (front and back), in the clear, each with a key/value cache
that follows the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import Block, Rows, rows_after
from models.family import ModelConfig, Params, family_of
from models.split import Split, front


@dataclass
class Ends:
    """Front and back for one text of up to `capacity` rows, drafts included.

    A row is written to its position in the text, so later rows write over rows of rejected drafts.
    There is one program for every number of rows, however many drafts were accepted before.
    """

    config: ModelConfig
    params: Params
    split: Split
    capacity: int

    def __post_init__(self) -> None:
        weights = family_of(self.config).fold(self.params, self.config)
        before, _, after = self.split.parts(weights)
        self._front, self._back = jax.device_put((before, after))
        self._caches = [
            self.config.with_layers(n).empty_cache(self.capacity) if n else Block((), ())
            for n in self.split
        ]
        self._up = jax.jit(partial(_up, self.config))
        self._down = jax.jit(partial(_down, self.config), static_argnames="last")

    def up(self, tokens: Sequence[int], at: int) -> np.ndarray:
        """Run the front on tokens that stand at position `at` and after; return the rows float32
        [n, d] that go to the middle.
        """
        rows, self._caches[0] = self._up(
            self._front, np.array(tokens, np.int32), self._caches[0], np.int32(at)
        )
        return np.asarray(rows)

    def down(self, rows: np.ndarray, at: int, last: int) -> np.ndarray:
        """Run the back on rows [n, d] that came from the middle and stand at position `at` and
        after; return logits [last, vocab] of the last ones.
        """
        logits, self._caches[1] = self._down(
            self._back, rows, self._caches[1], np.int32(at), last=last
        )
        return np.asarray(logits)

    def rehearse(self, count: int, at: int) -> None:
        """Do the work of a step of `count` rows at position `at` without changing the caches."""
        caches = list(self._caches)
        rows = self.up([0] * count, at)
        self.down(rows, at, count)
        self._caches = caches


def _rows(config: ModelConfig, at: jax.Array, count: int, cache: Block) -> Rows:
    capacity = cache.positions if cache.keys else count
    rows = rows_after(at, count, capacity)
    # Drafts past the context are never kept.
    return rows._replace(positions=jnp.minimum(rows.positions, config.context - 1))


def _up(
    config: ModelConfig, weights: Params, tokens: jax.Array, cache: Block, at: jax.Array
) -> tuple[jax.Array, Block]:
    return front(weights, config, tokens, _rows(config, at, tokens.shape[0], cache), cache)


def _down(
    config: ModelConfig, weights: Params, x: jax.Array, cache: Block, at: jax.Array, *, last: int
) -> tuple[jax.Array, Block]:
    """Run `models.split.back` with the head on the last `last` rows only."""
    family, rows = family_of(config), _rows(config, at, x.shape[0], cache)
    normed, cache, _ = family.forward(weights, config, x, rows, cache)
    return family.head(weights, normed[x.shape[0] - last :]), cache
