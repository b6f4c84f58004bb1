"""INDVocab (NOIR, algorithm 1; §2.2 of the digest): a secret codebook in place of the token table.

Each feature of each token is drawn on its own (`mechanisms`): kept, or copied from another token.
By sorting a column of V values a row of V probabilities need not be written out:

1. Sort x. For token t at place a, w_k = e^(-c |x_t - x_k|) is e^(-c x_t) e^(c x_k) to its left and
   e^(c x_t) e^(-c x_k) to its right: two prefix sums give both sides' weights of every t.
2. Keep or move: by their masses.
3. Who moves takes the left or the right side, by their weights.
4. Within the side, binary search in its prefix sums for a uniform integer below the side's sum.

O(m V log V) in all, one column in memory at a time. Steps 2 and 3 compare 63 random bits with a
whole number; the weights of step 4 are whole numbers of about 62 - log2 V bits, so that this step
is exact for these. (Uniform float32 numbers would change a bin of 1 / 151,936 by 0.9 %, against
eps_i = 0.3 %.) Rounding of all these numbers changes the log of two probabilities' ratio by less
than `ROUNDING` of eps_i, which sound mechanisms are not given in the first place: theirs is
eps (1 - ROUNDING).

What the codebook is worth: at the paper's eps / m of 13 / 4096 about one feature in V is kept. The
codebook is a random table whose columns hold the values of the public table's, and tuning has to
learn it anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spu_llm.core.prg import Prg
from spu_llm.systems.split.mechanisms import MECHANISMS, SOUND, check, decay, masses

__all__ = [
    "DEFAULT",
    "MECHANISMS",
    "SOUND",
    "Codebook",
    "ColumnDistribution",
    "Distortion",
    "column_distribution",
    "draw",
    "draw_codebook",
    "expected_distortion",
    "observed_distortion",
]

# Of the two that hold their epsilon, the one whose values lie nearer to the token's own for every
# eps_i below about ln V - 1: wherever epsilon still means something. (Above, grr keeps more.)
DEFAULT = "exponential"
ROUNDING = 2.0**-20
_BITS = 63  # of a threshold
_LARGEST = 100.0  # eps_i: e^eps_i and e^-eps_i are far from the ends of float64


@dataclass(frozen=True)
class ColumnDistribution:
    """The distribution that the tokens of one column are drawn from; arrays [V] by place in sorted
    order.
    """

    order: np.ndarray  # int64: the token at a place
    keep: np.ndarray  # uint64: kept if 63 random bits are below it
    left: np.ndarray  # uint64: who moves goes left if 63 random bits are below it
    rising: np.ndarray  # uint64 [V + 1]: sums of the first weights e^(c x), in order
    falling: np.ndarray  # uint64 [V + 1]: sums of the first weights e^(-c x), in reverse order
    spent: float  # eps_i, the largest of all tokens
    rounding: float  # log of two probabilities' ratio: off by this at most

    def draw(self, prg: Prg) -> np.ndarray:
        """Draw for every token (not place) the token whose value it takes, int64 [V]."""
        size = len(self.order)
        taken = np.arange(size)
        moving = np.flatnonzero(~_happens(self.keep, prg))
        goes_left = _happens(self.left[moving], prg)
        left, right = moving[goes_left], moving[~goes_left]
        taken[left] = _within(self.rising, left, prg)
        taken[right] = size - 1 - _within(self.falling, size - 1 - right, prg)
        drawn = np.empty(size, np.int64)
        drawn[self.order] = self.order[taken]
        return drawn


def column_distribution(
    values: np.ndarray, mechanism: str, budget: float, features: int
) -> ColumnDistribution:
    """Return the distribution of a column [V] for eps_i = budget. ValueError where 63 bits are too
    few.
    """
    size = len(values)
    # 1.
    order = np.argsort(values, kind="stable")
    x = np.asarray(values, np.float64)[order]
    spread = float(x[-1] - x[0])
    c = decay(mechanism, spread, budget, features)
    bits = 62 - size.bit_length()
    up, down = np.exp(c * (x - x[-1])), np.exp(c * (x[0] - x))
    if up[0] * 2.0**bits < 1:
        raise ValueError(
            f"a feature's values are up to {c * spread:.0f} apart, in the units of the mechanism's "
            f"weights; {bits * np.log(2):.0f} is the most. Choose a smaller epsilon"
        )
    rising, falling = _sums(up, bits), _sums(down[::-1], bits)
    at = np.arange(size)
    # up[a] e^(-c (x[a] - x[-1])) = 1, down[a] e^(c (x[a] - x[0])) = 1
    to_left = rising[at].astype(np.float64) / np.ldexp(up, bits)
    to_right = falling[size - 1 - at].astype(np.float64) / np.ldexp(down, bits)
    if budget > _LARGEST:
        raise _too_few(mechanism, size, budget)
    gaps = np.concatenate([[np.inf], np.diff(x), [np.inf]])
    totals = masses(
        mechanism,
        to_left + to_right,
        np.minimum(gaps[:-1], gaps[1:]),
        np.maximum(x[-1] - x, x - x[0]),
        budget,
        features,
    )
    # 2., 3.
    keep, rarest = _threshold(totals.keep, totals.move)
    left, rarer = _threshold(to_left, to_right)
    # Off by a half each: a weight and a sum of weights, and either side of a threshold.
    least = min(float(np.ldexp(up[0], bits)), rarest, rarer)
    rounding = 2 * (4 / least + 2.0**-46)
    if rounding > ROUNDING * budget:
        raise _too_few(mechanism, size, budget)
    return ColumnDistribution(
        order, keep, left, rising, falling, float(totals.spent.max()), rounding
    )


class Codebook(NamedTuple):
    """A drawn table and what it cost."""

    table: np.ndarray  # [V, m], dtype of the public table
    kept: np.ndarray  # int64 [V]: features of each token drawn from the token itself
    spent: float  # sum over features of eps_i; above epsilon where ARR's window was empty


def draw(table: np.ndarray, mechanism: str, epsilon: float, prg: Prg) -> Codebook:
    """Draw INDVocab of the public table [V, m] with eps_i = epsilon / m, from a secret stream.
    ValueError for a table, mechanism or epsilon that is none.
    """
    check(mechanism, epsilon)
    if table.ndim != 2 or len(table) < 2 or not table.shape[1]:
        raise ValueError(f"a token table has two tokens or more and features, not {table.shape}")
    vocab, features = table.shape
    budget = epsilon / features
    if mechanism in SOUND:
        budget *= 1 - ROUNDING
    codebook, kept, spent = np.empty_like(table), np.zeros(vocab, np.int64), 0.0
    own = np.arange(vocab)
    for i in range(features):
        column = np.ascontiguousarray(table[:, i])
        if not np.all(np.isfinite(column)):
            raise ValueError(f"feature {i} of the token table has values that are not finite")
        distribution = column_distribution(column, mechanism, budget, features)
        taken = distribution.draw(prg)
        codebook[:, i] = column[taken]
        kept += taken == own
        spent += distribution.spent
    return Codebook(codebook, kept, spent)


def draw_codebook(table: np.ndarray, mechanism: str, epsilon: float, prg: Prg) -> np.ndarray:
    """Return the table of `draw`, [V, m] in `table`'s dtype: column by column its own values."""
    return draw(table, mechanism, epsilon, prg).table


class Distortion(NamedTuple):
    """The distortion of a table per token (a sum over its features), averaged over tokens."""

    kept: float  # features drawn from the token itself
    l1: float  # sum of |drawn - own|
    resampled: float  # the same if each value came from any token alike, the own included


def expected_distortion(
    table: np.ndarray, mechanism: str, budget: float, features: int
) -> Distortion:
    """Compute the distortion of the distribution for eps_i = budget, from sums alone: what `draw`
    gives on average. table: [V, k], some features of a table of `features`, for which the sums are.
    """
    kept = l1 = resampled = 0.0
    for values in np.asarray(table, np.float64).T:
        distribution = column_distribution(values, mechanism, budget, features)
        x = values[distribution.order]
        c = decay(mechanism, float(x[-1] - x[0]), budget, features)
        keep = np.ldexp(distribution.keep.astype(np.float64), -_BITS)
        weights, distances = _both_sides(x, c)
        kept += float(keep.mean())
        l1 += float(((1 - keep) * distances / weights).mean())
        resampled += float(_both_sides(x, 0.0)[1].mean() / len(x))
    return Distortion(kept, l1, resampled)


def observed_distortion(table: np.ndarray, codebook: Codebook) -> Distortion:
    """Measure the distortion of one drawn table."""
    apart = np.abs(np.asarray(codebook.table, np.float64) - np.asarray(table, np.float64))
    resampled = [_both_sides(np.sort(x), 0.0)[1].mean() for x in np.asarray(table, np.float64).T]
    return Distortion(
        float(codebook.kept.mean()),
        float(apart.sum(axis=1).mean()),
        float(np.sum(resampled) / len(table)),
    )


def _both_sides(x: np.ndarray, c: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute, for each place of sorted x, the sums over the others of w = e^(-c D), and of w D."""

    def side(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights = np.exp(c * (x - x[-1]))
        sums, moments = (np.cumsum(w) - w for w in (weights, weights * x))
        return sums / weights, (x * sums - moments) / weights

    left, right = side(x), side(-x[::-1])
    return left[0] + right[0][::-1], left[1] + right[1][::-1]


# ---- whole numbers in place of probabilities


def _sums(weights: np.ndarray, bits: int) -> np.ndarray:
    """Return uint64 [V + 1]: 0 and the sums of the first 1, 2, .. weights, rounded in 2^-bits."""
    whole = np.rint(np.ldexp(weights, bits)).astype(np.uint64)
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(whole, dtype=np.uint64)])


def _too_few(mechanism: str, size: int, budget: float) -> ValueError:
    return ValueError(
        f"{_BITS} random bits are too few to draw one of {size:,} values with epsilon / m = "
        f"{budget:.3g} by the mechanism {mechanism}"
    )


def _threshold(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, float]:
    """Return first / (first + second) in 2^-63, uint64, and the least share above zero in 2^-63,
    before it is rounded. The smaller share has 53 bits.
    """
    share = np.ldexp(np.minimum(first, second) / (first + second), _BITS)
    whole = np.rint(share).astype(np.uint64)
    thresholds = np.where(first < second, whole, np.uint64(1 << _BITS) - whole)
    return thresholds, float(share[share > 0].min(initial=2.0**_BITS))


def _happens(thresholds: np.ndarray, prg: Prg) -> np.ndarray:
    """Draw whether 63 random bits are below each threshold, bool."""
    below: np.ndarray = prg.words(thresholds.shape) >> np.uint64(64 - _BITS) < thresholds
    return below


def _within(sums: np.ndarray, counts: np.ndarray, prg: Prg) -> np.ndarray:
    """Draw for each count n > 0 an index below n, by the weights whose sums these are."""
    return index_of(sums, uniform_below(sums[counts], prg))


def index_of(sums: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the i with sums[i] <= number < sums[i + 1], int64; sums: 0, a, a + b, .."""
    return np.searchsorted(sums[1:], numbers, side="right")


def uniform_below(bounds: np.ndarray, prg: Prg) -> np.ndarray:
    """Draw uint64, exactly uniform in [0, bound), each bound from 1 to 2^62, by rejection.
    ValueError for a bound of zero.
    """
    if not np.all(bounds):
        raise ValueError("no number is below 0")
    # Of the float64 next to a bound: 2^bits is above the bound, or equal to it.
    bits = np.frexp(bounds.astype(np.float64))[1]
    shift = (64 - bits).astype(np.uint64)
    numbers = np.zeros(len(bounds), np.uint64)
    open_ = np.arange(len(bounds))
    while len(open_):
        drawn = prg.words((len(open_),)) >> shift[open_]
        numbers[open_] = drawn
        open_ = open_[drawn >= bounds[open_]]
    return numbers
