"""A shared bit times a shared word: b x for b = b_0 ^ b_1 and x = x_0 + x_1.

With X_0 = (1 - 2 b_0) x_0 of the client and X_1 = (1 - 2 b_1) x_1 of the provider,

    b x = b_0 x_0 + b_1 x_1 + b_0 X_1 + b_1 X_0,

and only the last two products are of both parties: a private bit times the other one's private
word. One is prepared for each direction (correlated OT, as in Gilboa, CRYPTO'99, with one bit).
Of a narrow share of x, mod 2^bits, only the bytes that hold its bits are sent.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from protocols.convert import arith_cost, as_arith
from protocols.logic import as_bool
from protocols.planes import bytes_for
from protocols.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.correlation import Correlation, Form, Part
from spu_llm.op import Cost, protocol_op
from spu_llm.party import Party
from spu_llm.values import CLIENT, PROVIDER, Arith, Owner, Value, from_bytes, low_bits, to_bytes

_1, _2 = np.uint64(1), np.uint64(2)

BIT_TIMES_WORD = Correlation(
    name="bits times words",
    masks=(
        Part((), Owner.CLIENT, Form.BIT),
        Part((), Owner.PROVIDER, Form.BIT),
        Part((), Owner.CLIENT, Form.ARITH),
        Part((), Owner.PROVIDER, Form.ARITH),
    ),
    results=(Part((2,), Owner.JOINT, Form.ARITH),),
    # Client's bit times provider's word, provider's bit times client's word.
    derive=lambda c, p, a, b: [_pair(c, p), _pair(b, a)],
    inputs=(Part((2,), Owner.JOINT, Form.BIT), Part((2,), Owner.JOINT, Form.ARITH)),
    secure=lambda bits, words: [bits.astype(words.dtype) * words],
    chunk=1 << 14,
)


def _pair(x: Any, y: Any) -> Any:
    return np.stack([x, y], axis=-1)


def mux_words(party: Party, bit: np.ndarray, x: np.ndarray, bits: int = 64) -> np.ndarray:
    """Shares of b x mod 2^bits. bit: this party's xor share (0 or 1) and x: its additive share,
    words [n].

    1. Each party sends its share of b under its prepared bit and its X under its prepared word.
    2. Both evaluate; with d = b_0 ^ c and f = X_1 - beta opened,
       b_0 X_1 = d X_1 + (1 - 2d) (c f + c beta), and likewise the other way round.
    """
    material = party.take(BIT_TIMES_WORD, x.size)
    own_bit, own_word = material.masks[party.rank], material.masks[2 + party.rank]
    signed = (_1 - _2 * bit) * x
    # 1.
    masked = bit ^ own_bit
    party.send_bytes(
        np.concatenate([
            np.packbits(masked.astype(np.uint8), bitorder="little"),
            to_bytes(signed - own_word, bits),
        ])
    )  # fmt: skip
    size = bytes_for(x.size)
    data = party.recv_bytes((size + bytes_for(bits) * x.size,))
    their_masked = np.unpackbits(data[:size], count=x.size, bitorder="little").astype(np.uint64)
    their_word = from_bytes(data[size:], bits)
    # 2. The product whose bit is ours, then the one whose word is ours.
    ours, theirs = material.results[0][:, party.rank], material.results[0][:, 1 - party.rank]
    product = bit * x
    product += (_1 - _2 * masked) * (own_bit * their_word + ours)
    product += their_masked * signed + (_1 - _2 * their_masked) * theirs
    return product


def mux_cost(count: int, bits: int = 64) -> Cost:
    """Of `mux_words` for `count` values."""
    size = bytes_for(count) + bytes_for(bits) * count
    return Cost(2, 1, size, size)


def width_of(x: Value) -> int:
    """Bits of a word that a protocol has to carry."""
    return x.bits if isinstance(x, Arith) else 64


# ---- the op


def _two_party(party: Party, bit: Value, x: Value) -> Arith:
    share, words = as_bool(party, bit), x if isinstance(x, Arith) else as_arith(party, x)
    if not words.words.size:
        return words
    low = share.words.reshape(-1) & _1
    product = mux_words(party, low, words.words.reshape(-1), words.bits)
    return Arith(product.reshape(x.shape), words.dtype, words.frac_bits, words.bits)


def _cost(bit: Value, x: Value) -> Cost:
    count = math.prod(x.shape)
    return arith_cost(x) + (mux_cost(count, width_of(x)) if count else Cost())


def correct_mux(
    party: SimulatedParty, made: np.ndarray, wanted: np.ndarray, *, later: int = 0
) -> None:
    """Change the last prepared products so that the result `made` becomes `wanted` (words).

    A product enters the result times 1 or -1, as the masked bit of its bit's owner says; the one
    with this party's own bit is changed. `later`: prepared products of bits
    (`protocols.convert.BITS`), and rounds, that come after these.
    """
    count = made.size
    data = party.outgoing[-1 - later][: bytes_for(count)]
    mine = np.unpackbits(data, count=count, bitorder="little").astype(np.uint64)
    difference = (wanted - made).reshape(-1)
    party.drawn[-1 - 3 * later][:, party.rank] += (_1 - _2 * mine) * difference


def _correct(bit: Value, x: Value) -> Correct:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        if made.words.size:
            difference = low_bits(wanted.words - made.words, made.bits)
            correct_mux(party, np.zeros_like(difference), difference)

    return correct


mux = protocol_op(
    "mux",
    reference=lambda bit, x: bit * x,
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
)
"""x where the bit is set, else zero; of equal shapes. One message each way, 8 bytes (fewer for a
narrow x, which stays narrow) and a bit per value."""

assert (CLIENT, PROVIDER) == (0, 1)  # masks and results are in the order of ranks
