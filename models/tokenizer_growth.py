"""Limit on the growth of a text in a tokenizer: a `tokenizer.json` may come from anybody, and three
rules of a few bytes each can turn a word into gigabytes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spu_llm.core.errors import InputError

MOST_PARTS = 32  # of what is done to a text one after the other
MOST_GROWTH = 1000  # of all that together, in characters or tokens
_MOST_ADDED = 64  # tokens, and pieces, around a text

# Characters that may come of one; of what is not named here, _ANY.
_GROWTH = {
    "Split": 1,
    "Digits": 1,
    "Punctuation": 1,
    "Whitespace": 1,
    "WhitespaceSplit": 1,
    "CharDelimiterSplit": 1,
    "Strip": 1,
    "StripAccents": 1,
    "Metaspace": 2,
    "NFKC": 18,
    "NFKD": 18,
}
_ANY = 4
_SEVERAL = ("normalizers", "pretokenizers", "processors")


def check_growth(path: Path, content: Any) -> None:
    """Raise InputError when the content of a `tokenizer.json` at `path` has more than MOST_PARTS
    parts or may make texts more than MOST_GROWTH times longer.
    """
    given = content if isinstance(content, dict) else {}
    names = ("normalizer", "pre_tokenizer", "post_processor")
    parts = [part for name in names for part in _flat(given.get(name))]
    if len(parts) > MOST_PARTS or math.prod(map(_growth, parts)) > MOST_GROWTH:
        raise InputError(f"{path} makes texts more than {MOST_GROWTH} times longer; copy it again")


def _flat(part: Any) -> Iterator[dict[str, Any]]:
    """Yield a part, or, of a sequence, its parts in order; anything else the library refuses."""
    if not isinstance(part, dict):
        return
    several = [inner for name in _SEVERAL if isinstance(inner := part.get(name), list)]
    for inner in several:
        for one in inner:
            yield from _flat(one)
    if not several:
        yield part


def _growth(part: dict[str, Any]) -> float:
    match part.get("type"):
        case "Prepend":  # to each text between added tokens
            return 1 + _length(part.get("prepend"))
        case "Replace":
            pattern = part.get("pattern")
            text = pattern.get("String") if isinstance(pattern, dict) else None
            replaced, put = _length(text), _length(part.get("content"))
            return max(1, put / replaced) if replaced else 1 + put
        case "Precompiled":
            return _of_table(part.get("precompiled_charsmap"))
        case "TemplateProcessing":
            return _of_template(part)
        case str() as kind:
            return _GROWTH.get(kind, _ANY)
    return _ANY


def _length(text: Any) -> int:
    return len(text) if isinstance(text, str) else 0


def _of_table(written: Any) -> float:
    """Return how many bytes SentencePiece's normalisation may put in place of one. Its table: the
    trie's size in bytes, the trie, and texts that end with 0.
    """
    try:
        table = base64.b64decode(written or "", validate=True)
    except (TypeError, ValueError):
        return _ANY  # the library refuses it
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1, max(map(len, texts.split(b"\0"))))


def _of_template(part: dict[str, Any]) -> float:
    """Return how often a template repeats the text; infinity if it puts too much around it."""
    pieces, known = part.get("single"), part.get("special_tokens")
    pieces = pieces if isinstance(pieces, list) else []
    tokens = known.values() if isinstance(known, dict) else []
    added = [
        len(ids)
        for one in tokens
        if isinstance(one, dict) and isinstance(ids := one.get("ids"), list)
    ]
    if len(pieces) > _MOST_ADDED or max(added, default=0) > _MOST_ADDED:
        return math.inf
    return max(1, sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces))
