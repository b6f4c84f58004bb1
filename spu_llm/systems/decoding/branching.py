"""Continuations of a text that a step verifies, of which the client goes on with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from protocols.verification.distribution import Streams


class Branch(NamedTuple):
    """A continuation: its drafts, their distributions q float64 [d, vocab], and the streams that
    they, and all that decides on them, are drawn from.
    """

    drafts: list[int]
    q: np.ndarray
    streams: Streams


class Branching(Protocol):
    """What the client tries in a step, and what it goes on with."""

    @property
    def count(self) -> int:
        """Return how many continuations a step verifies."""

    def streams(self) -> list[Streams]:
        """Return the streams of every continuation of the next step."""

    def choose(
        self, generated: Sequence[int], candidates: Sequence[Sequence[int]], limit: int
    ) -> int:
        """Return which of the continuations `found`, as they came out, goes on the text `generated`
        so far, which has `limit` tokens at most.
        """

    def rehearse(self, drafts: int, limit: int) -> None:
        """Do as much work as `choose` does after so many drafts, for a text that nearly has `limit`
        tokens.
        """


@dataclass
class Single:
    """One continuation, always by the same streams."""

    own: Streams

    @property
    def count(self) -> int:
        return 1

    def streams(self) -> list[Streams]:
        return [self.own]

    def choose(
        self, generated: Sequence[int], candidates: Sequence[Sequence[int]], limit: int
    ) -> int:
        return 0

    def rehearse(self, drafts: int, limit: int) -> None:
        """Do nothing: there is nothing to choose."""
