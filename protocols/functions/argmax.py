"""Where the largest of a row of shared numbers stands: the tournament of
`protocols.functions.maximum`, in which every number carries its place. Comparisons look at the
numbers alone; of equal ones the first wins.
"""

from __future__ import annotations

import numpy as np

from protocols.bits.convert import arith_cost, as_arith, public_share
from protocols.bits.mux import width_of
from protocols.functions.maximum import (
    MAX_FAN_IN,
    check,
    correct_maximum,
    maximum_cost,
    maximum_words,
)
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import Arith, Value, low_bits

_KINDS = 2  # numbers and places


def _two_party(party: Party, x: Value, *, bits: int, widest: int = MAX_FAN_IN) -> Arith:
    share = as_arith(party, x, narrow=True)
    check(x, bits)
    if x.shape[1] > 1 << (share.bits - 1):
        raise ValueError(f"{x.shape[1]} places in words of {share.bits} bits")
    places = np.arange(x.shape[1], dtype=np.uint64) * public_share(party, 1)
    both = np.stack([share.words, np.broadcast_to(places, share.shape)])
    winner = maximum_words(party, both, bits, share.bits, widest)[1]
    return Arith(winner, np.dtype(np.int32), 0, share.bits)


def _cost(x: Value, *, bits: int, widest: int = MAX_FAN_IN) -> Cost:
    rows, n = x.shape
    return arith_cost(x) + maximum_cost(rows, n, bits, width_of(x), _KINDS, widest)


def _correct(x: Value, *, bits: int, widest: int = MAX_FAN_IN) -> Correct:
    n = x.shape[1]

    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        if n > 1:
            difference = low_bits(wanted.words - made.words, made.bits)
            correct_maximum(party, difference, n, bits, made.bits, _KINDS, widest)

    return correct


argmax = protocol_op(
    "argmax",
    reference=lambda x, bits, widest=MAX_FAN_IN: x.argmax(axis=-1).astype(np.int32),
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
)
"""The index (int32 [rows]) of the largest number of every row of x [rows, n]; the first of equals.
Differences in a row lie within 2^(bits-1), exclusive, of the ring (a float's encoding). A narrow
share of at least `bits` bits stays narrow; it must hold n, too, and `mux` of such ones may be off.
Matches are of `widest` numbers at most: the fewer, the fewer comparisons, and the more rounds.
"""
