"""Boundary rows estimated from normalised ones, which a host on shares would see without masks.

The first norm of the middle is the client's own work, so that what its first product takes has lost
the size of each row, and nothing else: weights are folded, and a norm is a division by the root
mean square. A row's size follows well enough from its direction: its logarithm is fitted to
normalised rows of public text, by ridge regression.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.family import ModelConfig
from spu_llm.systems.split.attacks.views import Public

FITTED = 256  # public texts
RIDGE = 1e-3  # of the mean square of a feature, which is 1


def normalised(config: ModelConfig, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows [n, d] divided by their sizes, and the sizes [n, 1]."""
    exact = np.asarray(rows, np.float64)
    sizes = np.sqrt(np.square(exact).mean(axis=1, keepdims=True) + config.norm_epsilon)
    return exact / sizes, sizes


def before_norm(public: Public, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Estimate boundary rows float32 [n, d] of each text from what a norm made of them."""
    known = np.concatenate(public.front(public.texts[:FITTED]))
    x, sizes = normalised(public.config, known)
    wanted = np.log(sizes[:, 0])
    square = x.T @ x / len(x) + RIDGE * np.eye(x.shape[1])
    slope = np.linalg.solve(square, x.T @ (wanted - wanted.mean()) / len(x))

    def sized(rows: np.ndarray) -> np.ndarray:
        exact = np.asarray(rows, np.float64)
        size = np.clip(exact @ slope + wanted.mean(), wanted.min(), wanted.max())
        return np.asarray(exact * np.exp(size)[:, None], np.float32)

    return [sized(of_text) for of_text in rows]
