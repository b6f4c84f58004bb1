"""A9: texts with the same beginning have the same rows, up to their first differing token.

That needs no model, and no codebook hides it: a row follows from the tokens up to it (`attack`).

Random tokens before a text stop only that rows are equal. They are alike still, so many positions
further on, since what a row is of most is its own token: the text that begins alike is the one
whose rows, moved by as many positions as the prefixes differ in length, are nearest by cosine
(`twins`).
"""

from __future__ import annotations

import numpy as np

from spu_llm.systems.split.attacks import grouping
from spu_llm.systems.split.attacks.inversion import SAME
from spu_llm.systems.split.attacks.views import HostView, Public, Texts

PREFIX = 8  # tokens of a random prefix, at most: it has so many characters
COMPARED = 24  # rows of a beginning, at most


def attack(view: HostView, same: float = SAME) -> list[list[int]]:
    """Return how long a beginning each text shares with each other one, and with itself: a
    symmetric matrix [text, text] of numbers of tokens. `same`: relative distance of equal rows.
    """
    return [[_shared(a, b, same) for b in view.rows] for a in view.rows]


def _shared(a: np.ndarray, b: np.ndarray, same: float) -> int:
    n = min(len(a), len(b))
    away = np.linalg.norm(a[:n].astype(np.float64) - b[:n], axis=1)
    equal = away <= same * np.linalg.norm(a[:n].astype(np.float64), axis=1)
    return n if equal.all() else int(np.argmin(equal))


def truth(texts: Texts) -> list[list[int]]:
    """Return how many first tokens each text shares with each, itself included: [text, text]."""

    def shared(a: np.ndarray, b: np.ndarray) -> int:
        n = min(len(a), len(b))
        equal = a[:n] == b[:n]
        return n if equal.all() else int(np.argmin(equal))

    tokens = [np.asarray(text) for text in texts]
    return [[shared(a, b) for b in tokens] for a in tokens]


def twins(view: HostView, public: Public, prefix: int = PREFIX) -> list[int]:
    """Return, for each text, the other text that begins most alike after random prefixes of at most
    `prefix` tokens: of highest median cosine over the first rows, at the best of all shifts.
    """
    rows = grouping.directions(public, view.rows)
    n = len(rows)
    alike = np.full((n, n), -np.inf)
    for i in range(n):
        for j in range(i):
            shifts = range(1 - prefix, prefix)
            alike[i, j] = alike[j, i] = max(_alike(rows[i], rows[j], s) for s in shifts)
    return [int(j) for j in alike.argmax(axis=1)]


def _alike(a: np.ndarray, b: np.ndarray, shift: int) -> float:
    """Return the median cosine of the first rows of two texts, `a` being moved up by `shift` rows;
    -inf where no rows are left.
    """
    a, b = a[max(0, shift) :], b[max(0, -shift) :]
    n = min(len(a), len(b), COMPARED)
    return float(np.median((a[:n] * b[:n]).sum(axis=1))) if n else -np.inf
