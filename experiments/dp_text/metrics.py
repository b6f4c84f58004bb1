"""How near generated texts come to real ones.

**MAUVE** (Pillutla et al. 2021, section 3; their program's defaults where the paper leaves them
open): features of both samples are projected on the principal components that hold 90 % of the
variance and cut into n / 10 clusters by k-means, n the smaller sample. P and Q are the shares of
the clusters; the frontier has the points

    (exp(-c KL(Q || R)), exp(-c KL(P || R))),   R = lambda P + (1 - lambda) Q,   0 < lambda < 1,

with c = 5, and MAUVE is the area under it. It is computed here since `mauve-text` brings torch and
faiss, and its features a model of gigabytes. Ours are the model's own (`lanes.Features`): the mean
over a text of what the head reads, of length 1. So values compare with one another, not with the
InvisibleInk paper's, whose features, buckets (n / 20) and c (0.9) are others.

**Perplexity gap**: the mean over texts x of |PPL(x) - mean over real r of PPL(r)|, under a model.
**Names**: see `names`.

Intervals are 99 % Wald ones, as in the InvisibleInk paper, z = 2.576: of means, from the texts; of
MAUVE, from a bootstrap's standard deviation, of both samples. (Percentiles of a bootstrap would lie
too low: a text that is drawn twice makes a sample look further away than it is.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.cluster.vq import kmeans2

from models.family import ModelConfig
from spu_llm.systems.dp_text.lanes import Nats

Z = 2.576  # 99 %
SCALING = 5.0
VARIANCE, POINTS, TEXTS_IN_A_BUCKET = 0.9, 25, 10
RESTARTS, BOOTSTRAPS = 5, 200
_AT_ONCE = 16


# ---- MAUVE


def frontier_area(p: np.ndarray, q: np.ndarray, scaling: float = SCALING) -> float:
    """Return the area under the divergence frontier of two distributions over the same clusters."""
    mixing = np.linspace(1e-6, 1 - 1e-6, POINTS)[:, None]
    r = mixing * p + (1 - mixing) * q
    points = np.exp(-scaling * np.stack([_divergence(q, r), _divergence(p, r)], axis=1))
    x, y = np.concatenate([[[1.0, 0.0]], points, [[0.0, 1.0]]]).T
    across, up = np.lexsort((-y, x)), np.lexsort((-x, y))  # a falling curve, also where it is steep
    return (_area(x[across], y[across]) + _area(y[up], x[up])) / 2


def _area(x: np.ndarray, y: np.ndarray) -> float:
    return float((np.diff(x) * (y[1:] + y[:-1]) / 2).sum())


def _divergence(p: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Compute KL(p || r) for each row of r, which is above 0 where p is."""
    inside = p > 0
    return np.asarray((p[inside] * np.log(p[inside] / r[:, inside])).sum(axis=1))


def clusters(points: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the cluster of each point [n, width]: the best of `RESTARTS` runs of k-means."""
    best, least = np.zeros(len(points), int), np.inf
    for number in range(RESTARTS):
        rng = np.random.default_rng([seed, number])
        centres, labels = kmeans2(points, count, minit="++", seed=rng, missing="warn")
        cost = float(((points - centres[labels]) ** 2).sum())
        if cost < least:
            best, least = labels, cost
    return best


def projected(points: np.ndarray) -> np.ndarray:
    """Project centred points on the first principal components that hold `VARIANCE` of the
    variance.
    """
    centred = np.asarray(points, np.float64) - points.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    if not sizes.any():
        return centred[:, :1]
    held = np.cumsum(sizes**2) / np.sum(sizes**2)
    keep = int(np.searchsorted(held, VARIANCE)) + 1
    return np.asarray(left[:, :keep] * sizes[:keep])


def mauve(
    made: np.ndarray, real: np.ndarray, seed: int, clusterings: int = 5
) -> tuple[float, float]:
    """Return (MAUVE, half its interval) of features [n, width] and [m, width]: the mean over
    clusterings from several seeds.
    """
    points = projected(np.concatenate([made, real]))
    count = max(2, round(min(len(made), len(real)) / TEXTS_IN_A_BUCKET))
    values, spread = [], []
    for number in range(clusterings):
        labels = clusters(points, count, seed + number)
        of = labels[: len(made)], labels[len(made) :]
        values.append(frontier_area(shares(of[0], count), shares(of[1], count)))
        rng = np.random.default_rng([seed, number])
        spread.append(
            [
                frontier_area(
                    shares(rng.choice(of[0], len(made)), count),
                    shares(rng.choice(of[1], len(real)), count),
                )
                for _ in range(BOOTSTRAPS)
            ]
        )
    deviation = np.std(spread, axis=1, ddof=1).mean()
    return float(np.mean(values)), float(Z * deviation)


def shares(labels: np.ndarray, count: int) -> np.ndarray:
    """Return the share of each cluster."""
    return np.bincount(labels, minlength=count) / len(labels)


# ---- perplexity


class Perplexity:
    """Perplexity of texts after one context, under a model whose weights are folded. room: tokens
    of a text at most.
    """

    def __init__(
        self, config: ModelConfig, weights: Any, context: Sequence[int], room: int
    ) -> None:
        self._room = room
        self._nats = Nats(config, weights, _AT_ONCE, context, room)

    def of(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the perplexity of each text, float64 [text]; NaN for an empty one."""
        lengths = np.array([min(len(text), self._room) for text in texts])
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.exp(self._nats.of(texts) / lengths)


# ---- names, means

_NAME = re.compile(
    r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?:\(\))?"  # os.path, sock.close()
    r"|[A-Za-z_]\w*\(\)"  # close()
    r"|[A-Za-z]\w*_\w+|_\w+"  # file_name, _private
    r"|[a-z]+[A-Z]\w*|[A-Z][a-z]+[A-Z]\w*"  # camelCase, ValueError
    r"|[A-Z]{2,}\w*"  # SSL, AF_INET
    r"|(?<=[a-z,] )[A-Z][a-z]+"  # a capitalised word inside a sentence
)


def names(text: str) -> int:
    """Count the identifiers and proper names of a text, by what they look like."""
    return len(_NAME.findall(text))


def mean(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return (mean, half its interval); NaN values are left out. (NaN, NaN) for fewer than 2."""
    known = np.asarray(values, np.float64)
    known = known[np.isfinite(known)]
    if len(known) < 2:
        return float("nan"), float("nan")
    return float(known.mean()), float(Z * known.std(ddof=1) / np.sqrt(len(known)))


def distance(made: np.ndarray, real: np.ndarray) -> float:
    """Compute Kolmogorov and Smirnov's distance: the largest difference of two distribution
    functions.
    """
    points = np.sort(np.concatenate([made, real]))
    below: list[Any] = [
        np.searchsorted(np.sort(side), points, side="right") / len(side) for side in (made, real)
    ]
    return float(np.abs(below[0] - below[1]).max())
