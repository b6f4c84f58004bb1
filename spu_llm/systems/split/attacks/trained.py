"""A1 (PromptRA-Vec2Text): an inverter trained on public text, and a corrector that is iterated.

The paper's are T5 models (Morris et al. 2023). There is none for rows of a small model: here both
are recurrent networks of a few million weights (`inverters`), and what is inverted is a row a token
in place of one vector a text, so that hypotheses are of the right length and each is one guess a
row, no beam.

1. Base: of public text, rows to tokens.
2. Corrector: of public text, the rows that came, the hypothesis (its embeddings) and the rows that
   it would have had, to tokens. Hypotheses of training are the base's on noisy rows, so that they
   have mistakes.
3. The corrector is applied again and again; of each text the hypothesis stays whose rows have the
   highest mean cosine with those that came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from models.family import family_of
from spu_llm.systems.split.attacks.inverters import Inverter, trained
from spu_llm.systems.split.attacks.views import HostView, Public

STEPS = 200  # of training each of the two
ROUNDS = 4
NOISE = 1.0  # of rows of training hypotheses, in units of their spread


@dataclass(frozen=True, eq=False)
class Inverters:
    """Of one public model and its texts, each trained when it is first asked for. Whoever holds
    them has them for one view after the other.
    """

    public: Public
    steps: int = STEPS
    seed: int = 0

    @cached_property
    def base(self) -> Inverter:
        """1. BiSR's inverter, too."""
        rows = self.public.front(self.public.texts)
        return self._trained(lambda those: [rows[i] for i in those], self.seed)

    @cached_property
    def corrector(self) -> Inverter:
        """2."""
        public, source = self.public, np.random.default_rng([self.seed, 1])
        rows = public.front(public.texts)
        spread = NOISE * float(np.std(np.concatenate(rows[:64])))
        noisy = [r + spread * source.standard_normal(r.shape, np.float32) for r in rows]
        hypotheses = self.base.tokens(noisy)
        again, table = public.front(hypotheses), _table(public)

        def features(those: Sequence[int]) -> list[np.ndarray]:
            return [_features(rows[i], again[i], table[np.asarray(hypotheses[i])]) for i in those]

        return self._trained(features, self.seed + 1)

    def _trained(
        self, features: Callable[[Sequence[int]], list[np.ndarray]], seed: int
    ) -> Inverter:
        public = self.public
        return trained(features, public.texts, public.config.vocab_size, self.steps, seed)


def attack(view: HostView, inverters: Inverters, rounds: int = ROUNDS) -> list[list[int]]:
    """3."""
    public, corrector = inverters.public, inverters.corrector
    best = inverters.base.tokens(view.rows)
    tried, again, table = best, public.front(best), _table(public)
    cosine = _cosines(view.rows, again)
    for _ in range(rounds):
        embeddings = [table[np.asarray(tokens)] for tokens in tried]
        tried = corrector.tokens([*map(_features, view.rows, again, embeddings)])
        again = public.front(tried)
        found = _cosines(view.rows, again)
        better = found > cosine
        best = [new if yes else old for new, old, yes in zip(tried, best, better, strict=True)]
        cosine = np.maximum(cosine, found)
    return best


def _table(public: Public) -> np.ndarray:
    return np.asarray(family_of(public.config).embeddings(public.weights)[0])


def _features(rows: np.ndarray, would: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    return np.concatenate([rows, rows - would, embeddings], axis=1)


def _cosines(rows: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """Of each text the mean over its rows."""

    def mean(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a.astype(float), b.astype(float)
        sizes = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        return float(((a * b).sum(axis=1) / (sizes + 1e-300)).mean())

    return np.array([mean(a, b) for a, b in zip(rows, others, strict=True)])
