"""Vocabulary of a `tokenizer.json`, read without the library that runs the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.files import TOKENIZER_FILE, read_json
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown


def tokens_beside(directory: Path) -> int | None:
    """Return the number of tokens of a model directory's tokenizer, None if it has no tokenizer.
    InputError when its tokens cannot be determined.
    """
    path = Path(directory) / TOKENIZER_FILE
    return len(numbered_tokens(path, read_json(path, ""))) if path.exists() else None


def numbered_tokens(path: Path, content: Any) -> dict[str, int]:
    """Return the number of each token in the content of `path`. InputError unless the numbers are
    0, 1, 2 ... without gaps and each has one token: a row of a model without a token could be
    drawn, and has no text.
    """
    parts = content if isinstance(content, Mapping) else {}
    model = parts.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    tokens = _of_pieces(path, vocab) if isinstance(vocab, list) else vocab
    if not isinstance(tokens, dict):
        raise InputError(
            f"{path} has no vocabulary of BPE's or Unigram's kind; use the tokenizer of a GPT-2, "
            "LLaMA or T5 model"
        )
    tokens = dict(tokens)
    for token in added_tokens(path, parts):
        name, number = token["content"], token["id"]
        if tokens.setdefault(name, number) != number:
            raise InputError(f"{path} gives {shown(name)} two numbers; copy it again")
    taken: dict[int, str] = {}
    for name, number in tokens.items():
        if type(number) is not int or number < 0:
            raise InputError(
                f"{path} gives {shown(name)} the number {shown(number)}; copy it again"
            )
        if number in taken:
            raise InputError(
                f"{path} gives {shown(taken[number])} and {shown(name)} one number; copy it again"
            )
        taken[number] = name
    if not taken:
        raise InputError(f"{path} has no tokens; copy it again")
    if (last := max(taken)) != len(taken) - 1:
        missing = next(number for number in range(len(taken)) if number not in taken)
        raise InputError(
            f"{path} has tokens up to number {shown(last)}, but none with number {missing}; add "
            "tokens for such numbers (added_tokens), so that all that the model can draw is text"
        )
    return tokens


def _of_pieces(path: Path, pieces: list[Any]) -> dict[Any, Any]:
    """Return the number of each piece of a Unigram vocabulary: its place in the list of pieces and
    their scores. InputError unless all are such, and different.
    """
    if not all(
        isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) and _is_number(p[1])
        for p in pieces
    ):
        raise InputError(f"{path} has pieces that are no text with a score; copy it again")
    tokens = {piece: number for number, (piece, _) in enumerate(pieces)}
    if len(tokens) != len(pieces):
        raise InputError(f"{path} has a piece twice; copy it again")
    return tokens


def _is_number(score: Any) -> bool:
    return isinstance(score, int | float) and not isinstance(score, bool)


def added_tokens(path: Path, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens, each with its number ("id") and its text ("content")."""
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(_is_token(token) for token in added):
        raise InputError(f"{path} has added_tokens that are none; copy it again")
    return added


def _is_token(token: Any) -> bool:
    return (
        isinstance(token, dict)
        and type(token.get("id")) is int
        and isinstance(token.get("content"), str)
    )
