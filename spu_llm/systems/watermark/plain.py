"""One form of a text, whatever programs did to it that no reader sees: what is invisible is left
out, and accents are composed (NFC).

    INVISIBLE   soft hyphens, zero-width spaces, marks of direction, byte-order marks: left out
    TAGS        left out, unless they make a flag
    JOINERS     zero-width joiners and non-joiners: left out, unless scripts or emoji stand on both
                sides, where they are part of the spelling
    SELECTORS   of how a character looks: left out after letters, digits and spaces; an emoji has
                one as part of its spelling

A text in NFC without such characters is its own form. Letters stay what they are: NFKC, which turns
`½` or `…` into several characters, would move the borders of words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"
    "\ufeff\ufff0-\ufffb]"
)
# The flags of England, Scotland and Wales are a black flag and tags.
_FLAG = "\U0001f3f4[\U000e0020-\U000e007f]+"
# Scripts whose letters join, and what emoji are made of; no letter of Latin, Greek or Cyrillic.
_JOINED = (
    "\u0590-\u10ff\u1200-\u1cff\u2194\u2195\u2600-\u27bf\u2b00-\u2bff\ua800-\uabff\ufb1d-\ufe0f"
    "\ufe70-\ufefe\U00010800-\U00011fff\U0001e900-\U0001faff\U000e0020-\U000e007f"
)
_CONTEXTUAL = re.compile(
    f"(?P<kept>{_FLAG})|[\U000e0000-\U000e00ff]|"
    f"(?<![{_JOINED}])[\u200c\u200d]+|[\u200c\u200d]+(?![{_JOINED}])|"
    r"(?:(?<=[\w\s])|^)[" + "\ufe00-\ufe0f\U000e0100-\U000e01ef]+(?!\u20e3)"
)


class Plain(NamedTuple):
    """The form of a text, and where each of its characters stood, (start, end)."""

    text: str
    places: Sequence[tuple[int, int]]


def plain(text: str) -> Plain:
    """Return the form of a text; it is the same for its NFC, NFD, and with INVISIBLE put in."""
    made = Plain(text, [(i, i + 1) for i in range(len(text))])
    # Accents that something invisible stood between are composed with it gone.
    for removed in (_INVISIBLE, _CONTEXTUAL):
        made = _composed(_without(removed, made))
    return made


def _without(pattern: re.Pattern[str], text: Plain) -> Plain:
    gone = [
        i
        for match in pattern.finditer(text.text)
        if not match.groupdict().get("kept")
        for i in range(*match.span())
    ]
    if not gone:
        return text
    left = sorted(set(range(len(text.text))) - set(gone))
    return Plain("".join(text.text[i] for i in left), [text.places[i] for i in left])


def _composed(typed: Plain) -> Plain:
    if unicodedata.is_normalized("NFC", typed.text):
        return typed
    parts, places = list[str](), list[tuple[int, int]]()
    for start, end in _pieces(typed.text):
        piece = typed.text[start:end]
        composed = _nfc(piece)
        parts.append(composed)
        if composed == piece:
            places += typed.places[start:end]
        else:
            places += [(typed.places[start][0], typed.places[end - 1][1])] * len(composed)
    text = "".join(parts)
    assert text == _nfc(typed.text)
    return Plain(text, places)


def _pieces(text: str) -> Iterable[tuple[int, int]]:
    """Cut a text so that the NFC of its pieces, joined, is the NFC of the whole."""
    start = 0
    for i in range(1, len(text)):
        first = unicodedata.normalize("NFD", text[i])[0]
        if unicodedata.combining(first):
            continue
        before, after = text[start:i], text[i]
        if _nfc(before + after) == _nfc(before) + _nfc(after):
            yield start, i
            start = i
    if text:
        yield start, len(text)


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)
