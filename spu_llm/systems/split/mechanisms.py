"""Randomising one feature of a token table: Adaptive Randomized Response and two sound mechanisms.

NOIR (§2.2 of the digest: INDVocab). A feature is a column x [V] of the table; token t keeps its
value x_t or copies x_k of another token, with P(k|t) a row of probabilities. N = V - 1, D = |x_t -
x_k|, m features, budget eps_i = eps / m of one feature.

| mechanism        | P(t|t)                | P(k|t), k other than t        | holds eps_i        |
|------------------|-----------------------|-------------------------------|--------------------|
| arr              | e^b / (e^b + N)       | N (w_k / Z) / (e^b + N)       | no                 |
| arr-renormalised | e^b / (e^b + N)       | N (w_k / (Z-1)) / (e^b + N)   | no                 |
| grr              | e^eps_i/(e^eps_i + N) | 1 / (e^eps_i + N)             | yes, exactly       |
| exponential      | 1 / Z                 | w_k / Z                       | yes, with some left|

w_k = e^(-c D) with c = 1 / m for ARR and eps_i / (2 (max x - min x)) for the exponential mechanism;
Z sums w over all tokens, t with its weight of one included. b (beta) is the upper end of what
theorem 1 allows, eps_i + ln N + ln(min over k of w_k / Z), (Z - 1 for the renormalised one).

**Rows of `arr` sum to less than one** (Eq. 2 as printed): the w_k / Z of the others sum to
1 - 1 / Z. The missing (N / Z) / (e^b + N) has to go somewhere, and Eq. 2 does not say where. Here
it is drawn again: the row is divided by its sum, which leaves all ratios within it as Eq. 2 has
them.
(To keep the own value instead, as a loop that falls through does, doubles P(t|t): at the paper's
size 2.003 against e^eps_i = 1.003.)

**Theorem 1 does not hold.** Its proof compares outputs of one token, P(k|t) / P(k'|t); the
definition compares tokens, P(k|t) / P(k|t'), and b and Z differ between tokens. Where the window
for b is empty, eps_i < (max D - min D) / m, eps_i of that token is raised to what makes its ends
meet.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MECHANISMS = ("arr", "arr-renormalised", "grr", "exponential")
SOUND = ("grr", "exponential")  # those that hold the epsilon they are given


class Masses(NamedTuple):
    """The chances of a token's draw, by weights that need not sum to one: P(keep) = keep / (keep +
    move); who moves copies token k with a chance proportional to e^(-decay D).
    """

    keep: np.ndarray  # float64 [V]
    move: np.ndarray  # float64 [V]
    spent: np.ndarray  # float64 [V]: eps_i, or more where ARR's window is empty


def check(mechanism: str, budget: float) -> None:
    """Raise ValueError for an unknown mechanism or a budget that is none."""
    if mechanism not in MECHANISMS:
        raise ValueError(f"{mechanism!r} is no mechanism; there are {', '.join(MECHANISMS)}")
    if not 0 < budget < np.inf:
        raise ValueError(f"epsilon must be above zero and finite, got {budget}")


def decay(mechanism: str, spread: float, budget: float, features: int) -> float:
    """Return c of w = e^(-c D). spread: max x - min x of the column; budget: eps_i; features: m."""
    if mechanism == "grr":
        return 0.0
    if mechanism == "exponential":
        return budget / (2 * spread) if spread else 0.0
    return 1 / features


def masses(
    mechanism: str,
    others: np.ndarray,
    nearest: np.ndarray,
    farthest: np.ndarray,
    budget: float,
    features: int,
) -> Masses:
    """Compute the masses of every token of a column. others: Z - 1, the sum of w over the other
    tokens; nearest and farthest: least and largest D to another token; all float64 [V].
    """
    n = len(others) - 1
    spent = np.full(len(others), float(budget))
    if mechanism == "grr":
        return Masses(np.exp(spent), np.full(len(others), float(n)), spent)
    if mechanism == "exponential":
        return Masses(np.ones(len(others)), others, spent)
    spent = np.maximum(spent, (farthest - nearest) / features)
    literal = mechanism == "arr"
    total = others + 1 if literal else others
    # e^b of the upper end: e^eps_i N (min w) / Z
    keep = np.exp(spent - farthest / features) * n / total
    return Masses(keep, n * others / total, spent)


def beta(values: np.ndarray, mechanism: str, budget: float, features: int) -> np.ndarray:
    """Compute beta of every token, float64 [V], for the two kinds of ARR."""
    _, totals = _weights_and_masses(values, mechanism, budget, features)
    return np.log(totals.keep)


def rows(values: np.ndarray, mechanism: str, budget: float, features: int) -> np.ndarray:
    """Compute P(k|t), float64 [V, V], row t, by brute force. Rows of `arr` are Eq. 2's and sum to
    less than one; `drawn_rows` are what is drawn.
    """
    weights, totals = _weights_and_masses(values, mechanism, budget, features)
    total = totals.keep + totals.move
    if mechanism == "arr":
        total = totals.keep + len(total) - 1
    moving = weights / weights.sum(axis=1, keepdims=True) * totals.move[:, None]
    np.fill_diagonal(moving, totals.keep)
    return np.asarray(moving / total[:, None])


def drawn_rows(values: np.ndarray, mechanism: str, budget: float, features: int) -> np.ndarray:
    """Compute P(k|t) as drawn, float64 [V, V]: `rows` divided by their sums."""
    chances = rows(values, mechanism, budget, features)
    return np.asarray(chances / chances.sum(axis=1, keepdims=True))


def _weights_and_masses(
    values: np.ndarray, mechanism: str, budget: float, features: int
) -> tuple[np.ndarray, Masses]:
    """Compute w of the other tokens [V, V], zero on the diagonal, and the masses."""
    check(mechanism, budget)
    x = np.asarray(values, np.float64)
    apart = np.abs(x[:, None] - x[None])
    weights = np.exp(-decay(mechanism, float(np.ptp(x)), budget, features) * apart)
    np.fill_diagonal(weights, 0.0)
    farthest = apart.max(axis=1)
    np.fill_diagonal(apart, np.inf)
    totals = masses(mechanism, weights.sum(axis=1), apart.min(axis=1), farthest, budget, features)
    return weights, totals


# ---- worst ratios, of values: tokens of equal values are one output


def merged(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Add up P(k|t) [V, V] over tokens k of equal values: P(value|t), [V, distinct values]."""
    distinct, place = np.unique(np.asarray(values, np.float64), return_inverse=True)
    sums = np.zeros((len(rows), len(distinct)))
    np.add.at(sums.T, place, np.asarray(rows).T)
    return sums


def worst_ratio_within_row(rows: np.ndarray, values: np.ndarray) -> float:
    """Return max over t of max P(o|t) / min P(o|t): what theorem 1 is proved for."""
    chances = merged(rows, values)
    return float((chances.max(axis=1) / chances.min(axis=1)).max())


def worst_ratio_across(rows: np.ndarray, values: np.ndarray) -> float:
    """Return max over o of max P(o|t) / min P(o|t): what the definition asks for, <= e^eps_i."""
    chances = merged(rows, values)
    return float((chances.max(axis=0) / chances.min(axis=0)).max())


def worst_joint_ratio(of_features: list[np.ndarray], values: np.ndarray) -> float:
    """Return the worst ratio of all features together: max over t, t' of the product over features
    of max over o of P(o|t) / P(o|t'). of_features: `rows` of each; values [V, m]. For small tables.
    """
    joint = np.ones((len(values), len(values)))
    for i, rows in enumerate(of_features):
        chances = merged(rows, values[:, i])
        joint *= (chances[:, None] / chances[None]).max(axis=2)
    return float(joint.max())
