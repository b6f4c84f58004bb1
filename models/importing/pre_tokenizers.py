"""Pre-tokenizers: how byte-level BPE splits a text into words before it merges, by GGUF name.

Each is written as in the `tokenizer.json` of the models with that name. Source:
`tokenizer.ggml.pre` in llama.cpp's src/llama-vocab.cpp, whose comments quote the expressions in the
models' `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class PreTokenizer(NamedTuple):
    """The meaning of a GGUF file's pre-tokenizer name, in parts of `tokenizer.json`."""

    splits: list[dict[str, Any]]
    normalizer: dict[str, Any] | None = None
    whole_words: bool = False
    begins: bool = False


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _byte_level(use_regex=False)]


def _words(digits: str) -> str:
    """Return the expression of GPT-4's and later tokenizers, which split numbers by the expression
    `digits`.
    """
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = PreTokenizer([_byte_level(use_regex=True)])
_DIGITS = PreTokenizer([{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)])
_LLAMA3 = PreTokenizer(_split(_words(r"\p{N}{1,3}")), whole_words=True, begins=True)
_QWEN2 = PreTokenizer(_split(_words(r"\p{N}")), normalizer={"type": "NFC"})

BY_NAME: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2._replace(normalizer=None),
    "tekken": PreTokenizer(_split(_CASED), whole_words=True, begins=True),
}
