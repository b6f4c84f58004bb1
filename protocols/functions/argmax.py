"""Where the largest of a row of shared numbers stands.

Every number carries its index in the bits below its own, counted from the end, so that no two are
equal and the first of equal ones wins; the tournament of `protocols.functions.maximum` finds the
largest, and its low bits are the answer. They are a share mod 2^width of something below
2^(width-1). Then the shares add up with a wrap unless both top bits are 0, which one product of
private bits tells.
"""

from __future__ import annotations

import numpy as np

from protocols.arithmetic.truncate import truncate_cost
from protocols.bits.convert import (
    arith_cost,
    as_arith,
    correct_product_of_own_bits,
    public_share,
    wrap_of,
)
from protocols.functions.maximum import correct_maximum, maximum_cost, maximum_words
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, Arith, Value, low_bits


def _width(n: int) -> int:
    """Bits of an index, and a zero above."""
    return max(1, (n - 1).bit_length()) + 1


def _two_party(party: Party, x: Value, *, bits: int) -> Arith:
    """1. Places below the numbers. 2. The maximum. 3. Its low bits as a share mod 2^64."""
    share = as_arith(party, x)
    n, width = x.shape[1], _width(x.shape[1])
    # 1.
    words = share.words << np.uint64(width)
    if party.rank == CLIENT:
        words = words + np.arange(n - 1, -1, -1, dtype=np.uint64)
    # 2.
    best = maximum_words(party, words, bits + width)
    # 3.
    low = low_bits(best, width)
    from_end = low - (wrap_of(party, low, width) << np.uint64(width))
    return Arith(public_share(party, n - 1) - from_end, np.dtype(np.int32), 0)


def _cost(x: Value, *, bits: int) -> Cost:
    rows, n = x.shape
    return arith_cost(x) + maximum_cost(rows, n, bits + _width(n)) + truncate_cost(rows)


def _correct(x: Value, *, bits: int) -> Correct:
    n = x.shape[1]
    width = _width(n)

    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        """The low bits come from the last level's products, the others from the product of bits."""
        difference = made.words - wanted.words  # of the index
        low = low_bits(difference, width)
        if low.any():
            assert n > 1
            correct_maximum(party, low, n, bits + width, later=1)
            return
        correct_product_of_own_bits(party, difference >> np.uint64(width))

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
