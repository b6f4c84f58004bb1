"""How well a score tells marked texts from others, with intervals by prompt.

Scores are the higher the more a text looks marked. A partial area is standardised as McClish has
it: 0.5 (1 + (A - f^2 / 2) / (f - f^2 / 2)), A the area up to false positives of f, so that chance
is 0.5 and perfect 1. Intervals are percentiles of a bootstrap that draws whole prompts, with
everything that was written after them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats

FEW = 0.01  # false positives, of the partial area and of the rate of true ones
ROUNDS = 200
LEVEL = 95.0

Interval = list[float]  # the figure, and both ends


def roc(marked: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return false and true positives at every threshold, from (0, 0) to (1, 1)."""
    thresholds = np.unique(np.concatenate([marked, others]))[::-1]
    points = [
        1 - np.searchsorted(np.sort(side), thresholds, side="left") / len(side)
        for side in (others, marked)
    ]
    return np.concatenate([[0.0], points[0]]), np.concatenate([[0.0], points[1]])


def auc(marked: np.ndarray, others: np.ndarray) -> float:
    """Return P(a marked one scores higher) + P(alike) / 2."""
    ordered = np.sort(others)
    below = np.searchsorted(ordered, marked, side="left")
    not_above = np.searchsorted(ordered, marked, side="right")
    return float((below + not_above).mean() / (2 * len(others)))


def partial_auc(marked: np.ndarray, others: np.ndarray, most: float = FEW) -> float:
    """Return the area up to `most` false positives, standardised."""
    false, true = roc(marked, others)
    stop = int(np.searchsorted(false, most, side="right"))
    x, y = [*false[:stop], most], [*true[:stop], true[-1]]
    if stop < len(false):
        share = (most - false[stop - 1]) / (false[stop] - false[stop - 1])
        y[-1] = true[stop - 1] + share * (true[stop] - true[stop - 1])
    area = float(np.trapz(y, x))
    return 0.5 * (1 + (area - most**2 / 2) / (most - most**2 / 2))


def true_positives(marked: np.ndarray, others: np.ndarray, most: float = FEW) -> float:
    """Return the rate of true positives at the threshold that calls as many as possible, and no
    more than `most` of the others.
    """
    false, true = roc(marked, others)
    return float(true[false <= most].max())


def by_prompt(
    figure: Callable[[np.ndarray, np.ndarray], float], marked: np.ndarray, others: np.ndarray
) -> Interval:
    """Return a figure, with its interval, of scores [prompt, ...] of marked texts and of others,
    where the first prompts of the others are the prompts of the marked ones.
    """
    whole = figure(marked.ravel(), others.ravel())
    source = np.random.default_rng(0)
    drawn = []
    for _ in range(ROUNDS):
        mine = source.integers(0, len(marked), len(marked))
        if len(others) == len(marked):
            theirs = mine
        else:
            theirs = source.integers(0, len(others), len(others))
        drawn.append(figure(marked[mine].ravel(), others[theirs].ravel()))
    return _rounded(whole, drawn)


def difference(
    figure: Callable[[np.ndarray, np.ndarray], float],
    one: tuple[np.ndarray, np.ndarray],
    other: tuple[np.ndarray, np.ndarray],
) -> Interval:
    """Return a figure of `one` group of prompts less that of another, with its interval: scores
    [prompt, ...] of marked texts and of others, in each group. Prompts are drawn within groups.
    """
    source = np.random.default_rng(0)
    drawn = []
    for _ in range(ROUNDS):
        values = []
        for marked, others in (one, other):
            mine = source.integers(0, len(marked), len(marked))
            values.append(figure(marked[mine].ravel(), others[mine].ravel()))
        drawn.append(values[0] - values[1])
    whole = [figure(marked.ravel(), others.ravel()) for marked, others in (one, other)]
    return _rounded(whole[0] - whole[1], drawn)


def correlation(one: np.ndarray, other: np.ndarray, rounds: int = 2000) -> Interval:
    """Return Spearman's correlation, with its interval, of two values by prompt [prompt]; 0 where
    all values of one side are alike.
    """
    source = np.random.default_rng(0)
    rows = source.integers(0, len(one), (rounds, len(one)))
    whole = _of_ranks(one[None], other[None])
    return _rounded(float(whole[0]), _of_ranks(one[rows], other[rows]))


def _of_ranks(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return Spearman's correlations of two sides [round, prompt]."""
    ranks = [stats.rankdata(side, axis=1) for side in (one, other)]
    first, second = (side - side.mean(axis=1, keepdims=True) for side in ranks)
    spread = np.sqrt((first**2).sum(axis=1) * (second**2).sum(axis=1))
    return np.asarray((first * second).sum(axis=1) / np.where(spread > 0, spread, 1.0))


def mean(values: np.ndarray, rounds: int = 2000) -> Interval:
    """Return the mean, with its interval, of values by prompt [prompt]."""
    source = np.random.default_rng(0)
    drawn = values[source.integers(0, len(values), (rounds, len(values)))].mean(axis=1)
    return _rounded(float(values.mean()), drawn)


def ratio(over: np.ndarray, under: np.ndarray, rounds: int = 2000) -> Interval:
    """Return sum over / sum under, with its interval, both by prompt."""
    source = np.random.default_rng(0)
    rows = source.integers(0, len(over), (rounds, len(over)))
    return _rounded(
        float(over.sum() / under.sum()), over[rows].sum(axis=1) / under[rows].sum(axis=1)
    )


def difference_of_ratios(
    over: np.ndarray,
    under: np.ndarray,
    other_over: np.ndarray,
    other_under: np.ndarray,
    rounds: int = 2000,
) -> Interval:
    """Return the difference of two ratios of the same prompts, with its interval, prompt by prompt
    drawn together.
    """
    source = np.random.default_rng(0)
    rows = source.integers(0, len(over), (rounds, len(over)))

    def of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.asarray(a[rows].sum(axis=1) / b[rows].sum(axis=1))

    whole = over.sum() / under.sum() - other_over.sum() / other_under.sum()
    return _rounded(float(whole), of(over, under) - of(other_over, other_under))


def _rounded(whole: float, drawn: object) -> Interval:
    low, high = np.percentile(np.asarray(drawn), [50 - LEVEL / 2, 50 + LEVEL / 2])
    return [round(float(x), 4) for x in (whole, low, high)]
