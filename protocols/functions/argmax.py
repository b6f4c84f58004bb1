"""Where the largest of a row of shared numbers stands: the tournament of
`protocols.functions.maximum`, in which every number carries its place. Comparisons look at the
numbers alone; of equal ones the first wins.
"""

from __future__ import annotations

import numpy as np

from protocols.bits.convert import arith_cost, as_arith, public_share
from protocols.functions.maximum import correct_maximum, maximum_cost, maximum_words
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import Arith, Value

_KINDS = 2  # numbers and places


def _two_party(party: Party, x: Value, *, bits: int) -> Arith:
    words = as_arith(party, x).words
    places = np.arange(x.shape[1], dtype=np.uint64) * public_share(party, 1)
    both = np.stack([words, np.broadcast_to(places, words.shape)])
    return Arith(maximum_words(party, both, bits)[1], np.dtype(np.int32), 0)


def _cost(x: Value, *, bits: int) -> Cost:
    rows, n = x.shape
    return arith_cost(x) + maximum_cost(rows, n, bits, kinds=_KINDS)


def _correct(x: Value, *, bits: int) -> Correct:
    n = x.shape[1]

    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        if n > 1:
            correct_maximum(party, wanted.words - made.words, n, bits, kinds=_KINDS)

    return correct


argmax = protocol_op(
    "argmax",
    reference=lambda x, bits: x.argmax(axis=-1).astype(np.int32),
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
)
"""The index (int32 [rows]) of the largest number of every row of x [rows, n]; the first of equals.
Differences in a row lie within 2^(bits-1), exclusive, of the ring (a float's encoding)."""
