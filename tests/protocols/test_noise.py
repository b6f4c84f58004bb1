"""Discrete Gumbel noise: drawn exactly, and its privacy loss by enumeration against the claim."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from protocols.dp import noise
from protocols.dp.noise import Gumbel
from spu_llm.core.prg import Prg
from tests.protocols.verifying import chi_square_p


def winners(scores: np.ndarray, p: np.ndarray, low: int) -> np.ndarray:
    """Return the distribution of argmax (f_y + X_y), the first of equals, by enumeration: p are the
    probabilities of X from `low` on.
    """
    below = np.concatenate([[0.0], np.cumsum(p)])  # P(X < low + i)
    drawn = np.arange(p.size)
    distribution = np.zeros(len(scores))
    for y, score in enumerate(scores):
        ways = p.copy()
        for z, other in enumerate(scores):
            if z != y:
                most = drawn + score - other + (1 if z > y else 0)  # X_z < low + most
                ways *= below[np.clip(most, 0, p.size)]
        distribution[y] = ways.sum()
    return distribution


def neighbours(m: int, sensitivity: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores and others within the sensitivity of them: every corner, for some base scores."""
    moves = np.array(list(itertools.product([-sensitivity, 0, sensitivity], repeat=m)))
    bases = np.random.default_rng(0).integers(-12, 13, (6, m))
    return [(f, f + move) for f in bases for move in moves]


def spans(
    distribution: Gumbel, p: np.ndarray, m: int, sensitivity: int
) -> tuple[float, float, float]:
    """Return, over neighbours, the greatest |ln P/P'|, range of ln P/P', and of D_2(P||P') / 2."""
    epsilon = span = rho = 0.0
    for f, g in neighbours(m, sensitivity):
        a, b = winners(f, p, distribution.low), winners(g, p, distribution.low)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(a / b)
        if not np.all(np.isfinite(ratio)):
            return math.inf, math.inf, math.inf
        epsilon, span = max(epsilon, np.abs(ratio).max()), max(span, np.ptp(ratio))
        rho = max(rho, math.log(np.sum(a * a / b)) / 2)
    return epsilon, span, rho


@pytest.mark.parametrize("scale", [3, 8])
@pytest.mark.parametrize("m", [2, 3])
def test_the_loss_is_what_enumeration_finds(scale: int, m: int) -> None:
    """At most the claim, and nearly all of what the exponential mechanism loses."""
    for sensitivity in (1, 2):
        distribution = Gumbel.of(scale)
        claim = distribution.loss(sensitivity, m)
        actual = spans(distribution, distribution.probabilities(), m, sensitivity)
        span = math.sqrt(8 * claim.rho)
        claims = claim.epsilon, span, claim.rho
        # Float64 sums are good to 1e-9 here.
        assert all(f <= c + 1e-9 for f, c in zip(actual, claims, strict=True)), (actual, claims)
        assert actual[1] > 0.99 * 2 * sensitivity / scale


def test_ties_cost_something() -> None:
    """Neighbours with equal scores otherwise: more than the sensitivity alone would allow."""
    distribution, f = Gumbel.of(2), np.array([0, -10, -10])
    p = distribution.probabilities()
    a, b = (winners(f + np.array(move), p, distribution.low) for move in ([0, 0, 0], [1, -1, -1]))
    ratio = np.log(b / a)
    assert np.ptp(ratio) > 2 * 1 / 2
    assert np.ptp(ratio) <= math.sqrt(8 * distribution.loss(1, 3).rho)


def test_the_winner_has_the_distribution_in_closed_form() -> None:
    scale, f = 6, np.array([3, -2, 0, 5])
    distribution = Gumbel.of(scale)
    w, r = np.exp(f / scale), math.exp(1 / scale)
    s = [r * w[:y].sum() + w[y:].sum() for y in range(5)]
    wanted = scale * np.diff(np.log(s))
    np.testing.assert_allclose(
        winners(f, distribution.probabilities(), distribution.low), wanted, atol=1e-12
    )
    assert np.abs(np.log(wanted / (w / w.sum()))).max() < 1 / scale


@pytest.mark.parametrize("coarse", [3, 4])
def test_too_coarse_noise_is_caught(coarse: int) -> None:
    """Noise rounded up to multiples of some units, with the scores as they are."""
    distribution = Gumbel.of(8)
    p, claim = distribution.probabilities(), distribution.loss(1, 2)
    rounded = np.zeros(p.size + coarse)
    np.add.at(
        rounded, -(-(np.arange(p.size) + distribution.low) // coarse) * coarse - distribution.low, p
    )
    actual = spans(distribution, rounded, 2, 1)
    assert actual[0] > claim.epsilon + 1e-9 or actual[1] > math.sqrt(8 * claim.rho) + 1e-9


def test_cut_tails_cost_delta_that_is_counted() -> None:
    """Within bounds that leave something out, pure loss is unbounded; the delta is as counted, and
    not much less.
    """
    for low, high in ((-4, 20), (-8, 12), (-6, 9)):
        distribution = Gumbel(4, low, high)
        claim, p = distribution.loss(2, 2), distribution.probabilities()
        assert claim.total_variation == pytest.approx(2 * distribution.outside)
        delta = 0.0
        for f, g in [(np.array([0, d]), np.array([2, d - 2])) for d in range(-30, 31)]:
            a, b = winners(f, p, low), winners(g, p, low)
            delta = max(delta, np.maximum(a - math.exp(claim.epsilon) * b, 0).sum())
        assert 0 < delta <= claim.delta(1, claim.epsilon)
        actual = spans(replace(distribution), p, 2, 2)
        assert actual[0] > claim.epsilon
    assert Gumbel.of(4).outside < 2**-64


def test_two_noises_are_a_mixture() -> None:
    """Whoever knows one of two noises sees the other's loss, at most."""
    distribution, claim = Gumbel.of(5), Gumbel.of(5).loss(1, 2)
    p = distribution.probabilities()
    both = np.convolve(p, p)
    shown = replace(distribution, low=2 * distribution.low, high=2 * distribution.high)
    actual = spans(shown, both, 2, 1)
    assert actual[0] <= claim.epsilon and actual[1] <= math.sqrt(8 * claim.rho)
    assert distribution.loss(1, 2, noises=2).total_variation == 2 * claim.total_variation


@pytest.mark.parametrize("s, expected", [(1, 3.3e-4), (2, 3e-8)])
def test_fluctuation_is_bounded(s: int, expected: float) -> None:
    """|Gamma(1 + i u)| by the formula, twice, is what K leaves its mean by."""
    assert expected < noise._fluctuation(s) < 2 * expected
    x = np.linspace(0, 1 / s, 50)[:, None] - np.arange(-400, 400) / s
    kernel = np.exp(x - np.exp(np.minimum(x, 50))).sum(axis=1)
    assert np.abs(kernel / s - 1).max() <= noise._fluctuation(s)
    assert np.abs(kernel / s - 1).max() > 0.2 * noise._fluctuation(s)


def test_any_loss_at_the_scale_of_a_text() -> None:
    """At 2^-18 a unit, seven references: whole numbers and ties cost next to nothing."""
    scale = math.ceil(7 * 1.2 * 2**18)
    units = int(0.66 * 2**18)
    loss = Gumbel.of(scale).loss(units, 57)
    assert loss.rho == pytest.approx((0.66 / (7 * 1.2)) ** 2 / 2, rel=1e-5)
    assert loss.delta(500, 10.0) < 1e-10
    with pytest.raises(ValueError, match="no noise"):
        Gumbel.of(0)


# ---- draws


class Words(Prg):
    """A stream of the words given."""

    def __init__(self, words: list[int]) -> None:
        self.left = list(words)

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        count = math.prod(shape)
        taken, self.left = self.left[:count], self.left[count:]
        return np.array(taken, np.uint64).reshape(shape)


def test_draws_have_the_distribution() -> None:
    """Chi-square of 40,000 draws, false-alarm rate 1e-6; floats rounded to the nearest fail."""
    distribution = Gumbel.of(3)
    drawn = distribution.sample(Prg.from_seed(5, "noise"), (40_000,))
    p = distribution.probabilities()
    bins = np.clip(drawn, -5, 16)
    edges = np.concatenate(
        [[p[: -5 - distribution.low + 1].sum()], p[-4 - distribution.low : 16 - distribution.low]]
    )
    edges = np.concatenate([edges, [1 - edges.sum()]])
    assert chi_square_p(np.bincount(bins + 5, minlength=22).astype(float), edges) > 1e-6
    nearest = np.clip(np.rint(drawn - 0.5), -5, 16).astype(int)
    assert chi_square_p(np.bincount(nearest + 5, minlength=22).astype(float), edges) < 1e-6


def test_quick_and_exact_draws_agree() -> None:
    """Whatever the word is; and the quick way is nearly always enough."""
    rng = np.random.default_rng(1)
    words = [0, 1, 2, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, *rng.integers(0, 2**63, 20).tolist()]
    words += [int(w) << k for k in range(0, 60, 4) for w in rng.integers(1, 8, 2)]
    for scale in (5, 2_202_010):
        distribution = Gumbel.of(scale)
        quick = distribution.sample(Words([*words, *[12345] * 200]), (len(words),))
        exact = [distribution._narrowed(Words([12345] * 9), w) for w in words]
        np.testing.assert_array_equal(quick, exact)
        with mock.patch.object(Gumbel, "_narrowed", side_effect=AssertionError):
            distribution.sample(Prg.from_seed(1, "noise"), (1000,))


def test_a_word_at_an_edge_takes_more() -> None:
    """Where a word leaves two numbers, the next one decides; an edge has its exact chance."""
    distribution, k = Gumbel.of(7), 4
    edge = -math.expm1(-math.exp(-k / 7))  # 1 - P(X <= k)
    word = int(edge * 2**64)
    near = [
        distribution.sample(Words([w, rest, 0]), (1,))[0]
        for w in range(word - 4096, word + 4097, 256)
        for rest in (0, 2**64 - 1)
    ]
    assert set(near) == {k, k + 1} and near == sorted(near, reverse=True)
    assert distribution.sample(Words([0, 0, 0, 2**40, 5]), (1,))[0] == distribution.high
