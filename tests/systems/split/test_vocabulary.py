"""The codebook's tables by sorting are the mechanisms' distributions by brute force. Chi-square
tests raise a false alarm once in a million seeds; theirs is fixed.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from models.hf import load_model
from models.training.snippets import SHIPPED
from spu_llm.core.prg import Prg
from spu_llm.systems.split import vocabulary
from spu_llm.systems.split.mechanisms import MECHANISMS, SOUND, drawn_rows
from spu_llm.systems.split.vocabulary import (
    ColumnDistribution,
    column_distribution,
    draw,
    draw_codebook,
    expected_distortion,
    index_of,
    observed_distortion,
    uniform_below,
)

FALSE_ALARM = 1e-6
PER_FEATURE = 13 / 4096  # the paper's epsilon / m


def exact_rows(distribution: ColumnDistribution) -> list[list[Fraction]]:
    """P(k|t) of what `ColumnLaw.draw` does with its uniform whole numbers, by token."""
    size, whole = len(distribution.order), 1 << 63
    collected = [[Fraction(0)] * size for _ in range(size)]
    for a, token in enumerate(distribution.order):
        keep, left = (Fraction(int(x[a]), whole) for x in (distribution.keep, distribution.left))
        collected[token][token] += keep
        for b in range(size):
            if b == a:
                continue
            side, sums, first = (
                (left, distribution.rising, b)
                if b < a
                else (1 - left, distribution.falling, size - 1 - b)
            )
            bound = int(sums[a if b < a else size - 1 - a])
            share = Fraction(int(sums[first + 1]) - int(sums[first]), bound)
            collected[token][distribution.order[b]] += (1 - keep) * side * share
    return collected


@given(
    st.lists(st.floats(-2, 2).map(lambda x: round(x, 2)), min_size=2, max_size=8),
    st.sampled_from(MECHANISMS),
    st.floats(0.002, 8),
)
@settings(max_examples=60, deadline=None)
def test_the_sampler_has_the_mechanisms_distribution(
    values: list[float], mechanism: str, budget: float
) -> None:
    """All its whole numbers swept, as fractions: brute force agrees, no value is lost, and sound
    mechanisms hold the epsilon that is stated, rounding included.
    """
    column = np.array(values)
    distribution = column_distribution(column, mechanism, budget * (1 - vocabulary.ROUNDING), 2)
    actual = exact_rows(distribution)
    assert all(sum(row) == 1 for row in actual)
    wanted = drawn_rows(column, mechanism, budget * (1 - vocabulary.ROUNDING), 2)
    assert np.array(actual, float) == pytest.approx(wanted, rel=1e-9)
    assert np.array(actual, float) == pytest.approx(wanted, rel=distribution.rounding)
    if mechanism in SOUND:
        merged = [
            [sum(p for p, x in zip(row, values, strict=True) if x == v) for v in set(values)]
            for row in actual
        ]
        ratios = [max(of) / min(of) for of in zip(*merged, strict=True)]
        assert max(ratios) <= Fraction(np.exp(budget))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_draws_have_the_distribution(mechanism: str) -> None:
    """Chi-square of all tokens' draws together, and a distribution that is off is noticed."""
    column, draws = np.array([0.5, -1.0, 0.1, 0.1, 2.0]), 4000
    distribution, prg = column_distribution(column, mechanism, 1.5, 1), Prg.from_seed(0, mechanism)
    counts = np.zeros((5, 5))
    for _ in range(draws):
        counts[np.arange(5), distribution.draw(prg)] += 1

    def p_value(rows: np.ndarray) -> float:
        statistic = np.sum((counts - draws * rows) ** 2 / (draws * rows))
        return float(stats.chi2.sf(statistic, 5 * 4))

    assert p_value(drawn_rows(column, mechanism, 1.5, 1)) > FALSE_ALARM
    assert p_value(drawn_rows(column, mechanism, 1.9, 1)) < FALSE_ALARM


def test_whole_numbers_are_uniform() -> None:
    bounds = np.repeat(np.array([1, 2, 3, 5, 2**62, 2**62 - 1], np.uint64), 3000)
    drawn = uniform_below(bounds, Prg.from_seed(1, "below")).reshape(6, 3000)
    assert np.all(drawn < bounds.reshape(6, 3000))
    for row, bound in zip(drawn, (1, 2, 3, 5), strict=False):
        counts = np.bincount(row.astype(int), minlength=bound)
        assert bound == 1 or stats.chisquare(counts).pvalue > FALSE_ALARM
    for row in drawn[4:]:
        assert stats.kstest(row / 2.0**62, "uniform").pvalue > FALSE_ALARM

    with pytest.raises(ValueError, match="below 0"):
        uniform_below(bounds * 0, Prg.from_seed(1, "below"))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_each_index_has_as_many_numbers_as_its_weight(weights: list[int]) -> None:
    """All numbers swept."""
    sums = np.cumsum([0, *weights]).astype(np.uint64)
    total = index_of(sums, np.arange(sum(weights), dtype=np.uint64))
    assert np.bincount(total).tolist() == weights and np.all(np.diff(total) >= 0)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_columns_keep_their_values_and_a_key_gives_one_codebook(mechanism: str) -> None:
    table = np.random.default_rng(0).normal(size=(60, 7)).astype(np.float16)
    first, again, other = (
        draw_codebook(table, mechanism, 3.0, Prg.from_seed(seed, "book")) for seed in (0, 0, 1)
    )
    assert first.dtype == table.dtype and first.shape == table.shape
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    for drawn, column in zip(first.T, table.T, strict=True):
        assert set(drawn) <= set(column)


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return np.random.default_rng(2).normal(0, 0.02, (4096, 256)).astype(np.float32)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_at_the_papers_epsilon_the_codebook_is_drawn_anew(
    mechanism: str, table: np.ndarray
) -> None:
    """Oracle 5, scaled down at the paper's epsilon / m: "DP noise is negligible" is refuted. A
    token keeps a feature in V, and is as far from its own row as one of values drawn from the
    columns without looking at it.
    """
    book = draw(table, mechanism, PER_FEATURE * 256, Prg.from_seed(0, "paper"))
    actual = observed_distortion(table, book)
    expected = expected_distortion(table[:, :8], mechanism, PER_FEATURE, 256)
    # Kept: Poisson of 4096 x 256 / 4096; outside once in 10^6 seeds.
    low, high = stats.poisson(256 * expected.kept / 8 * 4096).ppf([5e-7, 1 - 5e-7])
    assert low <= book.kept.sum() <= high
    assert expected.kept / 8 * 4096 == pytest.approx(1, abs=0.005)
    assert expected.l1 == pytest.approx(expected.resampled, rel=5e-4)
    assert actual.l1 == pytest.approx(actual.resampled, rel=5e-3)
    # The best match by inner product of a drawn row is the own row about as often as any other.
    best = np.argmax(book.table[:512] @ table.T, axis=1)
    assert np.sum(best == np.arange(512)) <= stats.poisson(512 / 4096).ppf(1 - FALSE_ALARM)


def test_the_shipped_models_codebook_is_drawn_anew_too() -> None:
    """And its ARR spends more than it is given: some windows for beta are empty at m = 128."""
    _, params = load_model(SHIPPED / "public")
    table = np.asarray(params["wte"])
    features = table.shape[1]
    for mechanism in ("arr", vocabulary.DEFAULT):
        book = draw(table, mechanism, PER_FEATURE * features, Prg.from_seed(1, "shipped"))
        actual = observed_distortion(table, book)
        assert actual.l1 == pytest.approx(actual.resampled, rel=5e-3)
        assert actual.kept < 0.05  # of a token's features
        assert (book.spent > PER_FEATURE * features) == (mechanism == "arr")


def test_the_default_is_nearer_where_epsilon_means_something(table: np.ndarray) -> None:
    """And GRR beyond, where most features are kept."""
    for budget, nearer in (
        (PER_FEATURE, vocabulary.DEFAULT),
        (3.0, vocabulary.DEFAULT),
        (9.0, "grr"),
    ):
        l1 = {m: expected_distortion(table[:, :2], m, budget, 256).l1 for m in SOUND}
        assert min(l1, key=l1.__getitem__) == nearer


def test_keeping_half_takes_a_budget_without_meaning() -> None:
    """ln(V) a feature: 42,490 at the paper's size."""
    column = np.random.default_rng(0).normal(0, 0.02, (32_000, 1))
    half = expected_distortion(column, "arr-renormalised", 42_490 / 4096, 4096)
    assert half.kept == pytest.approx(0.5, abs=1e-3)


@pytest.mark.slow
def test_the_papers_size() -> None:
    """Oracle 5 by formula: 64 of 4096 columns of 32,000 values; all are alike."""
    columns = np.random.default_rng(0).normal(0, 0.02, (32_000, 64))
    actual = expected_distortion(columns, "arr", PER_FEATURE, 4096)
    assert 64 * actual.kept == pytest.approx(0.128, abs=1e-3)
    # Of resampling that leaves the own value out, it differs by 3.5e-5.
    others = actual.resampled * 32_000 / 31_999
    assert actual.l1 / others == pytest.approx(1 - 3.5e-5, abs=2e-6)
    assert actual.l1 / actual.resampled == pytest.approx(1, abs=3e-6)


def test_expected_distortion_is_that_of_the_rows() -> None:
    columns = np.random.default_rng(3).normal(size=(40, 3))
    for mechanism in MECHANISMS:
        distributions = [drawn_rows(x, mechanism, 2.0, 4) for x in columns.T]
        kept = sum(np.diag(distribution).mean() for distribution in distributions)
        apart = [np.abs(x[:, None] - x[None]) for x in columns.T]
        l1 = sum(
            (distribution * d).sum(axis=1).mean()
            for distribution, d in zip(distributions, apart, strict=True)
        )
        actual = expected_distortion(columns, mechanism, 2.0, 4)
        assert actual.kept == pytest.approx(kept) and actual.l1 == pytest.approx(l1)
        assert actual.resampled == pytest.approx(sum(d.mean() for d in apart))


def test_an_empty_window_is_reported_as_spent() -> None:
    table = np.array([[0.0], [1.0], [5.0]])
    assert draw(table, "arr", 1.0, Prg.from_seed(0, "x")).spent == 4.0  # (5 - 1) / m, of token 0
    for mechanism in SOUND:
        assert draw(table, mechanism, 1.0, Prg.from_seed(0, "x")).spent <= 1.0


@pytest.mark.parametrize(
    ("table", "mechanism", "epsilon", "words"),
    [
        (np.ones((4, 2)), "laplace", 1.0, "no mechanism"),
        (np.ones((4, 2)), "grr", 0.0, "above zero"),
        (np.ones((1, 2)), "grr", 1.0, "two tokens or more"),
        (np.array([[1.0], [np.nan]]), "grr", 1.0, "not finite"),
        (np.array([[0.0], [1.0]]), "exponential", 900.0, "smaller epsilon"),
        (np.array([[0.0], [1.0]]), "grr", 60.0, "too few"),
        (np.array([[0.0], [1.0]]), "arr", 900.0, "too few"),
        (np.array([[0.0], [1.0]]), "grr", 1e-9, "too few"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    table: np.ndarray, mechanism: str, epsilon: float, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        draw_codebook(table, mechanism, epsilon, Prg.from_seed(0, "x"))
