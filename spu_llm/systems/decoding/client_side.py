"""The client's plaintext half of a completion: prompt, drafting, sampling, text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.draft import Drafter
from models.tokenizer import StreamDecoder, Tokenizer
from protocols.verification.distribution import Streams
from protocols.verification.variants import Verifier, lanes_of
from spu_llm.core.prg import Prg
from spu_llm.systems.decoding.cadence import Cadence


@dataclass
class ClientSide:
    """The client's plaintext half: prompt, drafting, sampling, text.

    `on_text` receives text as soon as it is certain.
    """

    prompt: list[int]
    tokenizer: Tokenizer
    drafter: Drafter | None
    verifier: Verifier
    streams: Streams
    stop: list[str] = field(default_factory=list)
    on_text: Callable[[str], None] = lambda text: None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    prefix: list[int] = field(default_factory=list)  # public, before the prompt
    cadence: Cadence | None = None  # of what the provider sees of a step

    def __post_init__(self) -> None:
        self._decoder = StreamDecoder(self.tokenizer)
        self._shown = 0
        self._drafts: list[int] = []
        self._q = np.zeros((0, self.tokenizer.vocab_size))

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
        streams = Streams(Prg.from_os(), Prg.from_os())
        self.cadence = Cadence.of(lambda: self._draft([0] * len(self._text), count, streams))

    def prompts(self) -> list[list[int]]:
        """Input of the prefill, one lane."""
        return [self.prompt]

    def step_tokens(self) -> list[list[int]]:
        """Input of the secure forward, one lane: the last token, not cached yet, and the drafts."""
        return [[self._text[-1], *self._drafts]]

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
        retained = rows <= self.resolve(of_lane, limit)
        if not self.finish_reason:
            self.propose(drafts)
        if self.cadence is not None:
            self.cadence.wait()
        return retained, bool(self.finish_reason)

    def resolve(self, outcome: Any, limit: int) -> int:
        """Emit the accepted drafts and the token after; returns the number of accepted drafts."""
        k, token = self.verifier.resolve(
            outcome, self._drafts, self._q, lambda: float(self.streams.sampling.uniform(()))
        )
        self._emit([*self._drafts[:k], token], limit)
        return k

    def _emit(self, tokens: list[int], limit: int) -> None:
        for token in tokens:
            if token in self.tokenizer.eos_ids:
                self.finish_reason = "eos"
                break
            self.tokens.append(token)
            self.text += self._decoder.push([token])
            if self._cut_at_stop():
                self.finish_reason = "stop"
                break
            if len(self.tokens) >= limit:
                self.finish_reason = "length"
                break
        if self.finish_reason and self.finish_reason != "stop":
            self.text += self._decoder.finish()
            self._cut_at_stop()
        self._show(len(self.text) if self.finish_reason else self._certain())

    def _cut_at_stop(self) -> bool:
        found = [i for s in self.stop if (i := self.text.find(s)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def _certain(self) -> int:
        """Length of text that no stop string can still take back."""
        held = 0
        for s in self.stop:
            for n in range(1, len(s)):
                if self.text.endswith(s[:n]):
                    held = max(held, n)
        return len(self.text) - held

    def _show(self, end: int) -> None:
        if end > self._shown:
            self.on_text(self.text[self._shown : end])
            self._shown = end
