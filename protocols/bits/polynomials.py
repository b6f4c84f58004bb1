"""Gates as polynomials over F_2 in bits that one party knows or both share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from spu_llm.core.values import Owner

Monomial = frozenset[int]
Polynomial = frozenset[Monomial]  # the xor of its monomials; the empty one is the constant 1

ONE: Polynomial = frozenset([frozenset()])
ZERO: Polynomial = frozenset()


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
                for s in subsets(monomial):
                    of_s = weights.setdefault(s, [ZERO] * len(self.outputs))
                    of_s[i] = plus(of_s[i], frozenset([monomial - s]))
        alike: dict[tuple[Polynomial, ...], list[Monomial]] = {}
        for s in sorted(filter(None, weights), key=order):
            alike.setdefault(tuple(weights[s]), []).append(s)
        return {frozenset(total): weight for weight, total in alike.items() if any(weight)}

    @functools.cached_property
    def sums(self) -> tuple[Polynomial, ...]:
        """Return the sums of `terms` that both parties prepare: with a product that nobody can make
        alone.
        """
        hard = [p for p in self.terms if any(len(self.factors(s)) > 1 for s in p)]
        return tuple(sorted(hard, key=lambda p: order(max(p, key=order))))

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


def order(s: Monomial) -> tuple[int, list[int]]:
    return len(s), sorted(s)


def subsets(s: Monomial) -> Iterable[Monomial]:
    return (
        frozenset(c) for size in range(len(s) + 1) for c in itertools.combinations(sorted(s), size)
    )


def is_mask(p: Polynomial) -> bool:
    """Return whether a polynomial in masks is one of them."""
    return len(p) == 1 and all(len(s) == 1 for s in p)
