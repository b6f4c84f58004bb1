"""A provider with sensitive references of its own, which one session may spend of."""

from __future__ import annotations

from pathlib import Path

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.systems.dp_text.parameters import check_budget
from spu_llm.systems.dp_text.prompts import read_references
from spu_llm.systems.dp_text.secure_records import PrivacyBudget
from spu_llm.systems.program import Served
from spu_llm.systems.served import Offer, ServedSystem


class OwnReferences(ServedSystem):
    """References in a file, of whose privacy a session may spend (epsilon, delta) each. InputError
    for a budget that is none.
    """

    def __init__(self, path: Path, epsilon: float, delta: float) -> None:
        check_budget(epsilon, delta)
        self._path, self._epsilon, self._delta = path, epsilon, delta
        self._references: list[list[int]] = []

    def open(self, tokenizer: Tokenizer | None, *, studies: bool) -> None:
        if tokenizer is None:
            raise InputError("a model without a tokenizer reads no --references")
        texts = read_references(self._path)
        self._references = [tokenizer.encode(text, goes_on=True) for text in texts]

    def offer(self, folder: Path | None) -> Offer:
        return Offer(Served.of(PrivacyBudget(self._references, self._epsilon, self._delta)))
