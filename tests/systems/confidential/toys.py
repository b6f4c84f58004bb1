"""A public model that is a table, whose texts are letters: exact, and quick enough for
statistics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from models.scoring import Scored
from spu_llm.systems.confidential.obfuscation import Public
from spu_llm.systems.confidential.spans import Prompt, parse, tokenised

LETTERS = "abcdefghij"


class Letters:
    """A token for each letter; number 0 ends a text."""

    eos_ids = frozenset([0])
    vocab_size = len(LETTERS) + 1

    def encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        return [LETTERS.index(c) + 1 for c in text]

    def token_bytes(self, ids: Iterable[int]) -> bytes:
        return "".join(LETTERS[i - 1] for i in ids if i > 0).encode()

    def decode(self, ids: Iterable[int]) -> str:
        return self.token_bytes(ids).decode()


class Spaced(Letters):
    """The first five letters, each also with a space before it, as another token."""

    eos_ids = frozenset([0])
    vocab_size = 11
    _TEXTS = ("", *"abcde", *(f" {c}" for c in "abcde"))

    def encode(self, text: str, *, goes_on: bool = False) -> list[int]:
        return [self._TEXTS.index(piece) for piece in re.findall(" ?[a-e]", text)]

    def token_bytes(self, ids: Iterable[int]) -> bytes:
        return "".join(self._TEXTS[i] for i in ids).encode()


class Table:
    """P(next | this): float64 [vocab, vocab], in the form of `models.scoring.Scorer`."""

    def __init__(self, chances: np.ndarray) -> None:
        with np.errstate(divide="ignore"):
            self._logs = np.log(chances)
        self.vocab_size = len(chances)

    def begin(self, context: Sequence[int]) -> Any:
        tokens = np.array(context, np.int32)[None]
        return Scored(tokens, np.zeros(1), self._logs[tokens[:, -1]], None)

    def extended(self, texts: Any, parents: np.ndarray, tokens: np.ndarray) -> Any:
        rows = np.concatenate([texts.tokens[parents], tokens.astype(np.int32)], axis=1)
        k = tokens.shape[1]
        logs = self._logs[rows[:, -k - 1 : -1], rows[:, -k:]].sum(axis=1)
        return Scored(rows, texts.total[parents] + logs, self._logs[rows[:, -1]], None)

    def chosen(self, texts: Any, numbers: np.ndarray) -> Any:
        return Scored(texts.tokens[numbers], texts.total[numbers], texts.next[numbers], None)

    def log_probability(self, context: Sequence[int], rest: np.ndarray) -> Any:
        return self.extended(self.begin(context), np.zeros(len(rest), int), rest).total


def public_of(seed: int, spread: float = 1.0, tokenizer: Any = None) -> Public:
    """Return a random table, the end of a text impossible; of `Letters`, if nothing else is asked
    for.
    """
    rows = np.random.default_rng(seed).normal(size=(11, 11)) * spread
    chances = np.exp(rows)
    chances[:, 0] = 0
    table: Any = Table(chances / chances.sum(axis=1, keepdims=True))
    return Public(table, tokenizer or Letters())


def prompt_of(public: Public, text: str) -> Prompt:
    return tokenised(parse(text), public.tokenizer)


def shipped() -> Public:
    """Return the model pair's public one."""
    from models.hf import load_model
    from models.scoring import Scorer
    from models.tokenizer import Tokenizer
    from spu_llm.api.defaults import shipped

    directory = shipped("public")
    return Public(Scorer(*load_model(directory), 64), Tokenizer.load(directory))
