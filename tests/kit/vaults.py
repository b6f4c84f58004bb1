"""Vaults in one process, and what a whole model says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from models.family import ModelConfig, logits
from models.partials import Partial
from spu_llm.systems.confidential.held import Held

WHOLE = jax.jit(logits, static_argnums=1)  # rows do not see those after them


class Vaults:
    """What all vaults hold, as the engine asks; counts floats."""

    def __init__(self, held: Sequence[tuple[Held, int]]) -> None:
        self._lanes, self.floats = held, 0

    def ask(self, layer: int, query: np.ndarray) -> None:
        self._query = query
        self.floats += query.size

    def answer(self, layer: int) -> Partial:
        parts = [
            held.reply(layer, [lane], self._query[i : i + 1])
            for i, (held, lane) in enumerate(self._lanes)
        ]
        self.floats += sum(a.size for part in parts for a in part)
        return Partial(*(np.concatenate(a) for a in zip(*parts, strict=True)))


def is_greedy(config: ModelConfig, params: Any, prompt: list[int], text: list[int]) -> Any:
    """Return whether the whole model has `text` after the prompt; its logits."""
    padded = np.pad([*prompt, *text], (0, config.context - len(prompt) - len(text)))
    rows = np.asarray(WHOLE(params, config, padded))[len(prompt) - 1 :][: len(text)]
    assert rows.argmax(-1).tolist() == text
    return rows
