"""Drafts by the text itself: which token, and with which distribution."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import ngrams
from models.draft import Drafter
from models.ngrams import MOST, Ngrams, continuation
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.plain import Plain
from protocols.verification.variants import VARIANTS, Rule, verifier
from spu_llm.core.prg import Prg

VOCAB = 9
LEAST = 6  # of a match that goes before a model of which nothing is known yet


class Model(Drafter):
    """Finds token 8 the likeliest; counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def logits(self, tokens: list[int]) -> np.ndarray:
        self.asked.append(tokens)
        return np.arange(VOCAB, dtype=np.float64)


def argmax(logits: np.ndarray, position: int) -> tuple[int, np.ndarray]:
    return int(np.argmax(logits)), Sampling().distribution(logits)


@pytest.mark.parametrize(
    ("text", "token", "length"),
    [
        ([4], 4, 0),
        ([4, 4], 4, 1),
        ([1, 2, 3], 1, 0),
        ([1, 2, 2, 3], 2, 0),
        ([1, 2, 1], 2, 1),
        ([1, 2, 3, 1, 2], 3, 2),
        ([7, 1, 2, 5, 1, 2, 7, 1, 2], 5, 3),  # the longest, though another one is later
        ([1, 2, 5, 1, 2, 6, 1, 2], 6, 2),  # of equal ones the latest
        ([1, 1, 1, 1], 1, 3),
    ],
)
def test_what_followed_is_proposed(text: list[int], token: int, length: int) -> None:
    assert continuation(text) == (token, length)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_it_is_what_a_search_by_hand_finds(text: list[int]) -> None:
    def same(place: int) -> int:
        """Return how many tokens before `place` are those at the end."""
        pairs = zip(reversed(text[:place]), reversed(text), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), place)

    best = max(range(1, len(text)), key=lambda at: (min(same(at), MOST), at), default=0)
    actual = continuation(text)
    if best and same(best):
        assert actual == (text[best], min(same(best), MOST))
    else:
        assert actual[1] == 0 and Counter(text)[actual[0]] == max(Counter(text).values())


def test_drafts_go_on_with_what_followed() -> None:
    drafts, q = Ngrams(VOCAB).propose([1, 2, 3, 4, 5, 6, 1, 2, 3], 5, argmax)
    assert drafts == [4, 5, 6, 1, 2]
    np.testing.assert_array_equal(q, np.eye(VOCAB)[drafts])


def test_a_model_drafts_where_little_was_there_before() -> None:
    """And is asked in either case: what it takes does not say who drafted."""
    model = Model()
    mixed = Ngrams(VOCAB, model)
    seen = [*range(8)]
    drafts, _ = mixed.propose([*seen, *seen[: LEAST - 1]], 3, argmax)
    assert drafts == [8, 8, 8]
    drafts, _ = mixed.propose([*seen, *seen[:LEAST]], 3, argmax)
    assert drafts == [6, 7, 0]
    lengths = [len(seen) + LEAST + i for i in (-1, 0, 1, 0, 1, 2)]
    assert [len(asked) for asked in model.asked] == lengths


def goes_on(mixed: Ngrams, text: list[int], tokens: list[int]) -> list[int]:
    """Return the drafts after texts that go on by `tokens`, one a step."""
    made = []
    for i in range(len(tokens)):
        made += mixed.propose([*text, *tokens[:i]], 1, argmax)[0]
    return made


def test_short_matches_draft_where_the_model_is_wrong() -> None:
    """In a text that counts from 0 to 5 again and again, after a model that says 8 throughout."""
    text = [0, 1, 2, 3, 4, 5]
    drafts = goes_on(Ngrams(VOCAB, Model()), text, text * 2)
    assert drafts == [8, 8, 8, *(text * 2)[3:]]


def test_long_matches_give_way_where_they_are_wrong() -> None:
    """In a text where another token comes after a long match than came the last time."""
    mixed, match = Ngrams(VOCAB, Model()), [0, 1, 2, 3, 4, 5, 6]
    text, drafts = [*match, 7], []
    for i in range(3):
        text += match
        drafts += mixed.propose(text, 1, argmax)[0]
        text.append((8, 7)[i % 2])
    assert drafts == [7, 8, 8]


def counts(mixed: Ngrams) -> tuple[int, int]:
    """Return how many guesses of the text, and drafts of the model, were counted."""
    of_text, of_model = (
        sum(share.seen for share in each) for each in (mixed._by_text, mixed._by_model)
    )
    assert of_model == mixed._of_model.seen
    return of_text, of_model


def test_what_is_counted_is_of_the_text_that_goes_on() -> None:
    """Not of another one, such as rehearsals have, nor of drafts after a wrong one, nor of a turn
    that somebody else writes.
    """
    mixed = Ngrams(VOCAB, Model())
    mixed.propose([1, 2, 3], 2, argmax)
    mixed.propose([5, 5, 5, 5], 2, argmax)
    assert counts(mixed) == (0, 0)
    mixed.propose([5, 5, 5, 5, 6, 6], 2, argmax)
    assert counts(mixed) == (1, 1)
    mixed.begin()
    mixed.propose([5, 5, 5, 5, 6, 6, 8, 8, 8], 2, argmax)
    assert counts(mixed) == (1, 1)
    mixed.propose([5, 5, 5, 5, 6, 6, 8, 8, 8, 8, 8, 0], 2, argmax)
    assert counts(mixed) == (3, 3)


def test_of_several_continuations_the_models_are_not_counted() -> None:
    """The text goes on with one of them, whichever it is."""
    mixed = Ngrams(VOCAB, Model())
    for _ in range(3):
        mixed.propose([1, 2, 3], 2, argmax)
    mixed.propose([1, 2, 3, 8, 8], 2, argmax)
    assert counts(mixed) == (2, 0)
    mixed.propose([1, 2, 3, 8, 8, 8], 2, argmax)
    assert counts(mixed) == (3, 1)


@pytest.mark.parametrize("name", [*VARIANTS, "greedy", "plain"])
def test_every_rule_gets_a_distribution_of_one_token(name: str) -> None:
    sampling = Sampling(0.0 if name == "greedy" else 0.7, top_k=3 if name == "plain" else 0)
    rule: Rule = (
        Plain(sampling)
        if name == "plain"
        else verifier("token" if name == "greedy" else name, sampling, hide_progress=False)
    )
    streams = Streams(Prg.from_seed(1, "drafts"), Prg.from_seed(1, "sampling"))
    drafts, q = Ngrams(VOCAB).propose(
        [5, 6, 7, 5], 2, lambda logits, position: rule.propose(logits, position, streams)
    )
    assert drafts == [6, 7]
    np.testing.assert_array_equal(q, np.eye(VOCAB)[drafts])
    given = rule.client_input(drafts, q, 4, streams)
    if (of_drafts := getattr(given, "q", None)) is not None and name in ("token", "naive"):
        np.testing.assert_array_equal(np.asarray(of_drafts)[:2], np.eye(VOCAB)[drafts] * 2**16)


class Small(Drafter):
    """Knows three tokens, by what comes before."""

    def __init__(self) -> None:
        self.table = np.random.default_rng(7).normal(0, 1, (3, 3))

    def logits(self, tokens: list[int]) -> np.ndarray:
        return self.table[tokens[-1]]


@pytest.mark.parametrize("mixed", [False, True])
def test_texts_have_the_models_distribution(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of whole texts by the plain rule, false-alarm rate 1e-6; a rule that takes drafts
    for ones of the model's is noticed. Mixed, one outcome says who drafts next.
    """
    from tests.protocols.verifying import chi_square_p

    monkeypatch.setattr(ngrams, "_RIGHT", (0.3,) * (MOST + 1))
    monkeypatch.setattr(ngrams, "_KEPT", 0.31)
    drafted_by = set()
    sampling, tokens, source = Sampling(), 3, random.Random(5)
    table = np.random.default_rng(6).normal(0, 1, (3, 3))  # logits after each token

    def text(right: bool) -> tuple[int, ...]:
        made = [0, 1, 0]
        drafter = Ngrams(3, Small() if mixed else None)

        def pick(logits: np.ndarray, position: int) -> tuple[int, np.ndarray]:
            q = sampling.distribution(logits)
            return source.choices(range(3), q)[0], q

        while len(made) < 3 + tokens:
            drafts, q = drafter.propose(made, 2, pick)
            drafted_by.update(guess.by_model for guess in drafter._guesses)
            rows = np.stack([table[t] for t in [made[-1], *drafts]])
            if not right:
                q = np.stack([sampling.distribution(row) for row in rows[:2]])
            k, token = Plain(sampling).resolve(rows, drafts, q, source.random)
            made += [*drafts[:k], token]
        return tuple(made[3 : 3 + tokens])

    def p_of(right: bool) -> float:
        actual = Counter(text(right) for _ in range(6000))
        distribution: dict[Any, float] = {}
        for a in range(3):
            for b in range(3):
                for c in range(3):
                    rows = (table[0], table[a], table[b])
                    distribution[a, b, c] = float(
                        np.prod(
                            [
                                sampling.distribution(row)[t]
                                for row, t in zip(rows, (a, b, c), strict=True)
                            ]
                        )
                    )
        return float(
            chi_square_p(
                np.array([actual[t] for t in distribution]), np.array([*distribution.values()])
            )
        )

    assert p_of(True) > 1e-6
    assert drafted_by == ({False, True} if mixed else {False})
    assert p_of(False) < 1e-6
