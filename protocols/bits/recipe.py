"""How the sums of products of masks that a gate prepares are made of few products."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from protocols.bits.polynomials import Gate, Monomial, Polynomial, order
from spu_llm.core.values import Owner


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

    @property
    def products(self) -> int:
        """Return how many products of shared bits an instance takes."""
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
        ordered = sorted(total, key=order)
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
