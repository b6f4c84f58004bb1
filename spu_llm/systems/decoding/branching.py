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
        """Of continuations."""

    def streams(self) -> list[Streams]:
        """Of every continuation of the next step."""

    def choose(
        self, generated: Sequence[int], found: Sequence[Sequence[int]], limit: int
    ) -> int:
        """Which of the continuations, as they came out, goes on the text generated so far, which
        has `limit` tokens at most.
        """

    def rehearse(self, drafts: int, limit: int) -> None:
        """Work like that of `choose` after so many drafts, of a text that has its limit nearly."""


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
        self, generated: Sequence[int], found: Sequence[Sequence[int]], limit: int
    ) -> int:
        return 0

    def rehearse(self, drafts: int, limit: int) -> None:
        """Nothing is to be chosen."""
