"""Tags in prompts, and the tokens that they mean."""

from __future__ import annotations

import re
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tokenizer import Tokenizer
from spu_llm.api.defaults import shipped
from spu_llm.core.errors import InputError
from spu_llm.systems.confidential.spans import Span, filled, parse, said, tagged, tokenised
from spu_llm.systems.confidential.taggers import TAGGERS, by_patterns

TOKENIZER = Tokenizer.load(shipped("public"))


def test_spans_lie_where_their_tags_stood() -> None:
    marked = parse("Dear <confidential>Dr <redacted>Who</redacted>,</confidential> hi")
    assert marked.text == "Dear Dr Who, hi"
    assert marked.confidential == [Span(5, 12)] and marked.redacted == [Span(8, 11)]


def test_without_tags_all_is_confidential() -> None:
    assert parse("all of it").confidential == [Span(0, 9)]
    assert parse("a <b> and </b> are text").text == "a <b> and </b> are text"


def test_a_redacted_span_is_confidential_by_itself() -> None:
    marked = parse("a <redacted>b</redacted> c")
    assert marked.confidential == marked.redacted == [Span(2, 3)]


@pytest.mark.parametrize(
    "text, words",
    [
        ("a <redacted>b", "<redacted> is not closed; add </redacted>"),
        ("<confidential>a <redacted>b</confidential>", "<redacted> is still open"),
        ("a</redacted>", "closes nothing: none is open"),
        ("<redacted>a<redacted>b</redacted></redacted>", "opens inside <redacted>"),
        ("<redacted>a<confidential>b</confidential></redacted>", "opens inside <redacted>"),
        ("<confidential><confidential>b", "opens inside <confidential>"),
        ("a<redacted></redacted>", "is empty"),
        ("<Redacted>a</Redacted> <redacted>b</redacted>", "'<Redacted>' is no tag"),
        ("< redacted>a</redacted>", "'< redacted>' is no tag"),
        ("<redacted id=1>a</redacted>", "'<redacted id=1>' is no tag"),
        ("<confidential>a</confidential >", "'</confidential >' is no tag"),
    ],
)
def test_broken_tags_are_one_clear_line(text: str, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        parse(text)


pieces = st.text(st.characters(codec="utf-8", exclude_characters="<>"), min_size=1, max_size=8)


@given(pieces, pieces, pieces, pieces, pieces)
def test_tokens_of_a_span_hold_it_and_the_edges_around(
    a: str, b: str, c: str, d: str, e: str
) -> None:
    """Any text: each target's bytes are its span between two edges, and filling a prompt with its
    own secrets gives it back.
    """
    text = f"{a}<redacted>{b}</redacted>{c}<redacted>{d}</redacted>{e}"
    try:
        prompt = tokenised(parse(text), TOKENIZER)
    except InputError as exc:
        assert "two redacted spans touch" in str(exc)
        return
    assert prompt.tokens == TOKENIZER.encode(a + b + c + d + e)
    for secret, target, (left, right) in zip((b, d), prompt.targets, prompt.edges, strict=True):
        tokens = TOKENIZER.token_bytes(prompt.tokens[target.start : target.stop])
        assert tokens == left + secret.encode() + right
    assert filled(prompt.marked, [b, d]) == prompt.marked
    other = filled(prompt.marked, ["x" + b, ""])
    assert other.text == a + "x" + b + c + e
    assert other.text[slice(*other.redacted[0])] == "x" + b
    inside = {i for target in prompt.targets for i in target}
    assert not inside & set(prompt.public)
    assert inside | set(prompt.public) == set(range(len(prompt.tokens)))


@given(st.text(max_size=8))
def test_a_text_is_its_word_and_what_is_around(text: str) -> None:
    before, word, after = said(text)
    assert before + word + after == text
    assert said(word) == ("", word, "")
    if re.search(r"\w", text):
        assert said(f" ({text}).\n")[1] == word


def test_spans_of_one_word_are_told_by_it() -> None:
    text = "<redacted>(Guido</redacted>) b <redacted>me</redacted> c <redacted>Guido</redacted>"
    prompt = tokenised(parse(text), TOKENIZER)
    assert prompt.same == [(0, "(", ""), (1, "", ""), (0, "", "")]


def test_leading_public_tokens_are_those_before_the_first_span() -> None:
    prompt = tokenised(parse("import os\nname = <redacted>x</redacted> + y"), TOKENIZER)
    first = prompt.targets[0].start
    assert prompt.leading == list(range(first)) and prompt.public[-1] == len(prompt.tokens) - 1


def test_patterns_find_personal_data_and_nothing_in_plain_words() -> None:
    text = "Mr. Smith, 42, of smith@example.org, called +49 30 1234567 on 2026-11-24."
    marked = tagged(text, by_patterns)
    assert [text[slice(*span)] for span in marked.redacted] == [
        "Mr. Smith",
        "42",
        "smith@example.org",
        "+49 30 1234567",
        "2026-11-24",
    ]
    assert not by_patterns("nothing to see here")


def test_a_tagger_is_no_match_for_tags_that_are_there() -> None:
    with pytest.raises(InputError, match="has tags already"):
        tagged("a <redacted>b</redacted>", by_patterns)


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(1)])
def test_presidio_says_how_to_get_its_language_model(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise error

    library = types.SimpleNamespace(AnalyzerEngine=fails)
    monkeypatch.setitem(sys.modules, "presidio_analyzer", library)
    with pytest.raises(InputError, match="python -m spacy download en_core_web_lg"):
        TAGGERS["presidio"]("text")


def test_presidio_says_how_to_get_it() -> None:
    try:
        import presidio_analyzer  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match=r"pip install 'spu-llm\[presidio\]'"):
            TAGGERS["presidio"]("text")
