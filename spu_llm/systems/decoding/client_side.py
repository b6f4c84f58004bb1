"""The client's plaintext half of a completion: prompt, drafting, sampling, text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.draft import Drafter
from models.ends import Ends
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from protocols.verification.variants import Rule, lanes_of
from spu_llm.core.prg import Prg
from spu_llm.systems.decoding.cadence import Cadence
from spu_llm.systems.decoding.emitted import Emitted


@dataclass
class ClientSide:
    """The client's plaintext half: prompt, drafting, sampling, text.

    `on_text` receives text as soon as it is certain. `ends`: of a split model, whose first blocks
    give what goes into the secure forward, and whose last ones take what comes out of it.
    """

    prompt: list[int]
    tokenizer: Tokenizer
    drafter: Drafter | None
    verifier: Rule
    streams: Streams
    stop: list[str] = field(default_factory=list)
    on_text: Callable[[str], None] = lambda text: None
    prefix: list[int] = field(default_factory=list)  # public, before the prompt
    cadence: Cadence | None = None  # of what the provider sees of a step
    ends: Ends | None = None

    def __post_init__(self) -> None:
        self._emitted = Emitted(self.tokenizer, self.stop, self.on_text)
        self._drafts: list[int] = []
        self._q = np.zeros((0, self.tokenizer.vocab_size))
        self._raised = np.zeros((0, 0))  # rows of `_next`

    @property
    def tokens(self) -> list[int]:
        """Of the completion, so far."""
        return self._emitted.tokens

    @property
    def text(self) -> str:
        """Of these."""
        return self._emitted.text

    @property
    def finish_reason(self) -> str:
        """See `Emitted`."""
        return self._emitted.finish_reason

    @property
    def _text(self) -> list[int]:
        """All tokens so far."""
        return [*self.prefix, *self.prompt, *self.tokens]

    def propose(self, count: int) -> None:
        """Draft in the clear (POST, Algorithm 1, line 1)."""
        self._drafts, self._q = [], np.zeros((0, self._q.shape[1]))
        if count:
            self._drafts, self._q = self._draft(self._text, count, self.streams)

    def _draft(
        self, text: list[int], count: int, streams: Streams
    ) -> tuple[list[int], np.ndarray]:
        assert self.drafter is not None
        return self.drafter.propose(
            text,
            count,
            lambda logits, position: self.verifier.propose(logits, position, streams),
        )

    def keep_time(self, count: int) -> None:
        """Set the cadence of steps with `count` drafts, by drafts after a text of zeros."""
        streams, text = Streams(Prg.from_os(), Prg.from_os()), [0] * len(self._text)

        def rehearse() -> None:
            if self.ends is not None:
                self.ends.rehearse(count + 1, len(text) - 1)
            self._draft(text, count, streams)

        self.cadence = Cadence.of(rehearse)

    def prefill_input(self) -> Any:
        """One lane: the prompt, or what the front makes of it."""
        return [self.prompt if self.ends is None else self.ends.up(self.prompt, 0)]

    def step_input(self) -> Any:
        """Of the secure forward, one lane: the last token, not cached yet, and the drafts; or what
        the front makes of them.
        """
        return [self._next if self.ends is None else self._raised]

    @property
    def _next(self) -> list[int]:
        return [self._text[-1], *self._drafts]

    def verifier_inputs(self) -> list[Any]:
        """The client's input to the verifier, one lane."""
        text = len(self._text)
        return [self.verifier.client_input(self._drafts, self._q, text, self.streams)]

    def settle(self, outcome: Any, limit: int, drafts: int) -> tuple[np.ndarray, bool]:
        """Emit a step's tokens and draft the next one's: which of its rows stay, bool [d + 1], and
        whether the text ends. Where the provider may not know, it takes a time that says nothing.
        `outcome`: of one lane, lane first.
        """
        if self.cadence is not None:
            self.cadence.begin()
        (of_lane,) = lanes_of(outcome)
        rows = np.arange(1 + len(self._drafts))
        retained = rows <= self.resolve(self._seen(of_lane), limit)
        if not self.finish_reason:
            self.propose(drafts)
            if self.ends is not None:
                self._raised = self.ends.up(self._next, len(self._text) - 1)
        if self.cadence is not None:
            self.cadence.wait()
        return retained, bool(self.finish_reason)

    def _seen(self, outcome: Any) -> Any:
        """What the rule resolves: a judge's outcome as it is, or logits of the rows [n, d] that
        came from a split model's middle, the last of which stand for the drafts.
        """
        if self.ends is None:
            return outcome
        rows, drafts = np.asarray(outcome), len(self._drafts)
        return self.ends.down(rows, len(self._text) + drafts - len(rows), drafts + 1)

    def resolve(self, outcome: Any, limit: int) -> int:
        """Emit the accepted drafts and the token after; returns the number of accepted drafts."""
        k, token = self.verifier.resolve(
            outcome, self._drafts, self._q, lambda: float(self.streams.sampling.uniform(()))
        )
        self._emitted.add([*self._drafts[:k], token], limit)
        return k
