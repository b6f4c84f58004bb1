"""A mark of words outlasts what programs do to a text that no reader sees."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.systems.watermark.detecting import detect
from spu_llm.systems.watermark.embedding import Embedder
from spu_llm.systems.watermark.keys import KeyFile, Scheme
from spu_llm.systems.watermark.plain import plain
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.units import WordUnits
from tests.systems.watermark.chains import key_of

WORDS = "été école père forêt château élève déjà très leçon garçon hôtel île naïf reçu où".split()
INVISIBLE = "\u00ad\u200b\u2060\ufeff\u200e"
SCHEME = Scheme(ngram=3, units="words")
# Of several alphabets, with accents, joiners and emoji: texts whose forms differ.
TEXT = st.text(
    st.one_of(
        st.sampled_from("aé\u0301\u0323\u0345 .…½ﬁİß각한\u1100\u1161\u0f73\u0f74क\u093c"),
        st.sampled_from("\u200c\u200d\ufe0f\u20e3👩❤🏴\U000e0067\u200b\u00ad\u034f≠"),
        st.characters(),
    ),
    max_size=30,
)


class _Words:
    def __init__(self) -> None:
        self._random = random.Random(1)

    def sample(self, prefix: object, n: int, max_tokens: int) -> list[Drawn]:
        return [Drawn(" " + self._random.choice(WORDS), False) for _ in range(n)]


def _marked() -> str:
    made = Embedder((key_of(4),), SCHEME, _Words(), WordUnits(), m=8).text("x", 150)
    assert isinstance(made.content, str)
    return made.content


def _hyphened(text: str) -> str:
    return " ".join(word[:3] + "\u00ad" + word[3:] for word in text.split())


@pytest.mark.parametrize(
    "change",
    [
        lambda text: unicodedata.normalize("NFD", text),
        lambda text: unicodedata.normalize("NFKD", text.upper()),
        lambda text: text.replace(" ", "\r\n"),
        lambda text: "\ufeff" + text.replace("t", "t\u200b"),
        lambda text: text.replace("e", "e\u200d\u200c"),
        lambda text: text.replace(" ", "\ufe0f ").replace("é", "e\u034f\u0301"),
        _hyphened,
    ],
)
def test_a_mark_of_words_outlasts_what_no_reader_sees(change: Callable[[str], str]) -> None:
    text = _marked()
    file = KeyFile(key_of(4), SCHEME)
    before, after = (detect([file], [WordUnits()], t) for t in (text, change(text)))
    assert change(text) != text and before.log_p < -20
    assert after.log_p == before.log_p
    assert [u.value for u in WordUnits().placed(change(text))] == WordUnits().of(text)


@settings(max_examples=300)
@given(TEXT, st.data())
def test_all_forms_of_a_text_have_the_same_units(text: str, data: st.DataObject) -> None:
    units = WordUnits()
    at = data.draw(st.integers(0, len(text)))
    put_in = text[:at] + data.draw(st.sampled_from(INVISIBLE)) + text[at:]
    for changed in (*(unicodedata.normalize(f, text) for f in ("NFC", "NFD")), put_in):
        assert units.of(changed) == units.of(text)
        actual = plain(changed)
        assert actual.text == plain(text).text and len(actual.places) == len(actual.text)
        assert all(0 <= start < end <= len(changed) for start, end in actual.places)
        assert list(actual.places) == sorted(actual.places)


@pytest.mark.parametrize(
    "text",
    [
        "Das Maß … ½ ﬁn ① ℡",
        "می\u200cخواهم",
        "क्\u200dष",
        "👩\u200d👩\u200d👧 ❤\ufe0f\u200d🔥 1\ufe0f\u20e3",
        "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
        "한국어 日本語 ไทย",
        "",
    ],
)
def test_spelling_stays(text: str) -> None:
    """Marks of such texts are found by what they were made of."""
    assert plain(text) == (text, [(i, i + 1) for i in range(len(text))])


def test_units_stand_where_they_are_in_the_text_that_was_found() -> None:
    text = "\ufeffe\u0301te\u0301, my\u00adste\u0300re"
    placed = WordUnits().placed(text)
    assert [u.value.decode() for u in placed] == ["été", ",", "mystère"]
    collected = [text[u.start : u.end] for u in placed]
    assert collected == ["e\u0301te\u0301", ",", "my\u00adste\u0300re"]
