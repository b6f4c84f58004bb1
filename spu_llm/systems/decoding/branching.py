"""Continuations of a text that a step verifies, of which the client goes on with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from models.draft import Proposer
from protocols.verification.distribution import Streams
from protocols.verification.variants import Rule


class Branch(NamedTuple):
    """A continuation: its drafts, their distributions q float64 [d, vocab], and the streams that
    they, and all that decides on them, are drawn from.
    """

    drafts: list[int]
    q: np.ndarray
    streams: Streams


class Branching(Protocol):
    """Continuations that the client tries in a step, and the choice among them."""

    @property
    def count(self) -> int:
        """Return how many continuations a step verifies."""

    @property
    def apart(self) -> bool:
        """Return whether no two continuations begin with the same draft, as far as what drafts
        knows others.
        """

    def streams(self) -> list[Streams]:
        """Return the streams of every continuation of the next step."""

    def choose(
        self, generated: Sequence[int], candidates: Sequence[Sequence[int]], limit: int
    ) -> int:
        """Return which of the `candidates`, the continuations as they came out, goes on the text
        `generated` so far, which has `limit` tokens at most.
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

    @property
    def apart(self) -> bool:
        return False

    def streams(self) -> list[Streams]:
        return [self.own]

    def choose(
        self, generated: Sequence[int], candidates: Sequence[Sequence[int]], limit: int
    ) -> int:
        return 0

    def rehearse(self, drafts: int, limit: int) -> None:
        """Do nothing: there is nothing to choose."""


@dataclass
class Chains:
    """Chains of drafts that begin apart, a tree whose only fork is its root; all are verified under
    one noise, or greedily.

    Token j of the text is then one function of the tokens before it and of the noise of position j
    (`protocols.verification.race`), so every chain comes out as a beginning of the same text,
    whatever its drafts are, and the longest is the text's next tokens. But numbers so close that
    shares decide between them may come out apart in two chains, and then the longer one's count: a
    choice among winners, each of which is one within that module's bound.
    """

    own: Streams
    count: int

    @property
    def apart(self) -> bool:
        return True

    def streams(self) -> list[Streams]:
        return [self.own] * self.count

    def choose(
        self, generated: Sequence[int], candidates: Sequence[Sequence[int]], limit: int
    ) -> int:
        return max(range(len(candidates)), key=lambda i: len(candidates[i]))

    def rehearse(self, drafts: int, limit: int) -> None:
        """Do nothing: choosing takes no time."""


def drafted(
    drafter: Proposer,
    rule: Rule,
    text: list[int],
    count: int,
    each: Sequence[Streams],
    *,
    apart: bool = False,
) -> list[Branch]:
    """Draft a continuation of `count` tokens after a text for each of the streams, one after the
    other. apart: those after the first are drafted by `drafter.beside` and begin with no draft that
    one before them begins with, unless what drafts knows no other.
    """
    branches: list[Branch] = []
    for streams in each:
        begun = [branch.drafts[0] for branch in branches] if apart else []

        def pick(
            logits: np.ndarray,
            position: int,
            streams: Streams = streams,
            begun: Sequence[int] = begun,
        ) -> tuple[int, np.ndarray]:
            if position == len(text):
                logits = _without(logits, begun)
            return rule.propose(logits, position, streams)

        proposer = drafter.beside if begun else drafter
        branches.append(Branch(*proposer.propose(text, count, pick), streams))
    return branches


def _without(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Return logits [vocab] in which these tokens are ruled out, unless nothing is left then."""
    rest = np.array(logits)
    rest[list(tokens)] = -np.inf
    return rest if np.isfinite(rest).any() else logits
