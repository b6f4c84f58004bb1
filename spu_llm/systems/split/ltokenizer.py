"""LTokenizer (NOIR; §2.3 of the digest): a secret uniform permutation tau of the vocabulary.

Token t has the index tau(t): the codebook's row tau(t) is that of t, and the label of t is tau(t).
The head is not permuted along, so that tuning teaches the back the secret vocabulary, and dL/dy,
which the provider receives, is that of another label. (With the head permuted along, dL/dy would be
that of the true label: nothing would be hidden.) What stays visible: equal labels have equal
indices. On the side of the input, tau is a mere renaming and changes nothing of what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spu_llm.core.prg import Prg


@dataclass(frozen=True)
class Permutation:
    """tau and its inverse, int64 [V]; secret of the client."""

    forward: np.ndarray
    inverse: np.ndarray

    def __post_init__(self) -> None:
        own = np.arange(len(self.forward))
        if self.inverse.shape != own.shape or not (
            np.array_equal(np.sort(self.forward), own)
            and np.array_equal(self.inverse[self.forward], own)
        ):
            raise ValueError("no permutation with its inverse")

    @staticmethod
    def draw(vocab: int, prg: Prg) -> Permutation:
        """Draw a permutation, exactly uniform: the order of `vocab` distinct words of 128 bits."""
        while True:
            words = prg.words((2, vocab))
            order = np.lexsort(words)
            ordered = words[:, order]
            if not np.any(np.all(ordered[:, 1:] == ordered[:, :-1], axis=0)):
                return Permutation(np.argsort(order), order)

    @staticmethod
    def identity(vocab: int) -> Permutation:
        """Return tau(t) = t, of a model without LTokenizer."""
        return Permutation(np.arange(vocab), np.arange(vocab))

    def labels(self, tokens: np.ndarray) -> np.ndarray:
        """Return tau of token ids of any shape."""
        return self.forward[np.asarray(tokens)]

    def tokens(self, labels: np.ndarray) -> np.ndarray:
        """Return tau^-1 of labels of any shape."""
        return self.inverse[np.asarray(labels)]

    def rows(self, table: np.ndarray) -> np.ndarray:
        """Return the table [V, ..] by label: row tau(t) is row t of `table`."""
        return table[self.inverse]
