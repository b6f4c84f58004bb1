"""How a gate's products of masks are made of random oblivious transfers.

A product of shared bits x y is x_0 y_0 ^ x_1 y_1, which each party has, and x_0 y_1 ^ x_1 y_0: two
products of a bit of each party. A *star* is one transfer that makes several of these: the chooser's
bit c times every bit d_j of its peer's, one bit of the strings for each (Gilboa, CRYPTO'99, for
bits; Ishai, Kilian, Nissim and Petrank, CRYPTO'03). The strings differ in random bits r_j = s_0j ^
s_1j, of which the chooser knows nothing, so that

    s_(c)j = s_0j ^ c r_j        is a share of c r_j beside s_0j.

A mask is a random bit that its holder need not draw: it may be the random bit of one transfer in
which the holder chooses, or one r_j of its own strings. Where a star wants another bit as well, it
is corrected: the chooser sends c ^ (the random bit), and the peer exchanges its strings where that
is set; the peer sends d_j ^ r_j, and the chooser adds c (d_j ^ r_j). Each is a bit under a random
one that serves once.

Which stars: the fewest that have an end of every product, by the greedy choice of ends with most
products left; of equal ones those of the party that is asked to choose first, so that two plans
take turns with the directions.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from protocols.bits.polynomials import Gate, Polynomial, is_mask
from protocols.bits.recipe import recipe
from spu_llm.core.values import CLIENT, PROVIDER, Owner

# A party's own bit: the sum of its shares of these polynomials in the masks.
Bit = frozenset[Polynomial]


@dataclass(frozen=True)
class Star:
    """A bit of the chooser's times each of its peer's `strings`. Bits that are `fresh` are masks
    that come out of this transfer.
    """

    chooser: int
    choice: Bit
    strings: tuple[Bit, ...]
    fresh_choice: bool
    fresh: frozenset[Bit]

    @property
    def corrections(self) -> tuple[int, int]:
        """Return the bits that the chooser sends, and its peer."""
        return int(not self.fresh_choice), len(self.strings) - len(self.fresh)


# Of each level of a recipe.
Stars = tuple[tuple[Star, ...], ...]


def local_bit(gate: Gate, factor: Iterable[Polynomial], rank: int) -> Bit:
    """Return the party's share of a sum of polynomials, as those of which it has any."""

    def is_held(p: Polynomial) -> bool:
        if len(p) != 1:
            return True
        (s,) = p
        holders = {gate.holder(i) for i in s}
        return holders <= {Owner.of_rank(rank)} or Owner.JOINT in holders or len(holders) > 1

    return frozenset(p for p in factor if is_held(p))


@functools.cache
def stars(gate: Gate, first: int) -> Stars:
    """Return the stars of each level of the gate's recipe; `first`: who rather chooses."""
    known: tuple[set[Bit], set[Bit]] = set(), set()  # masks that have come out of a transfer
    levels: list[tuple[Star, ...]] = []
    for level in recipe(gate).levels:
        left: set[tuple[Bit, Bit]] = set()  # products: a bit of the client's, one of the provider's
        for step in level:
            for a, b in ((step.left, step.right), (step.right, step.left)):
                ends = local_bit(gate, a, CLIENT), local_bit(gate, b, PROVIDER)
                if all(ends):
                    left.add(ends)
        chosen = []
        while left:
            chooser, choice = _best(left, first)
            mine = {ends for ends in left if ends[chooser] == choice}
            left -= mine
            strings = tuple(sorted((ends[1 - chooser] for ends in mine), key=_order))
            # Later levels correct towards masks that are there.
            fresh_choice = not levels and _comes_out(choice, known[chooser])
            fresh = [d for d in strings if not levels and _comes_out(d, known[1 - chooser])]
            chosen.append(Star(chooser, choice, strings, fresh_choice, frozenset(fresh)))
        levels.append(tuple(chosen))
    return tuple(levels)


def transfers(gate: Gate) -> tuple[float, float]:
    """Return how many transfers an instance takes in which the client chooses, and in which the
    provider does, on average over both plans.
    """
    counts = Counter(
        star.chooser
        for first in (CLIENT, PROVIDER)
        for level in stars(gate, first)
        for star in level
    )
    return counts[CLIENT] / 2, counts[PROVIDER] / 2


def correction_bits(gate: Gate) -> float:
    """Return how many bits both parties send for an instance, on average over both plans."""
    plans = [stars(gate, first) for first in (CLIENT, PROVIDER)]
    return sum(sum(star.corrections) for plan in plans for level in plan for star in level) / 2


def _best(left: set[tuple[Bit, Bit]], first: int) -> tuple[int, Bit]:
    """Return the end with most products, and whose it is."""
    degree: Counter[tuple[int, Bit]] = Counter()
    for ends in left:
        degree.update(enumerate(ends))
    return min(degree, key=lambda end: (-degree[end], end[0] != first, _order(end[1])))


def _comes_out(bit: Bit, known: set[Bit]) -> bool:
    """Return whether a bit is a mask of which nothing has come out of a transfer, and note it."""
    if len(bit) != 1 or not is_mask(*bit) or bit in known:
        return False
    known.add(bit)
    return True


def _order(bit: Bit) -> list[list[list[int]]]:
    return sorted(sorted(sorted(s) for s in p) for p in bit)
