"""The engine of vault mode: one token at a time of all its users' texts, whose prompts it lacks.

"Confidential Prompting" (Gim, Li, Zhong), section 4, step 3. Of a *lane* (one text) the engine has
the keys and values of what it generated, and of prompt rows that were given to it; a vault has the
others. Per layer the query goes there and a partial attention comes back.

The engine learns every query, answer, token and position: in the clear, and by computing on
candidates it can tell prompts apart (`spu_llm.systems.confidential.attacks`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from models.family import ModelConfig
from models.partials import Partial, merged, partial
from models.stages import stages_of


class Private(Protocol):
    """Whoever has the lanes' other keys and values; asked once a layer, answering after that."""

    def ask(self, layer: int, query: np.ndarray) -> None:
        """Ask for the attention of a layer; query: float32 [lane, kv head, group, head_dim]."""
        ...

    def answer(self, layer: int) -> Partial:
        """Return the partial attention that was asked for, [lane, kv head, group, ...]."""
        ...


@dataclass
class Spent:
    """Seconds of steps, by what they went to."""

    model: float = 0.0  # projections and feed-forward layers
    send_query: float = 0.0
    own_attention: float = 0.0
    wait: float = 0.0  # for the answers
    merge: float = 0.0


@dataclass
class Engine:
    """A model with room for `room` lanes. `weights` are folded."""

    config: ModelConfig
    weights: Any
    room: int
    spent: Spent = field(default_factory=Spent)

    def __post_init__(self) -> None:
        config = self.config
        self._stages, self._weights = stages_of(config), jax.device_put(self.weights)
        shape = self.room, config.kv_heads, config.context, config.head_dim
        # Pages that no lane has written to take no memory.
        self._keys = [np.zeros(shape, np.float32) for _ in range(config.layers)]
        self._values = [np.zeros(shape, np.float32) for _ in range(config.layers)]
        self._rows = np.zeros(self.room, np.int64)  # of each lane, that the engine has
        self._positions = np.zeros(self.room, np.int32)  # of its next token
        self._free = list(range(self.room))

    @property
    def free(self) -> int:
        """Return the number of lanes that there is room for."""
        return len(self._free)

    def join(self) -> int:
        """Take a free lane; the caller has looked at `free`."""
        lane = self._free.pop(0)
        self.place(lane, 0)
        return lane

    def place(self, lane: int, position: int) -> None:
        """Put the lane's next token at `position`; the lane has no rows yet."""
        self._rows[lane], self._positions[lane] = 0, position

    def is_full(self, lane: int) -> bool:
        """Return whether the model's context has no position for another token."""
        return int(self._positions[lane]) >= self.config.context

    def leave(self, lane: int) -> None:
        """Free the lane for another text. What it has written is overwritten before it is shown."""
        self._free = sorted([*self._free, lane])

    def give(self, lane: int, layer: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Take rows of a prompt, [kv head, n, head_dim], that its owner does not keep; before the
        first step, in every layer.
        """
        n = keys.shape[1]
        self._keys[layer][lane, :, :n], self._values[layer][lane, :, :n] = keys, values
        self._rows[lane] = n

    def step(self, lanes: Sequence[int], tokens: Sequence[int], private: Private) -> np.ndarray:
        """Compute logits float32 [lane, vocab] after one more token of each of these lanes."""
        count, stages, weights = len(lanes), self._stages, self._weights
        at = _taken(lanes)
        # As few shapes as there are powers of two: each is compiled once.
        fill = (0, (1 << (count - 1).bit_length()) - count)
        positions = np.pad(self._positions[at], fill)
        x = stages.embed(weights, np.pad(np.asarray(tokens, np.int32), fill), positions)
        own = self._rows[at]
        longest = int(own.max()) + 1
        seen = (np.arange(longest) <= own[:, None])[:, None, None]
        for layer, block in enumerate(weights["blocks"]):
            clock = _Clock(self.spent)
            asked = [np.asarray(a)[:count] for a in stages.ask(block, x, positions)]
            query, key, value = asked
            clock.now("model")
            private.ask(layer, query)
            clock.now("send_query")
            keys, values = self._keys[layer], self._values[layer]
            keys[lanes, :, own], values[lanes, :, own] = key, value
            here = partial(query, keys[at, :, :longest], values[at, :, :longest], seen)
            clock.now("own_attention")
            there = private.answer(layer)
            clock.now("wait")
            attended = merged(here, there).out
            clock.now("merge")
            x = stages.answer(block, x, np.pad(attended, [fill, (0, 0), (0, 0), (0, 0)]))
            x.block_until_ready()
            clock.now("model")
        self._rows[at] += 1
        self._positions[at] += 1
        return np.asarray(stages.head(weights, x))[:count]


class _Clock:
    def __init__(self, spent: Spent) -> None:
        self._spent, self._last = spent, time.perf_counter()

    def now(self, what: str) -> None:
        """Add the time since the last call to `what`, which was done in it."""
        last, self._last = self._last, time.perf_counter()
        setattr(self._spent, what, getattr(self._spent, what) + self._last - last)


def _taken(lanes: Sequence[int]) -> Any:
    """Return an index of these lanes; a slice, which copies nothing, where that will do."""
    first = lanes[0]
    if list(lanes) == list(range(first, first + len(lanes))):
        return slice(first, first + len(lanes))
    return np.asarray(lanes)
