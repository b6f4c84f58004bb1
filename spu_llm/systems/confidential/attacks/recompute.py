"""Checking candidates: whoever has the weights recomputes what a prompt would have shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.family import ModelConfig
from models.partials import Partial, partial
from spu_llm.systems.confidential.attacks.layer0 import Dictionary
from spu_llm.systems.confidential.attacks.views import LayerQueries, Seen
from spu_llm.systems.confidential.engine import Engine
from spu_llm.systems.confidential.held import Held


def filled(config: ModelConfig, weights: Any, prompts: Sequence[Sequence[int]]) -> Held:
    """Compute the keys and values of prompts, as a vault has them; `weights` are folded."""
    held = Held(config, prompts)
    held.fill(weights)
    return held


def by_answers(candidates: Held, seen: Seen, count: int, steps: int) -> np.ndarray:
    """Measure how far the answers to the engine's queries would have been from those that came, for
    each of `count` candidates: float64, a sum over layers, a mean over the first `steps` tokens.
    """
    total = np.zeros(count)
    for step in seen.steps[:steps]:
        for layer, (query, answer) in enumerate(zip(step.queries, step.answers, strict=True)):
            asked = np.broadcast_to(query, (count, *query.shape))
            would = candidates.reply(layer, range(count), asked)
            total += _squares(would.out - answer.out) / np.square(answer.out).mean()
            total += _squares(_lse(would) - _lse(answer))
    return total / max(1, len(seen.steps[:steps]))


def by_first_layer(made: Dictionary, asked: LayerQueries, candidates: np.ndarray) -> np.ndarray:
    """Measure how far the first layer's answers would have been from those that came, computed from
    its keys and values alone, for each of the candidates [c, n].
    """
    at = np.arange(candidates.shape[1])
    total = np.zeros(len(candidates))
    for i, tokens in enumerate(candidates):
        # [kv head, n, head_dim]
        keys, values = (table[at, tokens].swapaxes(0, 1) for table in made)
        would = partial(asked.query, keys, values, asked.visible[:, None, None, :])
        away = _squares((would.out - asked.answer.out)[None]) / np.square(asked.answer.out).mean()
        total[i] = (away + _squares((_lse(would) - _lse(asked.answer))[None])).item()
    return total


def by_states(
    config: ModelConfig, weights: Any, candidates: Held, seen: Seen, count: int, steps: int
) -> np.ndarray:
    """Measure how far the logits after generated tokens would have been from those that the engine
    has, for each of `count` candidates: from its own states alone, as if answers had been hidden.
    """
    engine = Engine(config, weights, count)
    lanes = [engine.join() for _ in range(count)]
    for lane in lanes:
        engine.place(lane, seen.length)
    total = np.zeros(count)
    for step in seen.steps[:steps]:
        rows = engine.step(lanes, [step.token] * count, _Replies(candidates))
        total += _squares(rows - step.logits)
    return total / max(1, len(seen.steps[:steps]))


class _Replies:
    def __init__(self, held: Held) -> None:
        self._held = held

    def ask(self, layer: int, query: np.ndarray) -> None:
        self._query = query

    def answer(self, layer: int) -> Partial:
        return self._held.reply(layer, range(len(self._query)), self._query)


def _lse(of: Partial) -> np.ndarray:
    # Of shares a mass may be anything.
    return np.asarray(of.shift + np.log(np.maximum(np.abs(of.mass), 1e-30)))


def _squares(rows: np.ndarray) -> np.ndarray:
    """Return the mean of the squares, over all axes but the first."""
    return np.square(rows.reshape(len(rows), -1), dtype=np.float64).mean(axis=1)
