"""Adaptive Randomized Response does not hold its epsilon; GRR and the exponential mechanism do
(spec: oracles 1 to 5 of NOIR).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.systems.split.mechanisms import (
    MECHANISMS,
    SOUND,
    beta,
    drawn_rows,
    rows,
    worst_joint_ratio,
    worst_ratio_across,
    worst_ratio_within_row,
)

COLUMN = np.array([0, 0.1, 0.3, 1])
TABLE = np.array([[0, 0.5], [0.2, 0.1], [1, 0.9]])
EPSILON, FEATURES = 13.0, 4096  # the paper's


def holds(epsilon: float, rows: np.ndarray, values: np.ndarray) -> bool:
    """Return e^epsilon bounds all pairs of tokens: what the definition asks for."""
    return worst_ratio_across(rows, values) <= math.exp(epsilon) * (1 + 1e-12)


def test_arr_is_equation_2() -> None:
    """Oracle 1."""
    assert beta(COLUMN, "arr", 2.0, 1) == pytest.approx([0.9955, 1.0575, 1.2815, 1.2784], abs=5e-5)
    actual = rows(COLUMN, "arr", 2.0, 1)
    assert actual[0] == pytest.approx([0.47424, 0.15786, 0.12925, 0.06418], abs=5e-6)
    deficits = 1 - actual.sum(axis=1)
    assert deficits == pytest.approx([0.17446, 0.16302, 0.14869, 0.20043], abs=5e-6)
    # What theorem 1 is proved for holds: the ratios within a row,
    assert worst_ratio_within_row(actual, COLUMN) == pytest.approx(math.e**2, rel=1e-12)
    # and what it claims does not.
    assert worst_ratio_across(actual, COLUMN) == pytest.approx(8.4887, abs=5e-5)


def test_arr_renormalised() -> None:
    """Oracle 1."""
    actual = beta(COLUMN, "arr-renormalised", 2.0, 1)
    assert actual == pytest.approx([1.3987, 1.4424, 1.6778, 1.8588], abs=5e-5)
    distribution = rows(COLUMN, "arr-renormalised", 2.0, 1)
    assert distribution[0] == pytest.approx([0.57447, 0.19122, 0.15656, 0.07775], abs=1e-5)
    assert distribution.sum(axis=1) == pytest.approx(np.ones(4), rel=1e-14)
    assert worst_ratio_across(distribution, COLUMN) == pytest.approx(8.7643, abs=5e-5)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_epsilon_holds_by_sound_mechanisms_alone(mechanism: str) -> None:
    """Oracle 1: theorem 1 is refuted, by Eq. 2 and by what is drawn of it."""
    assert holds(2.0, rows(COLUMN, mechanism, 2.0, 1), COLUMN) == (mechanism in SOUND)
    assert holds(2.0, drawn_rows(COLUMN, mechanism, 2.0, 1), COLUMN) == (mechanism in SOUND)


def test_an_outlier_costs_arr_a_factor_of_489() -> None:
    """Oracle 2."""
    column = np.append(np.linspace(0, 1e-3, 1000), 10.0)
    actual = worst_ratio_across(rows(column, "arr", 10.0, 1), column)
    assert actual / math.exp(10) == pytest.approx(489, abs=0.5)
    for mechanism in SOUND:
        assert holds(10.0, rows(column, mechanism, 10.0, 1), column)


@pytest.mark.parametrize(
    ("mechanism", "log_ratio"),
    [("arr", 1.2156), ("arr-renormalised", 1.2604), ("grr", 1.2), ("exponential", 0.61650)],
)
def test_joint_ratio_of_two_features(mechanism: str, log_ratio: float) -> None:
    """Oracle 3; ln 1.8524 = 0.61650."""
    actual = worst_joint_ratio([rows(x, mechanism, 0.6, 2) for x in TABLE.T], TABLE)
    assert math.log(actual) == pytest.approx(log_ratio, abs=5e-5)
    assert (math.log(actual) <= 1.2 + 1e-12) == (mechanism in SOUND)


def test_exponential_mechanism_leaves_some_of_its_epsilon() -> None:
    """Oracle 4."""
    actual = worst_ratio_across(rows(COLUMN, "exponential", 0.5, 1), COLUMN)
    assert actual == pytest.approx(1.38364, abs=5e-6)
    assert actual <= math.exp(0.5)


@given(
    st.lists(st.floats(-3, 3).map(lambda x: round(x, 2)), min_size=2, max_size=9),
    st.floats(0.01, 6),
)
def test_sound_mechanisms_hold_on_any_column(values: list[float], epsilon: float) -> None:
    """Equal values, which are one output, included."""
    column = np.array(values)
    for mechanism in SOUND:
        distribution = rows(column, mechanism, epsilon, 3)
        assert distribution.sum(axis=1) == pytest.approx(np.ones(len(values)), rel=1e-12)
        assert holds(epsilon, distribution, column)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=9), st.floats(0.01, 3))
def test_an_empty_window_raises_epsilon(values: list[float], epsilon: float) -> None:
    """ARR: p is never below a q, whatever the column."""
    column = np.array(values)
    for mechanism in ("arr", "arr-renormalised"):
        distribution = rows(column, mechanism, epsilon, 1)
        assert np.all(np.diag(distribution) >= distribution.max(axis=1) * (1 - 1e-12))
        assert np.all(distribution > 0)


def test_equal_values_are_one_output() -> None:
    """Bins of equal values add up before a ratio is taken."""
    column = np.array([0.0, 0.0, 1.0])
    distribution = rows(column, "grr", 1.0, 1)
    p, q = math.e / (math.e + 2), 1 / (math.e + 2)
    assert worst_ratio_across(distribution, column) == pytest.approx(max((p + q) / (2 * q), p / q))


# ---- the paper's size: one column of 32,000 values, which are 4096 alike


@pytest.fixture(scope="module")
def llama_column() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.02, 32_000)


def some_rows(values: np.ndarray, budget: float, tokens: np.ndarray) -> np.ndarray:
    """Eq. 2's rows of some tokens of a column of a table of FEATURES."""
    n = len(values) - 1
    apart = np.abs(values[tokens, None] - values[None])
    weights = np.exp(-apart / FEATURES)
    q = weights / weights.sum(axis=1, keepdims=True)
    b = np.exp(budget) * n * q.min(axis=1)
    actual = n * q / (b + n)[:, None]
    actual[np.arange(len(tokens)), tokens] = b / (b + n)
    return np.asarray(actual)


def test_at_the_papers_size_little_is_revealed(llama_column: np.ndarray) -> None:
    """Oracle 5: DP noise is not negligible, it is all there is. What is drawn says next to nothing
    about the token, far less than the bounds of theorem 3 let one think.
    """
    budget, vocab = EPSILON / FEATURES, len(llama_column)
    tokens = np.random.default_rng(1).integers(0, vocab, 24)
    distribution = some_rows(llama_column, budget, tokens)
    keep = distribution[np.arange(len(tokens)), tokens]
    assert keep * vocab == pytest.approx(np.full(len(tokens), 1.00313), abs=2e-5)
    assert FEATURES * keep.mean() == pytest.approx(0.128, abs=5e-4)
    apart = np.abs(np.log(distribution[:, None] / distribution[None])).max()
    assert 0.00315 < apart <= budget
    # Kullback and Leibler, all features together: one token's distribution from another's, on
    # average.
    for epsilon, wanted in ((EPSILON, 1.3e-6), (27.0, 5.6e-6)):
        distribution = some_rows(llama_column, epsilon / FEATURES, tokens)
        distribution /= distribution.sum(axis=1, keepdims=True)
        logs = np.log(distribution)
        apart = np.sum(distribution * logs, axis=1)[:, None] - distribution @ logs.T
        of_pairs = apart.sum() / (len(tokens) * (len(tokens) - 1))
        assert FEATURES * of_pairs == pytest.approx(wanted, rel=0.05)


def test_the_deficit_given_to_the_own_value_costs_thousands(llama_column: np.ndarray) -> None:
    """A loop over the others that falls through to "keep" is not ARR: its ratio is 2.003 instead of
    1.003, and the epsilon of all features about 2840 instead of 13.
    """
    budget = EPSILON / FEATURES
    tokens = np.array([3, 17])
    distribution = some_rows(llama_column, budget, tokens)
    own = np.arange(2), tokens
    assert distribution[own] / distribution[0, 99] == pytest.approx(
        np.full(2, math.exp(budget)), rel=1e-4
    )
    distribution[own] += 1 - distribution.sum(axis=1)
    ratio = distribution[0, 3] / distribution[1, 3]
    assert ratio == pytest.approx(2.003, abs=5e-4)
    assert 2835 < FEATURES * math.log(ratio) < 2850
    # On the small column as well.
    small = rows(COLUMN, "arr", 2.0, 1)
    small[np.diag_indices(4)] += 1 - small.sum(axis=1)
    assert worst_ratio_within_row(small, COLUMN) > 1.3 * math.e**2
