"""What the paper compares with (§4): Aaronson, Kirchenbauer and Kuditipudi, token by token from a
known distribution, and their detection.

Contexts go over generated tokens alone, as ours do, so that detection needs no prompt. Numbers of
a context are a keyed stream's (`race_marks.uniforms`): R_v of every token v of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.cdfs import gamma, irwin_hall
from spu_llm.systems.watermark.keys import Key
from spu_llm.systems.watermark.race_marks import TINY, context_of, scored, uniforms
from spu_llm.systems.watermark.scores import GREEN

# ---- Aaronson 2023


@dataclass(frozen=True)
class Aaronson:
    """argmax R_v^(1 / p_v), R of the n - 1 tokens before: no randomness of its own."""

    key: Key
    vocab: int
    ngram: int = 4

    def next(self, p: np.ndarray, generated: Sequence[int]) -> int:
        """Return the next token, from probabilities p [vocab]."""
        numbers = uniforms(self.key, context_of(generated, self.ngram), self.vocab)
        return exponential_argmax(p, numbers)

    def numbers(self, tokens: Sequence[int]) -> np.ndarray:
        """Return R of each token, n-grams that come again included, as published."""
        return np.array([u for _, u in scored(self.key, tokens, self.ngram)])

    def distinct(self, tokens: Sequence[int]) -> np.ndarray:
        """Return R of each distinct n-gram."""
        return np.array(list(dict(scored(self.key, tokens, self.ngram)).values()))


def exponential_argmax(p: np.ndarray, numbers: np.ndarray) -> int:
    """Return argmax_v R_v^(1 / p_v), computed in logarithms."""
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.where(p > 0, np.log(numbers) / np.maximum(p, 1e-300), -np.inf)))


def aaronson_score(numbers: np.ndarray) -> float:
    """Return -sum log(1 - R), which grows with the length, whatever the text is."""
    return math.fsum(-np.log1p(-numbers))


def corrected_log_p(numbers: np.ndarray) -> float:
    """Return log p of `aaronson_score`, which is Gamma(T, 1) under H0. (Printed as the score
    itself, 1 - the CDF is this p-value; what grows with the mark is the CDF.)
    """
    return gamma(len(numbers), aaronson_score(numbers)).log_sf if len(numbers) else 0.0


def corrected_sum_log_p(numbers: np.ndarray) -> float:
    """Return log p of sum R, Irwin-Hall(T) under H0: a variant of `corrected_log_p`."""
    return irwin_hall(len(numbers), math.fsum(numbers)).log_sf if len(numbers) else 0.0


# ---- Kirchenbauer et al. 2023


@dataclass(frozen=True)
class Kirchenbauer:
    """delta is added to the logits of green tokens, each green with probability gamma by the n-gram
    that ends with it (their version with the current token in the n-gram). Distorts the text.
    """

    key: Key
    vocab: int
    delta: float
    ngram: int = 4
    gamma: float = GREEN

    def logits(self, logits: np.ndarray, generated: Sequence[int]) -> np.ndarray:
        """Return the logits with delta added for green tokens, float64 [vocab]."""
        numbers = uniforms(self.key, context_of(generated, self.ngram), self.vocab)
        return np.asarray(logits, np.float64) + self.delta * (numbers < self.gamma)

    def z(self, tokens: Sequence[int]) -> float:
        """Return (T_g - gamma T) / sqrt(T gamma (1 - gamma)), of distinct n-grams."""
        return self.z_of(np.array(list(dict(scored(self.key, tokens, self.ngram)).values())))

    def z_of(self, numbers: np.ndarray) -> float:
        """Return (T_g - gamma T) / sqrt(T gamma (1 - gamma)), of the numbers of distinct
        n-grams.
        """
        green, count = int((numbers < self.gamma).sum()), len(numbers)
        spread = math.sqrt(count * self.gamma * (1 - self.gamma))
        return (green - self.gamma * count) / spread if count else 0.0

    def log_p(self, tokens: Sequence[int]) -> float:
        """Return the exact log p: T_g is binomial under H0."""
        numbers = list(dict(scored(self.key, tokens, self.ngram)).values())
        green = sum(u < self.gamma for u in numbers)
        if not green:
            return 0.0
        return math.log(max(float(special.bdtrc(green - 1, len(numbers), self.gamma)), 1e-300))


# ---- Kuditipudi et al. 2023


@dataclass(frozen=True)
class Kuditipudi:
    """Aaronson's rule along a secret list of `length` rows, cyclic, from a random start; detection
    aligns the text with the list (`gap`: what an insertion or deletion costs).
    """

    key: Key
    vocab: int
    length: int = 256
    gap: float = 0.4

    def begin(self, prg: Prg) -> int:
        """Draw a random start in the list."""
        return int(float(prg.uniform(())) * self.length)

    def next(self, p: np.ndarray, place: int) -> int:
        """Return the token at a place of the list (the start, then one further at each token)."""
        return exponential_argmax(p, row_of(self.key, place % self.length, self.vocab))

    def cost(self, tokens: Sequence[int], key: Key | None = None) -> float:
        """Return the least cost of aligning the text with as many rows of the list from any start:
        a Levenshtein distance, in which a token against a row costs log(1 - R) (negative, very
        where the row chose the token). Low where it is marked.
        """
        return float(self.costs(tokens, self.rows(key))[-1]) if len(tokens) else 0.0

    def rows(self, key: Key | None = None) -> np.ndarray:
        """Return the list under its key, or another: float64 [length, vocab]."""
        return np.stack([row_of(key or self.key, i, self.vocab) for i in range(self.length)])

    def costs(self, tokens: Sequence[int], rows: np.ndarray) -> np.ndarray:
        """Return the `cost` of every beginning of the text, from one token on: float64 [token]."""
        along = np.log1p(-rows[:, np.asarray(tokens, int)])  # [row, token]
        count = len(tokens)
        # Of the tokens so far with j rows, for every start at once: [j, start].
        place = (np.arange(self.length) + np.arange(count)[:, None]) % self.length
        gaps = self.gap * np.arange(count + 1)[:, None]
        best = np.broadcast_to(gaps, (count + 1, self.length))
        costs = np.zeros(count)
        for i in range(count):
            new = best + self.gap
            new[1:] = np.minimum(new[1:], best[:-1] + along[place, i])
            # A row that no token has: min over j' <= j of new[j'] + gap (j - j').
            best = np.minimum.accumulate(new - gaps) + gaps
            costs[i] = best[i + 1].min()
        return costs

    def p_value(self, tokens: Sequence[int], references: int, prg: Prg) -> float:
        """Return p against lists of other keys: (1 + how many align as well) / (1 + references)."""
        own = self.cost(tokens)
        others = [Key(prg.words((4,)).tobytes()) for _ in range(references)]
        as_good = sum(self.cost(tokens, other) <= own for other in others)
        return (1 + as_good) / (1 + references)


def row_of(key: Key, number: int, vocab: int) -> np.ndarray:
    return np.clip(key.row(number).uniform((vocab,)), TINY, 1 - TINY)
