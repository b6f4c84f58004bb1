"""A toy op with any number of rounds, to try the framework on."""

from __future__ import annotations

import math

from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import Arith, Value


def _toy_two_party(party: Party, x: Value, *, rounds: int) -> Arith:
    """Make fresh arithmetic shares of x, `rounds` times over.

    1. Each party draws a mask of its own and sends its share plus the mask; 2. y = the peer's
    masked share - own mask. The next round masks y, so rounds depend on each other.
    """
    assert isinstance(x, Arith)
    words = x.words
    for _ in range(rounds):
        # 1. The word sent is half of what this party gives up, hidden by its own fresh mask.
        own = party.mask(x.shape)
        party.send(words + own)
        peer = party.recv(x.shape)
        # 2. The parties swap roles: each now holds the peer's masked share minus its own mask.
        words = peer - own
    return Arith(words, x.dtype, x.frac_bits)


def _toy_correct(x: Value, *, rounds: int) -> Correct:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        party.incoming[-1] += wanted.words - made.words

    return correct


def _toy_cost(x: Value, *, rounds: int) -> Cost:
    size = 8 * math.prod(x.shape) * rounds
    return Cost(2 * rounds, rounds, size, size)


toy_reshare = protocol_op(
    "toy_reshare",
    reference=lambda x, rounds: x,
    two_party=_toy_two_party,
    cost=_toy_cost,
    simulate=uniform_messages(_toy_two_party, _toy_correct),
)
