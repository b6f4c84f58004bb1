"""The client's half of a race whose noise is a watermark's (`watermark.race_marks`).

A row of noise follows from the key and the tokens generated before its position, drafts included:
row i of a step stands after i drafts. As in a race without a mark, a row is the same whenever it is
asked for, so drafts win with the noise that they are verified with. The provider's half is the
race's own, and nothing tells them apart: it gets the same messages of the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from protocols.verification.distribution import Sampling, Streams
from protocols.verification.race import ClientInput, Race, RaceOutcome, brought
from spu_llm.systems.watermark.history import packed
from spu_llm.systems.watermark.race_marks import MarkedNoise


class MarkedRace:
    """A `Rule` for one text. `before`: tokens of prefix and prompt. `on_used` gets the names of
    contexts (`history.packed`) that tokens were drawn in, before anybody gets these tokens.
    """

    def __init__(
        self, race: Race, noise: MarkedNoise, before: int, on_used: Callable[[bytes], None]
    ) -> None:
        self._race, self._noise, self._on_used = race, noise, on_used
        self._before = before
        self._generated: list[int] = []  # by whole steps
        self._drafts: list[int] = []  # of the next one, so far

    @property
    def sampling(self) -> Sampling:
        return self._race.sampling

    def propose(
        self, logits: np.ndarray, position: int, streams: Streams
    ) -> tuple[int, np.ndarray]:
        """Draft a token by the mark's noise; return it and its distribution q. A step's drafts are
        asked for in their order.
        """
        count = position - self._before - len(self._generated)
        self._drafts = self._drafts[:count]
        assert len(self._drafts) == count
        draft, q = self._race.drafted(logits, self._noise.row([*self._generated, *self._drafts]))
        self._drafts.append(draft)
        return draft, q

    def client_input(
        self, drafts: Sequence[int], q: np.ndarray, position: int, streams: Streams
    ) -> ClientInput:
        assert position == self._before + len(self._generated)
        places = range(len(drafts) + 1)
        rows = [self._noise.row([*self._generated, *drafts[:i]]) for i in places]
        return brought(drafts, rows)

    def resolve(
        self,
        outcome: RaceOutcome,
        drafts: Sequence[int],
        q: np.ndarray,
        uniform: Callable[[], float],
    ) -> tuple[int, int]:
        k, token = self._race.resolve(outcome, drafts, q, uniform)
        first = len(self._generated)
        self._generated += [*drafts[:k], token]
        self._on_used(packed(self._noise.names(self._generated, first, len(self._generated))))
        return k, token
