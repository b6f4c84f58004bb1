"""Redacted spans with the word of an earlier one: what is said there follows from what is said
first, in the tokens of the later place ("(Guido" and " Guido" have others).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.tokenizer import Tokenizer
from spu_llm.systems.confidential.spans import Prompt, said, secret_in


class Repeats:
    """The targets of a prompt that repeat a word. All answers depend on the prompt's shape and on
    what is asked about, not on its secrets.

    inside: positions in them. starts: which target begins at a position. ends: which target, whose
    word comes again, is complete with a position.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        firsts, targets = [first for first, _, _ in prompt.same], prompt.targets
        later = [i for i, first in enumerate(firsts) if first != i]
        self._later = {first: [i for i in later if firsts[i] == first] for first in firsts}
        self.inside = {position for i in later for position in targets[i]}
        self.starts = {targets[i].start: i for i in later}
        self.ends = {targets[i].stop - 1: i for i, places in self._later.items() if places}
        self._found: dict[tuple[int, str], list[int] | None] = {}

    def first_of(self, later: int) -> range:
        """Return the positions of the target that a later one repeats."""
        return self._prompt.targets[self._prompt.same[later][0]]

    def fit(self, first: int, rows: np.ndarray) -> np.ndarray:
        """Return whether tokens [m, n] in target `first` can be said again in all later targets
        that repeat it, bool [m].
        """
        return np.array(
            [
                all(self._tokens(i, row) is not None for i in self._later[first])
                for row in rows.tolist()
            ]
        )

    def tokens(self, later: int, rows: np.ndarray) -> np.ndarray:
        """Return the tokens int32 [m, n'] of target `later`, where tokens [m, n] that fit are in
        the first one.
        """
        return np.array([self._tokens(later, row) for row in rows.tolist()], np.int32)

    def hold(self) -> bool:
        """Return whether the prompt's own tokens are those that follow from what they say first."""
        own = np.array(self._prompt.tokens)
        return all(
            self._tokens(i, own[self.first_of(i)].tolist()) == own[self._prompt.targets[i]].tolist()
            for i in self.starts.values()
        )

    def _tokens(self, later: int, row: Sequence[int]) -> list[int] | None:
        first, before, after = self._prompt.same[later]
        text = secret_in(self._tokenizer, row, self._prompt.edges[first])
        parts = said(text) if text else ("", "", "")
        _, *around = self._prompt.same[first]
        if not text or [parts[0], parts[2]] != around:
            return None
        secret = before + parts[1] + after
        if (later, secret) not in self._found:
            self._found[later, secret] = self._made(later, secret)
        return self._found[later, secret]

    def _made(self, later: int, secret: str) -> list[int] | None:
        """Return the secret's tokens in a target, between the public text next to it; None where
        they are not as many as the target's.
        """
        targets, tokens, token_bytes = (
            self._prompt.targets,
            self._prompt.tokens,
            self._tokenizer.token_bytes,
        )
        stops = [*(target.start for target in targets), len(tokens)]
        n, (left, right) = len(targets[later]), self._prompt.edges[later]
        start = tokens[targets[later - 1].stop : targets[later].start]
        end = tokens[targets[later].stop : stops[later + 1]]
        data = left + secret.encode() + right
        try:
            whole = (token_bytes(start) + data + token_bytes(end)).decode()
        except UnicodeDecodeError:
            return None
        encoded = self._tokenizer.encode(whole, goes_on=True)
        # Counted from the end: before a text there may stand a space of the tokenizer's.
        inside = encoded[max(0, len(encoded) - len(end) - n) : len(encoded) - len(end)]
        return inside if len(inside) == n and token_bytes(inside) == data else None
