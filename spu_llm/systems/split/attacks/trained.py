"""A1 (PromptRA-Vec2Text): an inverter trained on public text, and a corrector that is iterated.

The paper's are T5 models (Morris et al. 2023). There is none for rows of a small model: here both
are a regression and a recurrent network on it (`inverters`), and what is inverted is a row a token
in place of one vector a text, so that hypotheses are of the right length and each is one guess a
row, no beam. What they find in public text that they were not trained on says what they are worth
(`Inverters.on_public`).

1. Base: of public text, rows to tokens.
2. Corrector: of public text, the rows that came, the hypothesis (its embeddings) and the rows that
   it would have had, to tokens. Hypotheses of training are the base's on noisy rows, so that they
   have mistakes.
3. The corrector is applied again and again; of each text the hypothesis stays whose rows have the
   highest mean cosine with those that came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from spu_llm.systems.split.attacks.inverters import Features, Inverter, held_out, trained
from spu_llm.systems.split.attacks.views import HostView, Public

STEPS = 100  # of training each of the two, at most
LEARNED = 800  # public texts, at most
ROUNDS = 4
NOISE = 1.0  # of rows of training hypotheses, in units of their spread


class HeldOutScores(NamedTuple):
    """Shares of the tokens of public texts that were held out of training."""

    base: float
    corrected: float
    tokens: int


@dataclass(frozen=True, eq=False)
class Inverters:
    """The inverters of one public model and its texts, each trained when it is first asked for, and
    kept for the views that follow.
    """

    public: Public
    steps: int = STEPS
    seed: int = 0

    @cached_property
    def base(self) -> Inverter:
        """Train the base inverter (step 1), which is BiSR's inverter, too."""
        rows = self._rows
        return self._trained(lambda those: [rows[i] for i in those], self.seed)

    @cached_property
    def corrector(self) -> Inverter:
        """Train the corrector (step 2)."""
        public, rows, source = self.public, self._rows, np.random.default_rng([self.seed, 1])
        spread = NOISE * float(np.std(np.concatenate(rows[:64])))
        noisy = [r + spread * source.standard_normal(r.shape, np.float32) for r in rows]
        hypotheses = self.base.tokens(noisy)
        again, table = public.front(hypotheses), public.table

        def features(those: Sequence[int]) -> list[np.ndarray]:
            return [_features(rows[i], again[i], table[np.asarray(hypotheses[i])]) for i in those]

        return self._trained(features, self.seed + 1)

    @cached_property
    def on_public(self) -> HeldOutScores:
        """Measure base and corrector on public text that they were not trained on."""
        apart = held_out(len(self._texts))
        texts, view = np.asarray(self._texts[-apart:]), HostView(self._rows[-apart:])
        base, corrected = (
            float(np.mean(np.asarray(guess) == texts))
            for guess in (self.base.tokens(view.rows), attack(view, self))
        )
        return HeldOutScores(base, corrected, texts.size)

    @property
    def _texts(self) -> list[list[int]]:
        return self.public.texts[:LEARNED]

    @cached_property
    def _rows(self) -> list[np.ndarray]:
        return self.public.front(self._texts)

    def _trained(self, features: Features, seed: int) -> Inverter:
        return trained(features, self._texts, self.public.table, self.steps, seed)


def attack(view: HostView, inverters: Inverters, rounds: int = ROUNDS) -> list[list[int]]:
    """Iterate the corrector from the base's guesses on, and keep the best of each text (step 3)."""
    public, corrector = inverters.public, inverters.corrector
    best = inverters.base.tokens(view.rows)
    tried, again, table = best, public.front(best), public.table
    cosine = _cosines(view.rows, again)
    for _ in range(rounds):
        embeddings = [table[np.asarray(tokens)] for tokens in tried]
        tried = corrector.tokens([*map(_features, view.rows, again, embeddings)])
        again = public.front(tried)
        cosines = _cosines(view.rows, again)
        better = cosines > cosine
        best = [new if yes else old for new, old, yes in zip(tried, best, better, strict=True)]
        cosine = np.maximum(cosine, cosines)
    return best


def _features(rows: np.ndarray, would: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    return np.concatenate([rows, rows - would, embeddings], axis=1)


def _cosines(rows: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """Return, for each text, the mean cosine over its rows."""

    def mean(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a.astype(float), b.astype(float)
        sizes = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        return float(((a * b).sum(axis=1) / (sizes + 1e-300)).mean())

    return np.array([mean(a, b) for a, b in zip(rows, others, strict=True)])
