"""What the model's owner sees of a prompt that she lacks, as attacks get it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from models.partials import Partial
from spu_llm.systems.confidential.engine import Engine, Private


class Asked(NamedTuple):
    """Queries of one layer, and the attention that came back: t queries over n positions."""

    query: np.ndarray  # [t, kv head, group, head_dim], scaled
    answer: Partial  # [t, kv head, group, ...]
    visible: np.ndarray  # bool [t, n]: which positions an answer is about


@dataclass
class Step:
    """One generated token of a text, as the engine computes on it."""

    token: int
    position: int
    queries: list[np.ndarray]  # of each layer, [kv head, group, head_dim]
    answers: list[Partial]  # [kv head, group, ...]
    logits: np.ndarray  # [vocab], after the token


@dataclass
class Seen:
    """All that an engine sees of one text. length: of its prompt."""

    length: int
    steps: list[Step] = field(default_factory=list)

    def asked(self, layer: int, steps: int) -> Asked:
        """Of the first so many generated tokens."""
        taken = self.steps[:steps]
        answers = [step.answers[layer] for step in taken]
        return Asked(
            np.stack([step.queries[layer] for step in taken]),
            Partial(*(np.stack(parts) for parts in zip(*answers, strict=True))),
            np.ones((len(taken), self.length), bool),
        )


class WatchingEngine(Engine):
    """Notes what it sees, and does what an engine does. `seen`: texts in the order of their lanes'
    beginnings.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[Seen] = []
        self._texts: dict[int, Seen] = {}

    def place(self, lane: int, position: int) -> None:
        super().place(lane, position)
        if position:  # 0: somebody joins, who has not said how long the prompt is
            self._texts[lane] = Seen(position)
            self.seen.append(self._texts[lane])

    def step(self, lanes: Sequence[int], tokens: Sequence[int], private: Private) -> np.ndarray:
        at, noting = self._positions[list(lanes)].tolist(), _Noting(private)
        logits = super().step(lanes, tokens, noting)
        for i, lane in enumerate(lanes):
            queries = [query[i] for query in noting.queries]
            answers = [Partial(*(part[i] for part in answer)) for answer in noting.answers]
            step = Step(int(tokens[i]), at[i], queries, answers, logits[i])
            self._texts[lane].steps.append(step)
        return logits


class _Noting:
    def __init__(self, inner: Private) -> None:
        self._inner = inner
        self.queries: list[np.ndarray] = []
        self.answers: list[Any] = []

    def ask(self, layer: int, query: np.ndarray) -> None:
        self.queries.append(query.copy())
        self._inner.ask(layer, query)

    def answer(self, layer: int) -> Partial:
        self.answers.append(self._inner.answer(layer))
        return self.answers[-1]
