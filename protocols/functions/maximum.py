"""The maximum of every row of shared words: a tournament with wide matches where few words remain.

A match of f words compares all f (f - 1) / 2 pairs at once (`sign_words` of the difference). A word
wins when it is greater than all before it and not less than any after it, so the first of equal
ones wins and exactly one does. With w_i = [x_i wins], a product of f - 1 comparison bits or their
negations, the maximum is

    m = x_0 + sum_{i = 1..f-1} w_i (x_i - x_0):

the w_i are one round of `protocols.bits.gates` (a match of two needs none), the products another
one (`protocols.bits.mux`). A short last match is filled up with the row's last word. Words may
carry others with them, such as their places (`protocols.functions.argmax`): the same w_i choose.

Wide matches take fewer rounds, narrow ones fewer comparisons: `fan_ins` weighs one against the
other (`protocols.bits.price`). Comparisons are CrypTFlow2's (CCS'20), the gate is Beaver's
(CRYPTO'91) for many factors.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from protocols.bits.compare import sign_ahead, sign_cost, sign_words
from protocols.bits.convert import arith_cost, as_arith
from protocols.bits.gates import evaluate, gate_cost
from protocols.bits.mux import correct_mux, mux_cost, mux_words, width_of
from protocols.bits.planes import from_planes, to_planes
from protocols.bits.polynomials import Gate, times, variable
from protocols.bits.price import ahead, price
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, Arith, Value, low_bits

MAX_FAN_IN = 8


@functools.cache
def pairs(fan_in: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs (i, j), i < j, that a match compares, in order."""
    return tuple(itertools.combinations(range(fan_in), 2))


@functools.cache
def all_of(inputs: int) -> Gate:
    """Return the gate of the and of shared bits."""
    return Gate(f"all of {inputs}", 0, 0, inputs, (times(*map(variable, range(inputs))),))


def _match_cost(fan_in: int, count: int, bits: int, width: int, kinds: int) -> Cost:
    """Return the cost of `count` matches of words of `width` bits, each with kinds - 1 others."""
    cost = sign_cost(len(pairs(fan_in)) * count, bits)
    if fan_in > 2:
        cost += gate_cost(all_of(fan_in - 1), count, fan_in - 1)
    return cost + mux_cost(kinds * (fan_in - 1) * count, width)


def _match_ahead(fan_in: int, count: int, bits: int) -> int:
    """Return the worth of what `count` matches take that is made ahead, for comparisons and for who
    wins. (Products of bits and words are as many for any fan-in: one for each word that loses.)
    """
    total = sign_ahead(len(pairs(fan_in)) * count, bits)
    if fan_in > 2:
        total += ahead(all_of(fan_in - 1), count, fan_in - 1)
    return total


def fan_ins(
    rows: int, n: int, bits: int, width: int = 64, kinds: int = 1, widest: int = MAX_FAN_IN
) -> tuple[int, ...]:
    """Return the words per match, level by level, that give the maxima of `rows` rows of n words
    cheapest, in matches of `widest` at most.
    """
    return _fan_ins(rows, n, bits, width, kinds, widest)[1]


@functools.lru_cache(maxsize=1 << 14)
def _fan_ins(
    rows: int, n: int, bits: int, width: int, kinds: int, widest: int
) -> tuple[int, tuple[int, ...]]:
    """Return the price of the cheapest tournament, and its words per match, level by level."""
    if n == 1:
        return 0, ()
    plans = []
    for fan_in in range(2, min(n, widest) + 1):
        left = -(-n // fan_in)
        count = rows * left
        cost = _match_cost(fan_in, count, bits, width, kinds)
        own = price(cost, _match_ahead(fan_in, count, bits))
        above, then = _fan_ins(rows, left, bits, width, kinds, widest)
        plans.append((own + above, (fan_in, *then)))
    return min(plans, key=lambda plan: plan[0])


def maximum_words(
    party: Party, x: np.ndarray, bits: int, width: int = 64, widest: int = MAX_FAN_IN
) -> np.ndarray:
    """Compute shares [kinds, rows] of the row maxima of the first of words [kinds, rows, n], shared
    mod 2^width, and of what stands with them in the others.
    """
    kinds, rows, n = x.shape
    for fan_in in fan_ins(rows, n, bits, width, kinds, widest):
        x = _level(party, x, fan_in, bits, width)
    return x[:, :, 0]


def maximum_cost(
    rows: int, n: int, bits: int, width: int = 64, kinds: int = 1, widest: int = MAX_FAN_IN
) -> Cost:
    """Return the cost of `maximum_words`."""
    total = Cost()
    for fan_in in fan_ins(rows, n, bits, width, kinds, widest):
        n = -(-n // fan_in)
        total += _match_cost(fan_in, rows * n, bits, width, kinds)
    return total


def correct_maximum(
    party: SimulatedParty,
    difference: np.ndarray,
    n: int,
    bits: int,
    width: int = 64,
    kinds: int = 1,
    widest: int = MAX_FAN_IN,
) -> None:
    """Add `difference` (words [rows]) to what `maximum_words` gives last of rows of n > 1 words:
    the last match adds products to its first word, and the first of them changes.
    """
    rows = len(difference)
    last = fan_ins(rows, n, bits, width, kinds, widest)[-1]
    products = np.zeros((kinds, last - 1, rows), np.uint64)
    products[-1, 0] = difference
    correct_mux(party, products, bits=width)


def _level(party: Party, x: np.ndarray, fan_in: int, bits: int, width: int) -> np.ndarray:
    """Reduce words [kinds, rows, n] to the winners [kinds, rows, ceil(n / fan_in)] of matches.

    1. Compare all pairs of every match. 2. Who wins. 3. The winner, as its distance from the first.
    """
    kinds, rows, n = x.shape
    matches = -(-n // fan_in)
    filled = np.concatenate([x, np.repeat(x[..., -1:], matches * fan_in - n, axis=2)], axis=2)
    # Match by match in the last axis, so that every step works on long arrays.
    by_match = filled.reshape(kinds, rows * matches, fan_in)
    players = np.ascontiguousarray(by_match.transpose(0, 2, 1))
    # 1. less[k] = [x_i < x_j] = [x_i - x_j < 0]
    first = players[0]
    differences = np.stack([first[i] - first[j] for i, j in pairs(fan_in)])
    less = sign_words(party, differences, bits)
    # 2.
    wins = less if fan_in == 2 else _winners(party, less, fan_in)
    # 3.
    distances = players[:, 1:] - players[:, :1]
    moved = mux_words(party, np.tile(wins.reshape(-1), kinds), distances.reshape(-1), width)
    moved = moved.reshape(distances.shape)
    winners = players[:, 0] + moved.sum(axis=1, dtype=np.uint64)
    return winners.reshape(kinds, rows, matches)


def _winners(party: Party, less: np.ndarray, fan_in: int) -> np.ndarray:
    """Compute w_i [fan_in - 1, matches], i = 1.., from comparison bits [pairs, matches].

    Every w_i opens its comparisons under masks of its own: one small gate serves all of them.
    """
    count = less.shape[1]
    smaller = {pair: to_planes(bits, 1)[0] for pair, bits in zip(pairs(fan_in), less, strict=True)}
    negated = ~np.uint64(0) if party.rank == CLIENT else np.uint64(0)
    inputs = np.stack(
        [
            [smaller[j, i] if j < i else smaller[i, j] ^ negated for j in range(fan_in) if j != i]
            for i in range(1, fan_in)
        ]
    )
    planes = evaluate(party, all_of(fan_in - 1), count, fan_in - 1, inputs)
    return np.stack([from_planes(plane, count) for plane in planes])


# ---- the op


def _two_party(party: Party, x: Value, *, bits: int) -> Arith:
    check(x, bits)
    share = as_arith(party, x, narrow=True)
    words = share.words
    largest = maximum_words(party, words[None], bits, share.bits)[0] if len(words) else words[:, 0]
    return Arith(largest, share.dtype, share.frac_bits, share.bits)


def check(x: Value, bits: int) -> None:
    """Raise ValueError for what has no maxima."""
    if len(x.shape) != 2 or not x.shape[1]:
        raise ValueError(f"expected rows [rows, n] of at least one word, found shape {x.shape}")
    if not 2 <= bits <= width_of(x):
        raise ValueError(f"differences of {bits} bits; give 2 to {width_of(x)}")


def _cost(x: Value, *, bits: int) -> Cost:
    rows, n = x.shape
    return arith_cost(x) + (maximum_cost(rows, n, bits, width_of(x)) if rows else Cost())


def _correct(x: Value, *, bits: int) -> Correct:
    rows, n = x.shape

    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        if rows and n > 1:
            difference = low_bits(wanted.words - made.words, made.bits)
            correct_maximum(party, difference, n, bits, made.bits)

    return correct


maximum = protocol_op(
    "maximum",
    reference=lambda x, bits: x.max(axis=-1),
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
)
"""The maximum of every row of x [rows, n], where all differences of two words of a row lie in
[-2^(bits-1), 2^(bits-1)) of the ring (a float's encoding, fraction bits included). A narrow share
of at least `bits` bits stays narrow."""
