"""Greedy quantized sampling as published: what it promises of each step, and what it does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.scoring import Scored
from spu_llm.core.prg import Prg
from spu_llm.systems.confidential import published
from spu_llm.systems.confidential.published import (
    PROGRAM_MARGIN,
    PublishedFakes,
    as_printed,
    as_programmed,
    claimed_bound,
    rows,
    sampler,
)
from tests.systems.confidential.toys import prompt_of, public_of, shipped

TEXT = "cab<redacted>dea</redacted>hed"
PUBLIC = shipped()
REAL = "# Read the file <redacted>name</redacted> of <redacted>the user</redacted>.\n"


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_close_factors_make_close_products(pairs: list[tuple[float, float]]) -> None:
    """Oracle 3, lemma 9.1: |a_i - b_i| < eps / n for all i means |prod a - prod b| < eps."""
    a, b = np.array(pairs).T
    eps = len(pairs) * np.abs(a - b).max() + 1e-12
    assert abs(a.prod() - b.prod()) < eps


@pytest.mark.parametrize("eps", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_fake_is_within_eps(seed: int, eps: float) -> None:
    """Oracle 3: |P(fake) - P(target)| < eps, which is all that the theorem says; the target is not
    among its fakes, and no fake is there twice.
    """
    public = public_of(seed)
    prompt = prompt_of(public, TEXT)
    (target,) = prompt.targets
    actual = as_printed(public, prompt, target, eps, 64)
    assert np.all(np.abs(actual.probabilities - actual.target) < eps)
    own = prompt.tokens[target.start : target.stop]
    assert own not in actual.fakes
    assert len(set(map(tuple, actual.fakes))) == len(actual.fakes)


def test_a_wide_bin_takes_everything_and_the_likeliest_first() -> None:
    """With eps = n every token of every step qualifies: all strings but the target."""
    public = public_of(0)
    prompt = prompt_of(public, "cab<redacted>de</redacted>hed")
    actual = as_printed(public, prompt, prompt.targets[0], 2.0, 2000)
    assert len(actual.fakes) == 10 * 10 - 1
    assert (np.diff(actual.probabilities) <= 0).all()


def test_a_bin_has_its_upper_edge_and_lacks_its_lower() -> None:
    """floor(rho / eps') eps' < P <= (floor(rho / eps') + 1) eps': spec section 5."""
    public = public_of(0)
    table = np.exp(public.scorer._logs)  # type: ignore[attr-defined]
    prompt = prompt_of(public, "cab<redacted>d</redacted>hed")
    before = prompt.tokens[2]
    rho = table[before, prompt.tokens[3]]
    for eps in (0.03, 0.07, 0.2):
        low = np.floor(rho / eps) * eps
        expected = [
            i for i in range(1, 11) if low < table[before, i] <= low + eps and i != prompt.tokens[3]
        ]
        actual = as_printed(public, prompt, prompt.targets[0], eps, 64)
        assert sorted(f[0] for f in actual.fakes) == expected


def test_the_printed_algorithm_has_one_answer() -> None:
    prompt = prompt_of(PUBLIC, REAL)
    target = prompt.targets[0]
    first, second = (as_printed(PUBLIC, prompt, target, 1 / 8, 8) for _ in range(2))
    assert first.fakes == second.fakes
    drawn = {
        str(as_programmed(PUBLIC, prompt, target, 1 / 8, 8, Prg.from_seed(i, "gqs")).fakes)
        for i in range(3)
    }
    assert len(drawn) == 3


def test_the_program_keeps_to_its_bins_and_sorts_by_closeness() -> None:
    public = public_of(1)
    prompt = prompt_of(public, "cab<redacted>d</redacted>hed")
    actual = as_programmed(public, prompt, prompt.targets[0], 0.2, 8, Prg.from_seed(1, "gqs"))
    low = np.floor(actual.target / 0.2) * 0.2 + PROGRAM_MARGIN
    assert len(actual.fakes) > 1
    assert ((low <= actual.probabilities) & (actual.probabilities < low + 0.2)).all()
    assert (np.diff(np.abs(actual.probabilities - actual.target)) >= 0).all()


def test_the_programs_fakes_may_end_early() -> None:
    """At a full stop or a new line: such fakes are shorter than the target."""
    prompt = prompt_of(PUBLIC, "import <redacted>the whole of it</redacted>")
    target = prompt.targets[0]
    actual = as_programmed(PUBLIC, prompt, target, 0.9, 500, Prg.from_seed(0, "gqs"))
    short = [fake for fake in actual.fakes if len(fake) < len(target)]
    assert short
    for fake in short:
        assert PUBLIC.tokenizer.decode(fake[-1:]).rstrip(" ").endswith((".", "\n"))


def test_the_posterior_counterexample() -> None:
    """Oracle 7 (theorem 5.1 bounds the wrong quantity): a target of probability 0.09 and ten fakes
    of 1e-6 are eps-close for eps = 0.1; a guess is right with 0.9999, where 0.191 is claimed.
    """
    actual = PublishedFakes([[i] for i in range(10)], np.full(10, 1e-6), 0.09)
    eps = 0.1
    assert np.all(np.abs(actual.probabilities - actual.target) < eps)
    posterior = actual.target / (actual.target + actual.probabilities.sum())
    assert round(posterior, 4) == 0.9999
    assert claimed_bound(eps, 1, 10) == pytest.approx(0.191, abs=1e-3)


@pytest.mark.parametrize("variant", ["printed", "program"])
def test_rows_take_fakes_of_all_spans_and_nothing_else_changes(variant: str) -> None:
    prompt = prompt_of(PUBLIC, REAL)
    made = rows(prompt, sampler(variant, PUBLIC, prompt, 1 / 8, 8, Prg.from_seed(0, "gqs")))
    assert made[0] == prompt.tokens and len(made) > 4
    head, tail = prompt.targets[0].start, len(prompt.tokens) - prompt.targets[-1].stop
    for row in made:
        assert row[:head] == prompt.tokens[:head] and row[-tail:] == prompt.tokens[-tail:]


@pytest.mark.parametrize(("texts", "most"), [(1, 10), (130, 9), (70, 513)])
def test_a_step_keeps_the_likeliest_of_all_candidates(texts: int, most: int) -> None:
    """Also of equal ones, of which there are many here: the first."""
    source = np.random.default_rng(texts)
    logs = np.log(source.integers(1, 6, (texts, 20)) / 10).astype(np.float32)
    totals = np.log(source.integers(1, 4, texts) / 8)
    scored = Scored(np.zeros((texts, 1), np.int32), totals, logs, None)
    chances = np.exp(logs.astype(np.float64))
    for low, high in ((0.0, 0.35), (0.15, 0.25), (0.9, 1.0)):
        parents, tokens = np.nonzero((low < chances) & (chances <= high))
        joint = totals[parents] + logs[parents, tokens]
        best = np.argsort(-joint, kind="stable")[:most]
        wanted = parents[best], tokens[best], joint[best]
        for one, other in zip(published._likeliest(scored, low, high, most), wanted, strict=True):
            assert np.array_equal(one, other)
