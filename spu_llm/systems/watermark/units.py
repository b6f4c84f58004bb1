"""What n-grams are made of: tokens of a model, or words of the text, which no tokenizer has to be
known for, and which stay when somebody changes spaces, line breaks or capitals, decomposes accents
or puts invisible characters in (`plain`); or stems of the words that carry meaning, which also stay
when endings, function words or punctuation change (`stems`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from models.tokenizer import Tokenizer
from spu_llm.systems.watermark.keys import token_unit
from spu_llm.systems.watermark.plain import plain
from spu_llm.systems.watermark.stems import is_function_word, stem

# What a sampler writes: token ids, or text.
Content = tuple[int, ...] | str
_WORD = re.compile(r"\w+|[^\w\s]")
_WORD_ALONE = re.compile(r"\w+")


class Unit(NamedTuple):
    """A unit and where it stands in a text, in characters."""

    value: bytes
    start: int
    end: int


class Units(Protocol):
    def of(self, content: Content) -> list[bytes]:
        """Return the units of what was generated so far."""

    def placed(self, text: str) -> list[Unit]:
        """Return the units of a text that is found somewhere, with their places in it."""


class TokenUnits:
    """Token ids. A text is tokenized again, which seldom gives others than it was made of."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    def of(self, content: Content) -> list[bytes]:
        if isinstance(content, str):
            return [unit.value for unit in self.placed(content)]
        return [token_unit(token) for token in content]

    def placed(self, text: str) -> list[Unit]:
        if self._tokenizer is None:
            raise ValueError("a text's tokens need a tokenizer")
        units, at = [], 0
        tokens = self._tokenizer.encode(text, goes_on=True)
        # Characters that end with each token: a character of several tokens is the last one's.
        for token in tokens:
            end = at + len(self._tokenizer.token_bytes([token]))
            units.append((token, at, end))
            at = end
        characters = _characters(text)
        return [
            Unit(
                token_unit(token),
                characters[min(start, len(characters) - 1)],
                characters[min(end, len(characters) - 1)],
            )
            for token, start, end in units
        ]


class WordUnits:
    """Words and signs of a text's one form (`plain`), without case and spaces. `tokenizer`: where
    tokens are sampled.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer

    def of(self, content: Content) -> list[bytes]:
        if not isinstance(content, str):
            if self._tokenizer is None:
                raise ValueError("words of tokens need a tokenizer")
            content = self._tokenizer.decode(cast(Sequence[int], content))
        return [unit.value for unit in self.placed(content)]

    def placed(self, text: str) -> list[Unit]:
        form, places = plain(text)
        return [
            Unit(
                _folded(match[0]).encode("utf-8", "surrogatepass"),
                places[match.start()][0],
                places[match.end() - 1][1],
            )
            for match in _WORD.finditer(form)
        ]


class StemUnits(WordUnits):
    """Stems of words, without function words and signs: a small kind of the semantic units that
    the paper sketches (§3, extensions).
    """

    def placed(self, text: str) -> list[Unit]:
        units = []
        for unit in super().placed(text):
            word = unit.value.decode("utf-8", "surrogatepass")
            if _WORD_ALONE.fullmatch(word) and not is_function_word(word):
                units.append(unit._replace(value=stem(word).encode("utf-8", "surrogatepass")))
        return units


_KINDS: dict[str, Callable[[Tokenizer | None], Units]] = {
    "tokens": TokenUnits,
    "words": WordUnits,
    "stems": StemUnits,
}


def units_of(name: str, tokenizer: Tokenizer | None) -> Units:
    """Return the units of a scheme, by their name in it (`keys.Scheme.units`)."""
    return _KINDS[name](tokenizer)


def _folded(word: str) -> str:
    return unicodedata.normalize("NFKC", word).casefold()


def _characters(text: str) -> list[int]:
    """Return, for every byte of the text in UTF-8, and its end, the number of its character."""
    places = []
    for i, character in enumerate(text):
        places += [i] * len(character.encode("utf-8", "surrogatepass"))
    return [*places, len(text)]


def joined(before: Content, after: Content) -> Content:
    """Return two contents of one kind as one."""
    return before + after  # type: ignore[operator, no-any-return]


def common(before: Sequence[bytes], after: Sequence[bytes]) -> int:
    """Return how many units both begin with."""
    for i, (one, other) in enumerate(zip(before, after, strict=False)):
        if one != other:
            return i
    return min(len(before), len(after))


def grams(units: Sequence[bytes], n: int, first: int = 0) -> list[tuple[bytes, ...]]:
    """Return the n-grams that end at each place from `first` on; shorter ones where the text
    begins.
    """
    return [tuple(units[max(0, i - n + 1) : i + 1]) for i in range(first, len(units))]
