"""Whether a shared value is below each of many public thresholds, under one mask.

For x = x_0 + x_1 mod 2^bits, with all differences x - t in [-2^(bits-1), 2^(bits-1)). Ahead of time
the parties share a random number R twice: by words, R = R_0 + R_1 mod 2^bits, and by the products
of bits in each of its digits (`protocols.bits.masked_number`).

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
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from protocols.bits.compare import sign_of
from protocols.bits.convert import arith_cost, as_arith
from protocols.bits.gates import evaluate, gate_cost
from protocols.bits.masked_number import Field, digits, fields, masked_number
from protocols.bits.planes import bytes_for, from_message, from_planes, to_message, to_planes
from protocols.bits.polynomials import Gate, plus, times, variable
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, Bool, Value, low_bits

_1 = np.uint64(1)
_ALL = (1 << 64) - 1
_AT_ONCE = 1 << 16  # values less thresholds: bounds memory


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


Thresholds = tuple[tuple[int, ...], ...]  # of each column


def _below(party: Party, x: np.ndarray, thresholds: Thresholds, bits: int) -> np.ndarray:
    """Compute xor shares [all thresholds, values] of [x < t] from additive shares of x
    [columns, values] mod 2^bits.
    """
    layout, count = digits(bits), sum(map(len, thresholds))
    correlations = party.take(masked_number(bits), x.size)
    (number,), (of_digits,) = correlations.masks, correlations.results
    # 1.
    own = low_bits(x.reshape(-1) + number, bits)
    party.send_bytes(to_message(to_planes(own, bits), x.size))
    peers = from_message(party.recv_bytes((bits, bytes_for(x.size))), x.size)
    opened = (own + from_planes(peers, x.size)).reshape(x.shape)
    # 2.
    *some, last = fields(bits)
    one_hots = [_one_hot(party.rank, field, of_digits).reshape(x.shape) for field in some]
    aboves = [_above(words, size) for words, (_, size) in zip(one_hots, layout, strict=True)]
    top = _bit(of_digits[:, last.word], np.uint64(last.place)).reshape(x.shape)
    inputs = np.empty((2 * len(layout) - 2, count, x.shape[1]), np.uint8)
    sign = np.empty((count, x.shape[1]), np.uint64)
    column_of = np.repeat(np.arange(len(thresholds)), [len(own) for own in thresholds])
    words = np.array([t & _ALL for own in thresholds for t in own], np.uint64)
    at_once = max(1, _AT_ONCE // x.shape[1])
    for start in range(0, count, at_once):
        group = slice(start, start + at_once)
        columns = column_of[group]
        moved = low_bits(opened[columns] - words[group, None], bits)
        places = [low_bits(moved >> np.uint64(first), size) for first, size in layout]
        gt = [_bit(above[columns], place) for above, place in zip(aboves, places, strict=True)]
        eq = [_bit(hot[columns], place) for hot, place in zip(one_hots, places, strict=True)]
        for k, share in enumerate([*gt[:-1], *eq[1:]]):
            inputs[k, group] = share
        sign[group] = gt[-1] ^ top[columns]
        if party.rank == CLIENT:
            sign[group] ^= _bit(moved, np.uint64(bits - 1))
    # 3.
    packed = np.packbits(inputs.reshape(len(inputs), -1), axis=1, bitorder="little")
    planes = from_message(packed, sign.size)
    borrow = evaluate(party, merge_gate(len(layout)), sign.size, 1, planes[None])
    return from_planes(borrow[0], sign.size).reshape(sign.shape) ^ sign


def _bit(words: np.ndarray, places: np.ndarray | np.uint64) -> np.ndarray:
    """Return the bit of each word at a place."""
    return (words >> places) & _1


def _one_hot(rank: int, field: Field, of_digits: np.ndarray) -> np.ndarray:
    """Return this party's shares of [digit = j] in bit j of words [values]."""
    values = low_bits(of_digits[:, field.word] >> np.uint64(field.place), (1 << field.size) - 1)
    words = (values << _1) | np.uint64(rank == CLIENT)  # the product of no bits is one
    # [digit = j] is the sum of the products over all sets that contain j's ones.
    for i in range(field.size):
        lower = sum(1 << j for j in range(1 << field.size) if not j >> i & 1)
        words ^= (words >> np.uint64(1 << i)) & np.uint64(lower)
    return words


def _above(one_hot: np.ndarray, size: int) -> np.ndarray:
    """Return shares of [digit > j] in bit j: the sum of all higher bits of each word."""
    words = one_hot >> _1
    for i in range(size):
        words = words ^ (words >> np.uint64(1 << i))
    return words


def below_cost(columns: int, values: int, count: int, bits: int) -> Cost:
    """Return the cost of `below` for `count` thresholds of so many columns of values."""
    opened = bits * bytes_for(columns * values)
    return Cost(2, 1, opened, opened) + gate_cost(merge_gate(len(digits(bits))), count * values, 1)


def _sizes(x: Value, thresholds: Thresholds) -> tuple[int, int, int]:
    """Return the columns, the values of each, and the thresholds of all."""
    if len(x.shape) < 1 or x.shape[-1] != len(thresholds):
        raise ValueError(f"thresholds of {len(thresholds)} columns for shape {x.shape}")
    return x.shape[-1], math.prod(x.shape[:-1]), sum(map(len, thresholds))


def _two_party(party: Party, x: Value, *, thresholds: Thresholds, bits: int) -> Bool:
    share = as_arith(party, x, narrow=True)
    if not 5 <= bits <= share.bits:
        raise ValueError(f"thresholds of {bits} bits of a share of {share.bits}; give 5 to that")
    columns, values, count = _sizes(x, thresholds)
    shape = (count, *x.shape[:-1])
    if not values * count:
        return Bool(np.zeros(shape, np.uint64), np.dtype(np.bool_), 0, 1)
    words = np.ascontiguousarray(share.words.reshape(values, columns).T)
    made = _below(party, words, thresholds, bits)
    return Bool(made.reshape(shape), np.dtype(np.bool_), 0, 1)


def _cost(x: Value, *, thresholds: Thresholds, bits: int) -> Cost:
    columns, values, count = _sizes(x, thresholds)
    return arith_cost(x) + (below_cost(columns, values, count, bits) if values * count else Cost())


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
    moved = [x[None, ..., k] + some.reshape(-1, *[1] * (x.ndim - 1)) for k, some in enumerate(less)]
    return sign_of(xp.concatenate(moved), bits=bits)


def _shapes(
    x: jax.ShapeDtypeStruct, *, thresholds: Thresholds, bits: int
) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((sum(map(len, thresholds)), *x.shape[:-1]), np.bool_)]


below = protocol_op(
    "below",
    reference=_reference,
    shapes=_shapes,
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
)
"""Whether x < t for each of the thresholds of each column of x [..., columns], column by column,
[all thresholds, ...]: a boolean share. x is an integer, a share mod 2^bits at least, and all x - t
lie in [-2^(bits-1), 2^(bits-1)). Four messages: for a value and each way `bits` bits, and for each
threshold two bits a digit but the lowest."""
