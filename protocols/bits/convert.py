"""Boolean to arithmetic shares, and products of private bits, from one prepared bit in both forms.

The correlation (a "daBit", Rotaru and Wood, INDOCRYPT'19): a random bit l = c ^ p of which the
client knows c and the provider p, and additive shares of -l = -c - p + 2 c p. The product takes one
random transfer (Gilboa, CRYPTO'99): the chooser's bit u is that of the transfer; with strings s_0,
s_1 and a bit v, its peer sends e = s_0 - s_1 + 2 v, and s_u + u e = s_0 + 2 u v. The parties take
turns in choosing. Where only the low bits of -l count, only these are sent. Hence two things in one
round each:

- Opening m = s ^ l makes a shared bit s = m + (1 - 2m) l arithmetic.
- The product u v of the client's bit u and the provider's v, with d = u ^ c and e = v ^ p opened:
  u = d + (1 - 2d) c and v = e + (1 - 2e) p, so u v is linear in c, p and c p, and 2 c p is
  c + p - l. What can be had is 2 u v, mod 2^64: u v itself lacks its top bit.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from protocols.bits.planes import bytes_for, pack, unpack
from spu_llm.core.correlation import Correlation, Correlations, Form, Part
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.transfers import Transfers
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    Arith,
    Bool,
    Owner,
    Private,
    Public,
    Value,
    encode,
    frac_bits_of,
    from_bytes,
    to_bytes,
)

_1 = np.uint64(1)
_2 = np.uint64(2)
_BITS_AT_ONCE = 1 << 20  # bounds memory: a bit takes a word while it is worked on


def _bits_by_transfers(width: int, source: Transfers, units: int) -> Correlations:
    """Make units of `shared_bits`: one message each way, a word for each transfer that is
    offered.
    """
    counts = {CLIENT: units - units // 2, PROVIDER: units // 2}  # by the chooser
    (bits, strings), (zero, one) = source.both(counts[CLIENT], counts[PROVIDER])
    own = source.draw((len(zero),)) & _1
    sent = zero[:, 0] - one[:, 0] + _2 * own
    size = bytes_for(width)
    peers = from_bytes(source.swap(to_bytes(sent, width), size * len(bits)), width)
    chose = (bits, strings[:, 0] + bits * peers - bits)
    offered = (own, np.uint64(0) - zero[:, 0] - own)
    return of_halves(source.rank, chose, offered)


def of_halves(
    rank: int, chose: tuple[np.ndarray, np.ndarray], offered: tuple[np.ndarray, np.ndarray]
) -> Correlations:
    """Return units of a bit of each party and a shared result, in a first part of which the client
    chose and in the rest the provider. `chose`, `offered`: bits and shares where this party did.
    """
    both = (chose, offered) if rank == CLIENT else (offered, chose)
    mask, share = (np.concatenate(parts) for parts in zip(*both, strict=True))
    masks = [np.zeros_like(mask), np.zeros_like(mask)]
    masks[rank] = mask
    return Correlations(masks, [share])


@functools.cache
def shared_bits(width: int) -> Correlation:
    """Return the correlation of shared bits, of which -l holds mod 2^width: whole bytes."""
    return Correlation(
        name=f"shared bit {width}",
        masks=(Part((), Owner.CLIENT, Form.BIT), Part((), Owner.PROVIDER, Form.BIT)),
        results=(Part((), Owner.JOINT, Form.ARITH),),
        secure=lambda c, p: [-(c ^ p).astype(np.int64)],
        by_transfers=functools.partial(_bits_by_transfers, width),
        transfers=(0.5, 0.5),
        chunk=1 << 15,
    )


def width_of_wrap(place: int) -> int:
    """Return the bits of -l that count in a wrap times 2^place, in whole bytes."""
    return 8 * -(-(65 - place) // 8)


def swap_bits(party: Party, bits: np.ndarray) -> np.ndarray:
    """Send masked bits (uint8 of 0 or 1), return the peer's; one message each way."""
    party.send_bytes(pack(bits))
    data = party.recv_bytes((bytes_for(bits.size),))
    return np.unpackbits(data, count=bits.size, bitorder="little").reshape(bits.shape)


def swap_cost(bits: int) -> Cost:
    """Return the cost of `swap_bits`."""
    return Cost(2, 1, bytes_for(bits), bytes_for(bits))


def shared_bit(rank: int, opened: np.ndarray, minus_l: np.ndarray) -> np.ndarray:
    """Compute the additive share of the bit opened ^ l, from the share of -l."""
    return (_2 * opened - _1) * minus_l + (opened if rank == CLIENT else np.uint64(0))


def twice_product_of_bits(
    rank: int, d: np.ndarray, e: np.ndarray, own: np.ndarray, minus_l: np.ndarray
) -> np.ndarray:
    """Compute the additive share of 2 (d ^ c) (e ^ p); `own` is this party's c or p."""
    flip_d, flip_e = _1 - _2 * d, _1 - _2 * e
    crossed = flip_d * flip_e * (own + minus_l)
    if rank == CLIENT:
        return crossed + _2 * (d * e + flip_d * e * own)
    return crossed + _2 * d * flip_e * own


def twice_product_of_own_bits(party: Party, bit: np.ndarray, width: int) -> np.ndarray:
    """Compute the additive share mod 2^width of twice the product of a bit of each party, of which
    this party gives `bit` (words of 0 or 1, any shape); one message each way, a bit per value.
    """
    correlations = party.take(shared_bits(width), bit.size)
    own = correlations.masks[party.rank].reshape(bit.shape)
    own_part = bit ^ own
    peers = swap_bits(party, own_part.astype(np.uint8)).astype(np.uint64)
    d, e = (own_part, peers) if party.rank == CLIENT else (peers, own_part)
    minus_l = correlations.results[0].reshape(bit.shape)
    return twice_product_of_bits(party.rank, d, e, own, minus_l)


def wrap_of(party: Party, words: np.ndarray, place: int, bits: int = 64) -> np.ndarray:
    """Compute additive shares of 2^place, if both parties' words, below 2^bits each, add up to
    2^bits or more, else of zero: of 1 - (1 - top_0)(1 - top_1) for their top bits, times 2^place.
    The sum mod 2^bits has to be below 2^(bits-1); place >= 1. One message each way, a bit per
    value.
    """
    top = (words >> np.uint64(bits - 1)) ^ _1
    no_wrap = twice_product_of_own_bits(party, top, width_of_wrap(place))
    return (public_share(party, 2) - no_wrap) << np.uint64(place - 1)


def correct_wrap(party: SimulatedParty, difference: np.ndarray, place: int) -> None:
    """Take `difference`, multiples of 2^(place-1), from what `wrap_of`, the last step, gives."""
    own_part, peers = (unpack(m[-1], difference.size) for m in (party.outgoing, party.incoming))
    minus_l = party.drawn[-1]
    sign = (_1 - _2 * own_part) * (_1 - _2 * peers)
    minus_l += (sign * (difference.reshape(-1) >> np.uint64(place - 1))).reshape(minus_l.shape)


def arith_from_bool(party: Party, x: Bool) -> Arith:
    """Convert a boolean share to additive shares: one message each way, one bit per bit of x.

    1. Open m = s ^ l for every bit s of x under a prepared random bit l.
    2. x = sum_i 2^i (m_i + (1 - 2 m_i) l_i) on additive shares of the l_i.
    """
    rows, places = x.words.reshape(-1), np.arange(x.bits, dtype=np.uint64)
    step = _BITS_AT_ONCE // x.bits
    slices = [slice(i, i + step) for i in range(0, rows.size, step)]
    # 1. What is kept of every slice is a byte per bit, and the prepared words.
    own_part = np.empty((rows.size, x.bits), np.uint8)
    prepared = np.empty((rows.size, x.bits), np.uint64)
    for some in slices:
        bits = (rows[some, None] >> places) & _1
        correlations = party.take(shared_bits(64), bits.size)
        own_part[some] = bits ^ correlations.masks[party.rank].reshape(bits.shape)
        prepared[some] = correlations.results[0].reshape(bits.shape)
    opened = own_part ^ swap_bits(party, own_part)
    # 2.
    words = np.zeros(rows.size, np.uint64)
    for some in slices:
        bits = shared_bit(party.rank, opened[some].astype(np.uint64), prepared[some])
        words[some] = (bits << places).sum(axis=1, dtype=np.uint64)
    dtype = np.dtype(np.int32) if x.dtype == np.bool_ else x.dtype  # bits become integers
    return Arith(words.reshape(x.shape), dtype, x.frac_bits)


def as_arith(party: Party, value: Value, *, narrow: bool = False) -> Arith:
    """Return additive shares of a value in any form.

    What one party knows (or both) is one share, and zero the other; nothing is sent. Boolean shares
    cost one message each way (`arith_from_bool`). Raise ValueError for a narrow additive share,
    unless `narrow` says that it will do: its sum may wrap, so it is no share mod 2^64.
    """
    if isinstance(value, Arith):
        if value.bits != 64 and not narrow:
            raise ValueError(f"expected a share mod 2^64, found one mod 2^{value.bits}")
        return value
    if isinstance(value, Bool):
        return arith_from_bool(party, value)
    frac_bits = frac_bits_of(value.dtype, party.frac_bits)
    return Arith(known_words(party, value, frac_bits), value.dtype, frac_bits)


def known_words(
    party: Party, value: Public | Private, frac_bits: int = 0, *, public_at: int = CLIENT
) -> np.ndarray:
    """Return this party's share of a value that is plain somewhere: its encoding at the party that
    knows it, or at `public_at` where both do, and zeros at the other party.
    """
    if party.rank != (public_at if isinstance(value, Public) else value.owner):
        return np.zeros(value.shape, np.uint64)
    assert value.value is not None
    return encode(value.value, frac_bits)


def public_share(party: Party, number: int) -> np.uint64:
    """Return this party's share of a public number: the client has it, the provider zero."""
    return np.uint64(number if party.rank == CLIENT else 0)


def arith_cost(*values: Value) -> Cost:
    """Return the cost of `as_arith` for all of the values."""
    total = Cost()
    for x in values:
        if isinstance(x, Bool):
            total += swap_cost(math.prod(x.shape) * x.bits)
    return total


# ---- the op


def correct_bits(party: SimulatedParty, width: int, made: np.ndarray, wanted: np.ndarray) -> None:
    """Change the last conversion's drawn words so that its result `made` becomes `wanted`: those
    that belong to the lowest bits. `width`: bits per value.
    """
    own_part, peers = (
        unpack(m[-1], made.size * width).reshape(made.size, width)[:, 0]
        for m in (party.outgoing, party.incoming)
    )
    prepared = party.drawn[-1].reshape(made.size, width)
    prepared[:, 0] += (_2 * (own_part ^ peers) - _1) * (wanted - made).reshape(-1)


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
