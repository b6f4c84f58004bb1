"""Verification by a race: the largest logit after noise is the token, drafts or no drafts.

With Gumbel noise g_j of the client's for every position j of the text, x_j = argmax (z_j + g_j)
has the distribution softmax(z_j) (the exponential race in logarithms: Maddison et al., "A*
Sampling", 2014). The client drafts with the same noise, d_j = argmax (log q_j + g_j), and a draft
stays while it is the winner. x_j depends on the noise up to j alone, so g_j may serve again after a
rejection, and the text is exact whatever the drafts are (spec of POST, shared exponential race). No
exponential, no normaliser; a tournament over (d + 1) vocab numbers.

Without noise the winner is the likeliest token: greedy decoding.

Numbers run in units of 2^-10: narrow words (`protocols.arithmetic.narrow`), which take a third less
to compare. Each may be one unit low, by how it is shared, so of two numbers less than two units
apart either may win. Under any noise x_j is then the winner of logits that are off by some amount
from 0 to 2^-9, and that moves a probability by a factor of exp(2^-9) at most, whatever the amounts
depend on: at worst all logits but one are that much too low. Errors of a forward on shares move it
by ten times that.

Numbers and places are chosen between as words of 24 or 32 bits, whose products are off by one with
probability 2^-31 each (`protocols.bits.mux`): over a tournament of 32,000 numbers a place is wrong
with some 10^-8. It is then a neighbour, or no token at all, which `winner` refuses.

Simulation. Openings: the bits 0^k 1^(d-k), and the winner of row k, of d + 1 winners the only one
that is opened. Both follow from the emitted tokens. The client knows the noise: a token also says
that it beats all others under that noise. Greedy decoding has none to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from protocols.arithmetic.narrow import FRAC_BITS, MAX_BITS, narrow
from protocols.bits.compare import sign
from protocols.bits.logic import prefix_or
from protocols.bits.slices import by_rows
from protocols.functions.argmax import argmax
from protocols.verification.distribution import Sampling, Streams, gumbel
from protocols.verification.progress import open_stop, row_at
from spu_llm.core.errors import WireError
from spu_llm.core.prg import Prg
from spu_llm.core.reveal import reveal
from spu_llm.core.values import Owner

UNIT_BITS = 10  # fraction bits of the numbers that run
_THREE_BYTES = 24


class ClientInput(NamedTuple):
    drafts: Any  # int32 [drafts]
    noise: Any  # float32 [drafts + 1, vocab], or None


class RaceOutcome(NamedTuple):
    accepted: Any  # int32 [lane]
    token: Any  # int32 [lane]


@dataclass(frozen=True)
class Race:
    """`noise` False: greedy decoding, as the variant `token` has it."""

    sampling: Sampling
    noise: bool = True
    hide_progress: bool = False

    @property
    def name(self) -> str:
        return "race" if self.noise else "token"

    def client_shapes(self, drafts: int, vocab: int) -> ClientInput:
        noise = jax.ShapeDtypeStruct((drafts + 1, vocab), np.float32) if self.noise else None
        return ClientInput(jax.ShapeDtypeStruct((drafts,), np.int32), noise)

    def provider_shapes(self, drafts: int, vocab: int) -> None:
        return None

    def propose(
        self, logits: np.ndarray, position: int, streams: Streams
    ) -> tuple[int, np.ndarray]:
        noise = self._noise(logits.size, position, streams) if self.noise else None
        return self.drafted(logits, noise)

    def client_input(
        self, drafts: Sequence[int], q: np.ndarray, position: int, streams: Streams
    ) -> ClientInput:
        places = range(position, position + len(drafts) + 1) if self.noise else ()
        return brought(drafts, [self._noise(q.shape[1], place, streams) for place in places])

    def drafted(self, logits: np.ndarray, noise: np.ndarray | None) -> tuple[int, np.ndarray]:
        """Return the winner of the public model's logits [vocab] under noise [vocab], and q."""
        q = self.sampling.distribution(logits)
        if noise is None:
            return int(np.argmax(q)), q
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(q) + noise)), q

    def provider_input(self, drafts: int, vocab: int, stream: Prg) -> None:
        return None

    def verify(
        self, logits: Array, client: ClientInput, provider: None
    ) -> tuple[RaceOutcome, Array]:
        if client.noise is not None:
            logits = logits + client.noise
        bits = self.sampling.difference_bits + int(self.noise)  # noise spreads less than logits do
        return verify(logits, client.drafts, bits, hide_progress=self.hide_progress)

    def resolve(
        self,
        outcome: RaceOutcome,
        drafts: Sequence[int],
        q: np.ndarray,
        uniform: Callable[[], float],
    ) -> tuple[int, int]:
        return winner(outcome, q.shape[-1])

    def _noise(self, vocab: int, position: int, streams: Streams) -> np.ndarray:
        """Return the Gumbel noise of a position: the same whenever it is asked for."""
        return gumbel(streams.sampling.child(f"noise {position}").uniform((vocab,)))


def brought(drafts: Sequence[int], noise: Sequence[np.ndarray]) -> ClientInput:
    """Make the client's input: drafts, and noise of their positions and the one after, if any."""
    rows = np.stack(noise).astype(np.float32) if noise else None
    return ClientInput(np.array(drafts, np.int32), rows)


def winner(outcome: RaceOutcome, vocab: int) -> tuple[int, int]:
    """Return the number of accepted drafts and the token after them; raise WireError when that is
    none of `vocab`.
    """
    token = int(outcome.token)
    if not 0 <= token < vocab:
        raise WireError(f"the winner stands at {token}, where there is no token")
    return int(outcome.accepted), token


def verify(
    numbers: Array, drafts: Array, bits: int, *, hide_progress: bool = False
) -> tuple[RaceOutcome, Array]:
    """Verify drafts [lane, drafts] by shared logits, noise included, [lane, drafts + 1, vocab],
    that differ by `bits` signed bits in a row.

    1. The winner of every row. 2. Where a draft is not the winner. 3. The first such place k is
    opened, 4. and the winner of row k, to the client.
    """
    lanes, places, vocab = numbers.shape
    drop = FRAC_BITS - UNIT_BITS
    if bits - drop <= MAX_BITS:  # words of few bytes travel, and are chosen between, for less
        bits -= drop
        width = _THREE_BYTES if bits <= _THREE_BYTES else MAX_BITS
        numbers = narrow(numbers, drop=drop, bits=width)
    # 1.
    winners = by_rows(lambda rows: argmax(rows, bits=bits), numbers.reshape(-1, vocab))
    winners = winners.reshape(lanes, places)
    if places == 1:
        k = jnp.zeros(lanes, jnp.int32)
        return RaceOutcome(k, _open(winners[:, 0])), k
    # 2. A difference or its negative is below zero.
    apart = winners[:, :-1] - drafts
    either = sign(jnp.stack([apart, -apart], axis=-1), bits=20)
    rejected = prefix_or(either)[..., 1]
    # 3.
    k = open_stop(rejected, hide=hide_progress)
    # 4.
    return RaceOutcome(k, _open(row_at(winners, k, hide=hide_progress))), k


def _open(token: Array) -> Array:
    return reveal(token, to=Owner.CLIENT, label="token")
