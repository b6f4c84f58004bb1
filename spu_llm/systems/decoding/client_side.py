"""The client's plaintext half of a completion: prompt, drafting, sampling, text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from models.draft import Proposer
from models.stops import Stops
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from protocols.verification.variants import Rule, lanes_of
from spu_llm.core.prg import Prg
from spu_llm.systems.decoding.branching import Branch, Branching, Single, drafted
from spu_llm.systems.decoding.cadence import Cadence
from spu_llm.systems.decoding.emitted import Emitted, OnText
from spu_llm.systems.decoding.session_shape import ClientPart


@dataclass
class ClientSide:
    """The client's plaintext half: prompt, drafting, sampling, text.

    `on_text` receives text as soon as it is certain. `around`: what the client computes of the
    model before and after the secure forward. `branching`: continuations of a step, where there are
    several.
    """

    prompt: list[int]
    tokenizer: Tokenizer
    drafter: Proposer | None
    verifier: Rule
    streams: Streams
    stop: list[str] = field(default_factory=list)
    on_text: OnText = lambda text, drafted: None
    prefix: list[int] = field(default_factory=list)  # public, before the prompt
    cadence: Cadence | None = None  # of what the provider sees of a step
    around: ClientPart | None = None
    branching: Branching | None = None
    interrupted: Callable[[], bool] = lambda: False  # whether the text is to end where it is
    most: Callable[[], int | None] = lambda: None  # tokens that the user wants at most
    begins: bool = False  # whether the text is one of its own, rather than the prompt's end

    def __post_init__(self) -> None:
        stops = Stops.of(self.stop, self.tokenizer)
        self._emitted = Emitted(self.tokenizer, stops, self.on_text, self.begins)
        self._branching = self.branching or Single(self.streams)
        self._branches: list[Branch] = []
        self._raised = np.zeros((0, 0))  # rows of `_next`
        self._gained = 0  # tokens of the last forward

    @property
    def tokens(self) -> list[int]:
        """Return the completion's tokens so far."""
        return self._emitted.tokens

    @property
    def text(self) -> str:
        """Return the completion's text so far."""
        return self._emitted.text

    @property
    def finish_reason(self) -> str:
        """Return why the text ended, as `Emitted` has it."""
        return self._emitted.finish_reason

    @property
    def _text(self) -> list[int]:
        """Return all tokens so far: prefix, prompt and completion."""
        return [*self.prefix, *self.prompt, *self.tokens]

    def propose(self, count: int) -> None:
        """Draft every continuation in the clear (POST, Algorithm 1, line 1)."""
        self._branches = self._drafted(self._text, count, self._branching.streams())

    def _drafted(self, text: list[int], count: int, each: Sequence[Streams]) -> list[Branch]:
        if not count:
            none = np.zeros((0, self.tokenizer.vocab_size))
            return [Branch([], none, streams) for streams in each]
        assert self.drafter is not None
        return drafted(self.drafter, self.verifier, text, count, each, apart=self._branching.apart)

    def keep_time(self, count: int, limit: int, length: int) -> None:
        """Set the cadence of steps with `count` drafts, of a completion of `limit` tokens at most,
        by drafts after a text of `length` tokens, which the provider may know: none comes twice, so
        that a draft model is what drafts. Among several continuations one may go on that the
        drafter did not see last, with all its drafts.
        """
        several = self._branching.count
        unseen = count + 1 if several > 1 else 0
        # An encoder has read the prompt: what a drafter has not seen comes after it.
        seen = length if self.begins else max(0, length - unseen)
        streams, tokens = Streams(Prg.from_os(), Prg.from_os()), itertools.cycle((0, 1))

        def rehearse() -> None:
            if self.around is not None:
                self.around.rehearse(count + 1, length - 1)
            text = [i % self.tokenizer.vocab_size for i in range(seen)]
            text += [next(tokens)] * min(unseen, length)
            self._drafted(text, count, [streams] * several)
            self._branching.rehearse(count, limit)

        self.cadence = Cadence.of(rehearse)

    def prefill_input(self) -> Any:
        """Return the prefill's input, one lane: the prompt, or rows that the client makes of it."""
        return [self.prompt if self.around is None else self.around.up(self.prompt, 0)]

    def step_input(self) -> Any:
        """Return the input of a step's secure forward, one lane: the last token, not cached yet,
        and the drafts, one continuation's after the other's; or the rows that the client makes of
        them.
        """
        return [self._next if self.around is None else self._raised]

    def next_turn(self, tokens: Sequence[int]) -> ClientSide:
        """Return the client's side of the turn that begins when `tokens` come after this text."""
        if self.drafter is not None:
            self.drafter.begin()
        return replace(self, prompt=[*self.prompt, *self.tokens, *tokens])

    def follow(self) -> None:
        """Have the drafter read the text so far, outside of a step: how much it has not read yet
        depends on how many drafts stayed, and so does its time.
        """
        if self.drafter is not None:
            self.drafter.logits(self._text)

    def uncached(self, steps: int, hidden: bool) -> int:
        """Return how many of the text's last tokens are to go into the next turn's forward, after
        an answer of so many steps. Where the provider may not know which drafts stay, the last
        token always is, whether it was a draft or not.
        """
        return 1 if hidden and steps else self._gained

    def retained(self, count: int) -> np.ndarray:
        """Return which of the last step's rows hold the text before the `uncached` tokens, bool
        [count].
        """
        return np.arange(count) < self._gained

    def turn_input(self, count: int, empty: int = 0) -> Any:
        """Return the input of the secure forward that begins a later turn, one lane of `count`: the
        prompt's last tokens, after `empty` copies of the first of them, whose rows hold no text: so
        nothing is computed that the text would not have.
        """
        text = self.prompt[empty - count :]
        return [[text[0]] * empty + text]

    @property
    def _next(self) -> list[int]:
        return [self._text[-1], *itertools.chain(*(b.drafts for b in self._branches))]

    def verifier_inputs(self) -> list[Any]:
        """Return the client's input to the verifier, one for each continuation."""
        text, rule = len(self._text), self.verifier
        return [rule.client_input(b.drafts, b.q, text, b.streams) for b in self._branches]

    def settle(self, outcome: Any, limit: int, drafts: int) -> tuple[np.ndarray, bool]:
        """Emit a step's tokens and draft the next one's; return which of the step's rows stay, bool
        [n], and whether the text ends. Where the provider may not know, it takes a time that says
        nothing. `outcome`: the judge's, its first axis the continuations.
        """
        if self.cadence is not None:
            self.cadence.begin()
        retained = self.resolve(list(map(self._seen, lanes_of(outcome))), limit)
        if not self.finish_reason:
            self.propose(drafts)
            if self.around is not None:
                self._raised = self.around.up(self._next, len(self._text) - 1)
        if self.cadence is not None:
            self.cadence.wait()
        return retained, bool(self.finish_reason)

    def _seen(self, outcome: Any) -> Any:
        """Return what the rule resolves: a judge's outcome as it is, or logits of the rows [n, d]
        that were opened, the last of which stand for the drafts.
        """
        if self.around is None:
            return outcome
        rows, drafts = np.asarray(outcome), len(self._next) - 1
        return self.around.down(rows, len(self._text) + drafts - len(rows), drafts + 1)

    def resolve(self, outcomes: Sequence[Any], limit: int) -> np.ndarray:
        """Emit the accepted drafts of the continuation that goes on, and the token after; returns
        which rows of the step stay, bool [n].
        """
        stay, emitted = [], []
        for branch, outcome in zip(self._branches, outcomes, strict=True):
            k, token = self.verifier.resolve(
                outcome, branch.drafts, branch.q, functools.partial(_uniform, branch.streams)
            )
            stay.append(k)
            emitted.append([*branch.drafts[:k], token])
        won = self._branching.choose(self.tokens, emitted, limit)
        kept = [
            np.arange(len(branch.drafts)) < (k if i == won else 0)
            for i, (branch, k) in enumerate(zip(self._branches, stay, strict=True))
        ]
        before = len(self.tokens)
        most = self.most()
        limit = limit if most is None else min(limit, most)
        self._emitted.add(emitted[won], limit, len(emitted[won]) - 1)
        self._gained = len(self.tokens) - before
        if self.interrupted():
            self._emitted.interrupt()
        return np.concatenate([[True], *kept])


def _uniform(streams: Streams) -> float:
    return float(streams.sampling.uniform(()))
