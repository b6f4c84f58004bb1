"""A small Markov chain in place of a model, whose distribution is known, and chi-square tests of
it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.keys import Key
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.units import Content

FALSE_ALARM = 1e-6
START = np.array([0.5, 0.3, 0.2])
NEXT = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.4, 0.4, 0.2]])


class Chain:
    """Samples tokens 0, 1, 2; the prompt says nothing but for its last token."""

    def __init__(
        self, prg: Prg, start: Sequence[float] = tuple(START), next_: np.ndarray = NEXT
    ) -> None:
        self._prg, self._start, self._next = prg, np.array(start), next_

    def distribution(self, prefix: Content) -> np.ndarray:
        return self._next[int(prefix[-1])] if len(prefix) > 1 else self._start

    def sample(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
        return [self._one(prefix, max_tokens) for _ in range(n)]

    def _one(self, prefix: Content, count: int) -> Drawn:
        total: tuple[int, ...] = ()
        for point in self._prg.uniform((count,)):
            p = self.distribution(tuple(prefix) + total)
            total += (int(np.searchsorted(np.cumsum(p), point, side="right")),)
        return Drawn(total, False)

    def text_distribution(self, tokens: int) -> dict[tuple[int, ...], float]:
        """Return the distribution of a text after a prompt of one token."""
        collected = {}
        for text in itertools.product(range(len(self._start)), repeat=tokens):
            p, before = 1.0, (0,)
            for token in text:
                p *= float(self.distribution(before)[token])
                before += (token,)  # type: ignore[assignment]
            collected[text] = p
        return collected


def key_of(number: int, label: str = "key") -> Key:
    return Key(Prg.from_seed(number, label).words((4,)).tobytes())


def p_value(drawn: Iterable[Any], distribution: dict[Any, float]) -> float:
    """Return the p-value of a chi-square test; what is rare goes together."""
    counts = Counter(drawn)
    assert set(counts) <= set(distribution)
    total = sum(counts.values())
    common = [x for x in distribution if distribution[x] * total >= 10]
    observed = [counts[x] for x in common]
    expected = [distribution[x] * total for x in common]
    if total - sum(expected) > 1e-6:
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    return float(stats.chisquare(observed, expected).pvalue)
