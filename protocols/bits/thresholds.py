"""Whether a shared value is below each of many public thresholds, under one mask.

For x = x_0 + x_1 mod 2^bits, with all differences x - t in [-2^(bits-1), 2^(bits-1)). Ahead of time
the parties share a random number R twice: by words, R = R_0 + R_1 mod 2^bits, and by digits of its
low bits - 1 bits, of which they have xor shares of all products of bits in one digit
(`protocols.bits.gates`); and R's top bit.

  1. Open m = x + R mod 2^bits.
  2. For each t, m_t = m - t is public, and x - t = m_t - R. Its sign is the top bit of m_t, R's top
     bit, and the borrow [low(m_t) < low(R)]. A party has, of each digit of R, a share of every
     [digit = j] (sums of the products, the Moebius transform), hence of eq = [digit = c] and of
     gt = [digit > c] for the public digit c of m_t.
  3. borrow = gt_h + eq_h (gt_(h-1) + eq_(h-1) (...)), with the highest digit h first: one gate for
     each threshold, all of them at once.

Two rounds for any number of thresholds; a comparison by `protocols.bits.compare` opens masked bits
of each difference instead, in more rounds. (One mask for many thresholds: Boyle, Gilboa and Ishai,
"Secure Computation with Preprocessing via Function Secret Sharing", TCC 2019, section 4, for keys
of a dealer; here of transfers.)

Both parties learn m, which R makes uniform, and the gate's masked inputs.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from protocols.bits.compare import sign_of
from protocols.bits.convert import arith_cost, as_arith
from protocols.bits.gates import evaluate, gate_cost
from protocols.bits.mask_products import Products, make, plans
from protocols.bits.planes import (
    bytes_for,
    from_message,
    from_planes,
    to_message,
    to_planes,
    words_for,
)
from protocols.bits.polynomials import Gate, plus, times, variable
from protocols.bits.stars import Star, stars, transfers
from spu_llm.core.correlation import Correlation, Correlations, Form, Part, joined
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.transfers import Transfers
from spu_llm.core.values import CLIENT, Bool, Owner, Value, low_bits

_LARGEST_DIGIT = 5
_TRANSFERS_AT_ONCE = 1 << 18  # bounds memory
_1 = np.uint64(1)
_ALL = (1 << 64) - 1


def digits(bits: int) -> tuple[tuple[int, int], ...]:
    """Return (first bit, bits) of the digits of the low bits - 1 bits, lowest first, the larger
    ones first; there are two at least.
    """
    low = bits - 1
    count = max(2, -(-low // _LARGEST_DIGIT))
    sizes = [low // count + (i < low % count) for i in range(count)]
    return tuple(zip(itertools.accumulate([0, *sizes[:-1]]), sizes, strict=True))


@functools.cache
def number_gate(bits: int) -> Gate:
    """Return a gate of shared bits whose prepared sums are the products of two or more bits of each
    digit. It is never evaluated.
    """
    some = [
        frozenset(chosen)
        for first, size in digits(bits)
        for count in range(2, size + 1)
        for chosen in itertools.combinations(range(first, first + size), count)
    ]
    return Gate("number", 0, 0, bits, tuple(frozenset([s]) for s in some))


@functools.cache
def merge_gate(count: int) -> Gate:
    """Return the gate of what digits below the highest of `count` add to a borrow: of shared bits
    gt of each, lowest first, then eq of each but the lowest.
    """
    gt = [variable(i) for i in range(count - 1)]
    eq = {i: variable(count - 2 + i) for i in range(1, count)}
    above = [times(*(eq[j] for j in range(i + 1, count))) for i in range(count - 1)]
    whole = plus(*(times(x, y) for x, y in zip(gt, above, strict=True)))
    return Gate(f"merge {count}", 0, 0, 2 * count - 2, (whole,))


@functools.cache
def masked_number(bits: int) -> Correlation:
    """Return the correlation of R: a unit is 64 numbers. Masks: its bits, both parties' shares.
    Results: the products, and R by words.
    """
    gate = number_gate(bits)

    def secure(shared: Any) -> list[Any]:
        columns = shared.T
        made = [np.bitwise_and.reduce(columns[sorted(*p)]) for p in gate.sums]
        words = from_planes(np.ascontiguousarray(columns.view(np.uint64)), 64 * len(shared))
        return [np.stack(made, axis=-1), words.reshape(-1, 64).view(np.int64)]

    # What was prepared for other digits under the same name must not serve these.
    content = hashlib.sha256(repr(digits(bits)).encode()).hexdigest()[:8]
    by_client, by_provider = transfers(gate, alone=True)
    return Correlation(
        name=f"masked number {bits} {content}",
        masks=(Part((bits,), Owner.JOINT, Form.BOOL),),
        results=(
            Part((len(gate.sums),), Owner.JOINT, Form.BOOL),
            Part((64,), Owner.JOINT, Form.ARITH, bits),
        ),
        secure=secure,
        by_transfers=functools.partial(_by_transfers, bits),
        transfers=(64 * by_client, 64 * by_provider),
        chunk=max(2, int(_TRANSFERS_AT_ONCE / (64 * (by_client + by_provider))) * 2),
    )


def _by_transfers(bits: int, source: Transfers, units: int) -> Correlations:
    """Make units of `masked_number`: bits and products, then the words of R.

    With l_i = c_i ^ p_i, R is the sum of 2^i (c_i + p_i - 2 c_i p_i) mod 2^bits. The products with
    2^(i+1), of which the low n = bits - 1 - i bits count, are made of the second words of transfers
    whose choice is the chooser's share u of l_i (`protocols.bits.convert`): its peer, with v, sends
    n bits of s_0 - s_1 + v, and s_u + u (s_0 - s_1 + v) is s_0 + u v. One more message each way.
    """
    gate = number_gate(bits)
    halves = [Products(gate, source, first, count, keep=True) for first, count in plans(units)]
    make(halves)
    masks = [half.masks(range(bits)) for half in halves]
    mine, theirs = halves if source.rank == CLIENT else halves[::-1]
    sent = []
    for i, star in _choices(bits, theirs.first).items():
        zero, one = theirs.words[star]
        own = _unpacked(masks[halves.index(theirs)][:, i])
        sent.append(to_planes(zero - one + own, bits - 1 - i))
    planes = bits * (bits - 1) // 2
    peers = source.swap(np.concatenate(sent).reshape(-1), 8 * planes * mine.units)
    received = peers.view(np.uint64).reshape(planes, mine.units)
    words = []
    for half, shares in zip(halves, masks, strict=True):
        total = from_planes(np.ascontiguousarray(shares.T), 64 * half.units)
        for i, star in _choices(bits, half.first).items():
            place, count = np.uint64(i + 1), bits - 1 - i
            if half is mine:
                correction = from_planes(received[:count], 64 * half.units)
                received = received[count:]
                product = half.words[star][0] + _unpacked(shares[:, i]) * correction
                total -= product << place
            else:
                total += half.words[star][0] << place
        words.append(low_bits(total, bits).reshape(half.units, 64))
    return joined(
        [
            Correlations([shares], [half.sums(), some])
            for half, shares, some in zip(halves, masks, words, strict=True)
        ]
    )


@functools.cache
def _choices(bits: int, first: int) -> dict[int, Star]:
    """Return the transfer whose choice is party `first`'s share of each bit but the top one."""
    by_choice = {star.choice: star for star in stars(number_gate(bits), first, alone=True)}
    chosen = {i: by_choice[frozenset([variable(i)])] for i in range(bits - 1)}
    assert all(star.chooser == first and star.fresh_choice for star in chosen.values())
    return chosen


def _unpacked(plane: np.ndarray) -> np.ndarray:
    return from_planes(plane[None], 64 * len(plane))


# ---- online


Thresholds = tuple[tuple[int, ...], ...]  # of each row


def _below(party: Party, x: np.ndarray, thresholds: Thresholds, bits: int) -> np.ndarray:
    """Compute xor shares [all thresholds, values] of [x < t] from additive shares of x
    [rows, values] mod 2^bits.
    """
    layout, count = digits(bits), sum(map(len, thresholds))
    correlations = party.take(masked_number(bits), words_for(x.size))
    mask, (products, number) = correlations.masks[0].T, correlations.results
    # 1.
    own = low_bits(x.reshape(-1) + number.reshape(-1)[: x.size], bits)
    party.send_bytes(to_message(to_planes(own, bits), x.size))
    peers = from_message(party.recv_bytes((bits, bytes_for(x.size))), x.size)
    opened = (own + from_planes(peers, x.size)).reshape(x.shape)
    # 2.
    one_hots = _one_hot(party.rank, bits, mask, products, x)
    aboves = [_above(words, size) for words, (_, size) in zip(one_hots, layout, strict=True)]
    top = from_planes(mask[bits - 1 : bits], x.size).reshape(x.shape)
    inputs = np.empty((2 * len(layout) - 2, count, x.shape[1]), np.uint8)
    sign = np.empty((count, x.shape[1]), np.uint64)
    each = ((row, t) for row, some in enumerate(thresholds) for t in some)
    for k, (row, t) in enumerate(each):
        moved = low_bits(opened[row] - np.uint64(t & _ALL), bits)
        places = [low_bits(moved >> np.uint64(first), size) for first, size in layout]
        gt = [_bit(words[row], place) for words, place in zip(aboves, places, strict=True)]
        eq = [_bit(words[row], place) for words, place in zip(one_hots, places, strict=True)]
        inputs[:, k] = [*gt[:-1], *eq[1:]]
        sign[k] = gt[-1] ^ top[row]
        if party.rank == CLIENT:
            sign[k] ^= _bit(moved, np.uint64(bits - 1))
    # 3.
    planes = np.zeros((len(inputs), 8 * words_for(sign.size)), np.uint8)
    packed = np.packbits(inputs.reshape(len(inputs), -1), axis=1, bitorder="little")
    planes[:, : packed.shape[1]] = packed
    gate = merge_gate(len(layout))
    borrow = evaluate(party, gate, sign.size, 1, planes.view(np.uint64)[None])
    return from_planes(borrow[0], sign.size).reshape(sign.shape) ^ sign


def _bit(words: np.ndarray, places: np.ndarray | np.uint64) -> np.ndarray:
    """Return the bit of each word at a place."""
    return (words >> places) & _1


def _one_hot(
    rank: int, bits: int, mask: np.ndarray, products: np.ndarray, x: np.ndarray
) -> list[np.ndarray]:
    """Return this party's shares of [digit = j] in bit j of words of x's shape, for each digit."""
    sums = {p: products[:, k] for k, p in enumerate(number_gate(bits).sums)}
    made = []
    for first, size in digits(bits):
        planes = []
        for j in range(1 << size):
            s = frozenset(first + i for i in range(size) if j >> i & 1)
            if len(s) == 1:
                planes.append(mask[min(s)])
            elif s:
                planes.append(sums[frozenset([s])])
            else:
                planes.append(np.full(mask.shape[1], _ALL if rank == CLIENT else 0, np.uint64))
        words = from_planes(np.stack(planes), x.size)
        # [digit = j] is the sum of the products over all sets that contain j's ones.
        for i in range(size):
            lower = sum(1 << j for j in range(1 << size) if not j >> i & 1)
            words ^= (words >> np.uint64(1 << i)) & np.uint64(lower)
        made.append(words.reshape(x.shape))
    return made


def _above(one_hot: np.ndarray, size: int) -> np.ndarray:
    """Return shares of [digit > j] in bit j: the sum of all higher bits of each word."""
    words = one_hot >> _1
    for i in range(size):
        words = words ^ (words >> np.uint64(1 << i))
    return words


def below_cost(rows: int, values: int, count: int, bits: int) -> Cost:
    """Return the cost of `below` for `count` thresholds of so many rows of values."""
    opened = bits * bytes_for(rows * values)
    return Cost(2, 1, opened, opened) + gate_cost(merge_gate(len(digits(bits))), count * values, 1)


def _sizes(x: Value, thresholds: Thresholds) -> tuple[int, int, int]:
    """Return the rows, the values of each, and the thresholds of all."""
    if len(x.shape) < 1 or x.shape[0] != len(thresholds):
        raise ValueError(f"thresholds of {len(thresholds)} rows for shape {x.shape}")
    return x.shape[0], math.prod(x.shape[1:]), sum(map(len, thresholds))


def _two_party(party: Party, x: Value, *, thresholds: Thresholds, bits: int) -> Bool:
    share = as_arith(party, x, narrow=True)
    if not 5 <= bits <= share.bits:
        raise ValueError(f"thresholds of {bits} bits of a share of {share.bits}; give 5 to that")
    rows, values, count = _sizes(x, thresholds)
    shape = (count, *x.shape[1:])
    if not values * count:
        return Bool(np.zeros(shape, np.uint64), np.dtype(np.bool_), 0, 1)
    made = _below(party, share.words.reshape(rows, values), thresholds, bits)
    return Bool(made.reshape(shape), np.dtype(np.bool_), 0, 1)


def _cost(x: Value, *, thresholds: Thresholds, bits: int) -> Cost:
    rows, values, count = _sizes(x, thresholds)
    return arith_cost(x) + (below_cost(rows, values, count, bits) if values * count else Cost())


def _correct(x: Value, *, thresholds: Thresholds, bits: int) -> Correct:
    def correct(party: SimulatedParty, made: Bool, wanted: Bool) -> None:
        gate = merge_gate(len(digits(bits)))
        top = max(gate.outputs[0], key=len)
        difference = low_bits(made.words ^ wanted.words, 1).reshape(-1)
        party.drawn[-1][:, gate.index_of(top)] ^= to_planes(difference, 1)[0]

    return correct


def _reference(x: Any, *, thresholds: Thresholds, bits: int) -> Any:
    # Less the threshold, as words go: int32 holds -2^31 but not 2^31.
    less = [np.array([-t for t in some], np.int64).astype(x.dtype) for some in thresholds]
    xp = jnp if isinstance(x, jax.Array) else np
    moved = [
        row[None] + some.reshape(-1, *[1] * (x.ndim - 1)) for row, some in zip(x, less, strict=True)
    ]
    return sign_of(xp.concatenate(moved), bits=bits)


_op = protocol_op(
    "below",
    reference=_reference,
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
)


def below(x: Any, *, thresholds: Thresholds, bits: int) -> Any:
    """Compute whether x < t for each of the thresholds of each row of x [rows, ...], row by row,
    [all thresholds, ...]: a boolean share. x is an integer, a share mod 2^bits at least, and all
    x - t lie in [-2^(bits-1), 2^(bits-1)). Four messages: for a value and each way `bits` bits, and
    for each threshold two bits a digit but the lowest.
    """
    return _op(x, thresholds=thresholds, bits=bits)
