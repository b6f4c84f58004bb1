"""The baselines find their own marks and are calibrated; Aaronson's is the limit of candidates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.baselines import (
    Aaronson,
    Kirchenbauer,
    Kuditipudi,
    aaronson_score,
    corrected_log_p,
    corrected_sum_log_p,
    exponential_argmax,
    row_of,
)
from spu_llm.systems.watermark.cdfs import Family
from spu_llm.systems.watermark.selecting import choose
from tests.systems.watermark.chains import FALSE_ALARM, key_of, p_value

VOCAB = 60
LAW = np.exp(np.random.default_rng(3).normal(size=VOCAB))
P = LAW / LAW.sum()


def unmarked(number: int, count: int) -> list[int]:
    points = Prg.from_seed(number, "unmarked").uniform((count,))
    return np.searchsorted(np.cumsum(P), points, side="right").tolist()


def test_aaronsons_rule_has_the_distribution_of_the_model() -> None:
    mu = {0: 0.5, 1: 0.3, 2: 0.2}
    p = np.array(list(mu.values()))
    drawn = [Aaronson(key_of(i), 3).next(p, []) for i in range(4000)]
    assert p_value(drawn, mu) > FALSE_ALARM
    # A token of probability 0 never wins, and tiny ones do not overflow.
    assert exponential_argmax(np.array([0.0, 1e-300, 1.0]), np.array([0.999, 0.5, 1e-9])) == 2


def test_many_candidates_are_aaronsons_rule() -> None:
    """c / m goes to p: probabilities as counts choose as R^(1/p) does, number by number."""
    for trial in range(200):
        key = key_of(trial, "limit")
        grams = [[(bytes([v]),)] for v in range(VOCAB)]
        numbers = np.array([key.seed(gram[0]).uniform for gram in grams])
        chosen = choose(key, grams, P.tolist(), Family(), Prg.from_seed(0, "none"))
        assert chosen.index == exponential_argmax(P, numbers)


def test_aaronson_is_found_and_corrected_for_length() -> None:
    scheme = Aaronson(key_of(0), VOCAB)
    text: list[int] = []
    for _ in range(60):
        text.append(scheme.next(P, text))
    assert corrected_log_p(scheme.distinct(text)) < math.log(1e-10)
    assert corrected_sum_log_p(scheme.distinct(text)) < math.log(1e-6)
    nulls = [
        Aaronson(key_of(i, "null"), VOCAB).distinct(unmarked(i, 40 + i % 50)) for i in range(250)
    ]
    for log_p in (corrected_log_p, corrected_sum_log_p):
        collected = [math.exp(log_p(numbers)) for numbers in nulls]
        assert stats.kstest(collected, "uniform").pvalue > FALSE_ALARM
    # The plain score grows with the length: a long text without a mark outdoes a short marked one.
    long = aaronson_score(Aaronson(key_of(1), VOCAB).numbers(unmarked(1, 800)))
    assert long > aaronson_score(scheme.numbers(text))
    # As printed, 1 - CDF is the p-value; chi^2_2T at 2 s is the same CDF.
    s, count = aaronson_score(scheme.distinct(text)[:10]), 10
    assert math.exp(corrected_log_p(scheme.distinct(text)[:10])) == pytest.approx(
        float(stats.chi2.sf(2 * s, 2 * count)), rel=1e-9
    )


def test_kirchenbauer_is_found_and_counts_n_grams_once() -> None:
    scheme, prg = Kirchenbauer(key_of(0), VOCAB, 4.0), Prg.from_seed(0, "kgw")
    text: list[int] = []
    for point in prg.uniform((80,)):
        p = np.exp(scheme.logits(np.log(P), text))
        text.append(int(np.searchsorted(np.cumsum(p / p.sum()), point, side="right")))
    assert scheme.z(text) > 6 and scheme.log_p(text) < math.log(1e-8)
    assert scheme.z(text * 2) < 1.1 * scheme.z(text)
    zs = [Kirchenbauer(key_of(i, "z"), VOCAB, 2.0).z(unmarked(i, 150)) for i in range(120)]
    # Mean 0 and variance 1: six standard errors.
    assert abs(np.mean(zs)) < 6 / math.sqrt(120) and abs(np.var(zs) - 1) < 6 * math.sqrt(2 / 120)
    assert scheme.z([]) == 0.0 and scheme.log_p([]) == 0.0


def test_kuditipudi_is_found_after_edits() -> None:
    scheme, prg = Kuditipudi(key_of(0), VOCAB, length=32), Prg.from_seed(0, "kth")
    start = scheme.begin(prg)
    text = [scheme.next(P, start + i) for i in range(24)]
    edited = [*text[:8], 1, *text[8:15], *text[17:]]
    assert scheme.cost(text) < scheme.cost(edited) < scheme.cost(unmarked(2, 23))
    assert scheme.p_value(text, 19, prg) == scheme.p_value(edited, 19, prg) == 0.05
    # p of unmarked texts: each of 1/20 ... 1 alike.
    nulls = [scheme.p_value(unmarked(i, 8), 19, prg) for i in range(40)]
    counts = np.bincount([min(4, int((p - 1e-9) * 5)) for p in nulls], minlength=5)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_alignment_is_the_levenshtein_recursion() -> None:
    """Against the recursion as it is written, for one start after the other."""
    scheme = Kuditipudi(key_of(5), 7, length=5)
    text = [3, 1, 4]
    rows = np.stack([row_of(key_of(5), i, 7) for i in range(5)])

    def distance(tokens: list[int], places: list[int]) -> float:
        if not tokens or not places:
            return scheme.gap * (len(tokens) + len(places))
        along = math.log1p(-rows[places[0], tokens[0]]) + distance(tokens[1:], places[1:])
        gaps = min(distance(tokens[1:], places), distance(tokens, places[1:])) + scheme.gap
        return min(along, gaps)

    expected = min(distance(text, [(start + j) % 5 for j in range(3)]) for start in range(5))
    assert scheme.cost(text) == pytest.approx(expected, rel=1e-12)
