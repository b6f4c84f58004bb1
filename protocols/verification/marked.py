"""Verification by a race whose noise is the provider's: it can carry a mark that no client strips.

As in `race`, x_j = argmax (z_j + g_j) has the distribution softmax(z_j) where g_j is Gumbel noise,
and a draft stays while it is the winner. Here the provider brings the noise, a row of it for every
row of a forward, and adds it to its own share: no message. The client does not know the noise. It
can neither choose it, so as to have the text without what the noise carries, nor ask for a row of
it. Where the rows come from a keyed stream (`spu_llm.systems.watermark.sessions`), whoever has the
key finds the text again (`spu_llm.systems.watermark.aligning`).

Rows are of (forward, row of it), not of a position of the text: the provider does not learn how
many drafts stay, so it does not know positions. A row is drawn once, and a forward's are fresh
after whatever the forwards before gave. Hence the text is exact whatever the drafts are: row i of a
forward stands for the text's next token once drafts 0 to i - 1 were the winners of their rows, and
neither its logits nor anything that the client has seen depends on its noise. The rows after the
first draft that is no winner are for nothing, and drawn anew by the next forward.

The client drafts the likeliest tokens of its public model: under noise that is not known a draft t
wins with p(t), so that none has better chances than the likeliest. (In `race` it drafts with the
noise itself: of two models that agree every draft stays, here one in 1 / max p.)

Numbers, widths and rounding are the race's (`protocols.verification.race`).

Simulation. Openings: the bits 0^k 1^(d-k), and the winner of row k, of d + 1 winners the only one
that is opened. Both follow from the emitted tokens. That is all the client gets, of the noise no
more than that these tokens won. The provider gets what it gets of a race: number of steps, end of
text, and accepted counts if progress is shown.

Here that says more than in a race. Text and accepted counts are a function of prompt, noise and
drafts; the provider knows the noise, and the drafts follow from the prompt where the draft model is
public. So it can run a prompt that it guesses and compare when the text ends: of 24 prompts, texts
of 24 tokens and three drafts, the number of steps alone told some 3 of the 4.6 bits, and another
session with the same prompt tells as much again. In `race` and `token` the client's own randomness
is between. And whoever hands a marked text over hands the provider a test of its prompt.

Parties that deviate. A client that adds to its share biases the text, and with it the mark, as in
every variant. One that follows the messages may bring any drafts: they move forwards, not the
distribution of the text or the mark. It may ask again, and edit the text it has: an edit takes
marks away. It may also put a text together from many sessions, at the price of a prefill for each
part: parts of a few tokens are too short to be found. A provider may bring other noise than it
says, and the client cannot tell: large noise makes the text one of its choice, and an opened stop
(progress shown) then says whether a draft is a token that it names. With hidden progress it reads
nothing at a step, but when the text ends is up to it.

An exact distribution takes that no row serves twice: one stream for one session, under a nonce that
is fresh. With a nonce again, equal prompts would give equal texts, and others depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from protocols.verification import race
from protocols.verification.distribution import Sampling, Streams, gumbel
from protocols.verification.race import ClientInput, RaceOutcome
from spu_llm.core.prg import Prg


@dataclass(frozen=True)
class Marked:
    """The client brings drafts alone, the provider noise."""

    sampling: Sampling
    hide_progress: bool = False
    name: str = "marked"

    def client_shapes(self, drafts: int, vocab: int) -> ClientInput:
        return ClientInput(jax.ShapeDtypeStruct((drafts,), np.int32), None)

    def provider_shapes(self, drafts: int, vocab: int) -> Any:
        return jax.ShapeDtypeStruct((drafts + 1, vocab), np.float32)

    def propose(
        self, logits: np.ndarray, position: int, streams: Streams
    ) -> tuple[int, np.ndarray]:
        q = self.sampling.distribution(logits)
        return int(np.argmax(q)), q

    def client_input(
        self, drafts: Sequence[int], q: np.ndarray, position: int, streams: Streams
    ) -> ClientInput:
        return race.brought(drafts, ())

    def provider_input(self, drafts: int, vocab: int, stream: Prg) -> np.ndarray:
        """Draw noise float32 [drafts + 1, vocab]: the next (drafts + 1) vocab words of the stream,
        row by row.
        """
        return gumbel(stream.uniform((drafts + 1, vocab))).astype(np.float32)

    def verify(
        self, logits: Array, client: ClientInput, provider: Array
    ) -> tuple[RaceOutcome, Array]:
        bits = self.sampling.difference_bits + 1  # noise spreads less than logits do
        return race.verify(logits + provider, client.drafts, bits, hide_progress=self.hide_progress)

    def resolve(
        self,
        outcome: RaceOutcome,
        drafts: Sequence[int],
        q: np.ndarray,
        uniform: Callable[[], float],
    ) -> tuple[int, int]:
        return race.winner(outcome, q.shape[-1])
