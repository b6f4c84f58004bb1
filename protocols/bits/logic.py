"""And and prefix-or of shared bits, by gates of up to four inputs (protocols.bits.gates)."""

from __future__ import annotations

import functools
import math

import numpy as np

from protocols.bits.convert import known_words
from protocols.bits.gates import evaluate, gate_cost
from protocols.bits.planes import from_planes, to_planes
from protocols.bits.polynomials import ONE, Gate, Polynomial, plus, times, variable
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.simulated import Correct, SimulatedParty, uniform_messages
from spu_llm.core.values import Arith, Bool, Value, low_bits

_GROUP = 4  # inputs of one gate

AND = Gate("and", 0, 0, 2, (times(variable(0), variable(1)),))


def as_bool(party: Party, value: Value) -> Bool:
    """Return xor shares of bits or integers; what one party knows (or both) is one share, zero the
    other.

    Raise NotImplementedError for additive shares: `sign` and the like make bits of them.
    """
    if isinstance(value, Bool):
        return value
    if isinstance(value, Arith):
        raise NotImplementedError("bits of an additive share; compare it, or keep it boolean")
    return Bool(known_words(party, value), value.dtype, 0, _width(value))


def _width(value: Value) -> int:
    """Return how many bits of a value count."""
    if isinstance(value, Bool):
        return value.bits
    return 1 if value.dtype == np.bool_ else 64


# ---- and


def _and_two_party(party: Party, x: Value, y: Value) -> Bool:
    """Compute x & y by one gate per bit; bits above the narrower input are zero."""
    a, b = as_bool(party, x), as_bool(party, y)
    bits, rows = min(a.bits, b.bits), a.words.size
    if not rows:
        return Bool(a.words, a.dtype, a.frac_bits, bits)
    inputs = np.stack([to_planes(v.words.reshape(-1), bits) for v in (a, b)], axis=1)
    planes = evaluate(party, AND, rows, bits, inputs)[:, 0]
    return Bool(from_planes(planes, rows).reshape(a.shape), a.dtype, a.frac_bits, bits)


def _and_cost(x: Value, y: Value) -> Cost:
    rows = math.prod(x.shape)
    return gate_cost(AND, rows, min(_width(x), _width(y))) if rows else Cost()


def _and_correct(x: Value, y: Value) -> Correct:
    def correct(party: SimulatedParty, made: Bool, wanted: Bool) -> None:
        rows = made.words.size
        difference = low_bits(made.words ^ wanted.words, made.bits).reshape(-1)
        if rows:
            planes = to_planes(difference, made.bits)  # [bits, words]
            party.drawn[-1][:, 0] ^= planes.T.reshape(-1)  # units: row groups first, then bits

    return correct


and_bits = protocol_op(
    "and_bits",
    reference=lambda x, y: x & y,
    two_party=_and_two_party,
    cost=_and_cost,
    simulate=uniform_messages(_and_two_party, _and_correct),
)
"""x & y bit by bit, of equal shapes and types: boolean shares. One message each way."""


# ---- prefix-or


@functools.cache
def _prefix_gate(inputs: int) -> Gate:
    """Return the gate of y_i = x_0 or .. or x_i, i = 1.., of `inputs` shared bits (y_0 is x_0)."""
    zero = [plus(ONE, variable(i)) for i in range(inputs)]
    outputs = tuple(plus(ONE, times(*zero[: i + 1])) for i in range(1, inputs))
    return Gate(f"prefix or {inputs}", 0, 0, inputs, outputs)


@functools.cache
def _carry_gate() -> Gate:
    """Return the gate of x_i or c, i = 1.._GROUP, for the or c of all earlier groups."""
    carry = variable(_GROUP)

    def either(x: Polynomial) -> Polynomial:
        return plus(x, carry, times(x, carry))

    outputs = tuple(either(variable(i)) for i in range(_GROUP))
    return Gate("or into group", 0, 0, _GROUP + 1, outputs)


def _prefix(party: Party, x: np.ndarray, rows: int) -> np.ndarray:
    """Compute planes [n, words] of shares of the prefix-ors, from planes x [n, words] of shares.

    1. Prefix-or inside groups of four. 2. Prefix-or of the groups' totals (each a group's last).
    3. Or the total of all earlier groups into every group.
    """
    n = len(x)
    groups = -(-n // _GROUP)
    if n == 1:
        return x
    # 1.
    size = n if groups == 1 else _GROUP
    padded = np.zeros((groups * size, x.shape[1]), np.uint64)
    padded[:n] = x
    grouped = padded.reshape(groups, size, -1)
    rest = evaluate(party, _prefix_gate(size), rows, groups, grouped)
    inside = np.concatenate([grouped[:, :1], rest], axis=1)
    if groups == 1:
        return inside[0]
    # 2.
    totals = _prefix(party, inside[:-1, -1], rows)
    # 3. The first group has none before it.
    inputs = np.concatenate([inside[1:], totals[:, None]], axis=1)
    whole = evaluate(party, _carry_gate(), rows, groups - 1, inputs)
    return np.concatenate([inside[:1], whole]).reshape(groups * _GROUP, -1)[:n]


def _prefix_cost(rows: int, n: int) -> Cost:
    groups = -(-n // _GROUP)
    if n == 1:
        return Cost()
    if groups == 1:
        return gate_cost(_prefix_gate(n), rows, 1)
    return (
        gate_cost(_prefix_gate(_GROUP), rows, groups)
        + _prefix_cost(rows, groups - 1)
        + gate_cost(_carry_gate(), rows, groups - 1)
    )


def _prefix_or_two_party(party: Party, x: Value) -> Bool:
    share = as_bool(party, x)
    *batch, n = share.shape
    rows = math.prod(batch)
    if not rows or n < 2:
        return share
    planes = np.concatenate([to_planes(c, 1) for c in share.words.reshape(rows, n).T])
    prefixes = _prefix(party, planes, rows)
    words = np.stack([from_planes(p[None], rows) for p in prefixes], axis=1)
    return Bool(words.reshape(x.shape), np.dtype(np.bool_), 0, 1)


def _prefix_or_cost(x: Value) -> Cost:
    *batch, n = x.shape
    rows = math.prod(batch)
    return _prefix_cost(rows, n) if rows and n > 1 else Cost()


def _prefix_or_correct(x: Value) -> Correct:
    """Return the function that brings simulated prefix-ors to the wanted ones. The first group's
    outputs come from the first gate, the others from the last. In the first gate, a product that
    one output ends with also enters the outputs after it: the lowest one first. The first bit stays
    as it was.
    """

    def correct(party: SimulatedParty, made: Bool, wanted: Bool) -> None:
        n = x.shape[-1]
        difference = low_bits(made.words ^ wanted.words, 1).reshape(-1, n)
        planes = np.stack([to_planes(c, 1)[0] for c in difference.T])  # [n, words]
        first = _prefix_gate(min(n, _GROUP))
        sums = party.drawn[3].reshape(planes.shape[1], -1, len(first.sums))
        if planes[:_GROUP].any():
            i = next(i for i in range(_GROUP) if planes[i].any())
            sums[:, 0, first.index_of(frozenset(range(i + 1)))] ^= planes[i]
            return
        gate = _carry_gate()
        sums = party.drawn[-1].reshape(planes.shape[1], -1, len(gate.sums))
        for i in range(_GROUP, n):
            top = gate.index_of(frozenset([i % _GROUP, _GROUP]))
            sums[:, i // _GROUP - 1, top] ^= planes[i]

    return correct


prefix_or = protocol_op(
    "prefix_or",
    reference=lambda x: x.cumsum(axis=-1) > 0,
    two_party=_prefix_or_two_party,
    cost=_prefix_or_cost,
    simulate=uniform_messages(_prefix_or_two_party, _prefix_or_correct),
)
"""y_i = x_0 or .. or x_i along the last axis of x [..., n], shared bits: a boolean share.

2 messages of both parties for n <= 4, 4 for n <= 8, 6 for n <= 20, 8 for n <= 36."""
