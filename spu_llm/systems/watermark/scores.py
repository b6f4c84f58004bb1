"""Scores of the uniform numbers of a text, and their exact p-values, as natural logarithms.

Under H0 (the text was not marked under this key) the numbers R of its distinct n-grams are
independent draws of F, so that every score has a known distribution for every length (§2.4):

    sum      F_W(sum R): large where it is marked
    fisher   -2 sum log(1 - F(R)), chi^2 with 2 W degrees of freedom
    lrt      sum log f1(R) / f0(R), f1 the density in a winner of m candidates of k n-grams each
    green    how many are in the largest quarter (Kirchenbauer et al. 2023), a binomial number

and lrt-published is lrt with both densities estimated as the paper does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import special, stats

from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.cdfs import Family, gamma, log_tail

SCORES = ("sum", "fisher", "lrt", "lrt-published", "green")
GREEN = 0.25  # of numbers
_GRID = 2048  # points of (0, 1) at which a likelihood ratio is tabulated
_REST = 2000  # draws of the other n-grams of a winner
_REPEATS = 10_000  # winners that the published estimate draws
_MOST_DRAWS = 1 << 25  # 268 MB of them, several times over


def log_p(
    uniforms: np.ndarray, family: Family, score: str = "sum", m: int = 2, k: int = 1
) -> float:
    """Return log p of a text's numbers (float64 [W], distinct n-grams), 0 where there are none. m,
    k: what `lrt` supposes that the text was made with.
    """
    u = np.asarray(uniforms, np.float64)
    if score not in SCORES:
        raise InputError(f"there is no score {score!r}; choose from {', '.join(SCORES)}")
    if not len(u):
        return 0.0
    if score == "sum":
        return family.tails(u).log_sf
    if score == "fisher":
        return fisher(u)
    if score == "green":
        return greens(u)
    ratios = (log_ratios if score == "lrt" else log_ratios_published)(family, m, k)
    return ratio_tail(ratios, float(np.sum(at(ratios, u))), len(u))


def fisher(uniforms: np.ndarray) -> float:
    """Return log p of -2 sum log(1 - u)."""
    u = np.asarray(uniforms, np.float64)
    return gamma(len(u), math.fsum(-np.log1p(-u))).log_sf


def greens(uniforms: np.ndarray) -> float:
    """Return log P(Binomial(W, GREEN) >= the count of numbers above 1 - GREEN)."""
    u = np.asarray(uniforms, np.float64)
    count = int((u > 1 - GREEN).sum())
    return float(stats.binom.logsf(count - 1, len(u), GREEN))


def combined(log_ps: Sequence[float]) -> float:
    """Return log p of t independent tests together: -2 sum log p is chi^2 with 2 t degrees
    (§2.6).
    """
    if not log_ps:
        return 0.0
    return gamma(len(log_ps), -math.fsum(log_ps)).log_sf


# ---- likelihood ratios


def grid() -> np.ndarray:
    """Return the midpoints of the table's cells of (0, 1), ascending."""
    return np.asarray((np.arange(_GRID) + 0.5) / _GRID)


def at(ratios: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return the tabulated values at these numbers, by the cell that each is in."""
    return ratios[np.minimum((np.asarray(uniforms) * _GRID).astype(int), _GRID - 1)]


@functools.lru_cache(maxsize=32)
def log_ratios(family: Family, m: int, k: int) -> np.ndarray:
    """Return log f1 / f0 at each point of `grid`, of winners among m distinct candidates of k
    n-grams that nobody shares: f1/f0 (r) = m E F_k(r + S)^(m-1), S the sum of the k - 1 others. For
    -Gamma(1/k) and k its own it is Theorem 4.4's closed form; at k = 1 it is m u^(m-1) for every F.
    """
    if m < 2 or k < 1:
        raise InputError(f"a likelihood ratio needs 2 candidates of 1 token, or more: {m} of {k}")
    _check_room(_REST * k)
    u = grid()
    if k == 1:
        return np.asarray(math.log(m) + (m - 1) * np.log(u))
    if family.name == "gamma" and family.k == k:
        return np.asarray(math.log(m) / k + (m - 1) * family.draws(u))
    prg = Prg.from_seed(k, f"likelihood ratio {family.name} {family.k} {m}")
    others = np.maximum(prg.uniform((_REST, k - 1)), 2.0**-53)
    rest = np.sort(family.draws(others).sum(axis=1))
    sums = family.draws(u)[:, None] + rest[None]
    # F_k on a few hundred places; between them a straight line.
    places = np.linspace(sums.min(), sums.max(), 512)
    cdf = np.array([math.exp(family.of_sum(k, float(s)).log_cdf) for s in places])
    power = np.interp(sums, places, cdf) ** (m - 1)
    return np.log(np.maximum(m * power.mean(axis=1), 1e-12))


@functools.lru_cache(maxsize=8)
def log_ratios_published(family: Family, m: int, k: int, seed: int = 0) -> np.ndarray:
    """Return log f1 / f0 at each point of `grid`, as the paper estimates it (§2.4): Gaussian
    kernels (Scott's bandwidth) on the first entry of the row with the largest sum, of m rows of k
    draws, and on draws of F.
    """
    _check_room(_REPEATS * m * k)
    prg = Prg.from_seed(seed, "published ratio")
    u = np.maximum(prg.uniform((_REPEATS, m, k)), 2.0**-53)
    draws = family.draws(u)
    best = draws.sum(axis=2).argmax(axis=1)
    winners = draws[np.arange(_REPEATS), best, 0]
    f1, f0 = stats.gaussian_kde(winners), stats.gaussian_kde(draws[:, 0, 0])
    places = family.draws(grid())
    return np.asarray(f1.logpdf(places) - f0.logpdf(places))


def _check_room(draws: int) -> None:
    if draws > _MOST_DRAWS:
        raise InputError(
            f"a likelihood ratio of so many candidates and tokens takes {draws:,} draws, and "
            f"{_MOST_DRAWS:,} at most are made; give fewer --candidates or a smaller --chunk"
        )


def ratio_tail(ratios: np.ndarray, total: float, count: int) -> float:
    """Return log P(sum of `count` tabulated values at uniform cells >= total), by the saddle point
    (Lugannani and Rice 1980): the distribution under H0 is exactly the table's, each cell alike.
    """
    mean, most = float(ratios.mean()), float(ratios.max())
    if total >= count * most:  # all in the best cells
        return count * math.log(float(np.mean(ratios == most)))
    if total <= count * float(ratios.min()):
        return 0.0
    if count <= 2:  # too few for a saddle point, and few enough to count
        rest = np.sort(ratios)
        need = np.array([total]) if count == 1 else total - rest
        return math.log(max(1.0 - float(np.searchsorted(rest, need).mean()) / _GRID, _GRID**-count))
    x = total / count
    sign = 1.0 if x > mean else -1.0
    values = sign * ratios
    t = _solve(values, sign * x)
    log_mgf, _, variance = _cumulants(values, t)
    w = math.sqrt(max(0.0, 2 * count * (t * sign * x - log_mgf)))
    v = t * math.sqrt(count * variance)
    if w < 1e-3:
        return math.log(0.5)
    tail = log_tail(w, v)
    return tail if sign > 0 else math.log1p(-math.exp(min(tail, math.log(0.999999))))


def _solve(values: np.ndarray, mean: float) -> float:
    """Return the t at which the tilted mean is `mean`."""
    low, high = 0.0, 1.0
    while _cumulants(values, high)[1] < mean and high < 1e9:
        high *= 2
    for _ in range(100):
        t = (low + high) / 2
        low, high = (t, high) if _cumulants(values, t)[1] < mean else (low, t)
    return (low + high) / 2


def _cumulants(values: np.ndarray, t: float) -> tuple[float, float, float]:
    logs = t * values
    log_mgf = float(special.logsumexp(logs)) - math.log(len(values))
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    mean = float(weights @ values)
    return log_mgf, mean, float(weights @ (values - mean) ** 2)
