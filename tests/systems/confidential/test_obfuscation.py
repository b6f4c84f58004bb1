"""Fakes and their bound: on tables where everything is exact, and with the shipped public model.
What is drawn repeats from run to run.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.confidential import obfuscation
from spu_llm.systems.confidential.attacks import sets
from spu_llm.systems.confidential.attacks.sets import Sent
from spu_llm.systems.confidential.obfuscation import (
    Limits,
    Public,
    TooFewError,
    alike,
    log_probabilities,
    shuffled,
    typed,
)
from spu_llm.systems.confidential.repeats import Repeats
from spu_llm.systems.confidential.spans import Prompt, filled, parse, said, tokenised
from tests.kit.seeded import seed_urandom
from tests.systems.confidential.toys import LETTERS, Spaced, prompt_of, public_of, shipped

TRIES = 3000
SIGMAS = 4.5  # of each guess a false alarm in 3e-6 of all seeds, and the seed is fixed
TOY = Limits(fakes=2, fewest=2, eta=0.15, beam=40, width=6.0)
# Text that everybody knows stands before, between and after the spans.
SHAPE = "cab<redacted>{}{}</redacted>f<redacted>{}</redacted>hed"


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_urandom(monkeypatch)


def secrets_of(public: Public) -> tuple[list[str], np.ndarray]:
    """Return all prompts of this shape, and how likely each is: exactly, by enumeration."""
    texts = [SHAPE.format(*three) for three in itertools.product(LETTERS, repeat=3)]
    one = prompt_of(public, texts[0])
    rows = np.array([prompt_of(public, text).tokens for text in texts])
    chances = np.exp(log_probabilities(public, one, rows))
    return texts, chances / chances.sum()


def guesses(public: Public, prompt: Any, rows: np.ndarray) -> dict[str, int]:
    """Return what somebody with the public model may go by: the row each strategy points at."""
    logs = log_probabilities(public, prompt, rows)
    ends = [target.stop for target in prompt.targets]
    first = public.scorer.log_probability(public.before(prompt.tokens, 3), rows[:, 3 : ends[0]])
    after = logs - first
    return {
        "likeliest": int(logs.argmax()),
        "least likely": int(logs.argmin()),
        "likeliest first span": int(first.argmax()),
        "oddest first span": int(first.argmin()),
        "likeliest after it": int(after.argmax()),
        "least likely after it": int(after.argmin()),
        "order": 0,
    }


def success(public: Public, limits: Limits) -> dict[str, float]:
    """Return how often each strategy finds the own prompt, of prompts that get their fakes."""
    source, (texts, chances) = np.random.default_rng(0), secrets_of(public)
    hits: dict[str, list[bool]] = {}
    for i in source.choice(len(texts), p=chances, size=TRIES):
        prompt = prompt_of(public, texts[i])
        try:
            rows, own = shuffled(list(alike(public, prompt, Prg.from_os(), limits)), Prg.from_os())
        except TooFewError:
            continue
        for name, guess in guesses(public, prompt, np.array(rows)).items():
            hits.setdefault(name, []).append(guess == own)
    assert len(hits["order"]) > TRIES // 8
    return {name: float(np.mean(actual)) for name, actual in hits.items()} | {
        "tries": float(len(hits["order"]))
    }


def excess(actual: dict[str, float], bound: float) -> float:
    """Return the excess of the best strategy above the bound, in standard deviations."""
    best = max(rate for name, rate in actual.items() if name != "tries")
    return float((best - bound) / np.sqrt(bound * (1 - bound) / actual["tries"]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_no_strategy_beats_the_bound(seed: int) -> None:
    """Secrets of the public model's own distribution, where the bound holds for whatever guess."""
    actual = success(public_of(seed), TOY)
    assert excess(actual, TOY.bound(TOY.fakes)) < SIGMAS, actual


def test_forgotten_draws_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bin is of P, as if likely beginnings had not been drawn more often."""
    pruned = obfuscation._pruned

    def forgetful(*args: Any) -> Any:
        beam = pruned(*args)
        return beam._replace(drawn=np.zeros_like(beam.drawn))

    monkeypatch.setattr(obfuscation, "_pruned", forgetful)
    assert excess(success(public_of(0), TOY), TOY.bound(TOY.fakes)) > SIGMAS


def test_wide_bins_are_found_out() -> None:
    wide = dataclasses.replace(TOY, eta=10.0)
    assert excess(success(public_of(0), wide), TOY.bound(TOY.fakes)) > SIGMAS


def test_the_bound_is_the_formula() -> None:
    """Oracle 7's sound replacement."""
    assert Limits(eta=0.5).bound(8) == pytest.approx(1 / (1 + 8 * 0.6065306597))
    assert Limits(eta=1e-9).bound(9) == pytest.approx(0.1)


@pytest.mark.parametrize("count", [1, 5, 40, 100, 200])
def test_as_many_stay_as_there_is_room_for(count: int) -> None:
    weights = np.random.default_rng(count).normal(size=100) * 5
    p = np.minimum(1, np.exp(weights - obfuscation._threshold(weights, count)))
    assert p.sum() == pytest.approx(min(count, 100))


PUBLIC = shipped()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "# Written by <redacted>Guido</redacted> in 1999.\nimport os",
        "import os\nfrom <redacted>socket</redacted> import <redacted>timeout</redacted>\n\ndef",
        "<redacted>Alice</redacted> said: hello",
    ],
)
def test_fakes_differ_in_the_spans_and_could_be_typed(text: str) -> None:
    prompt = prompt_of(PUBLIC, text)
    rows = alike(PUBLIC, prompt, Prg.from_seed(1, "fakes"), Limits())
    assert rows[0].tolist() == prompt.tokens and rows.shape == (9, len(prompt.tokens))
    assert len({row.tobytes() for row in rows}) == len(rows)
    inside = [i for target in prompt.targets for i in target]
    outside = np.setdiff1d(np.arange(rows.shape[1]), inside)
    assert (rows[:, outside] == rows[0, outside]).all()
    for row in rows:
        words = typed(PUBLIC.tokenizer, prompt, row)
        assert words is not None
        other = tokenised(filled(prompt.marked, words), PUBLIC.tokenizer)
        assert other.tokens == row.tolist() and other.shape == prompt.shape


def test_a_secret_that_is_there_twice_has_fakes_that_are() -> None:
    text = "def f(<redacted>path</redacted>):\n    return open(<redacted>path</redacted>)\n"
    prompt = prompt_of(PUBLIC, text)
    assert prompt.same == [(0, "", ""), (0, "", "")]
    rows = alike(PUBLIC, prompt, Prg.from_seed(1, "fakes"), Limits(fewest=1, eta=3.0))
    words = [typed(PUBLIC.tokenizer, prompt, row) for row in rows]
    assert all(actual is not None and actual[0] == actual[1] for actual in words)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "def f(<redacted>name</redacted>):\n    return <redacted>name</redacted>\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "# By <redacted>Guido</redacted> (<redacted>Guido</redacted>), 1999\n",
            marks=pytest.mark.slow,
        ),
        "def f(<redacted>data</redacted>):\n    x =<redacted> data</redacted> +"
        "<redacted> (data)</redacted>\n",
    ],
)
def test_a_word_with_other_edges_is_the_same_word(text: str) -> None:
    """Each place has tokens of its own, and all of them say one word."""
    prompt = prompt_of(PUBLIC, text)
    assert {first for first, _, _ in prompt.same} == {0}
    assert len({tuple(prompt.tokens[i] for i in target) for target in prompt.targets}) > 1
    rows = alike(PUBLIC, prompt, Prg.from_seed(1, "fakes"), Limits(fewest=1, eta=3.0))
    words = set()
    for row in rows:
        actual = typed(PUBLIC.tokenizer, prompt, row)
        assert actual is not None
        (word,) = {said(text)[1] for text in actual}
        words.add(word)
    assert len(words) == len(rows) > 1


# Without a space, then with one.
TWICE = "ca<redacted>{0}</redacted>d e <redacted>{0}</redacted> a"


def found_by_coherence(seed: int) -> dict[str, float]:
    """Secrets of the public model's distribution, given that both spans say the same."""
    public = public_of(seed, tokenizer=Spaced())
    texts = [TWICE.format(a + b) for a in "abcde" for b in "abcde"]
    rows = np.array([prompt_of(public, text).tokens for text in texts])
    chances = np.exp(log_probabilities(public, prompt_of(public, texts[0]), rows))
    source, hits = np.random.default_rng(0), []
    for i in source.choice(len(texts), p=chances / chances.sum(), size=TRIES // 3):
        prompt = prompt_of(public, texts[i])
        assert len({tuple(prompt.tokens[j] for j in t) for t in prompt.targets}) == 2
        try:
            sent, own = shuffled(list(alike(public, prompt, Prg.from_os(), TWO)), Prg.from_os())
        except TooFewError:
            continue
        hits.append(sets.by_coherence(public, Sent(prompt, [r.tolist() for r in sent], own)) == own)
    assert len(hits) > TRIES // 24
    return {"coherent": float(np.mean(hits)), "tries": float(len(hits))}


TWO = dataclasses.replace(TOY, eta=0.5)


def test_coherence_finds_nothing_beyond_the_bound() -> None:
    assert excess(found_by_coherence(0), TWO.bound(TWO.fakes)) < SIGMAS


def test_repeats_by_tokens_alone_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word with a space is another one, as tokens have it."""
    alone = property(lambda prompt: [(i, "", "") for i, _ in enumerate(prompt.targets)])
    monkeypatch.setattr(Prompt, "same", alone)
    assert excess(found_by_coherence(0), TWO.bound(TWO.fakes)) > SIGMAS


def test_a_repeat_in_other_tokens_than_the_words_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever has such a prompt would be the only one."""
    public = public_of(0, tokenizer=Spaced())
    prompt = prompt_of(public, "ca<redacted>b</redacted>d <redacted>b</redacted>e")
    tokens = [*prompt.tokens[:4], public.tokenizer.encode(" c")[0], prompt.tokens[5]]
    other = dataclasses.replace(prompt, tokens=tokens)
    assert Repeats(public.tokenizer, prompt).hold()
    assert not Repeats(public.tokenizer, other).hold()
    monkeypatch.setattr(obfuscation, "typed", lambda *args: [])  # which finds it, too
    with pytest.raises(InputError, match="in tokens that do not follow"):
        alike(public, other, Prg.from_os(), TWO)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("by <redacted>Guido</redacted> in", [" none"]),  # its first token holds the space alone
        ("<redacted>Guido</redacted>s", ["xid"]),  # one token less is redacted
        ("the path of <redacted>a</redacted>", ["path"]),  # stands in the clear
        ("# (path) of<redacted> (a</redacted>", ["(path"]),  # so does its word
    ],
)
def test_what_could_not_have_been_the_users_is_no_fake(text: str, words: list[str]) -> None:
    """Who sees it among others would leave it out."""
    prompt = prompt_of(PUBLIC, text)
    whole = filled(prompt.marked, [word.removeprefix(" ") for word in words]).text
    row = PUBLIC.tokenizer.encode(whole)
    if len(row) == len(prompt.tokens):
        assert typed(PUBLIC.tokenizer, prompt, np.array(row)) is None
    else:
        assert (
            tokenised(parse(text), PUBLIC.tokenizer).shape
            != tokenised(filled(prompt.marked, words), PUBLIC.tokenizer).shape
        )


def test_no_set_mixes_equal_spans_with_others() -> None:
    public, actual = public_of(0), 0
    for first, second in itertools.product(LETTERS[:6], repeat=2):
        prompt = prompt_of(public, f"ca<redacted>{first}</redacted>f<redacted>{second}</redacted>h")
        try:
            rows = alike(public, prompt, Prg.from_os(), TOY)
        except (TooFewError, InputError):
            continue
        actual += 1
        assert len({row[2] == row[4] for row in rows}) == 1
    assert actual > 5


def test_a_key_gives_the_same_fakes_and_another_one_others() -> None:
    prompt = prompt_of(PUBLIC, "# Written by <redacted>Guido</redacted> in 1999.\n")
    first, same, other = (
        alike(PUBLIC, prompt, Prg.from_seed(seed, "fakes"), Limits()) for seed in (1, 1, 2)
    )
    assert (first == same).all() and (first != other).any()


def test_what_the_text_gives_away_is_refused() -> None:
    """λ < λ_min: nothing is as likely as this."""
    prompt = prompt_of(PUBLIC, "def read(self):\n    <redacted>return</redacted> self._read()\n")
    with pytest.raises(TooFewError, match="found . of the 4 fake prompts that must be"):
        alike(PUBLIC, prompt, Prg.from_os(), Limits())


@pytest.mark.parametrize(
    "change", [{"fakes": 0}, {"fewest": 9}, {"eta": 0.0}, {"eta": float("nan")}, {"fakes": 600}]
)
def test_limits_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Limits(**change)
