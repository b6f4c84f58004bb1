"""What the model's owner sees of a prompt that she lacks, as attacks get it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from models.partials import Partial
from protocols.arithmetic.narrow import FRAC_BITS
from spu_llm.core.values import decode, sign_extended
from spu_llm.systems.confidential.engine import Engine, Private


class LayerQueries(NamedTuple):
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

    def asked(self, layer: int, steps: int) -> LayerQueries:
        """Return a layer's queries and answers of the first `steps` generated tokens."""
        taken = self.steps[:steps]
        answers = [step.answers[layer] for step in taken]
        return LayerQueries(
            np.stack([step.queries[layer] for step in taken]),
            Partial(*(np.stack(parts) for parts in zip(*answers, strict=True))),
            np.ones((len(taken), self.length), bool),
        )


@dataclass(frozen=True)
class Shares:
    """One party's words (uint64) of the first attention in a forward: see
    `spu_llm.systems.decoding.viewed`. rows: of the text, that it computes.
    """

    words: dict[str, np.ndarray]
    shift_bits: int
    rows: int

    @staticmethod
    def of_event(event: Mapping[str, Any]) -> Shares:
        """Read shares from an event, as a worker tells of them."""
        words = {
            name: np.frombuffer(base64.b64decode(text), np.uint64).reshape(event["shapes"][name])
            for name, text in event["words"].items()
        }
        return Shares(words, event["shift_bits"], event["rows"])

    def __add__(self, other: Shares) -> Shares:
        """Add both parties' words: what is shared."""
        words = {name: words + other.words[name] for name, words in self.words.items()}
        return Shares(words, self.shift_bits, self.rows)

    def decoded(self, groups: int) -> tuple[np.ndarray, Partial]:
        """Return query and attention of the last row, [kv head, group, ...], read as fixed point
        numbers.
        """
        heads, _, size = self.words["query"].shape

        def last(name: str, *more: int) -> np.ndarray:
            # In a model's last block, one row of a prefill goes on.
            of_all = self.words[name].reshape(heads, groups, -1, *more)
            return np.ascontiguousarray(of_all[:, :, -1])

        float64 = np.dtype(np.float64)
        query, out = (decode(last(name, size), float64, FRAC_BITS) for name in ("query", "out"))
        mass = decode(last("mass"), float64, FRAC_BITS)
        # Of `softmax_weights`: coarse scores, the largest of which is rounded up.
        coarse = sign_extended(last("shift"), self.shift_bits).view(np.int64)
        return query, Partial(out, (coarse + 2) / 16, mass)


def asked_of(shares: Sequence[Shares], groups: int) -> LayerQueries:
    """Return queries and answers of the last row of the prompt, and of each step after it; a row
    sees itself, too.
    """
    rows = np.cumsum([part.rows for part in shares])
    decoded = [part.decoded(groups) for part in shares]
    queries, answers = zip(*decoded, strict=True)
    return LayerQueries(
        np.stack(queries),
        Partial(*(np.stack(parts) for parts in zip(*answers, strict=True))),
        np.arange(rows[-1]) < rows[:, None],
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
