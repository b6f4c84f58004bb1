"""What the paper proves of detection (§3), as numbers: Theorem 4.2's bound, Theorem 4.4's rates,
and the approximation for normal draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special


@dataclass(frozen=True)
class Power:
    """Detection by the theorems, in a text of `tokens` tokens, no n-gram of which comes twice.

    auc_at_least: Theorem 4.2's bound, of uniform numbers and candidates of one token; None of
    longer ones. true_positives: of the likelihood ratio of gamma numbers (Theorem 4.4), which calls
    marked what has `-sum R` of `threshold` at most. normal_auc: of the sum of normal numbers.
    """

    tokens: int
    auc_at_least: float | None
    true_positives: float
    threshold: float
    normal_auc: float


def power(
    tokens: int, k: int, m: int, false_positives: float, entropy: float | None = None
) -> Power:
    """Return what m candidates of k tokens give. entropy: Theorem 4.2's alpha, in nats; log m, the
    most that it can be, where it is left out.
    """
    return Power(
        tokens,
        auc_bound(tokens, m, entropy) if k == 1 else None,
        gamma_power(false_positives, tokens, k, m),
        gamma_threshold(false_positives, tokens, k, m)[0],
        normal_auc(tokens, k, m),
    )


def selection_slope(m: int) -> float:
    """Return lambda = (m / (m + 1) - 1/2) / log m of Theorem 4.2. m = 1 embeds nothing: 0."""
    return (m / (m + 1) - 0.5) / math.log(m) if m > 1 else 0.0


def auc_bound(tokens: int, m: int | None, alpha: float | None = None) -> float:
    """Return Theorem 4.2's bound: AUC >= 1 / (1 + 1 / (3 T lambda^2 alpha^2)), of T unique n-grams,
    k = 1, F = U(0, 1). alpha: mean entropy of the counts, log m at most, which it is when left out.
    m None: the limit, where alpha must be log m.
    """
    reach = 0.5 if m is None else selection_slope(m) * (math.log(m) if alpha is None else alpha)
    strength = 3 * tokens * reach**2
    return 1 / (1 + 1 / strength) if strength else 0.0


def next_token(name: str, vocab: int) -> np.ndarray:
    """Return the probabilities [vocab] of one of the paper's figure 5: "uniform", or "zipf", where
    the i-th is 1 / i up to a factor.
    """
    weights = np.ones(vocab) if name == "uniform" else 1 / np.arange(1, vocab + 1)
    return np.asarray(weights / weights.sum())


def alpha_of(p: np.ndarray, m: int) -> float:
    """Return Theorem 4.2's alpha for m candidates of one token drawn from p [vocab], all below 1:
    the mean of the entropy of their counts c, in nats. The paper simulates it (figure 5); as
    log m - sum E[c log c] / m over tokens, c binomial, it is a finite sum.
    """
    log_mass, odds, total = m * np.log1p(-p), np.log(p) - np.log1p(-p), 0.0
    for c in range(1, m + 1):
        log_mass = log_mass + odds + math.log((m - c + 1) / c)
        total += c * math.log(c) * float(np.exp(log_mass).sum())
    return math.log(m) - total / m


def gamma_power(false_positives: float, tokens: int, k: int, m: int) -> float:
    """Return, by Theorem 4.4, the true positives of the likelihood ratio at this rate of false
    ones, F = -Gamma(1/k, beta) for any beta: G(m G^-1(f)), G the CDF of Gamma(T / k, 1).
    """
    shape = tokens / k
    return float(special.gammainc(shape, m * special.gammaincinv(shape, false_positives)))


def gamma_threshold(false_positives: float, tokens: int, k: int, m: int) -> tuple[float, float]:
    """Return (Q, t) of Theorem 4.4 at beta = 1: -sum R of at most Q is called marked; t is the
    threshold of s = (T / k) log m + (m - 1) sum R.
    """
    q = float(special.gammaincinv(tokens / k, false_positives))
    return q, tokens / k * math.log(m) - (m - 1) * q


def normal_auc(tokens: int, k: int, m: int) -> float:
    """Return the AUC of the sum of normal draws, no duplicates: Phi(sqrt(T / k) e_m / sqrt(1 +
    v_m)), e_m and v_m the mean and variance of the largest of m standard normals.
    """
    mean, variance = largest_of(m)
    return float(special.ndtr(math.sqrt(tokens / k) * mean / math.sqrt(1 + variance)))


def largest_of(m: int) -> tuple[float, float]:
    """Return mean and variance of the largest of m standard normals, by quadrature."""
    step, places = 1e-3, range(-9000, 9001)
    mean = square = 0.0
    for i in places:
        z = i * step
        weight = m * math.exp((m - 1) * float(special.log_ndtr(z)) - z * z / 2)
        mean += z * weight
        square += z * z * weight
    scale = step / math.sqrt(2 * math.pi)
    return mean * scale, square * scale - (mean * scale) ** 2
