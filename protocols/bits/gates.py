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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocols.bits.planes import bytes_for, from_message, to_message, words_for
from protocols.bits.polynomials import Gate, Monomial, Polynomial, variable
from protocols.bits.recipe import Step, recipe
from protocols.bits.stars import Bit, Star, local_bit, products, stars, transfers
from spu_llm.core.correlation import Correlation, Correlations, Form, Part, joined
from spu_llm.core.op import Cost
from spu_llm.core.party import Party
from spu_llm.core.transfers import Transfers
from spu_llm.core.values import CLIENT, PROVIDER, Owner

_TRANSFERS_AT_ONCE = 1 << 18  # bounds memory


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
        by_transfers=functools.partial(made_by_transfers, gate),
        transfers=(64 * by_client, 64 * by_provider),
        # Even, for both plans take turns.
        chunk=max(2, int(_TRANSFERS_AT_ONCE / (64 * (by_client + by_provider))) * 2),
    )


def made_by_transfers(gate: Gate, source: Transfers, units: int) -> Correlations:
    """Make units of a gate's correlation by its stars; half of them by the plan in which rather
    the client chooses, and half by the other one. Messages each way: one for each level of the
    recipe, less those that would be empty.
    """
    halves = [
        _Half(gate, source, stars(gate, first), count)
        for first, count in ((CLIENT, units - units // 2), (PROVIDER, units // 2))
    ]
    for level, steps in enumerate(recipe(gate).levels):
        for half in halves:
            half.take(level)
        own_part = [half.corrections(level) for half in halves]
        peers = sum(half.expected(level) for half in halves)
        words = source.swap(np.concatenate(own_part), 8 * peers).view(np.uint64)
        for half in halves:
            used = half.expected(level)
            half.finish(level, steps, words[:used])
            words = words[used:]
    return joined([half.made() for half in halves])


@dataclass
class _Taken:
    """A star's transfers at one party, 64 of them a word. At the chooser `choice` [units] and the
    strings that it says; at its peer the strings for 0, and `between`: those for 1, added.
    [bits of strings that are still to be used, units]
    """

    choice: np.ndarray | None
    strings: np.ndarray
    between: np.ndarray | None

    def next(self, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the next bits of the strings, and of `between`."""
        strings, self.strings = self.strings[:count], self.strings[count:]
        if self.between is None:
            return strings, None
        between, self.between = self.between[:count], self.between[count:]
        return strings, between


class _Half:
    """Units of a gate that are made by one plan, at one party; words [units] of 64 instances."""

    def __init__(self, gate: Gate, source: Transfers, plan: Sequence[Star], units: int) -> None:
        self._gate, self._source, self._units = gate, source, units
        self._plan, self._rank = plan, source.rank
        self._shares: dict[Polynomial, np.ndarray] = {}  # this party's, of what is known
        self._taken: dict[Star, _Taken] = {}
        self._products: dict[tuple[Bit, Bit], np.ndarray] = {}
        # Of the level: a star's bit times its strings, this party's part, and what lies between.
        self._parts: list[tuple[Star, np.ndarray, np.ndarray | None]] = []

    def take(self, level: int) -> None:
        """Take the transfers that are first used on a level, and the masks that come out."""
        for star in self._plan:
            if star.first == level:
                self._taken[star] = self._drawn(star)
        self._parts = [
            (star, *self._taken[star].next(len(star.strings[level])))
            for star in self._plan
            if star.strings[level]
        ]
        if level:
            return
        for star, _, between in self._parts:
            if between is None:
                if star.fresh_choice:
                    choice = self._taken[star].choice
                    assert choice is not None
                    self._came_out(star.choice, choice)
            else:
                for string, words in zip(star.strings[0], between, strict=True):
                    if string in star.fresh:
                        self._came_out(string, words)
        self._draw_others()

    def _drawn(self, star: Star) -> _Taken:
        if star.chooser == self._rank:
            bits, strings = self._source.choose(64 * self._units)
            choice = _packed(bits.astype(np.uint8)).reshape(self._units)
            return _Taken(choice, _sliced(strings, star.width), None)
        zero, one = (_sliced(s, star.width) for s in self._source.offer(64 * self._units))
        return _Taken(None, zero, zero ^ one)

    def _came_out(self, bit: Bit, words: np.ndarray) -> None:
        (mask,) = bit
        self._shares[mask] = words

    def _draw_others(self) -> None:
        """Draw the masks that come out of no transfer."""
        own = (Owner.JOINT, Owner.of_rank(self._rank))
        for i in range(self._gate.client + self._gate.provider + self._gate.joint):
            if self._gate.holder(i) in own and variable(i) not in self._shares:
                self._shares[variable(i)] = self._source.draw((self._units,))

    def _share(self, polynomials: Iterable[Polynomial]) -> np.ndarray:
        """Return this party's share of a sum, zero of what it has none of."""
        total = np.zeros(self._units, np.uint64)
        for p in local_bit(self._gate, polynomials, self._rank):
            if p not in self._shares:  # a product of masks that this party knows alone
                (s,) = p
                self._shares[p] = np.bitwise_and.reduce([self._shares[variable(i)] for i in s])
            total ^= self._shares[p]
        return total

    def corrections(self, level: int) -> np.ndarray:
        """Return the words that this party sends for a level."""
        sent = [np.empty(0, np.uint64)]
        for star, _, between in self._parts:
            if between is None:
                if star.chooser_sends(level):
                    choice = self._taken[star].choice
                    assert choice is not None
                    sent.append(self._share(star.choice) ^ choice)
                continue
            corrected = zip(star.strings[level], star.corrected(level), between, strict=True)
            sent += [self._share(string) ^ words for string, is_sent, words in corrected if is_sent]
        return np.concatenate(sent)

    def expected(self, level: int) -> int:
        """Return how many words the peer sends for a level."""
        return self._units * sum(
            sum(star.corrected(level)) if between is None else star.chooser_sends(level)
            for star, _, between in self._parts
        )

    def finish(self, level: int, steps: Sequence[Step], peers: np.ndarray) -> None:
        """Correct the products of a level, and add up its steps."""
        words = iter(peers.reshape(-1, self._units))
        for star, parts, between in self._parts:
            taken = self._taken[star]
            if between is None:
                if level == star.first:
                    taken.choice = self._share(star.choice)
                assert taken.choice is not None
                for part, is_sent in zip(parts, star.corrected(level), strict=True):
                    if is_sent:
                        part ^= taken.choice & next(words)
            elif star.chooser_sends(level):
                swap = next(words)
                parts ^= between & swap
                # Bits of later levels change places as well.
                assert taken.between is not None
                taken.strings ^= taken.between & swap
            for string, part in zip(star.strings[level], parts, strict=True):
                ends = (star.choice, string) if star.chooser == CLIENT else (string, star.choice)
                self._products[ends] = part
        for step in steps:
            total = self._share(step.left) & self._share(step.right)
            for ends in products(self._gate, step):
                total ^= self._products[ends]
            self._shares[step.made] = total ^ self._share(step.rest)

    def made(self) -> Correlations:
        """Return the masks, zeros for the peer's own, and the sums."""
        gate, masks = self._gate, []
        numbers = np.split(
            np.arange(gate.client + gate.provider + gate.joint),
            [gate.client, gate.client + gate.provider],
        )
        for group in numbers:
            columns = [self._share([variable(int(i))]) for i in group]
            empty = np.empty((self._units, 0), np.uint64)
            masks.append(np.stack(columns, axis=-1) if columns else empty)
        sums = [self._share(total) for total in recipe(gate).totals]
        return Correlations(masks, [np.stack(sums, axis=-1)])


def _packed(bits: np.ndarray) -> np.ndarray:
    """Return words of the bits [.., 64 words] (uint8 of 0 or 1)."""
    return np.packbits(bits, axis=-1, bitorder="little").view(np.uint64)


def _sliced(strings: np.ndarray, width: int) -> np.ndarray:
    """Return the first bits of strings [64 units, 2 words], one by one: words [width, units]."""
    octets = strings.view(np.uint8).reshape(len(strings), -1)
    bits = np.empty((width, len(strings)), np.uint8)
    for i in range(0, width, 8):
        octet = np.ascontiguousarray(octets[:, i // 8])
        for j in range(i, min(i + 8, width)):
            bits[j] = (octet >> np.uint8(j - i)) & np.uint8(1)
    return _packed(bits)


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
