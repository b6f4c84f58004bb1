"""Vectors that seem to be of the same token, by hierarchical clustering.

The number of groups is nobody's choice: vectors are joined until as many pairs are together as are
equal in public text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Sized

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage

from models.family import family_of
from spu_llm.systems.split.attacks.views import Public, Texts


def equal_share(texts: Texts) -> float:
    """Return the share of pairs of tokens of these texts that are equal."""
    counts = np.array(list(Counter(t for text in texts for t in text).values()), float)
    total = counts.sum()
    return float((counts * (counts - 1)).sum() / max(1.0, total * (total - 1)))


def groups_of(vectors: np.ndarray, share: float) -> np.ndarray:
    """Return the group int [n] of each of the vectors [n, d], from 0 on, largest first; by mean
    cosine, with at most this share of all pairs together.
    """
    n = len(vectors)
    if n < 2:
        return np.zeros(n, int)
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    tree = linkage(vectors / np.maximum(lengths, 1e-300), "average")  # |a - b|^2 = 2 - 2 cos
    heights = np.concatenate([[-1.0], np.unique(tree[:, 2])])
    low, high = 0, len(heights) - 1
    while low < high:
        middle = (low + high + 1) // 2
        together = _pairs(fcluster(tree, heights[middle], "distance"))
        low, high = (middle, high) if together <= share * n * (n - 1) / 2 else (low, middle - 1)
    return by_size(fcluster(tree, heights[low], "distance"))


def by_size(groups: np.ndarray) -> np.ndarray:
    """Renumber groups from the largest on."""
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    number = np.empty(len(order), int)
    number[order] = np.arange(len(order))
    numbers: np.ndarray = number[inverse.ravel()]
    return numbers


def _pairs(groups: np.ndarray) -> int:
    counts = np.unique(groups, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())


def without_positions(public: Public, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Subtract from rows what the public model's positions add to them."""
    _, table = family_of(public.config).embeddings(public.weights)
    table = np.asarray(table, np.float32)
    return [r - table[: len(r)] if len(table) > 1 else np.asarray(r) for r in rows]


def directions(public: Public, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the rows [n, d] of each text without positions, less the mean of all rows, of length
    one: their products are centred cosines.
    """
    bare = [r.astype(np.float64) for r in without_positions(public, rows)]
    mean = np.concatenate(bare).mean(axis=0)
    return [(r - mean) / (np.linalg.norm(r - mean, axis=1, keepdims=True) + 1e-300) for r in bare]


def cut(flat: Sequence[int] | np.ndarray, like: Sequence[Sized]) -> list[list[int]]:
    """Cut a flat sequence of numbers into texts of the lengths of `like`."""
    ends = np.cumsum([len(one) for one in like])
    return [part.tolist() for part in np.split(np.asarray(flat, int), ends[:-1])]
