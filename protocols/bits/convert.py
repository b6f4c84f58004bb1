"""Boolean to arithmetic shares, and products of private bits, from one prepared product of bits.

The correlation: the client's random bit c, the provider's random bit p, additive shares of c * p;
one correlated OT inside SPU. Hence two things in one round each:

- A shared random bit l = c ^ p is known in both forms, since c ^ p = c + p - 2 c p (a "daBit",
  Rotaru and Wood, INDOCRYPT'19). Opening m = s ^ l makes s = m + (1 - 2m) l arithmetic.
- The product u * v of the client's bit u and the provider's v, with u ^ c and v ^ p opened:
  u = d + (1 - 2d) c and v = e + (1 - 2e) p, so u v is linear in c, p and c * p.
"""

from __future__ import annotations

import math

import numpy as np

from protocols.bits.planes import bytes_for
from spu_llm.core.correlation import Correlation, Form, Part
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import (
    CLIENT,
    Arith,
    Bool,
    Owner,
    Public,
    Value,
    encode,
    frac_bits_of,
)

_1 = np.uint64(1)
_2 = np.uint64(2)
_BITS_AT_ONCE = 1 << 20  # bounds memory: a bit takes a word while it is worked on

BITS = Correlation(
    name="product of bits",
    masks=(Part((), Owner.CLIENT, Form.BIT), Part((), Owner.PROVIDER, Form.BIT)),
    results=(Part((), Owner.JOINT, Form.ARITH),),
    # The provider's bit as an additive share: then SPU's product is a correlated OT.
    inputs=(Part((), Owner.CLIENT, Form.BIT), Part((), Owner.PROVIDER, Form.ARITH)),
    secure=lambda c, p: [c.astype(np.int64) * p],
    chunk=1 << 15,
)


def swap_bits(party: Party, bits: np.ndarray) -> np.ndarray:
    """Send masked bits (uint8 of 0 or 1), return the peer's; one message each way."""
    party.send_bytes(np.packbits(bits.reshape(-1), bitorder="little"))
    data = party.recv_bytes((bytes_for(bits.size),))
    return np.unpackbits(data, count=bits.size, bitorder="little").reshape(bits.shape)


def shared_bit(rank: int, opened: np.ndarray, own: np.ndarray, product: np.ndarray) -> np.ndarray:
    """Additive share of the bit opened ^ l, with l = c ^ p; `own` is this party's c or p."""
    mask = own - _2 * product
    return (_1 - _2 * opened) * mask + (opened if rank == CLIENT else np.uint64(0))


def product_of_bits(
    rank: int, d: np.ndarray, e: np.ndarray, own: np.ndarray, product: np.ndarray
) -> np.ndarray:
    """Additive share of (d ^ c) * (e ^ p); `own` is this party's c or p."""
    flip_d, flip_e = _1 - _2 * d, _1 - _2 * e
    crossed = flip_d * flip_e * product
    if rank == CLIENT:
        return crossed + d * e + flip_d * e * own
    return crossed + d * flip_e * own


def product_of_own_bits(party: Party, bit: np.ndarray) -> np.ndarray:
    """Additive share of the product of a bit of each party (words of 0 or 1, any shape), the one
    that this party gives among them; one message each way, a bit per value.
    """
    material = party.take(BITS, bit.size)
    own = material.masks[party.rank].reshape(bit.shape)
    own_part = bit ^ own
    peers = swap_bits(party, own_part.astype(np.uint8)).astype(np.uint64)
    d, e = (own_part, peers) if party.rank == CLIENT else (peers, own_part)
    return product_of_bits(party.rank, d, e, own, material.results[0].reshape(bit.shape))


def correct_product_of_own_bits(party: SimulatedParty, difference: np.ndarray) -> None:
    """Add `difference` (words) to what `product_of_own_bits`, the last step, gives."""
    own_part, peers = (
        np.unpackbits(m[-1], count=difference.size, bitorder="little").astype(np.uint64)
        for m in (party.outgoing, party.incoming)
    )
    product = party.drawn[-1]
    sign = (_1 - _2 * own_part) * (_1 - _2 * peers)
    product += (sign * difference.reshape(-1)).reshape(product.shape)


def arith_from_bool(party: Party, x: Bool) -> Arith:
    """Additive shares of a boolean share: one message each way, one bit per bit of x.

    1. Open m = s ^ l for every bit s of x under a prepared random bit l.
    2. x = sum_i 2^i (m_i + (1 - 2 m_i) l_i) on additive shares of the l_i.
    """
    rows = x.words.reshape(-1)
    slices = [
        slice(i, i + _BITS_AT_ONCE // x.bits) for i in range(0, rows.size, _BITS_AT_ONCE // x.bits)
    ]
    # 1. What is kept of every slice is a byte per bit, and the prepared products.
    masked, owns, products = [], [], []
    for some in slices:
        bits = share_bits(rows[some], x.bits)
        material = party.take(BITS, bits.size)
        own = material.masks[party.rank].reshape(bits.shape)
        masked.append((bits ^ own).astype(np.uint8))
        owns.append(own.astype(np.uint8))
        products.append(material.results[0].reshape(bits.shape))
    own_part = np.concatenate(masked) if masked else np.zeros((0, x.bits), np.uint8)
    opened = own_part ^ swap_bits(party, own_part)
    # 2.
    words = np.zeros(rows.size, np.uint64)
    for some, own, product in zip(slices, owns, products, strict=True):
        words[some] = _weigh(party.rank, opened[some], own.astype(np.uint64), product)
    return Arith(words.reshape(x.shape), arith_dtype(x.dtype), x.frac_bits)


def share_bits(words: np.ndarray, bits: int) -> np.ndarray:
    """The low bits of words [rows], lowest first: [rows, bits], a word each."""
    return (words[:, None] >> np.arange(bits, dtype=np.uint64)) & _1


def _weigh(rank: int, opened: np.ndarray, own: np.ndarray, product: np.ndarray) -> np.ndarray:
    shifts = np.arange(opened.shape[1], dtype=np.uint64)
    bits = shared_bit(rank, opened.astype(np.uint64), own, product)
    return (bits << shifts).sum(axis=1, dtype=np.uint64)


def arith_dtype(dtype: np.dtype) -> np.dtype:
    """Of a boolean share once it is arithmetic: bits become integers."""
    return np.dtype(np.int32) if dtype == np.bool_ else dtype


def as_arith(party: Party, value: Value) -> Arith:
    """Additive shares of a value in any form.

    What one party knows (or both) is one share, and zero the other; nothing is sent. Boolean shares
    cost one message each way (`arith_from_bool`). ValueError for a narrow additive share: its sum
    may wrap, so it is no share mod 2^64.
    """
    if isinstance(value, Arith):
        if value.bits != 64:
            raise ValueError(f"expected a share mod 2^64, found one mod 2^{value.bits}")
        return value
    if isinstance(value, Bool):
        return arith_from_bool(party, value)
    frac_bits = frac_bits_of(value.dtype, party.frac_bits)
    holder = CLIENT if isinstance(value, Public) else value.owner
    words = np.zeros(value.shape, np.uint64)
    if party.rank == holder:
        assert value.value is not None
        words = encode(value.value, frac_bits)
    return Arith(words, value.dtype, frac_bits)


def arith_cost(*values: Value) -> Cost:
    """Price of `as_arith` for each of the values."""
    total = Cost()
    for x in values:
        if isinstance(x, Bool):
            size = bytes_for(math.prod(x.shape) * x.bits)
            total += Cost(2, 1, size, size)
    return total


# ---- the op


def correct_bits(
    party: SimulatedParty, width: int, made: np.ndarray, wanted: np.ndarray
) -> None:
    """Change the last conversion's drawn words so that its result `made` becomes `wanted`.

    `width`: bits per value. The lowest bit of a result share is fixed by what came in (client) or
    by the own mask (provider), the others by the prepared product of the lowest bit.
    """
    shape = made.size, width
    own, product = (party.drawn[i].reshape(shape) for i in (-3 + party.rank, -1))
    own_part, peers = (
        np.unpackbits(m[-1], count=made.size * width, bitorder="little").reshape(shape)
        for m in (party.outgoing, party.incoming)
    )
    own_part, peers = own_part.astype(np.uint64), peers.astype(np.uint64)

    def lowest() -> np.ndarray:
        return shared_bit(party.rank, own_part[:, 0] ^ peers[:, 0], own[:, 0], product[:, 0])

    rest = made.reshape(-1) - lowest()
    odd = (wanted - made).reshape(-1) & _1
    if party.rank == CLIENT:
        peers[:, 0] ^= odd
        party.incoming[-1][:] = np.packbits(peers.astype(np.uint8), bitorder="little")
    else:
        own[:, 0] ^= odd
        own_part[:, 0] ^= odd
        party.outgoing[-1][:] = np.packbits(own_part.astype(np.uint8), bitorder="little")
    even = wanted.reshape(-1) - rest - lowest()
    # The top bit of the product has no weight in 2 * product: it stays as drawn.
    product[:, 0] -= (_1 - _2 * (own_part[:, 0] ^ peers[:, 0])) * (even >> _1)


def _correct(x: Value) -> Correct:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        if isinstance(x, Bool) and made.words.size:
            correct_bits(party, x.bits, made.words, wanted.words)

    return correct


to_arith = protocol_op(
    "to_arith",
    reference=lambda x: x.astype(np.int32) if x.dtype == np.bool_ else x,
    two_party=as_arith,
    cost=arith_cost,
    simulate=uniform_messages(as_arith, _correct),
)
"""A value in any form as additive shares; a bit becomes the integer 0 or 1."""
