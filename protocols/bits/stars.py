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

Which stars: few that have an end of every product of all levels, by the greedy choice of ends with
most products left; of equal ones those of the party that is asked to choose first, so that two
plans take turns with the directions.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protocols.bits.polynomials import Gate, Polynomial, is_mask
from protocols.bits.recipe import Step, recipe
from spu_llm.core.values import CLIENT, PROVIDER, Owner

# A party's own bit: the sum of its shares of these polynomials in the masks.
Bit = frozenset[Polynomial]


@dataclass(frozen=True)
class Star:
    """A bit of the chooser's times bits of its peer's: those of each level of the recipe. Bits that
    are `fresh` are masks that come out of this transfer.
    """

    chooser: int
    choice: Bit
    strings: tuple[tuple[Bit, ...], ...]
    fresh_choice: bool
    fresh: frozenset[Bit]

    @property
    def first(self) -> int:
        """Return the level that the transfer is first used on."""
        return next(level for level, strings in enumerate(self.strings) if strings)

    @property
    def width(self) -> int:
        """Return how many bits of the strings are used."""
        return sum(map(len, self.strings))

    def chooser_sends(self, level: int) -> bool:
        """Return whether the chooser corrects its bit on this level."""
        return level == self.first and not self.fresh_choice

    def corrected(self, level: int) -> tuple[bool, ...]:
        """Return for each string bit of a level whether the chooser's peer corrects it."""
        return tuple(level > 0 or string not in self.fresh for string in self.strings[level])


def local_bit(gate: Gate, factor: Iterable[Polynomial], rank: int) -> Bit:
    """Return the party's share of a sum of polynomials, as those of which it has any: all but
    products that its peer knows alone.
    """
    alone = {Owner.of_rank(1 - rank)}
    return frozenset(p for p in factor if {gate.holder(i) for s in p for i in s} != alone)


def products(gate: Gate, step: Step) -> Iterator[tuple[Bit, Bit]]:
    """Yield the products of a bit of the client's and a bit of the provider's that a step takes."""
    for a, b in ((step.left, step.right), (step.right, step.left)):
        ends = local_bit(gate, a, CLIENT), local_bit(gate, b, PROVIDER)
        if all(ends):
            yield ends


@functools.cache
def stars(gate: Gate, first: int, *, alone: bool = False) -> tuple[Star, ...]:
    """Return the stars of a gate's recipe; `first`: who rather chooses, or always if `alone`."""
    levels = recipe(gate).levels
    level_of: dict[tuple[Bit, Bit], int] = {}
    for level, steps in enumerate(levels):
        for step in steps:
            for ends in products(gate, step):
                level_of.setdefault(ends, level)
    left, known = set(level_of), (set[Bit](), set[Bit]())
    made = []
    while left:
        chooser, choice = _best(left, first, alone)
        mine = {ends for ends in left if ends[chooser] == choice}
        left -= mine
        strings: list[list[Bit]] = [[] for _ in levels]
        for ends in mine:
            strings[level_of[ends]].append(ends[1 - chooser])
        for some in strings:
            some.sort(key=_order)
        # Later levels correct towards masks that are there.
        fresh_choice = bool(strings[0]) and _comes_out(choice, known[chooser])
        fresh = [d for d in strings[0] if _comes_out(d, known[1 - chooser])]
        made.append(
            Star(chooser, choice, tuple(map(tuple, strings)), fresh_choice, frozenset(fresh))
        )
    return tuple(made)


@functools.cache
def transfers(gate: Gate, *, alone: bool = False) -> tuple[float, float]:
    """Return how many transfers an instance takes in which the client chooses, and in which the
    provider does, on average over both plans.
    """
    plans = (stars(gate, first, alone=alone) for first in (CLIENT, PROVIDER))
    counts = Counter(star.chooser for plan in plans for star in plan)
    return counts[CLIENT] / 2, counts[PROVIDER] / 2


@functools.cache
def correction_bits(gate: Gate) -> float:
    """Return how many bits both parties send for an instance, on average over both plans."""
    plan = [star for first in (CLIENT, PROVIDER) for star in stars(gate, first)]
    levels = range(len(recipe(gate).levels))
    return sum(s.chooser_sends(k) + sum(s.corrected(k)) for s in plan for k in levels) / 2


def _best(left: set[tuple[Bit, Bit]], first: int, alone: bool) -> tuple[int, Bit]:
    """Return the end with most products, and whose it is."""
    degree: Counter[tuple[int, Bit]] = Counter()
    for ends in left:
        degree.update([(first, ends[first])] if alone else enumerate(ends))
    return min(degree, key=lambda end: (-degree[end], end[0] != first, _order(end[1])))


def _comes_out(bit: Bit, known: set[Bit]) -> bool:
    """Return whether a bit is a mask of which nothing has come out of a transfer, and note it."""
    if len(bit) != 1 or not is_mask(*bit) or bit in known:
        return False
    known.add(bit)
    return True


def _order(bit: Bit) -> list[list[list[int]]]:
    return sorted(sorted(sorted(s) for s in p) for p in bit)
