"""d_chi noise on embeddings, from a secret stream: as defined, and as SnD's public code has it.

`spherical` has a density proportional to e^(-eta |z|_2) (Chatzikokolakis et al. 2013; Feyisetan et
al. 2020): whoever sees x + z may tell x from x' by a factor of e^(eta |x - x'|_2). `published`
multiplies, coordinate by coordinate, a Gamma(m, 1 / eta) of its own by a uniform number of (-1, 1):
about sqrt(m) times larger in norm, of another distribution, and with no such statement. At m =
4096, eta = 13, its expected L1 norm is 645,277, the "645k" that NOIR prints; that of spherical
noise is 16,089.

float64 by inversion of 53 random bits: hardened neither against the gaps of floating point
(Mironov 2012) nor in its far tails. Both serve baselines.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import gammaincinv, ndtri

from spu_llm.core.prg import Prg


def spherical(count: int, features: int, eta: float, prg: Prg) -> np.ndarray:
    """Draw float64 [count, features]: radius Gamma(features, 1 / eta), direction uniform."""
    radius = gammaincinv(features, _inside((count, 1), prg)) / eta
    normal = ndtri(_inside((count, features), prg))
    return np.asarray(radius * normal / np.linalg.norm(normal, axis=1, keepdims=True))


def published(count: int, features: int, eta: float, prg: Prg) -> np.ndarray:
    """Draw float64 [count, features]: Gamma(features, 1 / eta) times uniform (-1, 1), each
    coordinate on its own.
    """
    size = count, features
    gamma = gammaincinv(features, _inside(size, prg)) / eta
    return np.asarray(gamma * (2 * _inside(size, prg) - 1))


NOISES: dict[str, Callable[[int, int, float, Prg], np.ndarray]] = {
    "spherical": spherical,
    "published": published,
}


def _inside(shape: tuple[int, ...], prg: Prg) -> np.ndarray:
    """Draw numbers uniform in (0, 1), ends left out."""
    return prg.uniform(shape) + 2.0**-54
