"""Tokens come with their exact distribution. Every chi-square test raises a false alarm once in a
million seeds; its seed is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.mechanism import SPAN
from spu_llm.systems.dp_text.methods import invisible_ink, public_only, token_weights
from spu_llm.systems.dp_text.parameters import Parameters
from spu_llm.systems.dp_text.sampling import as_integers, below, draw, gaussian, laplace

FALSE_ALARM = 1e-6
DRAWS, FEWER = 20_000, 6000


def p_value(drawn: np.ndarray, distribution: np.ndarray) -> float:
    """Return the p-value of a chi-square test; rare outcomes go together."""
    counts = np.bincount(drawn, minlength=len(distribution)).astype(float)
    expected = distribution * len(drawn)
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


def test_draws_have_the_distribution_of_the_weights() -> None:
    weights = np.exp(np.random.default_rng(0).normal(size=40) * 3)
    prg = Prg.from_seed(0, "draws")
    drawn = np.array([draw(weights, prg) for _ in range(DRAWS)])
    assert p_value(drawn, weights / weights.sum()) > FALSE_ALARM
    # Of a temperature 8 % off it is noticed.
    other = weights ** (1 / 1.08)
    assert p_value(drawn, other / other.sum()) < FALSE_ALARM


@pytest.mark.parametrize("centre", [False, True])
def test_tokens_have_the_distribution_of_the_mechanism(centre: bool) -> None:
    source = np.random.default_rng(1)
    public = source.normal(size=60).astype(np.float32) * 2
    private = public + source.normal(size=(4, 60)).astype(np.float32)
    present = np.array([True, True, False, True])
    p = Parameters(4, 1.5, 1.2, 10, 20, centre=centre)
    candidates, weights = token_weights(p, public, private, present)
    token = invisible_ink(p).begin(present, Prg.from_seed(1, "tokens"))
    drawn = np.searchsorted(candidates, [token(public, private) for _ in range(FEWER)])
    assert p_value(drawn, weights / weights.sum()) > FALSE_ALARM
    # The public model's is another one, and so is that with the null reference counted.
    plain = public_only(p).begin(present, Prg.from_seed(2, "tokens"))
    others = [plain(public, private) for _ in range(FEWER)]
    assert set(others) <= set(candidates.tolist())
    assert p_value(np.searchsorted(candidates, others), weights / weights.sum()) < FALSE_ALARM
    _, counted = token_weights(p, public, private, np.ones(4, bool))
    assert p_value(drawn, counted / counted.sum()) < FALSE_ALARM


@given(st.lists(st.floats(math.exp(-SPAN), math.exp(SPAN)), min_size=1, max_size=20))
def test_integers_are_in_the_very_proportions(weights: list[float]) -> None:
    actual = as_integers(np.array(weights))
    for integer, weight in zip(actual, weights, strict=True):
        assert Fraction(integer, actual[0]) == Fraction(weight) / Fraction(weights[0])


def test_what_is_rarer_than_a_random_word_can_still_come() -> None:
    """An inverse CDF on 53 bits never gives it: an infinite loss of privacy."""
    rare = np.array([1.0, math.exp(-SPAN)])
    assert min(as_integers(rare)) >= 2**52
    cumulative = np.cumsum(rare / rare.sum())
    assert cumulative[0] == 1.0  # where floating point sees nothing left


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [1.0, math.nan], [1.0, math.inf], [-1.0]])
def test_weights_that_are_none_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="finite and above zero"):
        draw(np.array(bad), Prg.from_os())


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 2**64, 2**64 + 1])
def test_integers_are_below_their_bound(bound: int) -> None:
    prg = Prg.from_seed(bound % 97, "below")
    collected = [below(bound, prg) for _ in range(3000)]
    assert all(0 <= i < bound for i in collected)
    if bound <= 10:
        assert p_value(np.array(collected), np.full(bound, 1 / bound)) > FALSE_ALARM or bound == 1


def _laplaces(prg: Prg) -> np.ndarray:
    return np.array([laplace(0.3, prg) for _ in range(5000)])


@pytest.mark.parametrize(
    "drawn, distribution",
    [(_laplaces, stats.laplace(scale=0.3)), (lambda prg: gaussian((5000,), prg), stats.norm())],
)
def test_noise_of_the_baselines(
    drawn: Callable[[Prg], np.ndarray], distribution: stats.rv_frozen
) -> None:
    actual = drawn(Prg.from_seed(0, "noise"))
    assert stats.kstest(actual, distribution.cdf).pvalue > FALSE_ALARM
    assert stats.kstest(actual * 1.2, distribution.cdf).pvalue < FALSE_ALARM


def test_randomness_comes_from_the_stream_alone() -> None:
    weights = np.arange(1.0, 40.0)
    one, two = Prg.from_seed(5, "s"), Prg.from_seed(5, "s")
    np.random.seed(0)
    first = [draw(weights, one) for _ in range(50)]
    np.random.seed(1)
    assert first == [draw(weights, two) for _ in range(50)]
