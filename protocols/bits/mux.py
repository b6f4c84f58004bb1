"""A shared bit times a shared word: b x for b = b_0 ^ b_1 and x = x_0 + x_1.

Prepared are a random bit l = c ^ p, whose parts the parties know, a random shared word w, and
shares of l w and of l. With d = b ^ l and f = x - w opened,

    b x = d x + (1 - 2d) l x = d x + (1 - 2d) (f l + l w).

Of a narrow share of x, mod 2^bits, only the bytes that hold its bits are sent, and up to 32 bits
one prepared word stands for both products: l (2^32 w + 1).

Ahead. With w = w_0 + w_1, l w_0 is c w_0 + p r for r = (1 - 2c) w_0: of one transfer in which the
provider chooses p, the client takes r as the difference of its strings, which makes w_0 (Gilboa,
CRYPTO'99, with one bit, and without a message). With the parties exchanged, l w_1. What is sent is
what lies in no random word: for -l, 2 c p (`protocols.bits.convert`), eight bytes; of a narrow
product the low half of (1 - 2c)(2^32 w_0 + 1), four.
"""

from __future__ import annotations

import math

import numpy as np

from protocols.bits.convert import arith_cost, as_arith, public_share
from protocols.bits.logic import as_bool
from protocols.bits.planes import bytes_for, pack, unpack
from spu_llm.core.correlation import Correlation, Correlations, Form, Part
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.transfers import Transfers
from spu_llm.core.values import CLIENT, Arith, Owner, Value, from_bytes, low_bits, to_bytes

_1, _2 = np.uint64(1), np.uint64(2)
NARROW_BITS = 32
_LOW = np.uint64((1 << NARROW_BITS) - 1)

_MASKS = (
    Part((), Owner.CLIENT, Form.BIT),  # c
    Part((), Owner.PROVIDER, Form.BIT),  # p
    Part((), Owner.JOINT, Form.ARITH),  # w; of narrow words the low 32 bits count
)


def _whole_by_transfers(source: Transfers, units: int) -> Correlations:
    """Make units of `BIT_TIMES_WORD`: one message of eight bytes each, of the provider's."""
    (bits, strings), (zero, one) = source.both(units, units)
    between = one[:, 0] - zero[:, 0]
    word = _signed(bits, between)
    share_of_lw = bits * word - zero[:, 0] + strings[:, 0]
    # 2 c p by the transfers in which the client chooses c, in the second words of their strings.
    if source.rank == CLIENT:
        peers = source.swap(np.empty(0, np.uint64), 8 * units).view(np.uint64)
        minus_l = strings[:, 1] + bits * peers - bits
    else:
        source.swap(zero[:, 1] - one[:, 1] + _2 * bits, 0)
        minus_l = np.uint64(0) - zero[:, 1] - bits
    return _made(source.rank, bits, word, np.stack([share_of_lw, minus_l], axis=-1))


def _narrow_by_transfers(source: Transfers, units: int) -> Correlations:
    """Make units of `BIT_TIMES_NARROW_WORD`: one message of four bytes each, of the client's."""
    (bits, strings), (zero, one) = source.both(units, units)
    half = np.uint64(NARROW_BITS)
    if source.rank == CLIENT:
        # e = s_0 - s_1 + (1 - 2c)(2^32 w_0 + 1), of which w_0 makes the upper half zero.
        rest = zero[:, 0] - one[:, 0] + _signed(bits, np.ones(units, np.uint64))
        word = _signed(bits, np.uint64(0) - (rest >> half)) & _LOW
        source.swap((rest & _LOW).astype(np.uint32), 0)
        product = bits * ((word << half) + _1) - zero[:, 0] + (strings[:, 0] << half)
    else:
        peers = source.swap(np.empty(0, np.uint32), 4 * units).view(np.uint32)
        word = _signed(bits, one[:, 0] - zero[:, 0])
        product = bits * (word << half) - (zero[:, 0] << half)
        product += strings[:, 0] + bits * peers
    return _made(source.rank, bits, word, product)


def _signed(bits: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return (1 - 2 bit) word."""
    return (_1 - _2 * bits) * words


def _made(rank: int, bits: np.ndarray, word: np.ndarray, result: np.ndarray) -> Correlations:
    masks = [np.zeros_like(bits), np.zeros_like(bits), word]
    masks[rank] = bits
    return Correlations(masks, [result])


BIT_TIMES_WORD = Correlation(
    name="bits times whole words",
    masks=_MASKS,
    results=(Part((2,), Owner.JOINT, Form.ARITH),),
    # l w and -l.
    secure=lambda c, p, w: [np.stack([(c ^ p).astype(w.dtype) * w, -(c ^ p).astype(w.dtype)], -1)],
    by_transfers=_whole_by_transfers,
    transfers=(1, 1),
    chunk=1 << 14,
)

BIT_TIMES_NARROW_WORD = Correlation(
    name="bits times narrow words",
    masks=_MASKS,
    results=(Part((), Owner.JOINT, Form.ARITH),),
    secure=lambda c, p, w: [(c ^ p).astype(w.dtype) * (w * (1 << NARROW_BITS) + 1)],
    by_transfers=_narrow_by_transfers,
    transfers=(1, 1),
    chunk=1 << 15,
)


def correlation_for(bits: int) -> Correlation:
    """Return the correlation that words of `bits` bits are multiplied with."""
    return BIT_TIMES_NARROW_WORD if bits <= NARROW_BITS else BIT_TIMES_WORD


def _prepared(party: Party, correlations: Correlations, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return this party's shares of l and of l w, mod 2^bits."""
    (product,) = correlations.results
    if bits > NARROW_BITS:
        return np.uint64(0) - product[:, 1], product[:, 0]
    # The low halves add up to l + 2^32, unless they are 0 and l or l and 0: then, with probability
    # 2^-31, the product is off by one.
    return product & _LOW, (product >> np.uint64(NARROW_BITS)) + public_share(party, 1)


def mux_words(party: Party, bit: np.ndarray, x: np.ndarray, bits: int = 64) -> np.ndarray:
    """Compute shares of b x mod 2^bits. bit: this party's xor share (0 or 1) and x: its additive
    share, words [n].

    1. Each party sends its share of b under its bit of l, and its share of x under that of w.
    2. The sum above, every term of which is something opened times something shared.
    """
    correlations = party.take(correlation_for(bits), x.size)
    own_bit, own_word = correlations.masks[party.rank], correlations.masks[2]
    # 1.
    masked, rest = bit ^ own_bit, x - own_word
    party.send_bytes(np.concatenate([pack(masked), to_bytes(rest, bits)]))
    size = bytes_for(x.size)
    data = party.recv_bytes((size + bytes_for(bits) * x.size,))
    d, f = masked ^ unpack(data, x.size), rest + from_bytes(data[size:], bits)
    # 2.
    share_of_l, share_of_lw = _prepared(party, correlations, bits)
    return d * x + (_1 - _2 * d) * (f * share_of_l + share_of_lw)


def mux_cost(count: int, bits: int = 64) -> Cost:
    """Return the cost of `mux_words` for `count` values."""
    size = bytes_for(count) + bytes_for(bits) * count
    return Cost(2, 1, size, size)


def width_of(x: Value) -> int:
    """Return how many bits of a word a protocol has to carry."""
    return x.bits if isinstance(x, Arith) else 64


# ---- the op


def _two_party(party: Party, bit: Value, x: Value) -> Arith:
    share, words = as_bool(party, bit), as_arith(party, x, narrow=True)
    if not words.words.size:
        return words
    low = share.words.reshape(-1) & _1
    product = mux_words(party, low, words.words.reshape(-1), words.bits)
    return Arith(product.reshape(x.shape), words.dtype, words.frac_bits, words.bits)


def _cost(bit: Value, x: Value) -> Cost:
    count = math.prod(x.shape)
    return arith_cost(x) + (mux_cost(count, width_of(x)) if count else Cost())


def correct_mux(party: SimulatedParty, difference: np.ndarray, *, bits: int = 64) -> None:
    """Change the last prepared products so that the result, mod 2^bits, grows by `difference`
    (words). l w enters the result times 1 or -1, as the opened bit says.
    """
    sent, received = (unpack(m[-1], difference.size) for m in (party.outgoing, party.incoming))
    difference = (_1 - _2 * (sent ^ received)) * difference.reshape(-1)
    if bits > NARROW_BITS:
        party.drawn[-1][:, 0] += difference
    else:
        party.drawn[-1] += difference << np.uint64(NARROW_BITS)


def _correct(bit: Value, x: Value) -> Correct:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        if made.words.size:
            difference = low_bits(wanted.words - made.words, made.bits)
            correct_mux(party, difference, bits=made.bits)

    return correct


mux = protocol_op(
    "mux",
    reference=lambda bit, x: bit * x,
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
)
"""x where the bit is set, else zero; of equal shapes. One message each way, 8 bytes (fewer for a
narrow x, which stays narrow) and a bit per value. Up to 32 bits, a product is off by one with
probability 2^-31."""
