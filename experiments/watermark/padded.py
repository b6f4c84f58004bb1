"""A model that continues many texts at once, whose prompts have different lengths.

Prompts end in the same column; shorter ones begin with padding, which their text does not see, and
which does not count in its positions. The cache begins short and grows with the texts, since
attention takes time for every row of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.watermark.texts import Lanes, State
from models.cache import Block

PADDING = -1
ROWS = 64  # that a cache grows by


def side_by_side(prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return prompts as int32 [prompt, column], PADDING before those that are shorter."""
    longest = max(map(len, prompts))
    return np.array([[PADDING] * (longest - len(one)) + list(one) for one in prompts], np.int32)


@dataclass
class PaddedState(State):
    """starts: the column that each lane's text begins in, int32 [lane]."""

    starts: np.ndarray


class PaddedLanes(Lanes):
    """Lanes of prompts as `side_by_side` makes them. look: called with the number of columns that
    are filled, after each step.
    """

    def __init__(self, directory: Path, look: Callable[[int], None] = lambda columns: None) -> None:
        super().__init__(directory, ROWS)
        self._look = look
        self._begun: dict[bytes, PaddedState] = {}

    def begun(self, prompts: np.ndarray) -> State:
        """Return the state after prompts; it is computed once for the same ones."""
        name = prompts.tobytes()
        if name not in self._begun:
            self._begun.clear()
            starts = (prompts == PADDING).sum(axis=1).astype(np.int32)
            empty = self.config.empty_cache(_rows(prompts.shape[1]), len(prompts))
            # Keys and values begin as the same zeros, and each array may be given away once.
            cache = jax.tree.map(lambda rows: rows.copy(), empty)
            tokens = np.where(prompts == PADDING, 0, prompts)
            self._begun[name] = self._stepped(cache, tokens, 0, starts)
        state = self._begun[name]
        cache = jax.tree.map(lambda rows: rows.copy(), state.cache)
        return PaddedState(cache, state.logits, state.at, state.starts)

    def after(self, state: State, tokens: np.ndarray) -> State:
        """Return the state after one token more in every lane; the given state is used up."""
        assert isinstance(state, PaddedState)
        cache, more = state.cache, _rows(state.at + 1) - state.cache.positions
        if more > 0:
            cache = jax.tree.map(lambda rows: jnp.pad(rows, ((0, 0), (0, more), (0, 0))), cache)
        return self._stepped(cache, tokens[:, None], state.at, state.starts)

    def picked(self, state: State, lanes: np.ndarray) -> State:
        """Return the state of the given lanes, which may repeat."""
        assert isinstance(state, PaddedState)
        some = super().picked(state, lanes)
        return PaddedState(some.cache, some.logits, some.at, state.starts[lanes])

    def _stepped(
        self, cache: Block, tokens: np.ndarray, at: int, starts: np.ndarray
    ) -> PaddedState:
        row = tokens.astype(np.int32)
        logits, cache = self._run(self._weights, cache, row, np.int32(at), starts)
        state = PaddedState(cache, np.asarray(logits), at + tokens.shape[1], starts)
        self._look(state.at)
        return state


def _rows(columns: int) -> int:
    """Return the rows of a cache that has room for so many columns."""
    return -(-columns // ROWS) * ROWS
