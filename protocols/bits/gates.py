"""Boolean gates with many inputs in one round: masked openings and prepared products of masks.

A gate is a list of polynomials over F_2 in a few bits x_i. Ahead of time the parties share a random
mask l_i of every input and sums of products l_S = prod_{i in S} l_i. Online:

  1. Each party sends its share of every input, xored with its share of the mask; an input that one
     party knows is sent by that party alone. Now m_i = x_i ^ l_i is public and uniform.
  2. Since x_i = m_i ^ l_i, a monomial expands to
         prod_{i in T} x_i = xor_{S subset of T} (prod_{i in T - S} m_i) l_S,
     which is linear in the shared l_S: each party evaluates its share without a message.

Products l_S that every polynomial multiplies with the same public factors are prepared as one sum.
Inside SPU a product of bits that one party knows each costs as much as one of shared bits, which
has two such products in it. So a sum often takes fewer products than it has terms (`recipe`).

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

from protocols.bits.planes import bytes_for, from_message, to_message, words_for
from spu_llm.core.correlation import Correlation, Form, Part
from spu_llm.core.op import Cost
from spu_llm.core.party import Party
from spu_llm.core.values import CLIENT, PROVIDER, Owner

Monomial = frozenset[int]
Polynomial = frozenset[Monomial]  # the xor of its monomials; the empty one is the constant 1

ONE: Polynomial = frozenset([frozenset()])
ZERO: Polynomial = frozenset()
_ANDS_PER_CALL = 1 << 19  # bounds SPU's memory when products of masks are made


def variable(i: int) -> Polynomial:
    return frozenset([frozenset([i])])


def plus(*terms: Polynomial) -> Polynomial:
    """Add polynomials over F_2."""
    return functools.reduce(lambda a, b: a ^ b, terms, ZERO)


def times(*factors: Polynomial) -> Polynomial:
    """Multiply polynomials over F_2, where x * x = x."""

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

    def holder(self, i: int) -> Owner:
        if i < self.client:
            return Owner.CLIENT
        return Owner.PROVIDER if i < self.client + self.provider else Owner.JOINT

    @functools.cached_property
    def terms(self) -> dict[Polynomial, tuple[Polynomial, ...]]:
        """Return the sums of products of masks, and what each output multiplies a sum with: a
        polynomial in the opened bits.
        """
        weights: dict[Monomial, list[Polynomial]] = {}
        for i, output in enumerate(self.outputs):
            for monomial in output:
                for s in _subsets(monomial):
                    of_s = weights.setdefault(s, [ZERO] * len(self.outputs))
                    of_s[i] = plus(of_s[i], frozenset([monomial - s]))
        alike: dict[tuple[Polynomial, ...], list[Monomial]] = {}
        for s in sorted(filter(None, weights), key=_order):
            alike.setdefault(tuple(weights[s]), []).append(s)
        return {frozenset(total): weight for weight, total in alike.items() if any(weight)}

    @functools.cached_property
    def sums(self) -> tuple[Polynomial, ...]:
        """Return the sums of `terms` that are prepared inside SPU: with a product that nobody can
        make alone.
        """
        hard = [p for p in self.terms if any(len(self.factors(s)) > 1 for s in p)]
        return tuple(sorted(hard, key=lambda p: _order(max(p, key=_order))))

    def index_of(self, s: Monomial) -> int:
        """Return the index of the prepared sum that has the product of these masks."""
        return next(i for i, p in enumerate(self.sums) if s in p)

    def factors(self, s: Monomial) -> tuple[Monomial, ...]:
        """Split `s` into sets that are known or shared as they are: the client's part, the
        provider's part, and each shared input.
        """
        by = {o: frozenset(i for i in s if self.holder(i) is o) for o in Owner}
        own = (by[Owner.CLIENT], by[Owner.PROVIDER])
        return (*(p for p in own if p), *(frozenset([i]) for i in sorted(by[Owner.JOINT])))

    def sent(self, rank: int) -> int:
        """Return how many bits per instance party `rank` sends."""
        return (self.client, self.provider)[rank] + self.joint


def _order(s: Monomial) -> tuple[int, list[int]]:
    return len(s), sorted(s)


# ---- what is prepared


@dataclass(frozen=True)
class Step:
    """A product made inside SPU, and what it makes: left times right plus rest, each a sum of
    polynomials in the masks that are known by then.
    """

    made: Polynomial
    left: tuple[Polynomial, ...]
    right: tuple[Polynomial, ...]
    rest: tuple[Polynomial, ...]


@dataclass(frozen=True)
class Recipe:
    """Steps, those of a level at once, and for each of the gate's sums what adds up to it."""

    levels: tuple[tuple[Step, ...], ...]
    totals: tuple[tuple[Polynomial, ...], ...]

    @property
    def products(self) -> int:
        """Return how many products of bits SPU makes per instance."""
        return sum(map(len, self.levels))

    def used(self) -> set[Polynomial]:
        steps = itertools.chain.from_iterable(self.levels)
        of_steps = (p for step in steps for p in (*step.left, *step.right, *step.rest))
        return {*of_steps, *itertools.chain.from_iterable(self.totals)}


@functools.cache
def recipe(gate: Gate) -> Recipe:
    """Find how the gate's sums are made of few products.

    A sum whose products have a factor in common is that factor times something smaller, which is
    mostly known by then. Two products c_1 p_1 and c_2 p_2 of a monomial of the client's masks and
    one of the provider's are made by one product of what are xor shares already:
        (c_1 + p_2) (c_2 + p_1) = c_1 p_1 + c_2 p_2 + c_1 c_2 + p_1 p_2,
    the last two of which one party knows.
    """
    steps: dict[Polynomial, Step] = {}

    def is_known(p: Polynomial) -> bool:
        return p in steps or (len(p) == 1 and len(gate.factors(*p)) == 1)

    def parts(total: Polynomial) -> list[Polynomial]:
        """Return what is known and adds up to `total`, after the steps that this adds."""
        if is_known(total):
            return [total]
        ordered = sorted(total, key=_order)
        easy = [frozenset([s]) for s in ordered if len(gate.factors(s)) == 1]
        hard = [s for s in ordered if len(gate.factors(s)) > 1]
        common = [f for f in gate.factors(hard[0]) if all(f in gate.factors(s) for s in hard)]
        quotients = {f: frozenset(s - f for s in hard) for f in common}
        known = [f for f in common if is_known(quotients[f])]
        if known or len(hard) == 1:
            factor = (known or common)[-1]
            smaller = tuple(parts(quotients[factor]))
            steps[total] = Step(total, smaller, (frozenset([factor]),), tuple(easy))
            return [total]
        crossed = [s for s in hard if not any(gate.holder(i) is Owner.JOINT for i in s)]
        crossed = crossed[: len(crossed) // 2 * 2]
        single = [s for s in hard if s not in crossed]
        for s, t in zip(crossed[::2], crossed[1::2], strict=True):
            pair = frozenset([s, t])
            steps[pair] = _crossed(pair, gate.factors(s), gate.factors(t))
            easy.append(pair)
        return [*easy, *itertools.chain.from_iterable(parts(frozenset([s])) for s in single)]

    totals = tuple(tuple(parts(total)) for total in gate.sums)
    depth: dict[Polynomial, int] = {}
    for made, step in steps.items():
        used = (*step.left, *step.right, *step.rest)
        depth[made] = 1 + max(depth.get(p, 0) for p in used)
    levels = tuple(
        tuple(step for made, step in steps.items() if depth[made] == level)
        for level in range(1, 1 + max(depth.values(), default=0))
    )
    return Recipe(levels, totals)


def _crossed(pair: Polynomial, s: Sequence[Monomial], t: Sequence[Monomial]) -> Step:
    """Return the step that makes c_1 p_1 + c_2 p_2 by one product."""
    (c_1, p_1), (c_2, p_2) = s, t

    def known(*monomials: Monomial) -> tuple[Polynomial, ...]:
        return tuple(frozenset([x]) for x in monomials)

    return Step(pair, known(c_1, p_2), known(c_2, p_1), known(c_1 | c_2, p_1 | p_2))


@functools.cache
def correlation(gate: Gate) -> Correlation:
    """Return the correlation of a gate: masks of the inputs and the sums of their products that the
    gate needs; a unit is 64 instances.
    """
    made = recipe(gate)
    alone = {s for p in made.used() for s in p if len(p) == 1 and len(gate.factors(s)) == 1}
    own = (
        sorted((s for s in alone if gate.holder(min(s)) is holder), key=_order)
        for holder in (Owner.CLIENT, Owner.PROVIDER)
    )
    joint = [frozenset([gate.client + gate.provider + i]) for i in range(gate.joint)]
    groups = [group for group in (*own, joint) if group]  # what `secure` takes, in its order

    def derive(*masks: Any) -> list[Any]:
        """Compute products of each party's masks, by that party (the other one's zeros stay zeros),
        and return them with the masks that are shared.
        """
        columns = np.concatenate(masks, axis=1).T  # numbered as the gate's inputs
        return [
            np.stack([np.bitwise_and.reduce(columns[sorted(s)]) for s in group], axis=-1)
            for group in groups
        ]

    def secure(*inputs: Any) -> list[Any]:
        """Compute the sums by the steps of the recipe, level by level."""
        known = {
            frozenset([s]): array[:, i]
            for group, array in zip(groups, inputs, strict=True)
            for i, s in enumerate(group)
        }

        def total(polynomials: Iterable[Polynomial]) -> Any:
            return functools.reduce(lambda a, b: a ^ b, [known[p] for p in polynomials])

        for level in made.levels:
            left = stack([total(step.left) for step in level])
            right = stack([total(step.right) for step in level])
            both = left & right
            known.update({step.made: both[:, i] for i, step in enumerate(level)})
            known.update({s.made: total((s.made, *s.rest)) for s in level if s.rest})
        return [stack([total(polynomials) for polynomials in made.totals])]

    def bits(count: int, holder: Owner) -> Part:
        return Part((count,), holder, Form.BOOL)

    # What was prepared for other polynomials under the same name must not serve these.
    sums = [sorted(map(sorted, p)) for p in gate.sums]
    content = repr((gate.client, gate.provider, gate.joint, sums))
    chunk = max(1, _ANDS_PER_CALL // (64 * made.products))
    return Correlation(
        name=f"gate {gate.name} {hashlib.sha256(content.encode()).hexdigest()[:8]}",
        masks=(
            bits(gate.client, Owner.CLIENT),
            bits(gate.provider, Owner.PROVIDER),
            bits(gate.joint, Owner.JOINT),
        ),
        results=(bits(len(gate.sums), Owner.JOINT),),
        secure=secure,
        derive=derive,
        inputs=tuple(bits(len(group), Owner.JOINT) for group in groups),
        chunk=chunk,
        transfers=64 * made.products,
    )


def stack(columns: Sequence[Any]) -> Any:
    """Stack arrays side by side in a new last axis, in NumPy or in JAX."""
    return (jnp if isinstance(columns[0], jax.Array) else np).stack(columns, axis=-1)


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


def _subsets(s: Monomial) -> Iterable[Monomial]:
    return (
        frozenset(c) for size in range(len(s) + 1) for c in itertools.combinations(sorted(s), size)
    )


def gate_cost(gate: Gate, rows: int, nodes: int) -> Cost:
    """Return the cost of `evaluate`: one round, both ways at once."""
    sizes = [nodes * gate.sent(rank) * bytes_for(rows) for rank in (CLIENT, PROVIDER)]
    return Cost(sum(1 for rank in (CLIENT, PROVIDER) if gate.sent(rank)), 1, *sizes)
