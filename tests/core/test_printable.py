"""What words of somebody else become before a person sees them."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core.printable import Streamed, one_line, printable

ENGLAND = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"
HARMLESS = [
    "def f(x):\n\treturn 'é ü 日本 \u3000 \xa0'",
    "👨\u200d👩\u200d👧",
    "👩🏽\u200d🚀 🏳\ufe0f\u200d🌈 ❤\ufe0f\u200d🔥",
    "1\ufe0f\u20e3 ☁\ufe0e",
    ENGLAND,
    "می\u200cخواهم",  # Persian: a prefix that must not join
    "क्\u200dष क्\u200cष",  # Hindi: half a letter, a visible virama
    "\u0600123",  # the Arabic sign of number, which is drawn around digits
    "葛\U000e0100",  # a variant of an ideograph
    "e\u0301 שלום",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_writing_needs_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b]52;c;QQ==\x07b", "a␛]52;c;QQ==␇b"),
        ("\r\x00\x7f", "␍␀␡"),
        ("\x9b31m\x85", "<U+009B>31m<U+0085>"),
        ("x\u202e = 1 \u2066y\u2069", "x<U+202E> = 1 <U+2066>y<U+2069>"),
        ("is\u200badmin\ufeff", "is<U+200B>admin<U+FEFF>"),
        ("ad\u200dmin ad\u200cmin", "ad<U+200D>min ad<U+200C>min"),
        ("soft\xadly, \u2060, \u00061", "soft<U+00AD>ly, <U+2060>, ␆1"),
        ("a\u2028b\u2029", "a<U+2028>b<U+2029>"),
        ("\ue000\U000f0000", "<U+E000><U+F0000>"),
        ("\udc9b", "<U+DC9B>"),
        ("q\U000e0071\U000e007f", "q<U+E0071><U+E007F>"),  # letters that hide, without a flag
        ("🏴" + "\U000e0061" * 9, "🏴" + "<U+E0061>" * 9),
        ("a\ufe0f\ufe01\ufe02", "a\ufe0f<U+FE01><U+FE02>"),  # more of them could carry a message
        ("\ufe0fa \n\ufe0f", "<U+FE0F>a \n<U+FE0F>"),
        ("👨\u200d \u200d👩 می\u200c", "👨<U+200D> <U+200D>👩 می<U+200C>"),
        ("\u3164 = 1; \u034f\u180e", "<U+3164> = 1; <U+034F><U+180E>"),
        ("\ufff0\U000e0fff", "<U+FFF0><U+E0FFF>"),
    ],
)
def test_what_acts_or_hides_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_every_character_that_is_never_drawn_is_shown() -> None:
    hidden = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
    signs = {0x0600, 0x0601, 0x0602, 0x0603, 0x0604, 0x0605, 0x06DD, 0x070F, 0x0890, 0x0891, 0x08E2}
    drawn = signs | {0x110BD, 0x110CD, ord("\n"), ord("\t")}
    codes = [
        code
        for code in [*range(0x40000), *range(0xE0000, 0xF0010), 0x10FFFD]
        if unicodedata.category(chr(code)) in hidden and code not in drawn
    ]
    assert len(codes) > 8000
    for code in codes:
        c = chr(code)
        assert printable(c) != c and c not in printable(f"a{c}b"), hex(code)


def test_a_line_stays_one() -> None:
    assert one_line(" a\n spu-llm:\u2028 b\r\x1b[2K\tc ") == "a spu-llm: b ␛[2K c"


CHARACTERS = "ab \n\x1b\u200c\u200d\ufe0f👨🏽❤🏴مख\u094d\u202e"
PARTS = st.sampled_from([*CHARACTERS, ENGLAND[1:3], ENGLAND[3:]])


@given(st.lists(PARTS.map(str) | st.lists(PARTS, max_size=3).map("".join), max_size=12))
def test_text_in_parts_comes_out_as_the_whole(parts: list[str]) -> None:
    streamed, whole = Streamed(), "".join(parts)
    shown = "".join(streamed.push(part) for part in parts) + streamed.finish()
    assert shown == printable(whole)
    assert printable(shown) == shown


def test_only_what_is_undecided_waits() -> None:
    streamed = Streamed()
    parts = ["👨", "\u200d", "👩", "\u200d", "x", "\u200d"]
    assert [streamed.push(part) for part in parts] == ["👨", "", "\u200d👩", "", "<U+200D>x", ""]
    assert streamed.finish() == "<U+200D>"
