"""Private texts to tune on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from models.tokenizer import Tokenizer
from spu_llm.core.text_files import read_json_texts, read_text


def tokens_of(paths: Sequence[Path], tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens int32 of all texts one after the other, each with what ends it. A file is a
    text; of one that ends in .jsonl, each line is an object with "text". InputError for others.
    """
    end = min(tokenizer.eos_ids)
    rows = [[*tokenizer.encode(text), end] for path in paths for text in _texts(path) if text]
    return np.array([token for text in rows for token in text], np.int32)


def digest_of(tokens: np.ndarray) -> str:
    """Return the SHA-256 (hex) of tokens. It stays with the secrets, since texts could be tried on
    it.
    """
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()


def _texts(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        return read_json_texts(path, "--texts")
    return [read_text(path, "--texts")]
