"""Shares modulo 2^64, or a smaller power, to shares modulo p (`spu_llm.core.field`), and back
modulo 2^64: a round each, with a bit per value each way.

Either way each party truncates its own share, and what the shares of a wrapped-around sum are too
much is taken out: a wrap, of one known side of which the other two say, as in
`protocols.arithmetic.truncate`.

into  x_0 + x_1 = x + 2^(k-2) + w 2^k, for shares modulo 2^k and |x| < 2^(k-2), with
      w = 1 - (1 - top_0)(1 - top_1) of the top bits. The shares modulo p are floor(x_0 / 2^cut),
      ceil(x_1 / 2^cut), less w 2^(k-cut) and 2^(k-2-cut): x / 2^cut, rounded without a bias.
back  y_0 + y_1 = z + c + w p, for |z| < c = 2^46 - 2^20. Since z + c < p / 2, a sum that wraps has
      a share of at least p / 2, and one that does not has none: w = 1 - (1 - t_0)(1 - t_1), with
      t_i = [y_i > p / 2]. The shares modulo 2^64 are floor(y_0 / 2^shift), ceil(y_1 / 2^shift),
      less w (p - 1) / 2^shift and c / 2^shift: p is 1 modulo 2^shift, so that is z / 2^shift, or
      (z + 1) / 2^shift where w = 1, rounded without a bias. With shift = 0 all of w p is taken out.

Who rounds how depends on the shares, as in `protocols.arithmetic.truncate`, which says what that
tells whoever learns a result.

Products of a bit of each party come from one prepared for random bits c and q of theirs: with
d = u ^ c and e = v ^ q opened, u v is linear in c, q and c q. That takes a random transfer (Gilboa,
CRYPTO'99): the chooser's bit u is that of the transfer; with strings s_0, s_1 and a bit v, its peer
sends s_0 - s_1 + v, and s_u + u (s_0 - s_1 + v) = s_0 + u v.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from protocols.arithmetic.truncate import refresh
from protocols.bits.convert import of_halves, public_share, swap_bits, swap_cost
from protocols.bits.planes import unpack
from spu_llm.core import field
from spu_llm.core.correlation import Correlation, Correlations, Form, Part
from spu_llm.core.op import Cost
from spu_llm.core.party import Party
from spu_llm.core.simulated import SimulatedParty
from spu_llm.core.transfers import Transfers
from spu_llm.core.values import CLIENT, PROVIDER, Arith, Owner, from_bytes, low_bits, to_bytes

LIMIT_BITS = 46  # of what comes back: |z| is below 2^46 - 2^20

_0, _1, _2 = np.uint64(0), np.uint64(1), np.uint64(2)
_OFFSET_BACK = (1 << LIMIT_BITS) - (1 << field.MAX_SHIFT)
_HALF = np.uint64((field.P + 1) // 2)


# ---- products of bits


def _element(strings: np.ndarray) -> np.ndarray:
    """Return elements of the field, uniform but for 2^-80, of strings [n, 2]."""
    high = field.multiplied(field.reduced(strings[:, 1]), np.array((1 << 64) % field.P, np.uint64))
    return field.added(high, field.reduced(strings[:, 0]))


def _made(form: Form, source: Transfers, units: int) -> Correlations:
    """Make products of bits: one message each way, a word for each transfer that is offered. The
    parties choose in one half of the units each.
    """
    in_field = form is Form.FIELD
    counts = {CLIENT: units - units // 2, PROVIDER: units // 2}  # by the chooser
    (bits, strings), (zero, one) = source.both(counts[CLIENT], counts[PROVIDER])
    own = source.draw((len(zero),)) & _1
    if in_field:
        chosen, s_0, s_1 = _element(strings), _element(zero), _element(one)
        sent = field.added(field.subtracted(s_0, s_1), own)
    else:
        chosen, s_0, s_1 = strings[:, 0], zero[:, 0], one[:, 0]
        sent = s_0 - s_1 + own
    width = form.bits
    peers = from_bytes(source.swap(to_bytes(sent, width), width // 8 * len(bits)), width)
    if in_field:
        chose = bits, field.added(chosen, field.reduced(bits * peers))
        offered = own, field.subtracted(np.zeros_like(s_0), s_0)
    else:
        chose, offered = (bits, chosen + bits * peers), (own, _0 - s_0)
    return of_halves(source.rank, chose, offered)


def _products_of_bits(name: str, form: Form) -> Correlation:
    return Correlation(
        name=name,
        masks=(Part((), Owner.CLIENT, Form.BIT), Part((), Owner.PROVIDER, Form.BIT)),
        results=(Part((), Owner.JOINT, form),),
        secure=lambda c, q: [(c & q).astype(np.int64)],
        by_transfers=functools.partial(_made, form),
        transfers=(0.5, 0.5),
        chunk=1 << 15,
    )


def _chosen(source: Transfers, units: int) -> Correlations:
    """Make units of `FIELD_TRANSFER` of random transfers: nothing is sent."""
    if source.rank == CLIENT:
        bits, strings = source.choose(units)
        return Correlations([bits, np.zeros_like(bits)], [_element(strings)])
    zero, one = map(_element, source.offer(units))
    none = np.zeros_like(zero)
    return Correlations([none, field.subtracted(one, zero)], [field.subtracted(none, zero)])


FIELD_TRANSFER = Correlation(
    name="field transfer",
    masks=(Part((), Owner.CLIENT, Form.BIT), Part((), Owner.PROVIDER, Form.FIELD)),
    results=(Part((), Owner.JOINT, Form.FIELD),),
    secure=lambda c, d: [np.where(c, d, np.zeros_like(d))],
    by_transfers=_chosen,
    transfers=(1, 0),
    chunk=1 << 15,
)
"""A random transfer of an element: for shares w_client + w_provider = c d of the client's bit c and
the provider's d, k_0 = -w_provider and k_1 = d - w_provider, so that w_client = k_c. Since d is
uniform, the client knows nothing of the other one."""

PRODUCT_IN_FIELD = _products_of_bits("field bits", Form.FIELD)
PRODUCT_IN_RING = _products_of_bits("ring bits", Form.ARITH)


def _product_of_own_bits(party: Party, bit: np.ndarray, correlation: Correlation) -> np.ndarray:
    """Compute this party's share of the product of a bit of each, modulo 2^64, also if the prepared
    one is of the field: then below 2^50 as an integer. This party gives `bit`, words of 0 or 1.
    """
    correlations = party.take(correlation, bit.size)
    own = correlations.masks[party.rank].reshape(bit.shape)
    product = correlations.results[0].reshape(bit.shape)
    own_part = bit ^ own
    peers = swap_bits(party, own_part.astype(np.uint8)).astype(np.uint64)
    flip_own, flip_peers = _1 - _2 * own_part, _1 - _2 * peers
    # Of (d + flip_d c)(e + flip_e q): what has one's own mask, and at the client the public part.
    share = flip_own * flip_peers * product + peers * flip_own * own
    return share + own_part * peers if party.rank == CLIENT else share


# ---- into the field


def into_field(party: Party, parts: Sequence[tuple[Arith, int]]) -> list[np.ndarray]:
    """Compute shares modulo p of x / 2^cut, for shares modulo 2^k of each x and its cut, in one
    message each way; |x| < 2^(k-2).

    1. Add 2^(k-2) and truncate both shares. 2. The product of the top bits' complements. 3. Take
    the wrap out, and what was added. ValueError for a cut above k - 2.
    """
    if not all(0 <= cut <= x.bits - 2 for x, cut in parts):
        raise ValueError("a factor is cut by 0 bits to two less than it has")

    def each(numbers: Iterable[int]) -> np.ndarray:
        return np.repeat(np.array(list(numbers), np.uint64), [x.words.size for x, _ in parts])

    cuts, offsets = each(cut for _, cut in parts), each(1 << x.bits - 2 for x, _ in parts)
    words = np.concatenate([x.words.reshape(-1) for x, _ in parts])
    # 1.
    words = refresh(party, words) + (offsets if party.rank == CLIENT else _0)
    words &= each((1 << x.bits) - 1 for x, _ in parts)
    share = words >> cuts
    if party.rank == PROVIDER:
        share += (words & ((_1 << cuts) - _1) != 0).astype(np.uint64)
    # 2.
    top = words >> each(x.bits - 1 for x, _ in parts)
    no_wrap = _product_of_own_bits(party, top ^ _1, PRODUCT_IN_FIELD)
    # 3. w 2^(k-cut) = 2^(k-cut) - no_wrap 2^(k-cut).
    wraps = each((1 << x.bits - cut) % field.P for x, cut in parts)
    elements = field.added(
        field.reduced(share), field.multiplied(field.of_integers(no_wrap.view(np.int64)), wraps)
    )
    if party.rank == CLIENT:
        constant = field.reduced(offsets >> cuts)
        elements = field.subtracted(elements, field.added(wraps, constant))
    pieces = np.split(elements, np.cumsum([x.words.size for x, _ in parts])[:-1])
    return [piece.reshape(x.shape) for piece, (x, _) in zip(pieces, parts, strict=True)]


# ---- back into the ring


def into_ring(party: Party, z: np.ndarray, shift: int) -> np.ndarray:
    """Compute shares modulo 2^64 of z / 2^shift, from shares modulo p; |z| < 2^46 - 2^20, shift is
    20 at most.

    1. Add c and truncate both shares. 2. The product of [y_i < p / 2]. 3. Take the wrap out, and c.
    """
    if not 0 <= shift <= field.MAX_SHIFT:
        raise ValueError(f"a truncation by {shift} bits; give 0 to {field.MAX_SHIFT}")
    bits = np.uint64(shift)
    # 1.
    y = field.added(z, np.full_like(z, public_share(party, _OFFSET_BACK)))
    share = y >> bits
    if party.rank == PROVIDER:
        share += (low_bits(y, shift) != 0).astype(np.uint64)
    # 2.
    no_wrap = _product_of_own_bits(party, (y < _HALF).astype(np.uint64), PRODUCT_IN_RING)
    # 3.
    wrap = public_share(party, 1) - no_wrap
    return share - wrap * np.uint64(_of_wrap(shift)) - public_share(party, _OFFSET_BACK >> shift)


def _of_wrap(shift: int) -> int:
    return field.P >> shift


def correct_ring(
    party: SimulatedParty, difference: np.ndarray, shift: int, product: np.ndarray
) -> None:
    """Add `difference` to what `into_ring`, the last step, gives: by the prepared product of bits,
    and what is no multiple of its factor by `product`, a share that entered z, in place.
    """
    flat = difference.reshape(-1)
    own_part, peers = (unpack(m[-1], flat.size) for m in (party.outgoing, party.incoming))
    factor = _of_wrap(shift)
    twos = (factor & -factor).bit_length() - 1
    low = low_bits(flat, twos)
    moved = field.added(product.reshape(-1), low << np.uint64(shift))
    product[...] = moved.reshape(product.shape)
    inverse = np.uint64(pow(factor >> twos, -1, 1 << 64))
    sign = (_1 - _2 * own_part) * (_1 - _2 * peers)
    prepared = party.drawn[-1]
    prepared += (sign * ((flat - low) >> np.uint64(twos)) * inverse).reshape(prepared.shape)


def crossing_cost(into: int, back: int) -> Cost:
    """Return the cost of `into_field` for so many values, and of `into_ring`."""
    return (swap_cost(into) if into else Cost()) + (swap_cost(back) if back else Cost())


def opening_cost(elements: int) -> Cost:
    """Return the cost of opening masked elements."""
    size = field.BITS // 8 * elements
    return Cost(2, 1, size, size)
