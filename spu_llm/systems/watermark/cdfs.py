"""The families of §2.5: a continuous F, and F_j, the CDF of the sum of j draws of it.

Everything is float64 and in logarithms on both sides: a score that rounds to 1 would end a
selection in a tie, and a p-value that rounds to 0 a combination of several.

    U(0, 1)            F_j = Irwin-Hall(j)
    N(0, 1)            N(0, j)
    chi^2_2            chi^2_2j
    -Gamma(1/k, 1)     -Gamma(j/k, 1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

from spu_llm.core.errors import InputError

FAMILIES = ("uniform", "normal", "chi2", "gamma")
_EXACT = 256  # summands up to which Irwin-Hall is computed in integers
_TINY = 1e-290  # below, a probability is computed as a logarithm
_HALF = math.log(0.5)


class Tails(NamedTuple):
    """log P(S <= s) and log P(S >= s)."""

    log_cdf: float
    log_sf: float

    @property
    def gumbel(self) -> float:
        """Return -log(-log u) of u = P(S <= s): standard Gumbel where u is uniform."""
        if self.log_sf < -30:  # -log u is 1 - u there
            return -self.log_sf
        if self.log_cdf == -math.inf:
            return -math.inf
        return -math.log(-self.log_cdf)


@dataclass(frozen=True)
class Family:
    """F by its name; `k` is of gamma alone (§2.5: the length of a chunk)."""

    name: str = "uniform"
    k: int = 1

    def __post_init__(self) -> None:
        if self.name not in FAMILIES:
            raise InputError(f"there is no family {self.name!r}; choose from {', '.join(FAMILIES)}")
        if self.k < 1 or (self.k > 1 and self.name != "gamma"):
            raise InputError(f"the family {self.name} has no k = {self.k}")

    def tails(self, uniforms: np.ndarray) -> Tails:
        """Return the tails of the sum of F^-1(u) over `uniforms` (float64 [j], in (0, 1), j >=
        1).
        """
        u = np.asarray(uniforms, np.float64)
        if len(u) == 1:
            return Tails(math.log(u[0]), math.log1p(-u[0]))
        if self.name == "uniform":
            return irwin_hall(len(u), math.fsum(u))
        if self.name == "normal":
            return normal(len(u), math.fsum(special.ndtri(u)))
        if self.name == "chi2":
            return _two_sided(len(u), math.log(math.fsum(-np.log1p(-u))))
        # R = -G: u is the probability that G is larger.
        logs = _log_gamma_of(1 / self.k, u)
        top = float(logs.max())
        total = top + math.log(math.fsum(np.exp(logs - top)))
        return _mirrored(_two_sided(len(u) / self.k, total))

    def draws(self, uniforms: np.ndarray) -> np.ndarray:
        """Return F^-1(u)."""
        u = np.asarray(uniforms, np.float64)
        if self.name == "uniform":
            return u
        if self.name == "normal":
            return np.asarray(special.ndtri(u))
        if self.name == "chi2":
            return np.asarray(-2 * np.log1p(-u))
        return np.asarray(-np.exp(_log_gamma_of(1 / self.k, u)))

    def of_sum(self, j: int, s: float) -> Tails:
        """Return the tails of a sum s of j draws."""
        if self.name == "uniform":
            return irwin_hall(j, s)
        if self.name == "normal":
            return normal(j, s)
        if self.name == "chi2":
            return _two_sided(j, _log(s / 2))
        return _mirrored(_two_sided(j / self.k, _log(-s)))


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _mirrored(tails: Tails) -> Tails:
    return Tails(tails.log_sf, tails.log_cdf)


# ---- Irwin-Hall


def irwin_hall(n: int, s: float) -> Tails:
    """Return the tails of the sum s of n uniforms."""
    if n < 1:
        raise ValueError(f"a sum has one term or more, found {n}")
    if s <= 0:
        return Tails(-math.inf, 0.0)
    if s >= n:
        return Tails(0.0, -math.inf)
    if s > n / 2:  # the smaller tail is computed, by symmetry
        numerator, denominator = s.as_integer_ratio()
        return _mirrored(_complete(_lower(n, n * denominator - numerator, denominator)))
    return _complete(_lower(n, *s.as_integer_ratio()))


def _complete(smaller: float) -> Tails:
    """Return both tails from the logarithm of the lower one, which is at most about a half."""
    return Tails(smaller, math.log1p(-math.exp(smaller)))


def _lower(n: int, numerator: int, denominator: int) -> float:
    """Return log P(S <= numerator / denominator), of at most n / 2.

    sum_i (-1)^i C(n, i) (s - i)^n / n! loses all digits in doubles from n = 50 on, so it is
    computed in whole numbers; where these are long, by the saddle point.
    """
    if n > _EXACT:
        return _lower_by_saddle_point(n, numerator / denominator)
    total, choose = 0, 1
    for i in range(numerator // denominator + 1):
        term = choose * (numerator - i * denominator) ** n
        total += -term if i % 2 else term
        choose = choose * (n - i) // (i + 1)
    whole = math.factorial(n) * denominator**n
    if total << 960 > whole:
        return math.log(total / whole)
    return math.log(total) - math.log(whole)


def _lower_by_saddle_point(n: int, s: float) -> float:
    """Return log P(S <= s), s <= n / 2: Lugannani and Rice 1980, mirrored to the upper tail. Its
    relative error is below 1e-3 at n = 256, also far out, and falls with n (tested against the
    exact one).
    """
    x = 1 - s / n  # the mean that is reached or exceeded
    if x - 0.5 < 1e-9:
        return _HALF
    low, high = 0.0, 1.0
    while _slope(high) < x:
        high *= 2
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if _slope(t) < x else (low, t)
    t = (low + high) / 2
    curve = _curvature(t)
    w = math.sqrt(max(0.0, 2 * n * (t * x - _cumulant(t))))
    v = t * math.sqrt(n * curve)
    return log_tail(w, v)


def log_tail(w: float, v: float) -> float:
    """Return log(Q(w) + phi(w) (1/v - 1/w)) of Lugannani and Rice, w > 0."""
    mills = math.sqrt(math.pi / 2) * float(special.erfcx(w / math.sqrt(2)))
    correction = 1 / v - 1 / w if w > 1e-4 else 0.0
    return -w * w / 2 - math.log(2 * math.pi) / 2 + math.log(mills + correction)


def _cumulant(t: float) -> float:
    """Return log E e^(t U), t > 0."""
    return t + math.log(-math.expm1(-t) / t) if t > 1e-6 else t / 2 + t * t / 24


def _slope(t: float) -> float:
    if t < 1e-3:
        return 0.5 + t / 12 - t**3 / 720
    return 1 / -math.expm1(-t) - 1 / t


def _curvature(t: float) -> float:
    if t < 1e-2:
        return 1 / 12 - t * t / 240
    return 1 / t**2 - math.exp(-t) / math.expm1(-t) ** 2


# ---- normal and Gamma


def normal(n: int, s: float) -> Tails:
    """Return the tails of the sum s of n standard normals."""
    z = s / math.sqrt(n)
    return Tails(float(special.log_ndtr(z)), float(special.log_ndtr(-z)))


def gamma(shape: float, s: float) -> Tails:
    """Return the tails of a Gamma(shape, 1) number s."""
    return _two_sided(shape, _log(s))


def _two_sided(shape: float, log_s: float) -> Tails:
    s = math.exp(min(log_s, 709.0))
    lower, upper = float(special.gammainc(shape, s)), float(special.gammaincc(shape, s))
    log_lower = math.log(lower) if lower > _TINY else _log_lower(shape, log_s, s)
    log_upper = math.log(upper) if upper > _TINY else _log_upper(shape, log_s, s)
    # Near 1 from the other side.
    if lower > 0.5:
        log_lower = math.log1p(-math.exp(log_upper))
    elif upper > 0.5:
        log_upper = math.log1p(-math.exp(log_lower))
    return Tails(log_lower, log_upper)


def _log_lower(a: float, log_s: float, s: float) -> float:
    """Return log P(a, s): s^a e^-s / Gamma(a + 1) times 1 + s/(a+1) + s^2/((a+1)(a+2)) + ..."""
    if log_s == -math.inf:
        return -math.inf
    total, term, i = 1.0, 1.0, 1
    while term > 1e-17 * total:
        term *= s / (a + i)
        total += term
        i += 1
    return a * log_s - s - math.lgamma(a + 1) + math.log(total)


def _log_upper(a: float, log_s: float, s: float) -> float:
    """Return log Q(a, s), s > a + 1, by its continued fraction (Lentz)."""
    tiny = 1e-300
    b = s + 1 - a
    c, d = 1 / tiny, 1 / b
    h = d
    for i in range(1, 100_000):
        an = -i * (i - a)
        b += 2
        d = an * d + b
        d = 1 / (d if abs(d) > tiny else tiny)
        c = b + an / c
        c = c if abs(c) > tiny else tiny
        h *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return a * log_s - s - math.lgamma(a) + math.log(h)


def _log_gamma_of(a: float, survival: np.ndarray) -> np.ndarray:
    """Return log of the Gamma(a) number that is exceeded with this probability. A draw itself
    underflows: at a = 1/50 one in five is below the smallest float32.
    """
    g = special.gammainccinv(a, survival)
    small = (np.log1p(-survival) + math.lgamma(a + 1)) / a  # P(a, g) = g^a / Gamma(a + 1)
    return np.where(g > 1e-10, np.log(np.maximum(g, 1e-300)), small)
