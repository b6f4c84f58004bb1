"""Several continuations of a text that a step verifies, of which a watermark chooses one.

The watermark of Bahri et al. in secure decoding: WatermarkSingle (§2.2), under several keys
WatermarkRecursive (§2.6). A step's rows are a tree (`text_rows.tree`): the candidates, each with
drafts of its own, go through one secure forward, and the next step stands after the winner, by rows
that only the client knows.

A chunk is what one step gives, however many tokens that are, and the text has the model's
distribution:

1. A candidate's tokens X_1, ..., X_(k+1) are the accepted drafts and the token after. Whether they
   end at place j follows from what was drawn up to j, so that k + 1 is a stopping time, and each
   X_j has the model's distribution after the text and X_1, ..., X_(j-1) (speculative sampling, or
   the race). By the strong Markov property such a step and then a text of the model's distribution,
   drawn by fresh randomness, are together one text of the model's distribution. Where the text
   ends, or has its length, follows from the tokens.
2. Given the text, the candidates of a step are independent and of one distribution, and the choice
keeps it
   (Theorem 4.1), since it is made by numbers that nothing before depends on: the history has the
   seeds of all candidates of the steps before, not of the winners alone. Winners under one key have
   that distribution each, and the next key, which chooses among them, knows nothing of the first.

Everything is drawn afresh in every step. A race that took the noise of a place again, as it does
without candidates, would bring tokens of candidates back that lost, whose seeds mark no more.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.history import History, packed
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.selecting import Chooser


@dataclass
class Candidates:
    """As many as the chooser chooses among. own: streams that theirs are children of. ends: tokens
    that end the text. usual: tokens of a rehearsal's text (`usual_tokens`). on_used gets the names
    of seeds (`history.packed`) that have scored a candidate, losers' too, of every key, before
    anybody gets the winner's tokens.
    """

    chooser: Chooser
    ends: frozenset[int]
    own: Streams
    usual: Sequence[int]
    on_used: Callable[[Sequence[bytes]], None] = lambda names: None

    def __post_init__(self) -> None:
        self._steps = 0

    @property
    def count(self) -> int:
        return self.chooser.count

    @property
    def apart(self) -> bool:
        return False

    def streams(self) -> list[Streams]:
        self._steps += 1
        names = [f"step {self._steps}, candidate {i}" for i in range(self.count)]
        return [Streams(*(stream.child(name) for stream in self.own)) for name in names]

    def choose(
        self, generated: Sequence[int], candidates: Sequence[Sequence[int]], limit: int
    ) -> int:
        room = limit - len(generated)
        drawn = [self._drawn(tokens, room) for tokens in candidates]
        winner, _, used = self.chooser.chosen(drawn, tuple(generated))
        self.on_used([packed(names) for names in used])
        return drawn.index(winner)

    def rehearse(self, drafts: int, limit: int) -> None:
        # A longer text, of more units, and candidates that differ take longer.
        tokens = itertools.cycle(self.usual)
        text = tuple(itertools.islice(tokens, max(0, limit - drafts - 1)))
        made = [
            Drawn(tuple(itertools.islice(tokens, drafts + 1)), False) for _ in range(self.count)
        ]
        fresh = tuple(History() for _ in self.chooser.keys)
        alike = replace(self.chooser, histories=fresh, prg=Prg.from_os())
        for names in alike.chosen(made, text).used:
            packed(names)

    def _drawn(self, tokens: Sequence[int], room: int) -> Drawn:
        """Return what the text gets of a continuation."""
        length = next((i for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        return Drawn(tuple(tokens[: min(length, room)]), length < min(len(tokens), room))


_USUAL = 500  # tokens, more than a text's n-grams come again in


def usual_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return tokens that are a word each after a space; any that end no text where there are too
    few.
    """
    ids = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.eos_ids]
    words = [i for i in ids if re.fullmatch(r" \w+", tokenizer.decode([i]))]
    return (words if len(words) >= 50 else ids)[:_USUAL]
