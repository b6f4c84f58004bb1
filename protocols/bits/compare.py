"""Sign and less-than of shared ring values that fit `bits` bits, in few messages.

With x = x_0 + x_1 mod 2^bits, the sign bit of x is msb(x_0) ^ msb(x_1) ^ carry, where the carry out
of the lower k = bits - 1 bits is [~x_0 < x_1] on those bits: a comparison of a number a that the
client knows with a number b that the provider knows (CrypTFlow2, CCS'20, Alg. 2). Each comparison
is a tree over digits: less(hi lo) = less(hi) ^ equal(hi) less(lo), equal(hi lo) = equal(hi)
equal(lo). Here the leaves are digits of two private bits and a node takes up to four digits at
once, each level one round of `protocols.bits.gates`. How deep the tree is, is a matter of price
(`protocols.bits.price`): the more values, the fewer transfers ahead, and the more rounds.

Messages of both parties (6 for a few values of 24 bits, 8 or 10 for many), bytes per value: see
`cost`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from protocols.bits.convert import arith_cost, as_arith
from protocols.bits.gates import evaluate, gate_cost
from protocols.bits.planes import from_planes, to_planes, words_for
from protocols.bits.polynomials import Gate, plus, times, variable
from protocols.bits.price import ahead, price
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, Bool, Value, low_bits

_MAX_FAN_IN = 4


@functools.cache
def leaf(root: bool) -> Gate:
    """Return the gate of less and equal of digits of two bits, a of the client, b of the provider.

    Each owner brings its bits and their product as inputs of their own, the client those of
    n = ~a: (n_0, n_1, n_0 n_1, b_0, b_1, b_0 b_1). Bits are equal where n_i + b_i = 1, so
        less = n_1 b_1 + (n_1 + b_1) n_0 b_0,    equal = (n_0 + b_0) (n_1 + b_1)
    have five products of an input of each, where masks of four bits have seven.
    """
    n0, n1, n01, b0, b1, b01 = (variable(i) for i in range(6))
    less = plus(times(n1, b1), times(n01, b0), times(n0, b01))
    if root:
        return Gate("leaf to bit", 3, 3, 0, (less,))
    return Gate("leaf", 3, 3, 0, (less, plus(n01, b01, times(n0, b1), times(n1, b0))))


@functools.cache
def node(fan_in: int, root: bool) -> Gate:
    """Return the gate that makes less and equal of a whole from `fan_in` digits, lowest first, as
    (less_0, .., equal_0, ..).

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


Level = tuple[int, int]  # fan-in, nodes


def levels(bits: int, rows: int) -> tuple[Level, ...]:
    """Return the levels above the leaves for `rows` numbers of `bits` bits, cheapest by
    `protocols.bits.price`. A digit that is left over on its own needs no node.
    """
    return _levels((bits + 1) // 2, words_for(rows))[1]


@functools.lru_cache(maxsize=1 << 14)
def _levels(digits: int, words: int) -> tuple[int, tuple[Level, ...]]:
    """Return the price, and the levels, of making one digit of `digits`, for 64 numbers a word."""
    if digits == 1:
        return 0, ()
    plans = []
    for fan_in in range(2, _MAX_FAN_IN + 1):
        full, rest = divmod(digits, fan_in)
        nodes = full + (rest > 1)
        left = nodes + (rest == 1)
        gate, rows = node(fan_in, root=left == 1), 64 * words
        above, then = _levels(left, words)
        own = price(gate_cost(gate, rows, nodes), ahead(gate, rows, nodes))
        plans.append((own + above, ((fan_in, nodes), *then)))
    return min(plans, key=lambda plan: plan[0])


def tree(bits: int, rows: int) -> list[tuple[Gate, int]]:
    """Return the gates of a comparison of `bits` bits, level by level, with their instances for
    each of `rows` rows; the last one is the root.
    """
    plan = levels(bits, rows)
    nodes = [(node(f, root=i == len(plan)), count) for i, (f, count) in enumerate(plan, 1)]
    return [(leaf(root=not plan), (bits + 1) // 2), *nodes]


def less_private(party: Party, number: np.ndarray, bits: int) -> np.ndarray:
    """Compute shares (plane [words]) of [a < b] for the client's a and the provider's b
    (CrypTFlow2, Algorithm 2, with wider digits and nodes).

    number: words [rows], this party's, of which the low `bits` bits count.

    1. Leaves: less and equal of digits of two bits, from the bits (the client's inverted) and
       their product; an odd number of bits has a zero on top.
    2. Nodes, level by level: less and equal of up to four digits at once. A short last group is
       filled with equal digits, a single last digit goes on as it is.
    3. What the root says is less.
    """
    # 1.
    rows, digits = len(number), (bits + 1) // 2
    own = to_planes(low_bits(number, bits), 2 * digits).reshape(digits, 2, -1)
    if party.rank == CLIENT:
        own = ~own
    own = np.concatenate([own, own[:, :1] & own[:, 1:]], axis=1)
    plan = levels(bits, rows)
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
    """Return the cost of `less_private`."""
    return sum((gate_cost(gate, rows, count) for gate, count in tree(bits, rows)), Cost())


def less_ahead(rows: int, bits: int) -> int:
    """Return the worth of what `less_private` takes that is made ahead."""
    return sum(ahead(gate, rows, count) for gate, count in tree(bits, rows))


def carry_words(party: Party, words: np.ndarray, bits: int) -> np.ndarray:
    """Compute xor shares (0 or 1, of any shape) of the carry out of the low `bits` bits of
    additively shared words: [~x_0 < x_1] on these bits.
    """
    flat = words.reshape(-1)
    less = less_private(party, ~flat if party.rank == CLIENT else flat, bits)
    return from_planes(less[None], flat.size).reshape(words.shape)


def sign_words(party: Party, words: np.ndarray, bits: int) -> np.ndarray:
    """Compute xor shares (0 or 1, of any shape) of bit number bits-1 of additively shared words.

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
    """Return the cost of `sign_words` for `count` values."""
    return less_cost(count, bits - 1) if bits > 1 and count else Cost()


def sign_ahead(count: int, bits: int) -> int:
    """Return the worth of what `sign_words` takes for `count` values that is made ahead."""
    return less_ahead(count, bits - 1) if bits > 1 and count else 0


# ---- the op


def sign_of(x: Any, *, bits: int) -> Any:
    """Compute in plaintext what `sign` does."""
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
        last, _ = tree(bits - 1, made.words.size)[-1]
        correct_gate(party, last, made, wanted)


def correct_gate(party: SimulatedParty, gate: Gate, made: Bool, wanted: Bool) -> None:
    """Change the last gate's prepared sums so that its one output changes as wanted."""
    top = max(gate.outputs[0], key=len)
    difference = low_bits(made.words ^ wanted.words, 1).reshape(-1)
    sums = party.drawn[-1]
    sums[:, gate.index_of(top)] ^= to_planes(difference, 1)[0]


sign = protocol_op(
    "sign",
    reference=sign_of,
    two_party=_two_party,
    cost=_cost,
    simulate=uniform_messages(_two_party, _correct),
)
"""Whether x < 0, for x in [-2^(bits-1), 2^(bits-1)) of the ring (a float's encoding, fraction bits
included); for any x, bit number bits-1 of the encoding. A boolean share."""


def less_than(x: Any, y: Any, *, bits: int) -> Any:
    """Compute whether x < y, a boolean share, by the sign of x - y, which fits `bits` bits."""
    return sign(x - y, bits=bits)
