"""A10: the host knows the first tokens of texts (an instruction, a template) and reads the rest.

No public table is needed: known pairs of token and row are of the victim's own codebook. A linear
discriminant (Fisher 1936) is fitted to them:

1. Rows less the public positions. Of each known token their mean.
2. The covariance of rows about the means of their tokens, shrunk to a multiple of one: what the
   tokens before and the position do to a row.
3. Any other row is of the token with the nearest mean, in the metric of 2.
"""

from __future__ import annotations

import numpy as np

from spu_llm.systems.split.attacks import grouping
from spu_llm.systems.split.attacks.views import HostView, Public, Texts

SHRINK = 0.3  # the share of a multiple of one in the covariance


def attack(view: HostView, public: Public, known: Texts) -> list[list[int]]:
    """Guess all tokens from `known`, the first tokens of each text (A10). Only tokens that are
    among these can be found.
    """
    rows = grouping.without_positions(public, view.rows)
    # 1.
    some = [r[: len(text)] for r, text in zip(rows, known, strict=True)]
    of_known, tokens = np.concatenate(some).astype(float), np.concatenate([*known]).astype(int)
    classes, place = np.unique(tokens, return_inverse=True)
    counts = np.bincount(place)
    means = np.zeros((len(classes), of_known.shape[1]))
    np.add.at(means, place, of_known)
    means /= counts[:, None]
    # 2.
    apart = of_known - means[place]
    d = of_known.shape[1]
    within = apart.T @ apart / max(1, len(tokens) - len(classes))
    size = np.trace(within) / d or 1.0
    root = np.linalg.inv(np.linalg.cholesky((1 - SHRINK) * within + SHRINK * size * np.eye(d)))
    # 3.
    goals = means @ root.T
    guesses = []
    for row, text in zip(rows, known, strict=True):
        seen = row.astype(float) @ root.T
        away = (goals**2).sum(axis=1) - 2 * seen @ goals.T
        guess = classes[away.argmin(axis=1)]
        guess[: len(text)] = text[: len(guess)]
        guesses.append(guess.tolist())
    return guesses
