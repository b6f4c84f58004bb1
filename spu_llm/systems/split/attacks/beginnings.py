"""A9: texts with the same beginning have the same rows, up to their first differing token.

That needs no model, and no codebook hides it: a row follows from the tokens up to it. Who puts
random tokens before a text hides it.
"""

from __future__ import annotations

import numpy as np

from spu_llm.systems.split.attacks.inversion import SAME
from spu_llm.systems.split.attacks.views import HostView, Texts


def attack(view: HostView, same: float = SAME) -> list[list[int]]:
    """Of each text, how long a beginning it shares with each other one, and with itself: a
    symmetric matrix [text, text] of numbers of tokens. `same`: relative distance of equal rows.
    """
    return [[_shared(a, b, same) for b in view.rows] for a in view.rows]


def _shared(a: np.ndarray, b: np.ndarray, same: float) -> int:
    n = min(len(a), len(b))
    away = np.linalg.norm(a[:n].astype(np.float64) - b[:n], axis=1)
    equal = away <= same * np.linalg.norm(a[:n].astype(np.float64), axis=1)
    return n if equal.all() else int(np.argmin(equal))


def truth(texts: Texts) -> list[list[int]]:
    """The same of the texts themselves."""

    def shared(a: np.ndarray, b: np.ndarray) -> int:
        n = min(len(a), len(b))
        equal = a[:n] == b[:n]
        return n if equal.all() else int(np.argmin(equal))

    tokens = [np.asarray(text) for text in texts]
    return [[shared(a, b) for b in tokens] for a in tokens]
