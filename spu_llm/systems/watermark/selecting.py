"""Which candidate comes out: WatermarkSingle, WatermarkRecursive and ScoreSeqs (§2.2, §2.3, §2.6).

u_i is uniform given the counts c, since no seed is in two candidates. -log(-log u_i) is then
standard Gumbel, and argmax_i -log(-log u_i) + log c_i is candidate i with probability c_i / sum c
(the form in logarithms of argmax u_i^(m / c_i), which underflows).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.cdfs import Family, Tails
from spu_llm.systems.watermark.history import History
from spu_llm.systems.watermark.keys import Key, Scheme, Seed, check_keys
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.units import Content, Units, common, grams, joined

Grams = Sequence[tuple[bytes, ...]]  # that a candidate adds to the text before it


@dataclass(frozen=True)
class Choice:
    """The number of the winner, and what took part."""

    index: int
    used: frozenset[bytes]  # names of all seeds that scored a candidate
    seeds: int  # of the winner: how many marked it


@dataclass(frozen=True)
class Chunk:
    """The origin of a chunk: how many of its candidates were distinct, and how many seeds marked
    it, key by key (in the last of the groups that it won).
    """

    distinct: int
    seeds: tuple[int, ...]


class Chosen(NamedTuple):
    """`used`: names of all seeds that scored a candidate, key by key."""

    drawn: Drawn
    chunk: Chunk
    used: tuple[frozenset[bytes], ...]


@dataclass(frozen=True)
class Chooser:
    """One of m^t candidates under the keys K_1, ..., K_t (WatermarkRecursive, §2.6).

    They are in groups of m: one of each is chosen under K_t, of m such winners one under K_(t-1),
    and so on. Within one chunk siblings below another key may share seeds, since the choice between
    them is under a key of its own and each has the right distribution. Every key has a history of
    its own.
    """

    keys: tuple[Key, ...]
    scheme: Scheme
    units: Units
    m: int
    histories: tuple[History, ...]
    prg: Prg

    def __post_init__(self) -> None:
        check_keys(self.keys)

    @property
    def count(self) -> int:
        """Return how many candidates it chooses among."""
        return int(self.m ** len(self.keys))

    def chosen(self, drawn: Sequence[Drawn], before: Content) -> Chosen:
        """Choose one of `count` candidates, which were drawn after what was generated before. The
        histories have the seeds from then on.
        """
        assert len(drawn) == self.count
        level, known = list(drawn), added(self.units, self.scheme.ngram, before, drawn)
        marked: dict[Drawn, tuple[int, ...]] = dict.fromkeys(known, ())
        used = [frozenset[bytes]() for _ in self.keys]
        for depth in reversed(range(len(self.keys))):
            winners, seeds = [], {}
            for start in range(0, len(level), self.m):
                winner, choice = among(
                    self.keys[depth],
                    level[start : start + self.m],
                    known,
                    self.scheme.family,
                    self.prg,
                    self.histories[depth],
                )
                used[depth] |= choice.used
                winners.append(winner)
                seeds[winner] = (choice.seeds, *marked[winner])
            level, marked = winners, seeds
        for history, names in zip(self.histories, used, strict=True):
            history.add(names)
        return Chosen(level[0], Chunk(len(known), marked[level[0]]), tuple(used))


def group_of(count: int, keys: int, most: int) -> int:
    """Return m of m^t = `count` candidates, `most` at most, under t keys. Raise InputError where
    there is no m of 2 or more.
    """
    if count <= most:
        for m in range(2, count + 1):
            if m**keys == count:
                return m
    few = [str(m**keys) for m in range(2, most + 1) if m**keys <= most]
    if not few:
        raise InputError(f"{keys} keys have no choice among {most} candidates; give fewer keys")
    raise InputError(
        f"{keys} keys choose one inside the other, among {' or '.join(few)} candidates, "
        f"found {count}"
    )


def gumbels(tails: Sequence[Tails], counts: Sequence[float]) -> np.ndarray:
    """Return -log(-log u_i) + log c_i, float64 [candidate]."""
    return np.array([t.gumbel + math.log(c) for t, c in zip(tails, counts, strict=True)])


def added(
    units: Units, ngram: int, before: Content, candidates: Sequence[Drawn]
) -> dict[Drawn, Grams]:
    """Return the n-grams that each candidate adds to what was generated before; distinct candidates
    in their order.
    """
    old, fresh = units.of(before), dict[Drawn, Grams]()
    for one in dict.fromkeys(candidates):
        whole = units.of(joined(before, one.content))
        fresh[one] = grams(whole, ngram, common(old, whole))
    return fresh


def among(
    key: Key,
    candidates: Sequence[Drawn],
    known: Mapping[Drawn, Grams],
    family: Family,
    prg: Prg,
    used: Container[bytes] = frozenset(),
) -> tuple[Drawn, Choice]:
    """Choose one of candidates of one distribution, independent or exchangeable, or winners under
    other keys; equal ones are counted together. `known` has their n-grams, the rest is as in
    `choose`.
    """
    counts = Counter(candidates)
    choice = choose(key, [known[one] for one in counts], list(counts.values()), family, prg, used)
    return list(counts)[choice.index], choice


def choose(
    key: Key,
    grams: Sequence[Grams],
    counts: Sequence[float],
    family: Family,
    prg: Prg,
    used: Container[bytes] = frozenset(),
) -> Choice:
    """Choose among distinct candidates with these n-grams and counts (or probabilities). `used`:
    seeds that may not decide any more. `prg`: private randomness, for who owns a shared seed and
    for candidates that are left with none.
    """
    seeds = own([[key.seed(gram) for gram in of_one] for of_one in grams], prg, used)
    scored = [
        np.array([seed.uniform for seed in of_one]) if of_one else open_uniform(prg)
        for of_one in seeds
    ]
    best = int(np.argmax(gumbels([family.tails(u) for u in scored], counts)))
    names = frozenset(seed.name for of_one in seeds for seed in of_one)
    return Choice(best, names, len(seeds[best]))


def own(
    seeds: Sequence[Sequence[Seed]], prg: Prg, used: Container[bytes] = frozenset()
) -> list[list[Seed]]:
    """Return the seeds that score each candidate: every seed has one owner, uniformly at random
    among the candidates that have it (§2.3 step 3: across the whole set, as prose and proof need
    it).
    """
    numbers: dict[bytes, float] = {}
    owners: dict[bytes, list[int]] = {}
    for i, of_one in enumerate(seeds):
        for name, uniform in of_one:
            if name not in used:
                numbers[name] = uniform
                having = owners.setdefault(name, [])
                if not having or having[-1] != i:
                    having.append(i)
    seeds_of: list[list[Seed]] = [[] for _ in seeds]
    for name, having in owners.items():
        owner = having[0]
        if len(having) > 1:
            owner = having[int(float(prg.uniform(())) * len(having))]
        seeds_of[owner].append(Seed(name, numbers[name]))
    return seeds_of


def open_uniform(prg: Prg) -> np.ndarray:
    """Draw one number in (0, 1), float64 [1]."""
    return np.maximum(prg.uniform((1,)), 2.0**-53)
