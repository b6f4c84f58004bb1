"""What the mechanisms of a codebook spend on one feature of a table, computed from all of their
probabilities (NOIR, Eq. 2 and Theorem 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spu_llm.systems.split.mechanisms import (
    MECHANISMS,
    drawn_rows,
    rows,
    worst_ratio_across,
    worst_ratio_within_row,
)


@dataclass(frozen=True)
class Spent:
    """The budget that one mechanism spends: the least and the largest sum of a token's
    probabilities as printed, and, as drawn, the logarithms of the largest ratio of two values of
    one token (`within`) and of one value for two tokens (`between`), which is the epsilon that is
    spent.
    """

    least_sum: float
    most_sum: float
    within: float
    between: float


def spent_on(column: np.ndarray, budget: float, features: int) -> dict[str, Spent]:
    """Return what each mechanism spends on a column [V] of a table with so many features. budget:
    eps_i, which it is given for this one.
    """
    spent = {}
    for mechanism in MECHANISMS:
        sums = rows(column, mechanism, budget, features).sum(axis=1)
        drawn = drawn_rows(column, mechanism, budget, features)
        spent[mechanism] = Spent(
            float(sums.min()),
            float(sums.max()),
            math.log(worst_ratio_within_row(drawn, column)),
            math.log(worst_ratio_across(drawn, column)),
        )
    return spent
