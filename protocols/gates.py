"""Boolean gates with many inputs in one round: masked openings and prepared products of masks.

A gate is a list of polynomials over F_2 in a few bits x_i. Ahead of time the parties share a random
mask l_i of every input and the products l_S = prod_{i in S} l_i that the polynomials need. Online:

  1. Each party sends its share of every input, xored with its share of the mask; an input that one
     party knows is sent by that party alone. Now m_i = x_i ^ l_i is public and uniform.
  2. Since x_i = m_i ^ l_i, a monomial expands to
         prod_{i in T} x_i = xor_{S subset of T} (prod_{i in T - S} m_i) l_S,
     which is linear in the shared l_S: each party evaluates its share without a message.

This is Beaver's circuit randomisation ("Efficient Multiparty Protocols Using Circuit
Randomization", CRYPTO'91, section 3) for products of any number of factors: a gate of fan-in k
costs one round instead of log2 k. Everything is bit-sliced: 64 rows per word.

Both parties learn the m_i, which the masks make uniform and independent of everything else.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from protocols.planes import bytes_for, from_message, to_message, words_for
from spu_llm.correlation import Correlation, Form, Part
from spu_llm.op import Cost
from spu_llm.party import Party
from spu_llm.values import CLIENT, PROVIDER, Owner

Monomial = frozenset[int]
Polynomial = frozenset[Monomial]  # the xor of its monomials; the empty one is the constant 1

ONE: Polynomial = frozenset([frozenset()])
ZERO: Polynomial = frozenset()
_ANDS_PER_CALL = 1 << 19  # bounds SPU's memory when products of masks are made


def variable(i: int) -> Polynomial:
    return frozenset([frozenset([i])])


def plus(*terms: Polynomial) -> Polynomial:
    """Sum over F_2."""
    return functools.reduce(lambda a, b: a ^ b, terms, ZERO)


def times(*factors: Polynomial) -> Polynomial:
    """Product over F_2, where x * x = x."""

    def two(a: Polynomial, b: Polynomial) -> Polynomial:
        return plus(*(frozenset([s | t]) for s in a for t in b))

    return functools.reduce(two, factors, ONE)


@dataclass(frozen=True)
class Gate:
    """Polynomials in `client` bits that the client knows, `provider` bits that the provider knows,
    and `joint` shared bits, numbered in this order.
    """

    name: str
    client: int
    provider: int
    joint: int
    outputs: tuple[Polynomial, ...]

    @property
    def arity(self) -> int:
        return self.client + self.provider + self.joint

    def holder(self, i: int) -> Owner:
        if i < self.client:
            return Owner.CLIENT
        return Owner.PROVIDER if i < self.client + self.provider else Owner.JOINT

    @functools.cached_property
    def products(self) -> tuple[Monomial, ...]:
        """Sets of at least two inputs whose masks' product is prepared inside SPU: those that are
        needed and that nobody can multiply alone.
        """
        needed = {
            frozenset(s)
            for monomial in itertools.chain.from_iterable(self.outputs)
            for size in range(2, len(monomial) + 1)
            for s in itertools.combinations(monomial, size)
        }
        return tuple(sorted((s for s in needed if len(self.factors(s)) > 1), key=_order))

    def factors(self, s: Monomial) -> tuple[Monomial, ...]:
        """`s` as sets that are known or shared as they are: the client's part, the provider's
        part, and each shared input.
        """
        by = {o: frozenset(i for i in s if self.holder(i) is o) for o in Owner}
        own = (by[Owner.CLIENT], by[Owner.PROVIDER])
        return (*(p for p in own if p), *(frozenset([i]) for i in sorted(by[Owner.JOINT])))

    def sent(self, rank: int) -> int:
        """Bits per instance that party `rank` sends."""
        return (self.client, self.provider)[rank] + self.joint


def _order(s: Monomial) -> tuple[int, list[int]]:
    return len(s), sorted(s)


@functools.cache
def correlation(gate: Gate) -> Correlation:
    """Masks of the inputs and the products that the gate needs; a unit is 64 instances."""
    own = {
        rank: sorted(
            {f for s in gate.products for f in gate.factors(s) if gate.holder(min(f)) is holder},
            key=_order,
        )
        for rank, holder in ((CLIENT, Owner.CLIENT), (PROVIDER, Owner.PROVIDER))
    }
    joint = [frozenset([gate.client + gate.provider + i]) for i in range(gate.joint)]

    def derive(client: Any, provider: Any, shared: Any) -> list[Any]:
        """Products of one party's masks, by that party (the other one's zeros stay zeros)."""
        masks = {CLIENT: client, PROVIDER: provider}
        first = {CLIENT: 0, PROVIDER: gate.client}

        def product(rank: int, s: Monomial) -> Any:
            columns = [masks[rank][:, i - first[rank]] for i in sorted(s)]
            return functools.reduce(np.bitwise_and, columns)

        made = [
            np.stack([product(rank, s) for s in own[rank]], axis=-1)
            for rank in (CLIENT, PROVIDER)
            if own[rank]
        ]
        return [*made, *([shared] if gate.joint else [])]

    def secure(*inputs: Any) -> list[Any]:
        """Products by number of factors: each is a shorter one times one more factor."""
        groups = [own[r] for r in (CLIENT, PROVIDER) if own[r]] + ([joint] if gate.joint else [])
        known = {
            s: array[:, i]
            for group, array in zip(groups, inputs, strict=True)
            for i, s in enumerate(group)
        }
        for count in range(2, gate.arity + 1):
            level = [s for s in gate.products if len(gate.factors(s)) == count]
            if level:
                last = [gate.factors(s)[-1] for s in level]
                left = _stack([known[s - f] for s, f in zip(level, last, strict=True)])
                right = _stack([known[f] for f in last])
                both = left & right
                known.update({s: both[:, i] for i, s in enumerate(level)})
        return [_stack([known[s] for s in gate.products])]

    def bits(count: int, holder: Owner) -> Part:
        return Part((count,), holder, Form.BOOL)

    # What was prepared for other polynomials under the same name must not serve these.
    content = repr((gate.client, gate.provider, gate.joint, [sorted(s) for s in gate.products]))
    chunk = max(1, _ANDS_PER_CALL // (64 * len(gate.products)))
    return Correlation(
        name=f"gate {gate.name} {hashlib.sha256(content.encode()).hexdigest()[:8]}",
        masks=(
            bits(gate.client, Owner.CLIENT),
            bits(gate.provider, Owner.PROVIDER),
            bits(gate.joint, Owner.JOINT),
        ),
        results=(bits(len(gate.products), Owner.JOINT),),
        secure=secure,
        derive=derive,
        inputs=(
            *(bits(len(own[r]), Owner.JOINT) for r in (CLIENT, PROVIDER) if own[r]),
            *([bits(gate.joint, Owner.JOINT)] if gate.joint else []),
        ),
        chunk=chunk,
    )


def _stack(columns: Sequence[Any]) -> Any:
    return (jnp if isinstance(columns[0], jax.Array) else np).stack(columns, axis=-1)


def evaluate(
    party: Party,
    gate: Gate,
    rows: int,
    nodes: int,
    own: np.ndarray | None = None,
    shared: np.ndarray | None = None,
) -> np.ndarray:
    """Shares of the outputs of `nodes` instances for each of `rows` rows: one message each way.

    own: planes [nodes, bits, words] of the inputs that this party knows (None when it knows none);
    shared: planes [nodes, joint, words] of this party's xor shares of the shared inputs.
    Returns planes [nodes, outputs, words] of xor shares; bits beyond `rows` mean nothing.
    """
    width = words_for(rows)
    material = party.take(correlation(gate), width * nodes)
    masks = [_planes(x, nodes) for x in material.masks]
    products = _planes(material.results[0], nodes)
    # 1. Open the masked inputs. The order on the wire is: those this party knows, then shares.
    mine = np.concatenate(
        [
            own if own is not None else np.zeros((nodes, 0, width), np.uint64),
            shared if shared is not None else np.zeros((nodes, 0, width), np.uint64),
        ],
        axis=1,
    ) ^ np.concatenate([masks[party.rank], masks[2]], axis=1)
    theirs = _exchange(party, gate, mine, rows)
    known = gate.client, gate.provider
    both = [mine, theirs] if party.rank == CLIENT else [theirs, mine]
    public = np.concatenate(
        [
            both[CLIENT][:, : known[CLIENT]],
            both[PROVIDER][:, : known[PROVIDER]],
            both[CLIENT][:, known[CLIENT] :] ^ both[PROVIDER][:, known[PROVIDER] :],
        ],
        axis=1,
    )
    # 2. Evaluate this party's share of every polynomial.
    return _combine(gate, party.rank, public, np.concatenate(masks, axis=1), products)


def _planes(words: np.ndarray, nodes: int) -> np.ndarray:
    """Units [width * nodes, k], row groups first, as planes [nodes, k, width]."""
    grouped = words.reshape(len(words) // nodes, nodes, words.shape[-1])
    return np.ascontiguousarray(grouped.transpose(1, 2, 0))


def _exchange(party: Party, gate: Gate, mine: np.ndarray, rows: int) -> np.ndarray:
    nodes, _, width = mine.shape
    if gate.sent(party.rank):
        party.send_bytes(to_message(mine, rows))
    expected = gate.sent(1 - party.rank)
    if not expected:
        return np.zeros((nodes, 0, width), np.uint64)
    data = party.recv_bytes((nodes * expected, bytes_for(rows)))
    return from_message(data, rows).reshape(nodes, expected, width)


def _combine(
    gate: Gate, rank: int, public: np.ndarray, masks: np.ndarray, products: np.ndarray
) -> np.ndarray:
    nodes, _, width = public.shape
    place = {s: i for i, s in enumerate(gate.products)}
    opened: dict[Monomial, np.ndarray] = {}

    def m(s: Monomial) -> np.ndarray:
        """prod_{i in s} m_i, [nodes, width]."""
        if s not in opened:
            first = min(s)
            rest = s - {first}
            opened[s] = public[:, first] & m(rest) if rest else public[:, first]
        return opened[s]

    def value(polynomial: Polynomial) -> Any:
        """A polynomial of the m_i, [nodes, width]; a constant stays one word."""
        total: Any = np.uint64(0)
        for s in polynomial:
            total = total ^ (m(s) if s else ~np.uint64(0))
        return total

    def mask_share(s: Monomial) -> np.ndarray | None:
        """This party's share of l_s; None when it is zero."""
        if s in place:
            return products[:, place[s]]
        holder = gate.holder(min(s))
        if holder is not Owner.JOINT and holder.rank != rank:
            return None
        return functools.reduce(np.bitwise_and, [masks[:, i] for i in sorted(s)])

    result = np.zeros((nodes, len(gate.outputs), width), np.uint64)
    for into, polynomial in zip(result.swapaxes(0, 1), gate.outputs, strict=True):
        coefficients: dict[Monomial, Polynomial] = {}
        for monomial in polynomial:
            for s in _subsets(monomial):
                coefficients[s] = plus(coefficients.get(s, ZERO), frozenset([monomial - s]))
        for s, coefficient in coefficients.items():
            if not s:  # the public part: one party's share
                if rank == CLIENT:
                    into ^= value(coefficient)
                continue
            share = mask_share(s)
            if share is None:
                continue
            into ^= share & value(coefficient)
    return result


def _subsets(s: Monomial) -> Iterable[Monomial]:
    return (
        frozenset(c) for size in range(len(s) + 1) for c in itertools.combinations(sorted(s), size)
    )


def gate_cost(gate: Gate, rows: int, nodes: int) -> Cost:
    """One round, both ways at once."""
    sizes = [nodes * gate.sent(rank) * bytes_for(rows) for rank in (CLIENT, PROVIDER)]
    return Cost(sum(1 for rank in (CLIENT, PROVIDER) if gate.sent(rank)), 1, *sizes)
