"""What came of an attack: how often it succeeded, against what guessing would give."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import bdtrc

_Z = 1.959963984540054  # of the normal distribution: 95 % within


@dataclass(frozen=True)
class AttackOutcome:
    """`what`: what counts as a success, and as a try. chance: the rate of whoever sees nothing.
    bound: the highest rate that is claimed for whoever sees all, where one is. luck: `by_luck`,
    where tries are not independent and it was found in another way.
    """

    attack: str
    mode: str
    what: str
    tries: int
    successes: int
    chance: float
    bound: float | None = None
    notes: str = ""
    luck: float | None = None

    @property
    def rate(self) -> float:
        return self.successes / self.tries

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the rate, by Wilson (1927), as if tries were independent."""
        return wilson(self.successes, self.tries)

    @property
    def by_luck(self) -> float:
        """Return the probability that as many independent guesses succeed as often, or more so. The
        interval does not say that: of rates near 0 a single success lifts its lower end above
        chance.
        """
        if self.luck is not None:
            return self.luck
        if not self.successes:
            return 1.0
        return float(bdtrc(self.successes - 1, self.tries, self.chance))

    @property
    def at_chance(self) -> bool:
        """Return whether guessing does as well with a probability of 1 % or more."""
        return self.by_luck >= 0.01

    def line(self) -> str:
        low, high = self.interval
        parts = [
            f"{self.attack}, {self.mode}: {self.what}: {self.successes} of {self.tries} = "
            f"{self.rate:.2%} ({low:.2%} to {high:.2%}), chance {self.chance:.2%} "
            f"(as often by luck: {self.by_luck:.2g})"
        ]
        parts += [] if self.bound is None else [f"bound {self.bound:.2%}"]
        parts += [self.notes] if self.notes else []
        return "; ".join(parts)


def wilson(successes: float, tries: int) -> tuple[float, float]:
    """Return the 95 % score interval of a rate. ValueError unless 0 <= successes <= tries and 0 <
    tries.
    """
    if not 0 <= successes <= tries or not tries:
        raise ValueError(f"{successes} of {tries} is no rate")
    rate, z2 = successes / tries, _Z**2
    middle = (rate + z2 / (2 * tries)) / (1 + z2 / tries)
    half = _Z / (1 + z2 / tries) * math.sqrt(rate * (1 - rate) / tries + z2 / (4 * tries**2))
    return max(0.0, middle - half), min(1.0, middle + half)
