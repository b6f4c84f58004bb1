"""Scores of texts under a key, and of unmarked texts under many keys, in the study of watermarks.

A text is detokenised and tokenised again before it is scored. Its first T tokens are then the
text of length T. Scores are the higher the more it looks marked:

    sum        -log10 p of sum R, the scheme's default
    fisher     -log10 p of -2 sum log(1 - R); "corrected" Aaronson, and the race
    recursive  -log10 p of both keys together
    plain      Aaronson's sum -log(1 - R) of all tokens, as published, whatever the length
    green      Kirchenbauer's z
    alignment  Kuditipudi: how far the cost lies below the cost of unmarked texts of its length,
               in standard deviations (in the place of the permutation test's 5,000 references)

Unmarked texts are scored under keys that they have nothing to do with, several each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from experiments.watermark.texts import NGRAM, Author, Method, key_of
from models.tokenizer import Tokenizer
from spu_llm.systems.watermark.baselines import Kirchenbauer, Kuditipudi, aaronson_score
from spu_llm.systems.watermark.cdfs import Family
from spu_llm.systems.watermark.detecting import Marked
from spu_llm.systems.watermark.keys import Key, token_unit
from spu_llm.systems.watermark.race_marks import scored
from spu_llm.systems.watermark.scores import combined, log_p
from spu_llm.systems.watermark.units import grams

KINDS: dict[str, tuple[str, ...]] = {
    "flat": ("sum",),
    "white-box": ("sum",),
    "recursive": ("recursive",),
    "race": ("fisher",),
    "aaronson": ("fisher", "plain"),
    "kirchenbauer": ("green",),
    "kuditipudi": ("alignment",),
}
P_VALUES = ("sum", "fisher", "recursive")
OF_CONTEXTS = ("fisher", "plain", "green")  # numbers of the race's kind
_LN10 = math.log(10)

Pairs = list[tuple[bytes, float]]  # of every token: the name of its n-gram, and its number


def retokenised(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    return tokenizer.encode(tokenizer.decode(tokens), goes_on=True)


def of_candidates(key: Key, tokens: Sequence[int]) -> Pairs:
    units = [token_unit(token) for token in tokens]
    return [tuple(key.seed(gram)) for gram in grams(units, NGRAM)]  # type: ignore[misc]


def of_contexts(key: Key, tokens: Sequence[int]) -> Pairs:
    return scored(key, tokens, NGRAM)


def distinct(pairs: Pairs, length: int | None = None) -> np.ndarray:
    """Return the numbers of distinct n-grams of the first tokens."""
    return np.array(list(dict(pairs[:length]).values()), np.float64)


def marks_of(pairs: Pairs) -> list[Marked]:
    """Return numbers as `detecting.spans_of` wants them, by token."""
    marks, seen = [], set()
    for i, (name, number) in enumerate(pairs):
        marks.append(Marked(i, i + 1, None if name in seen else number))
        seen.add(name)
    return marks


def score(kind: str, pairs: Pairs, family: Family, length: int | None = None) -> float:
    """Score one key's numbers; not by `recursive` and `alignment`."""
    if kind == "plain":
        return aaronson_score(np.array([number for _, number in pairs[:length]]))
    numbers = distinct(pairs, length)
    if kind == "green":
        return Kirchenbauer(_NOBODYS, 1, 0.0, NGRAM).z_of(numbers)
    return -log_p(numbers, family, kind) / _LN10


_NOBODYS = Key(bytes(32))


class Nulls:
    """Unmarked texts [prompt][sample] (tokenised again) under keys of nobody's."""

    def __init__(
        self, texts: Sequence[Sequence[list[int]]], keys: int, vocab: int, seed: int
    ) -> None:
        self._texts, self._vocab = texts, vocab
        self._keys = [key_of(seed, f"null {i}") for i in range(keys)]
        self._pairs: dict[bool, list[list[Pairs]]] = {}
        self._scores: dict[tuple[str, str, int], np.ndarray] = {}
        self._costs: np.ndarray | None = None

    def pairs(self, contexts: bool) -> list[list[Pairs]]:
        """Return the names and numbers of n-grams [prompt][sample and key]."""
        if contexts not in self._pairs:
            of = of_contexts if contexts else of_candidates
            self._pairs[contexts] = [
                [of(key, text) for text in row for key in self._keys] for row in self._texts
            ]
        return self._pairs[contexts]

    def scores(self, kind: str, length: int, family: Family | None = None) -> np.ndarray:
        """Return the scores float64 [prompt, sample and key]."""
        family = family or Family()
        at = kind, f"{family.name} {family.k}", length
        if at not in self._scores:
            self._scores[at] = self._scored(kind, length, family)
        return self._scores[at]

    def _scored(self, kind: str, length: int, family: Family) -> np.ndarray:
        if kind == "alignment":
            costs = self.costs()[:, :, min(length, self.costs().shape[2]) - 1]
            return np.asarray((costs.mean() - costs) / costs.std())
        if kind == "recursive":
            logs = -_LN10 * self.scores("sum", length, family)
            other = np.roll(logs.reshape(*logs.shape[:1], -1, len(self._keys)), 1, axis=2)
            pairs = zip(logs.ravel(), other.ravel(), strict=True)
            return -np.array([combined(pair) for pair in pairs]).reshape(logs.shape) / _LN10
        rows = self.pairs(kind in OF_CONTEXTS)
        return np.array([[score(kind, one, family, length) for one in row] for row in rows])

    def costs(self) -> np.ndarray:
        """Return the costs of Kuditipudi's alignment, of one text a prompt under two keys: float64
        [prompt, key, token]; the shortest text's length.
        """
        if self._costs is None:
            least = min(len(row[0]) for row in self._texts)
            costs = []
            for key in self._keys[:2]:
                scheme = Kuditipudi(key, self._vocab)
                rows = scheme.rows()
                costs.append([scheme.costs(row[0][:least], rows) for row in self._texts])
            self._costs = np.array(costs).transpose(1, 0, 2)
        return self._costs

    def aligned(self, costs: np.ndarray, length: int | None = None) -> float:
        """Return the score of a text with these costs of its beginnings."""
        known = self.costs()
        at = min(length or len(costs), len(costs), known.shape[2]) - 1
        same = known[:, :, at]
        return float((same.mean() - costs[at]) / same.std())


def scores_of(
    method: Method,
    kind: str,
    authors: Sequence[Author],
    texts: Sequence[list[int]],
    lengths: Sequence[int | None],
    nulls: Nulls,
    vocab: int,
) -> np.ndarray:
    """Score each text (tokenised again) under its author's keys, for each length (None: all of it):
    float64 [text, length].
    """
    scores = []
    for author, text in zip(authors, texts, strict=True):
        if kind == "alignment":
            scheme = Kuditipudi(author.keys[0], vocab)
            costs = scheme.costs(text, scheme.rows())
            scores.append([nulls.aligned(costs, length) for length in lengths])
            continue
        of = of_contexts if kind in OF_CONTEXTS else of_candidates
        rows = [of(key, text) for key in author.keys]
        if kind == "recursive":
            scores.append(
                [
                    -combined([log_p(distinct(p, n), method.scheme.family) for p in rows]) / _LN10
                    for n in lengths
                ]
            )
        else:
            scores.append([score(kind, rows[0], method.scheme.family, n) for n in lengths])
    return np.array(scores)
