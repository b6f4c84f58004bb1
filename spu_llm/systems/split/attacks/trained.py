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

import functools
from collections.abc import Sequence

import numpy as np

from models.family import family_of
from spu_llm.systems.split.attacks.inverters import Inverter, trained
from spu_llm.systems.split.attacks.views import HostView, Public

STEPS = 200  # of training each of the two
ROUNDS = 4
NOISE = 1.0  # of rows of training hypotheses, in units of their spread


@functools.lru_cache(maxsize=2)
def base(public: Public, steps: int = STEPS, seed: int = 0) -> Inverter:
    """1. BiSR's inverter, too."""
    rows = public.front(public.texts)
    return trained(
        lambda those: [rows[i] for i in those], public.texts, public.config.vocab_size, steps, seed
    )


def attack(
    view: HostView,
    public: Public,
    steps: int = STEPS,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> list[list[int]]:
    """3. What was trained on this public text stands ready for the next view."""
    corrector = _corrector(public, steps, seed)
    best = base(public, steps, seed).tokens(view.rows)
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


@functools.lru_cache(maxsize=2)
def _corrector(public: Public, steps: int, seed: int) -> Inverter:
    """2."""
    rows, source = public.front(public.texts), np.random.default_rng([seed, 1])
    spread = NOISE * float(np.std(np.concatenate(rows[:64])))
    noisy = [r + spread * source.standard_normal(r.shape, np.float32) for r in rows]
    hypotheses = base(public, steps, seed).tokens(noisy)
    again, table = public.front(hypotheses), _table(public)

    def features(those: Sequence[int]) -> list[np.ndarray]:
        return [_features(rows[i], again[i], table[np.asarray(hypotheses[i])]) for i in those]

    return trained(features, public.texts, public.config.vocab_size, steps, seed + 1)


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
