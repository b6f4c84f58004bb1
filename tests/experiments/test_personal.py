"""The study of personal data: its sentences and their forms, its model, and how results are
shown.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from experiments.confidential import personal
from experiments.confidential.fakes import EPSILONS
from experiments.confidential.one_context import OneContext
from experiments.confidential.personal_data import (
    CLASSES,
    FORMS,
    PUBLISHED,
    SENTENCES,
    secret_of,
    sentences,
)
from models.hf import load_model
from models.scoring import Scorer
from models.tokenizer import Tokenizer
from spu_llm.api.defaults import shipped
from spu_llm.systems.confidential.spans import tokenised

# Of presidio's recognizers that need no language model.
RECOGNIZERS = {
    "date": ("DateRecognizer", "DATE_TIME"),
    "email": ("EmailRecognizer", "EMAIL_ADDRESS"),
    "phone": ("PhoneRecognizer", "PHONE_NUMBER"),
    "card": ("CreditCardRecognizer", "CREDIT_CARD"),
    "iban": ("IbanRecognizer", "IBAN_CODE"),
    "ip": ("IpRecognizer", "IP_ADDRESS"),
    "url": ("UrlRecognizer", "URL"),
}


def test_every_secret_has_its_form_and_text_around_it() -> None:
    every = [marked for kind in CLASSES for marked in sentences(kind)]
    assert len(every) == len(SENTENCES.read_text(encoding="utf-8").splitlines())
    assert len({secret_of(marked) for marked in every}) == len(every)
    assert {"name", "date", "gender", "medication"} <= set(PUBLISHED)
    for kind in CLASSES:
        of = sentences(kind)
        assert len(of) == 6
        for marked in of:
            (span,) = marked.redacted
            assert kind in ("age", "gender", "ethnicity", "name") or span.start > 0
            assert span.stop < len(marked.text)
            assert kind not in FORMS or FORMS[kind](secret_of(marked))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("date", "February 30, 2019"),
        ("date", "12/13/14"),
        ("age", "0"),
        ("age", "4x"),
        ("email", "a@b"),
        ("phone", "212-555-014"),
        ("card", "4111 1111 1111 1112"),
        ("card", "4111111111111111"),
        ("iban", "DE88370400440532013000"),
        ("ip", "192.0.2.256"),
        ("ip", "192.0.2.045"),
        ("url", "https://example"),
    ],
)
def test_what_has_not_the_form_of_its_class(kind: str, text: str) -> None:
    assert not FORMS[kind](text)


def test_presidio_finds_what_is_marked_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pattern recognizers need no language model, which alone finds dates in words."""
    recognizers = pytest.importorskip("presidio_analyzer.predefined_recognizers")
    tldextract = pytest.importorskip("tldextract")
    offline = tldextract.TLDExtract(suffix_list_urls=())
    monkeypatch.setattr(tldextract, "extract", offline)
    for kind, (name, entity) in RECOGNIZERS.items():
        recognizer = getattr(recognizers, name)()
        for marked in sentences(kind):
            if kind == "date" and any(c.isalpha() for c in secret_of(marked)):
                continue
            (span,) = marked.redacted
            results: Any = recognizer.analyze(marked.text, [entity], None)
            # A comma after an address of the web is taken for its part.
            assert any(r.start <= span.start and span.stop <= r.end for r in results), marked.text


def test_patterns_hide_numbers_and_no_plain_words() -> None:
    tokenizer = Tokenizer.load(shipped("public"))

    def count(kind: str) -> int:
        return sum(personal.is_tagged(tokenised(s, tokenizer)) for s in sentences(kind))

    assert count("email") == 6 and count("age") == 6
    assert count("medication") == count("ethnicity") == 0


def test_one_context_for_all_texts_scores_as_one_for_each() -> None:
    directory, source = shipped("public"), np.random.default_rng(0)
    context = [5, 6, 7, 8, 9]
    one, each = OneContext(directory, 20, 3), Scorer(*load_model(directory), 24)
    here, there = one.begin(context), each.begin(context)
    np.testing.assert_allclose(here.next, there.next, atol=1e-4)
    for parents, width in ((np.zeros(70, int), 1), (source.integers(0, 70, 3), 2)):
        tokens = source.integers(0, 1000, (len(parents), width))
        here, there = (
            scorer.extended(texts, parents, tokens)
            for scorer, texts in ((one, here), (each, there))
        )
        assert np.array_equal(here.tokens, there.tokens)
        np.testing.assert_allclose(here.next, there.next, atol=1e-4)
        np.testing.assert_allclose(here.total, there.total, atol=1e-4)
    kept = one.chosen(here, np.array([2, 0]))
    assert np.array_equal(kept.next, here.next[[2, 0]])
    with pytest.raises(ValueError, match="4 tokens do not fit the 3 after a context"):
        one.extended(kept, np.zeros(1, int), np.ones((1, 1), int))
    with pytest.raises(ValueError, match="21 tokens do not fit the 20 of a context"):
        one.begin([1] * 21)


def test_the_table_has_a_line_for_each_class() -> None:
    rows = [
        {
            "kind": kind,
            "eps": eps,
            "lengths": [2, 4],
            "fakes": [0, 10],
            "formed": [0, 3] if kind in FORMS else None,
            "seconds": [0.5, 1.5],
            "tagged": [True, False],
        }
        for kind in ("age", "name")
        for eps in EPSILONS
    ]
    last = {**rows[0], "kind": "url"}  # the others are to come
    lines = personal.table({"rows": [*rows, last]}).splitlines()
    assert len(lines) == 2 + 2
    mean, formed = "5 ± 64; 5", "3 of 10; 3 of 10; 3 of 10"
    seconds = "1, 1, 1 | 1.5, 1.5, 1.5"
    assert lines[2] == (
        f"| age | 2 | 3.0 | {mean} | {mean} | {mean} | 1 | {formed} | {seconds} | 1 |"
    )
    assert lines[3].startswith("| person's name | ") and " | – | " in lines[3]
