"""Sign and less-than of shared ring values that fit `bits` bits, in few messages.

With x = x_0 + x_1 mod 2^bits, the sign bit of x is msb(x_0) ^ msb(x_1) ^ carry, where the carry out
of the lower k = bits - 1 bits is [~x_0 < x_1] on those bits: a comparison of a number a that the
client knows with a number b that the provider knows (CrypTFlow2, CCS'20, Alg. 2). Each comparison
is a tree over digits: less(hi lo) = less(hi) ^ equal(hi) less(lo), equal(hi lo) = equal(hi)
equal(lo). Here the leaves are digits of two private bits and a node takes up to four digits at
once, each level one round of `protocols.bits.gates`.

Messages of both parties (6 for 24 bits, 8 for 64), bytes per value: see `cost`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from protocols.bits.convert import arith_cost, as_arith
from protocols.bits.gates import ONE, Gate, evaluate, gate_cost, plus, recipe, times, variable
from protocols.bits.planes import from_planes, to_planes, words_for
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, Bool, Value, low_bits

_MAX_FAN_IN = 4


@functools.cache
def leaf(root: bool) -> Gate:
    """Digits of two bits, a = (a_0, a_1) of the client, b of the provider: less, equal."""
    a0, a1, b0, b1 = (variable(i) for i in range(4))
    not_a0, not_a1 = plus(ONE, a0), plus(ONE, a1)
    equal0, equal1 = plus(not_a0, b0), plus(not_a1, b1)
    less = plus(times(not_a1, b1), times(equal1, not_a0, b0))
    if root:
        return Gate("leaf to bit", 2, 2, 0, (less,))
    return Gate("leaf", 2, 2, 0, (less, times(equal0, equal1)))


@functools.cache
def node(fan_in: int, root: bool) -> Gate:
    """`fan_in` digits, lowest first, as (less_0, .., equal_0, ..): less and equal of the whole.

    The root gives less alone and does not ask for equal_0.
    """
    less = [variable(i) for i in range(fan_in)]
    first = 1 if root else 0
    equal = {i: variable(fan_in + i - first) for i in range(first, fan_in)}
    above = [times(*(equal[j] for j in range(i + 1, fan_in))) for i in range(fan_in)]
    whole = plus(*(times(x, y) for x, y in zip(less, above, strict=True)))
    if root:
        return Gate(f"node {fan_in} to bit", 0, 0, 2 * fan_in - 1, (whole,))
    return Gate(f"node {fan_in}", 0, 0, 2 * fan_in, (whole, times(*equal.values())))


@functools.cache
def levels(bits: int) -> tuple[tuple[int, int], ...]:
    """(fan-in, nodes) of the levels above the leaves for numbers of `bits` bits: fewest rounds,
    then fewest prepared products. A digit that is left over on its own needs no node.
    """
    digits = (bits + 1) // 2

    def plans(count: int) -> list[tuple[tuple[int, int], ...]]:
        if count == 1:
            return [()]
        found = []
        for fan_in in range(2, _MAX_FAN_IN + 1):
            full, rest = divmod(count, fan_in)
            nodes = full + (rest > 1)
            found += [((fan_in, nodes), *then) for then in plans(nodes + (rest == 1))]
        return found

    def products(plan: tuple[tuple[int, int], ...]) -> int:
        return sum(
            n * recipe(node(f, root=i == len(plan) - 1)).products for i, (f, n) in enumerate(plan)
        )

    return min(plans(digits), key=lambda plan: (len(plan), products(plan)))


def less_private(party: Party, number: np.ndarray, bits: int) -> np.ndarray:
    """Shares (plane [words]) of [a < b] for the client's a and the provider's b (CrypTFlow2,
    Algorithm 2, with wider digits and nodes).

    number: words [rows], this party's, of which the low `bits` bits count.

    1. Leaves: less and equal of digits of two bits; an odd number of bits has a zero on top.
    2. Nodes, level by level: less and equal of up to four digits at once. A short last group is
       filled with equal digits, a single last digit goes on as it is.
    3. What the root says is less.
    """
    # 1.
    rows, digits = len(number), (bits + 1) // 2
    own = to_planes(low_bits(number, bits), 2 * digits).reshape(digits, 2, -1)
    plan = levels(bits)
    state = evaluate(party, leaf(root=not plan), rows, digits, own)
    # 2.
    for i, (fan_in, nodes) in enumerate(plan):
        root = i == len(plan) - 1
        padded = np.zeros((nodes * fan_in, 2, words_for(rows)), np.uint64)
        used = min(len(state), len(padded))
        padded[:used] = state[:used]
        if party.rank == CLIENT:
            padded[used:, 1] = ~np.uint64(0)
        grouped = padded.reshape(nodes, fan_in, 2, -1)
        inputs = np.concatenate([grouped[:, :, 0], grouped[:, (1 if root else 0) :, 1]], axis=1)
        made = evaluate(party, node(fan_in, root), rows, nodes, inputs)
        state = np.concatenate([made, state[used:]]) if used < len(state) else made
    # 3.
    return state[0, 0]


def less_cost(rows: int, bits: int) -> Cost:
    """Price of `less_private`."""
    plan = levels(bits)
    total = gate_cost(leaf(root=not plan), rows, (bits + 1) // 2)
    for i, (fan_in, nodes) in enumerate(plan):
        total += gate_cost(node(fan_in, i == len(plan) - 1), rows, nodes)
    return total


def carry_words(party: Party, words: np.ndarray, bits: int) -> np.ndarray:
    """Xor shares (0 or 1, of any shape) of the carry out of the low `bits` bits of additively
    shared words: [~x_0 < x_1] on these bits.
    """
    flat = words.reshape(-1)
    less = less_private(party, ~flat if party.rank == CLIENT else flat, bits)
    return from_planes(less[None], flat.size).reshape(words.shape)


def sign_words(party: Party, words: np.ndarray, bits: int) -> np.ndarray:
    """Xor shares (0 or 1, of any shape) of bit number bits-1 of additively shared words.

    1. Each party splits its share into the top bit and the bits below.
    2. carry = [~x_0 < x_1] on the bits below. 3. sign = top_0 ^ top_1 ^ carry.
    """
    # 1.
    flat = words.reshape(-1)
    sign = (flat >> np.uint64(bits - 1)) & np.uint64(1)
    # 2. and 3.
    if bits > 1 and flat.size:
        sign = sign ^ carry_words(party, flat, bits - 1)
    return sign.reshape(words.shape)


def sign_cost(count: int, bits: int) -> Cost:
    """Price of `sign_words` for `count` values."""
    return less_cost(count, bits - 1) if bits > 1 and count else Cost()


# ---- the op


def _reference(x: Any, *, bits: int) -> Any:
    spare = 8 * x.dtype.itemsize - bits
    if jnp.issubdtype(x.dtype, jnp.floating) or spare <= 0:
        return x < 0
    return (x << spare) < 0


def _two_party(party: Party, x: Value, *, bits: int) -> Bool:
    share = as_arith(party, x, narrow=True)
    if not 1 <= bits <= share.bits:
        raise ValueError(f"a sign of {bits} bits of a share of {share.bits}; give 1 to that")
    return Bool(sign_words(party, share.words, bits), np.dtype(np.bool_), 0, 1)


def _cost(x: Value, *, bits: int) -> Cost:
    return arith_cost(x) + sign_cost(math.prod(x.shape), bits)


def _correct(x: Value, *, bits: int) -> Correct:
    def correct(party: SimulatedParty, made: Bool, wanted: Bool) -> None:
        correct_sign(party, made, wanted, bits)

    return correct


def correct_sign(party: SimulatedParty, made: Bool, wanted: Bool, bits: int) -> None:
    """Make `sign_words`, the last step, give `wanted`: change its last prepared sums."""
    if bits > 1 and made.words.size:
        plan = levels(bits - 1)
        last = node(plan[-1][0], root=True) if plan else leaf(root=True)
        correct_gate(party, last, made, wanted)


def correct_gate(party: SimulatedParty, gate: Gate, made: Bool, wanted: Bool) -> None:
    """Change the last gate's prepared sums so that its one output changes as wanted."""
    top = max(gate.outputs[0], key=len)
    difference = low_bits(made.words ^ wanted.words, 1).reshape(-1)
    sums = party.drawn[-1]
    sums[:, gate.index_of(top)] ^= to_planes(difference, 1)[0]


sign = protocol_op(
    "sign",
    reference=_reference,
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
)
"""Whether x < 0, for x in [-2^(bits-1), 2^(bits-1)) of the ring (a float's encoding, fraction bits
included); for any x, bit number bits-1 of the encoding. A boolean share."""


def less_than(x: Any, y: Any, *, bits: int) -> Any:
    """Whether x < y where x - y fits `bits` bits: the sign of the difference, a boolean share."""
    return sign(x - y, bits=bits)



