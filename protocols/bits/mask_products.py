"""Products of masks of a gate, made of random oblivious transfers by `protocols.bits.stars`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from protocols.bits.polynomials import Gate, Polynomial, variable
from protocols.bits.recipe import Step, recipe
from protocols.bits.stars import Bit, Star, local_bit, products, stars
from spu_llm.core.correlation import Correlations, joined
from spu_llm.core.transfers import STRING_WORDS, Transfers
from spu_llm.core.values import CLIENT, PROVIDER, Owner

TRANSFERS_AT_ONCE = 1 << 18  # of a chunk, about: bounds memory


def made(gate: Gate, source: Transfers, units: int) -> Correlations:
    """Make units of a gate's correlation: masks of its inputs and the prepared sums. Half of them
    are made by the plan in which rather the client chooses, and half by the other one.
    """
    halves = [Products(gate, source, first, count) for first, count in plans(units)]
    make(halves)
    ends = np.cumsum([0, gate.client, gate.provider, gate.joint])
    groups = [range(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    return joined(
        [Correlations([half.masks(group) for group in groups], [half.sums()]) for half in halves]
    )


def plans(units: int) -> tuple[tuple[int, int], ...]:
    """Return who rather chooses, and for how many units."""
    halves = (CLIENT, units - units // 2), (PROVIDER, units // 2)
    return halves if units > 1 else halves[:1]


def make(halves: Sequence[Products]) -> None:
    """Make the products of all halves, of one gate. Messages each way: one for each level of the
    recipe, less those that would be empty.
    """
    for level, steps in enumerate(recipe(halves[0].gate).levels):
        for half in halves:
            half.take(level)
        own_part = [half.corrections(level) for half in halves]
        peers = sum(half.expected(level) for half in halves)
        words = halves[0].source.swap(np.concatenate(own_part), 8 * peers).view(np.uint64)
        for half in halves:
            used = half.expected(level)
            half.finish(level, steps, words[:used])
            words = words[used:]


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


class Products:
    """Units of a gate that are made by one plan, at one party; words [units] of 64 instances."""

    def __init__(
        self, gate: Gate, source: Transfers, first: int, units: int, *, keep: bool = False
    ) -> None:
        """Set up for the plan in which rather party `first` chooses. keep: party `first` alone
        chooses, and the second words of all strings are kept for other uses.
        """
        self.gate, self.source = gate, source
        self._plan, self._rank, self._keep = stars(gate, first, alone=keep), source.rank, keep
        self.first, self.units = first, units
        # Of stars: at the chooser the second words of its strings, at its peer of both strings.
        self.words: dict[Star, tuple[np.ndarray, ...]] = {}
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
        chooses, count = star.chooser == self._rank, 64 * self.units
        bits, *strings = self.source.choose(count) if chooses else (None, *self.source.offer(count))
        # Second words that are kept serve elsewhere.
        assert star.width <= 64 * (STRING_WORDS - self._keep)
        if self._keep:
            self.words[star] = tuple(both[:, 1].copy() for both in strings)
        if bits is not None:
            choice = _packed(bits.astype(np.uint8)).reshape(self.units)
            return _Taken(choice, _sliced(strings[0], star.width), None)
        zero, one = (_sliced(both, star.width) for both in strings)
        return _Taken(None, zero, zero ^ one)

    def _came_out(self, bit: Bit, words: np.ndarray) -> None:
        (mask,) = bit
        self._shares[mask] = words

    def _draw_others(self) -> None:
        """Draw the masks that come out of no transfer."""
        own = (Owner.JOINT, Owner.of_rank(self._rank))
        for i in range(self.gate.client + self.gate.provider + self.gate.joint):
            if self.gate.holder(i) in own and variable(i) not in self._shares:
                self._shares[variable(i)] = self.source.draw((self.units,))

    def _share(self, polynomials: Iterable[Polynomial]) -> np.ndarray:
        """Return this party's share of a sum, zero of what it has none of."""
        total = np.zeros(self.units, np.uint64)
        for p in local_bit(self.gate, polynomials, self._rank):
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
        return self.units * sum(
            sum(star.corrected(level)) if between is None else star.chooser_sends(level)
            for star, _, between in self._parts
        )

    def finish(self, level: int, steps: Sequence[Step], peers: np.ndarray) -> None:
        """Correct the products of a level, and add up its steps."""
        words = iter(peers.reshape(-1, self.units))
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
            for ends in products(self.gate, step):
                total ^= self._products[ends]
            self._shares[step.made] = total ^ self._share(step.rest)

    def masks(self, inputs: Iterable[int]) -> np.ndarray:
        """Return this party's shares of the masks of these inputs: words [units, inputs]."""
        columns = [self._share([variable(i)]) for i in inputs]
        return np.stack(columns, -1) if columns else np.empty((self.units, 0), np.uint64)

    def sums(self) -> np.ndarray:
        """Return this party's shares of the prepared sums: words [units, sums]."""
        return np.stack([self._share(total) for total in recipe(self.gate).totals], -1)


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
