"""Drafting without a model: the draft is the token after the latest earlier occurrence of the
text's last tokens.

Prompt look-up decoding (Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with
Reference", 2023): summaries, corrections and rewritten code repeat long parts of their prompt. The
draft is deterministic, so its distribution q has all its mass on one token: speculative sampling
accepts it with probability p(draft), and the text has the private model's distribution all the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from models.draft import Drafter, Pick, Proposer

MOST = 8  # tokens of the text's end that are compared
# How often the token after a match of so many tokens was right, 0 to MOST, in 400 chats that
# SmolLM2-135M-Instruct wrote at temperature 0.7; and what a draft model is thought to have right.
_RIGHT = (0.04, 0.15, 0.41, 0.47, 0.59, 0.65, 0.70, 0.75, 0.85)
_KEPT = 0.66
_WEIGHT = 4.0  # drafts of a text that count as much as what is thought before


@dataclass
class Share:
    """A share of drafts that were right: what the text has shown so far."""

    right: int = 0
    seen: int = 0

    def count(self, right: bool) -> None:
        self.right, self.seen = self.right + right, self.seen + 1

    def after(self, before: float) -> float:
        """Return what is thought of the share, by what was thought before."""
        return (self.right + _WEIGHT * before) / (self.seen + _WEIGHT)


def _shares() -> list[Share]:
    return [Share() for _ in range(MOST + 1)]


@dataclass(frozen=True)
class _Guess:
    """Token that the text suggested at a place, the length of the match before it, and whether the
    model drafted there all the same.
    """

    token: int
    length: int
    by_model: bool


@dataclass
class Ngrams(Proposer):
    """Proposes the token that the text itself suggests; with a `model`, the model proposes wherever
    its draft, after a match as long, is expected to stay more often, by this text so far: so
    n-grams draft an answer that repeats its prompt, and the model another one. The model runs in
    either case, and what is counted is known by then: where progress is hidden, time does not tell
    which of the two drafts.
    """

    size: int  # tokens of the vocabulary
    model: Drafter | None = None
    _by_text: list[Share] = field(default_factory=_shares)  # by the length of the match
    _by_model: list[Share] = field(default_factory=_shares)
    _of_model: Share = field(default_factory=Share)  # of any length
    _context: list[int] | None = None  # of the last drafts; None: nothing is to be counted
    _several: bool = False  # drafts after it, one of which the text goes on with
    _guesses: list[_Guess] = field(default_factory=list)  # at its end, and after each of them
    _drafts: list[int] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return self.size

    @property
    def beside(self) -> Proposer:
        """Return the model, since the text suggests one token alone; without one, this."""
        return self if self.model is None else self.model

    def begin(self) -> None:
        self._context = None

    def propose(self, context: list[int], count: int, pick: Pick) -> tuple[list[int], np.ndarray]:
        self._count(context)
        self._several = context == self._context
        self._guesses = []
        drafts, q = super().propose(context, count, pick)
        self._context, self._drafts = list(context), drafts
        return drafts, q

    def _count(self, text: list[int]) -> None:
        """Count which of the last guesses are right in a text that goes on after them; a draft
        after a wrong one was not looked at. Of several continuations only one can have stayed, so
        that the model's drafts do not count there.
        """
        if self._context is None or text[: len(self._context)] != self._context:
            return
        rest = text[len(self._context) :]
        for guess, draft, token in zip(self._guesses, self._drafts, rest, strict=False):
            self._by_text[guess.length].count(guess.token == token)
            if guess.by_model and not self._several:
                self._by_model[guess.length].count(draft == token)
                self._of_model.count(draft == token)
            if draft != token:
                break

    def _prefers_model(self, length: int) -> bool:
        of_text = self._by_text[length].after(_RIGHT[length])
        return self._by_model[length].after(self._of_model.after(_KEPT)) >= of_text

    def logits(self, tokens: list[int]) -> np.ndarray:
        token, length = continuation(tokens)
        of_model = None if self.model is None else self.model.logits(tokens)
        by_model = of_model is not None and self._prefers_model(length)
        self._guesses.append(_Guess(token, length, by_model))
        if of_model is not None and by_model:
            return of_model
        certain = np.full(self.size, -np.inf)
        certain[token] = 0.0
        return certain


def continuation(text: Sequence[int]) -> tuple[int, int]:
    """Find the earlier place in the text that ends with most of its last tokens (MOST at most), the
    latest such place. Return the token after it and the number of matching tokens; without such a
    place, the text's commonest token and 0.
    """
    tokens = np.asarray(text)
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])  # of what stood there before
    if not ends.size:
        return int(np.bincount(tokens).argmax()), 0
    length = 1
    while length < MOST:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not longer.size:
            break
        ends, length = longer, length + 1
    return int(tokens[ends[-1] + 1]), length
