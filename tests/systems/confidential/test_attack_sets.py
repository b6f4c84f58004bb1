"""Attacks on sets of prompts: each finds what is there to be found, and nothing where it is not.
What is drawn repeats from run to run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from spu_llm.api.defaults import shipped as model_in
from spu_llm.attacks import prompts as attack_prompts
from spu_llm.core.prg import Prg
from spu_llm.systems.confidential import published
from spu_llm.systems.confidential.attacks import sets
from spu_llm.systems.confidential.attacks.sets import Sent
from spu_llm.systems.confidential.obfuscation import Limits, Public, TooFewError, alike, shuffled
from tests.kit.seeded import seed_urandom
from tests.systems.confidential.toys import LETTERS, prompt_of, public_of

PUBLIC = public_of(0)
TEXT = "cab<redacted>{}</redacted>hed"
LIMITS = Limits(fakes=4, fewest=2, eta=0.5, beam=40)
EPS, FAKES = 0.2, 4


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_urandom(monkeypatch)


def all_sent(make: Callable[[Public, str], list[list[int]]]) -> list[Sent]:
    """Return a set for every secret of two letters that has fakes."""
    collected = []
    for secret in (a + b for a in LETTERS for b in LETTERS):
        text = TEXT.format(secret)
        try:
            rows, own = shuffled(make(PUBLIC, text), Prg.from_os())
        except TooFewError:
            continue
        if len(rows) > 2:
            collected.append(Sent(prompt_of(PUBLIC, text), rows, own))
    assert len(collected) > 20
    return collected


def printed(public: Public, text: str) -> list[list[int]]:
    prompt = prompt_of(public, text)
    sample = published.sampler("printed", public, prompt, EPS, FAKES, Prg.from_os())
    return published.rows(prompt, sample)


def repaired(public: Public, text: str) -> list[list[int]]:
    prompt = prompt_of(public, text)
    return [row.tolist() for row in alike(public, prompt, Prg.from_os(), LIMITS)]


def rate(actual: list[Sent], guess: Callable[[Sent], int]) -> float:
    return float(np.mean([guess(s) == s.own for s in actual]))


def chance(actual: list[Sent]) -> float:
    return float(np.mean([1 / len(s.rows) for s in actual]))


def test_the_rank_attack_finds_targets_that_their_fakes_do_not() -> None:
    actual = all_sent(printed)
    assert rate(actual, lambda s: sets.by_regeneration(PUBLIC, s, EPS, FAKES)) > 0.6
    assert chance(actual) < 0.35


def test_redrawing_finds_nothing_among_repaired_sets() -> None:
    actual = all_sent(repaired)
    hits = rate(actual, lambda s: sets.by_redrawing(PUBLIC, s, LIMITS))
    sigma = np.sqrt(0.25 / len(actual))
    assert abs(hits - chance(actual)) < 4 * sigma


def test_likelihood_ranks_by_each_part() -> None:
    """Rows whose probabilities are known: every strategy points at the row that it means."""
    shape = prompt_of(PUBLIC, TEXT.format("ab"))
    rows = [prompt_of(PUBLIC, TEXT.format(a + b)).tokens for a in LETTERS for b in LETTERS]
    guess = sets.by_likelihood(PUBLIC, PUBLIC.scorer, Sent(shape, rows, 0))
    log = PUBLIC.scorer._logs  # type: ignore[attr-defined]
    whole = [sum(log[x, y] for x, y in zip(r[2:], r[3:], strict=False)) for r in rows]
    secret = [log[r[2], r[3]] + log[r[3], r[4]] for r in rows]
    after = np.subtract(whole, secret)
    of = "by the public model"
    assert guess[f"the likeliest prompt {of}"] == np.argmax(whole)
    assert guess[f"the least likely prompt {of}"] == np.argmin(whole)
    assert guess[f"the likeliest secret {of}"] == np.argmax(secret)
    assert guess[f"the oddest secret {of}"] == np.argmin(secret)
    best = after[guess[f"the likeliest text after it {of}"]]
    assert best == pytest.approx(after.max())


def test_coherence_prefers_spans_that_say_the_same() -> None:
    text = "ca<redacted>{}</redacted>f<redacted>{}</redacted>d"
    shape = prompt_of(PUBLIC, text.format("b", "b"))
    words = ["ab", "cd", "ee", "fg", "hi"]
    rows = [prompt_of(PUBLIC, text.format(*pair)).tokens for pair in words]
    assert sets.by_coherence(PUBLIC, Sent(shape, rows, 2)) == 2


def test_intersections_of_fresh_sets_leave_the_own_row() -> None:
    shape = prompt_of(PUBLIC, TEXT.format("ab"))
    own = shape.tokens
    others = [[[*own[:3], i, j, *own[5:]] for j in (5, 6)] for i in (3, 4, 7)]
    again = [Sent(shape, [fakes[0], own, fakes[1]], 1) for fakes in others]
    assert sets.by_intersection(again) == 1
    same = [dataclasses.replace(again[0]) for _ in range(3)]
    drawn = {sets.by_intersection(same) for _ in range(60)}
    assert drawn == {0, 1, 2}


def test_shorter_rows_are_fakes() -> None:
    shape = prompt_of(PUBLIC, TEXT.format("ab"))
    assert sets.by_length(Sent(shape, [[1], [1, 2], [1]], 1)) == 1


def test_the_best_strategy_is_chosen_on_other_tries() -> None:
    collected = [{"good": i, "bad": 99} for i in range(10)]
    assert sets.best_of(collected, list(range(10))) == ("good", 8, 8)
    lucky = [{"a": i if i < 2 else 99, "b": 99 if i < 2 else i} for i in range(10)]
    assert sets.best_of(lucky, list(range(10))) == ("a", 0, 8)


@pytest.mark.parametrize("draw", ["of_text", "of_distribution", "of_name"])
def test_prompts_have_their_secret_inside(draw: str) -> None:
    setting = attack_prompts.setting_of(model_in("private"), 0)
    drawn = [getattr(attack_prompts, draw)(setting) for _ in range(60)]
    prompts = [prompt for prompt in drawn if prompt is not None]
    assert prompts
    for prompt in prompts:
        assert prompt.targets[0].start > 0 and prompt.targets[-1].stop <= len(prompt.tokens)
        words = {prompt.marked.text[slice(*span)] for span in prompt.marked.redacted}
        assert len(words) == 1 if draw == "of_name" else len(prompt.targets) == 1
