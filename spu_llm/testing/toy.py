"""A toy op with any number of rounds, to try the framework on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spu_llm.core.op import Cost, Functionality, View, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import (
    Arith,
    Owner,
    Value,
)


def _toy_two_party(party: Party, x: Value, *, rounds: int) -> Arith:
    """Fresh arithmetic shares of the same value, `rounds` times over.

    1. Each party draws a mask of its own and sends it; 2. y = x - own mask + the peer's.
    The next round's mask covers the difference of two shares, so rounds depend on each other.
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


def _toy_simulate(
    rank: int,
    prg: Prg,
    common: Prg,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    *,
    rounds: int,
) -> View:
    """Masks are uniform; incoming words follow from them and this party's own shares."""
    (y,) = outputs
    assert isinstance(y, Arith)
    own = [prg.words(y.shape) for _ in range(rounds)]
    # The peer's fresh mask makes every incoming word uniform; the last one is fixed by the output.
    incoming = [prg.words(y.shape) for _ in range(rounds - 1)]
    incoming.append(y.words + own[-1])
    return View(own, incoming)


def _toy_cost(x: Value, *, rounds: int) -> Cost:
    size = 8 * int(np.prod(x.shape, dtype=int)) * rounds
    return Cost(2 * rounds, rounds, size, size)


toy_reshare = protocol_op(
    "toy_reshare",
    reference=lambda x, rounds: x,
    two_party=_toy_two_party,
    owners=lambda x, rounds: [Owner.JOINT],
    cost=_toy_cost,
    functionality=Functionality(),
    simulate=_toy_simulate,
)
