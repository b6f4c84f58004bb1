"""How the sums of products of masks that a gate prepares are made of few products."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from protocols.bits.polynomials import Gate, Monomial, Polynomial, order


@dataclass(frozen=True)
class Step:
    """A product of shared bits, and what it makes: left times right plus rest, each a sum of
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


@functools.cache
def recipe(gate: Gate) -> Recipe:
    """Find how the gate's sums are made of few products, of few different factors: each different
    one takes a transfer (`protocols.bits.stars`).

    A sum whose products have a factor in common is that factor times something smaller, if that is
    known. A single product is one of two factors that others have, too, as far as there are some;
    else of what lies in either half of the inputs that are multiplied with each other.
    """
    steps: dict[Polynomial, Step] = {}
    factors: set[Monomial] = set()
    groups = _groups(gate)

    def is_known(p: Polynomial) -> bool:
        return p in steps or (len(p) == 1 and len(gate.factors(*p)) == 1)

    def parts(total: Polynomial) -> list[Polynomial]:
        """Return what is known and adds up to `total`, after the steps that this adds."""
        if is_known(total):
            return [total]
        ordered = sorted(total, key=order)
        easy = [frozenset([s]) for s in ordered if len(gate.factors(s)) == 1]
        hard = [s for s in ordered if len(gate.factors(s)) > 1]
        if len(hard) == 1:
            split = min(_splits(gate, hard[0]), key=lambda both: cost(*both))
            factors.update(split)
            left, right = (tuple(parts(frozenset([s]))) for s in split)
            steps[total] = Step(total, left, right, tuple(easy))
            return [total]
        common = [f for f in gate.factors(hard[0]) if all(f in gate.factors(s) for s in hard)]
        for factor in reversed(common):
            quotient = frozenset(s - factor for s in hard)
            if is_known(quotient):
                steps[total] = Step(total, (quotient,), (frozenset([factor]),), tuple(easy))
                return [total]
        return [*easy, *itertools.chain.from_iterable(parts(frozenset([s])) for s in hard)]

    def cost(a: Monomial, b: Monomial) -> tuple[int, int, int, list[tuple[int, list[int]]]]:
        fresh = [s for s in (a, b) if s not in factors]
        unknown = sum(not is_known(frozenset([s])) for s in (a, b))
        low, high = next(ends for ends in groups if ends[0] <= min(a) < ends[1])
        apart = -min(_depth(s, low, high) for s in (a, b))
        return len(fresh), unknown, apart, [order(a), order(b)]

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


def _splits(gate: Gate, s: Monomial) -> Iterator[tuple[Monomial, Monomial]]:
    """Yield all ways to write a product as one of two, each of whole factors."""
    first, *others = gate.factors(s)
    for size in range(len(others)):
        for some in itertools.combinations(others, size):
            left = first.union(*some)
            yield left, s - left


def _groups(gate: Gate) -> list[tuple[int, int]]:
    """Return ranges of inputs, from the first up to the end, that no product crosses."""
    ends = sorted((min(s), max(s) + 1) for total in gate.sums for s in total)
    groups: list[tuple[int, int]] = []
    for low, high in ends:
        if groups and low < groups[-1][1]:
            groups[-1] = groups[-1][0], max(high, groups[-1][1])
        else:
            groups.append((low, high))
    return groups


def _depth(s: Monomial, low: int, high: int) -> int:
    """Return how often the inputs from `low` to `high` can be halved with `s` in one half."""
    middle = (low + high + 1) // 2
    if high - low < 2 or min(s) < middle <= max(s):
        return 0
    return 1 + (_depth(s, low, middle) if max(s) < middle else _depth(s, middle, high))
