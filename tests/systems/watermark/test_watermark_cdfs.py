"""The CDFs and scores of the paper, its two theorems, and numbers that were computed by others."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from spu_llm.app.mark_options import NEXT_TOKENS
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark import cdfs, theory
from spu_llm.systems.watermark.cdfs import Family, Tails, gamma, irwin_hall, normal
from spu_llm.systems.watermark.keys import Seed
from spu_llm.systems.watermark.scores import combined, fisher, log_p
from spu_llm.systems.watermark.selecting import gumbels, own

ALL = [Family("uniform"), Family("normal"), Family("chi2"), Family("gamma", 10)]


def uniforms(*shape: int, seed: int = 0) -> np.ndarray:
    return np.maximum(Prg.from_seed(seed, "uniforms").uniform(shape), 2.0**-53)


def cdf(tails: Tails) -> float:
    return math.exp(tails.log_cdf)


def test_irwin_hall_of_the_paper() -> None:
    assert cdf(irwin_hall(2, 1.5)) == 0.875
    assert cdf(irwin_hall(3, 2.0)) == pytest.approx(5 / 6, rel=1e-14)
    assert cdf(irwin_hall(10, 6.0)) == pytest.approx(0.861098, abs=5e-7)
    assert cdf(irwin_hall(100, 60.0)) == pytest.approx(0.999749344, abs=5e-10)
    assert math.exp(irwin_hall(100, 60.0).log_sf) == pytest.approx(2.5066e-4, rel=2e-5)
    # The normal approximation is 6 % off there, and the sum in doubles has no digit right.
    assert stats.norm.sf(10 / math.sqrt(100 / 12)) == pytest.approx(2.66e-4, rel=2e-3)
    doubles = sum(
        (-1) ** i * math.comb(100, i) * (60.0 - i) ** 100 / math.factorial(100) for i in range(61)
    )
    assert abs(doubles) > 1e8


def test_irwin_hall_against_fractions_and_both_tails() -> None:
    for n, s in [(1, 0.25), (7, 0.001), (30, 14.9), (30, 15.1), (60, 59.5), (256, 100.0)]:
        x = Fraction(s)
        terms = ((-1) ** i * math.comb(n, i) * (x - i) ** n for i in range(math.floor(x) + 1))
        below = sum(terms, Fraction(0)) / math.factorial(n)
        log = math.log(below.numerator) - math.log(below.denominator)
        actual = irwin_hall(n, s)
        assert actual.log_cdf == pytest.approx(log, abs=1e-10)
        mirrored = irwin_hall(n, n - s)
        assert mirrored.log_sf == pytest.approx(actual.log_cdf, rel=1e-12)
    assert irwin_hall(3, 0.0) == (-math.inf, 0.0) and irwin_hall(3, 3.0) == (0.0, -math.inf)


def test_the_saddle_point_follows_the_exact_sum() -> None:
    for part in (0.02, 0.1, 0.3, 0.45, 0.4999):
        s = 256 * part
        exact = cdfs._lower(256, *s.as_integer_ratio())
        assert cdfs._lower_by_saddle_point(256, s) == pytest.approx(exact, abs=1e-3)
    # Beyond, it is used, and joins the normal approximation in the middle.
    tails = irwin_hall(2000, 1010.0)
    z = 10 / math.sqrt(2000 / 12)
    assert tails.log_sf == pytest.approx(float(stats.norm.logsf(z)), abs=2e-3)


def test_gamma_takes_its_own_shape() -> None:
    family = Family("gamma", 10)
    assert cdf(family.of_sum(7, -0.5)) == pytest.approx(0.4425, abs=5e-5)
    assert math.exp(-0.5) == pytest.approx(0.6065, abs=5e-5)  # -Exp(1), right for 10 seeds alone
    assert cdf(family.of_sum(10, -0.5)) == pytest.approx(math.exp(-0.5), rel=1e-12)


def test_tails_go_on_where_doubles_end() -> None:
    assert normal(1, 40.0).log_sf == pytest.approx(-804.608442, rel=1e-8)
    assert normal(1, 9.0).log_cdf == pytest.approx(-1.1285884e-19, rel=1e-6)
    # Gamma(3) above 1000: e^-x (1 + x + x^2/2).
    exact = -1000 + math.log(1 + 1000 + 500_000)
    assert gamma(3, 1000.0).log_sf == pytest.approx(exact, rel=1e-13)
    assert gamma(0.02, 900.0).log_sf < -890 and gamma(0.02, 900.0).log_cdf == 0.0
    # Gamma(1/50) numbers below every double still order.
    family = Family("gamma", 50)
    logs = [cdfs._log_gamma_of(1 / 50, np.array([u]))[0] for u in (1e-9, 0.5, 1 - 1e-9, 1 - 1e-15)]
    assert min(logs) < -1500 and logs == sorted(logs, reverse=True)
    upper = [cdfs._two_sided(1 / 50, float(log)).log_sf for log in logs]
    assert upper == pytest.approx([math.log(1e-9), math.log(0.5), -1e-9, -1e-15], rel=0.2, abs=0)
    pair = [family.tails(np.array([u, u])).log_sf for u in (0.5, 1 - 1e-9, 1 - 1e-15)]
    assert pair == sorted(pair, reverse=True) and all(map(math.isfinite, pair))


@pytest.mark.parametrize("family", ALL, ids=lambda f: f.name)
def test_one_draw_gives_back_its_uniform(family: Family) -> None:
    for u in uniforms(50):
        assert cdf(family.tails(np.array([u]))) == pytest.approx(u, rel=1e-9)
        draw = float(family.draws(np.array([u]))[0])
        assert cdf(family.of_sum(1, draw)) == pytest.approx(u, rel=1e-8)


@pytest.mark.parametrize("family", ALL, ids=lambda f: f.name)
def test_sums_are_uniform_under_their_cdf(family: Family) -> None:
    """False alarm: 1e-6 for a seed, which is fixed."""
    collected = [cdf(family.tails(u)) for u in uniforms(1500, 7)]
    assert stats.kstest(collected, "uniform").pvalue > 1e-6
    other = [cdf(family.of_sum(14, float(family.draws(u).sum()))) for u in uniforms(1500, 7)]
    assert stats.kstest(other, "uniform").pvalue < 1e-6


def test_fisher_of_the_paper() -> None:
    logs = [math.log(0.05)] * 2
    assert -2 * sum(logs) == pytest.approx(11.98293, abs=5e-6)
    assert 1 - math.exp(combined(logs)) == pytest.approx(0.982521, abs=5e-7)
    assert 1 - math.exp(combined([math.log(0.01), math.log(0.5)])) == pytest.approx(
        0.968508, abs=5e-7
    )
    # A recursion of keys that saturate: no log of 0.
    assert combined([-900.0, -900.0]) == pytest.approx(-1800 + math.log(1801), rel=1e-12)


def test_fisher_on_uniforms_is_the_sum_on_chi_squares() -> None:
    for u in uniforms(50, 40, seed=3):
        assert log_p(u, Family("chi2")) == pytest.approx(fisher(u), rel=1e-13, abs=1e-15)


def test_winners_of_the_paper() -> None:
    u, counts = np.array([0.9, 0.5, 0.2]), [1, 2, 1]
    values = gumbels([Tails(math.log(x), math.log1p(-x)) for x in u], counts)
    assert np.exp(-4 * np.exp(-values)) == pytest.approx([0.6561, 0.25, 0.0016], rel=1e-12)
    assert int(values.argmax()) == 0
    # Where u^(m/c) underflows and 1 - u is no double any more.
    far = gumbels([Tails(-5000.0, 0.0), Tails(-6000.0, 0.0)], [1, 1])
    near = gumbels([Tails(0.0, -800.0), Tails(0.0, -900.0)], [1, 1])
    assert far[0] > far[1] and near[1] > near[0] and np.all(np.isfinite([*far, *near]))


def test_every_seed_has_one_owner() -> None:
    a, b, c = (Seed(name, 0.5) for name in (b"a", b"b", b"c"))
    prg = Prg.from_seed(0, "owners")
    owners = [own([[a, b, a], [a, c], [c]], prg) for _ in range(2000)]
    for total in owners:
        assert sorted(s.name for one in total for s in one) == [b"a", b"b", b"c"]
    # Each of the two that have it, alike: 6 standard deviations.
    assert abs(sum(a in total[0] for total in owners) - 1000) < 6 * math.sqrt(500)
    assert own([[a, b], [a]], prg, {b"a"}) == [[b], []]


LAMBDA = {2: 0.240449, 4: 0.216404, 16: 0.159121, 1024: 0.071994}
BOUNDS: dict[int | None, list[float]] = {
    2: [0.6757, 0.8065, 0.8929, 0.9542],
    4: [0.8710, 0.9310, 0.9643, 0.9854],
    16: [0.9359, 0.9669, 0.9832, 0.9932],
    1024: [0.9492, 0.9739, 0.9868, 0.9947],
    None: [0.94937, 0.97403, 0.98684, 0.99469],
}


def test_theorem_4_2() -> None:
    for m, expected in LAMBDA.items():
        assert theory.selection_slope(m) == pytest.approx(expected, abs=5e-7)
    for limit, row in BOUNDS.items():
        collected = [theory.auc_bound(t, limit) for t in (25, 50, 100, 250)]
        assert collected == pytest.approx(row, abs=5e-5 if limit else 5e-6)
    some = [theory.auc_bound(100, 1024, alpha) for alpha in (0.5, 1, 2, 3)]
    assert some == pytest.approx([0.2799, 0.6086, 0.8615, 0.9333], abs=5e-5)
    assert theory.auc_bound(100, 1) == 0.0  # m = 1 embeds nothing


def test_theorem_4_2_bounds_what_is_chosen() -> None:
    """p = (.7, .3), m = 4: alpha = .457376 and E R* = .606740 >= .598978."""
    alpha = mean = 0.0
    for c in range(5):
        weight = math.comb(4, c) * 0.7**c * 0.3 ** (4 - c)
        shares = [x / 4 for x in (c, 4 - c) if x]
        alpha -= weight * sum(s * math.log(s) for s in shares)
        mean += weight * sum(s / (1 + s) for s in shares)
    assert alpha == pytest.approx(0.457376, abs=5e-7) and mean == pytest.approx(0.606740, abs=5e-7)
    bound = 0.5 + theory.selection_slope(4) * alpha
    assert bound == pytest.approx(0.598978, abs=5e-7) and mean >= bound


def test_alpha_of_drawn_candidates() -> None:
    assert theory.alpha_of(np.array([0.7, 0.3]), 4) == pytest.approx(0.457376, abs=5e-7)
    # Of two candidates of two tokens half are different.
    assert theory.alpha_of(np.array([0.5, 0.5]), 2) == pytest.approx(math.log(2) / 2)
    uniform, zipf = (theory.next_token(name, 32_000) for name in NEXT_TOKENS)
    assert zipf.sum() == pytest.approx(1) and zipf[0] == pytest.approx(10 * zipf[9])
    source = np.random.default_rng(0)
    for p, m in ((uniform, 1024), (zipf, 64), (zipf, 1024)):
        entropies = []
        for _ in range(200):
            counts = np.unique(source.choice(len(p), m, p=p), return_counts=True)[1] / m
            entropies.append(-(counts * np.log(counts)).sum())
        error = 5 * np.std(entropies) / math.sqrt(len(entropies))
        assert theory.alpha_of(p, m) == pytest.approx(np.mean(entropies), abs=error)
    # The paper's figure 5: uniform is log m, Zipf falls behind.
    assert theory.alpha_of(uniform, 1024) > 0.99 * math.log(1024)
    assert theory.alpha_of(zipf, 1024) < 0.85 * math.log(1024)


def test_theorem_4_4() -> None:
    table = {
        (100, 50, 64): 0.999219,
        (100, 50, 16): 0.686490,
        (100, 50, 4): 0.120001,
        (250, 50, 16): 0.999988,
        (100, 10, 2): 0.316165,
    }
    for (tokens, k, m), power in table.items():
        assert theory.gamma_power(0.01, tokens, k, m) == pytest.approx(power, abs=5e-7)
    q, t = theory.gamma_threshold(0.01, 100, 50, 64)
    assert q == pytest.approx(0.148555, abs=5e-7) and t == pytest.approx(-1.0412, abs=5e-5)
    # H0 and H1 as they are, not as the prose has them: the mark makes draws larger (nearer 0).
    assert theory.gamma_power(0.01, 100, 50, 64) > 0.01


def test_normal_draws() -> None:
    expected = {2: (0.5642, 0.6817), 4: (1.0294, 0.4917), 16: (1.7660, 0.2950)}
    expected[32] = 2.0697, 0.2416
    for m, pair in expected.items():
        assert theory.largest_of(m) == pytest.approx(pair, abs=6e-5)
    for (k, m), auc in {(10, 2): 0.9156, (50, 4): 0.8834, (50, 16): 0.9859}.items():
        assert theory.normal_auc(100, k, m) == pytest.approx(auc, abs=6e-5)
    gains = [math.sqrt(d) * theory.largest_of(2)[0] for d in (2, 4, 5)]
    assert gains == pytest.approx([0.80, 1.13, 1.26], abs=5e-3)  # recursion, below flat's e_m
    assert all(g < theory.largest_of(2**d)[0] for g, d in zip(gains, (2, 4, 5), strict=True))


@pytest.mark.parametrize("name", ["", "uniform ", "exponential"])
def test_other_families_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="choose from"):
        Family(name)
    with pytest.raises(InputError, match="no k"):
        Family("normal", 3)
