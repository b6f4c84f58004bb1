"""Boolean gates with many inputs in one round: masked openings and prepared products of masks.

A gate is a list of polynomials over F_2 in a few bits x_i. Ahead of time the parties share a random
mask l_i of every input and sums of products l_S = prod_{i in S} l_i. Online:

  1. Each party sends its share of every input, xored with its share of the mask; an input that one
     party knows is sent by that party alone. Now m_i = x_i ^ l_i is public and uniform.
  2. Since x_i = m_i ^ l_i, a monomial expands to
         prod_{i in T} x_i = xor_{S subset of T} (prod_{i in T - S} m_i) l_S,
     which is linear in the shared l_S: each party evaluates its share without a message.

Products l_S that every polynomial multiplies with the same public factors are prepared as one sum
(`protocols.bits.recipe`), of random oblivious transfers (`protocols.bits.stars`).

This is Beaver's circuit randomisation ("Efficient Multiparty Protocols Using Circuit
Randomization", CRYPTO'91, section 3) for products of any number of factors: a gate of fan-in k
costs one round instead of log2 k. Everything is bit-sliced: 64 rows per word.

Both parties learn the m_i, which the masks make uniform and independent of everything else.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np

from protocols.bits.mask_products import TRANSFERS_AT_ONCE, made
from protocols.bits.planes import bytes_for, from_message, to_message, words_for
from protocols.bits.polynomials import Gate, Monomial, Polynomial
from protocols.bits.stars import transfers
from spu_llm.core.correlation import Correlation, Form, Part
from spu_llm.core.op import Cost
from spu_llm.core.party import Party
from spu_llm.core.values import CLIENT, PROVIDER, Owner


@functools.cache
def correlation(gate: Gate) -> Correlation:
    """Return the correlation of a gate: masks of the inputs and the sums of their products that the
    gate needs; a unit is 64 instances.
    """

    def secure(*masks: Any) -> list[Any]:
        columns = np.concatenate(masks, axis=1).T  # numbered as the gate's inputs

        def total(polynomial: Polynomial) -> Any:
            products = [np.bitwise_and.reduce(columns[sorted(s)]) for s in polynomial]
            return np.bitwise_xor.reduce(products)

        return [np.stack([total(polynomial) for polynomial in gate.sums], axis=-1)]

    def bits(count: int, holder: Owner) -> Part:
        return Part((count,), holder, Form.BOOL)

    # What was prepared for other polynomials under the same name must not serve these.
    sums = [sorted(map(sorted, p)) for p in gate.sums]
    content = repr((gate.client, gate.provider, gate.joint, sums))
    by_client, by_provider = transfers(gate)
    return Correlation(
        name=f"gate {gate.name} {hashlib.sha256(content.encode()).hexdigest()[:8]}",
        masks=(
            bits(gate.client, Owner.CLIENT),
            bits(gate.provider, Owner.PROVIDER),
            bits(gate.joint, Owner.JOINT),
        ),
        results=(bits(len(gate.sums), Owner.JOINT),),
        secure=secure,
        by_transfers=functools.partial(made, gate),
        transfers=(64 * by_client, 64 * by_provider),
        # Even, for both plans take turns.
        chunk=max(2, int(TRANSFERS_AT_ONCE / (64 * (by_client + by_provider))) * 2),
    )


def evaluate(party: Party, gate: Gate, rows: int, nodes: int, inputs: np.ndarray) -> np.ndarray:
    """Evaluate `nodes` instances of a gate for each of `rows` rows: one message each way.

    inputs: planes [nodes, bits, words], in the order on the wire: the inputs that this party knows,
    then its xor shares of the shared inputs.
    Returns planes [nodes, outputs, words] of xor shares; bits beyond `rows` mean nothing.
    """
    correlations = party.take(correlation(gate), words_for(rows) * nodes)
    masks = [_planes(x, nodes) for x in correlations.masks]
    sums = _planes(correlations.results[0], nodes)
    # 1. Open the masked inputs.
    own_part = inputs ^ np.concatenate([masks[party.rank], masks[2]], axis=1)
    peers = _exchange(party, gate, own_part, rows)
    client, provider = (own_part, peers) if party.rank == CLIENT else (peers, own_part)
    shared = client[:, gate.client :] ^ provider[:, gate.provider :]
    public = np.concatenate(
        [client[:, : gate.client], provider[:, : gate.provider], shared], axis=1
    )
    # 2. Evaluate this party's share of every polynomial.
    return _combine(gate, party.rank, public, np.concatenate(masks, axis=1), sums)


def _planes(words: np.ndarray, nodes: int) -> np.ndarray:
    """Return units [width * nodes, k], row groups first, as planes [nodes, k, width]."""
    grouped = words.reshape(len(words) // nodes, nodes, words.shape[-1])
    return np.ascontiguousarray(grouped.transpose(1, 2, 0))


def _exchange(party: Party, gate: Gate, own_part: np.ndarray, rows: int) -> np.ndarray:
    nodes, _, width = own_part.shape
    if gate.sent(party.rank):
        party.send_bytes(to_message(own_part, rows))
    expected = gate.sent(1 - party.rank)
    if not expected:
        return np.zeros((nodes, 0, width), np.uint64)
    data = party.recv_bytes((nodes * expected, bytes_for(rows)))
    return from_message(data, rows).reshape(nodes, expected, width)


def _combine(
    gate: Gate, rank: int, public: np.ndarray, masks: np.ndarray, sums: np.ndarray
) -> np.ndarray:
    nodes, _, width = public.shape
    prepared = {p: sums[:, i] for i, p in enumerate(gate.sums)}
    opened: dict[Monomial, np.ndarray] = {}

    def m(s: Monomial) -> np.ndarray:
        """Compute prod_{i in s} m_i, [nodes, width]."""
        if s not in opened:
            first = min(s)
            rest = s - {first}
            opened[s] = public[:, first] & m(rest) if rest else public[:, first]
        return opened[s]

    def value(polynomial: Polynomial) -> Any:
        """Evaluate a polynomial of the m_i, [nodes, width]; a constant stays one word."""
        total: Any = np.uint64(0)
        for s in polynomial:
            total = total ^ (m(s) if s else ~np.uint64(0))
        return total

    def share(total: Polynomial) -> Any:
        """Compute this party's share of a sum of products of masks."""
        if total in prepared:
            return prepared[total]
        own_part: Any = np.uint64(0)
        for s in total:
            if gate.holder(min(s)) in (Owner.JOINT, Owner.of_rank(rank)):
                inputs = [masks[:, i] for i in sorted(s)]
                own_part = own_part ^ functools.reduce(np.bitwise_and, inputs)
        return own_part

    result = np.zeros((nodes, len(gate.outputs), width), np.uint64)
    outputs = result.swapaxes(0, 1)
    if rank == CLIENT:  # the public part: one party's share
        for into, polynomial in zip(outputs, gate.outputs, strict=True):
            into ^= value(polynomial)
    for total, weights in gate.terms.items():
        own_part = share(total)
        for into, weight in zip(outputs, weights, strict=True):
            into ^= own_part & value(weight)
    return result


def gate_cost(gate: Gate, rows: int, nodes: int) -> Cost:
    """Return the cost of `evaluate`: one round, both ways at once."""
    sizes = [nodes * gate.sent(rank) * bytes_for(rows) for rank in (CLIENT, PROVIDER)]
    return Cost(sum(1 for rank in (CLIENT, PROVIDER) if gate.sent(rank)), 1, *sizes)
