"""AdaPMixED (Flemings et al. 2024), adapted to references in prompts as the InvisibleInk paper does
(spec 3.2). Its privacy loss depends on the data: it holds for the references at hand, is itself
sensitive, and is no differential privacy, so that its event is one that no accountant supports.

1. p_0, p_i: softmax of phi_pub, phi_i. Screen: ptilde = lambda mean p_i + (1 - lambda) p_0 on the
   60 likeliest of p_0, plus N(0, sigma^2), normalised; D_alpha^sym(p_0, ptilde) > threshold: draw
   from p_0. Every token is charged alpha (lambda / (B sigma))^2 for that.
2. Else lambda_i = the largest in [0, 1] with D_alpha^sym(p_0, lambda_i p_i + (1 - lambda_i) p_0) <=
   beta alpha, and the token is drawn from pbar, the mean of these mixtures. The charge is max_i
   D_alpha^sym(pbar, pbar_-i); in pbar_-i reference i is left out, or p_0 in its place.
3. epsilon = charges + ln(1 - 1 / alpha) - ln(delta alpha) / (alpha - 1); a token that would take it
   above the target is not drawn, and ends the text.

`published` leaves reference i out of pbar_-i (adding or removing one), and sets lambda_i = 0, as
the authors' program does, where even lambda_i = 1 meets the constraint. Corrected, p_0 takes the
place of p_i there, as for all other methods here, and lambda_i is 1. A null reference's p_i is p_0.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
from dp_accounting import dp_event

from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.mechanism import sanitised
from spu_llm.systems.dp_text.methods import Method, Next
from spu_llm.systems.dp_text.parameters import check_budget
from spu_llm.systems.dp_text.sampling import draw, gaussian

SCREENED = 60
_HALVINGS = 30
_TINY = 1e-300


@dataclass(frozen=True)
class AdaPMixED:
    """The target (epsilon, delta), and the method's constants."""

    epsilon: float
    delta: float
    batch: int
    max_new_tokens: int
    temperature: float = 1.0
    alpha: float = 15.0
    beta: float = 0.3
    threshold: float = 4.5
    mixing: float = 1e-4  # lambda
    noise: float = 0.01  # sigma
    replace: bool = True  # pbar_-i has p_0 in the place of p_i; else i is left out
    published: bool = False

    @property
    def screening_charge(self) -> float:
        """Return the Renyi charge of every token for its screening."""
        return self.alpha * (self.mixing / (self.batch * self.noise)) ** 2


def epsilon_after(charges: float, alpha: float, delta: float) -> float:
    """Return epsilon after these charges (step 3)."""
    return charges + math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1)


def divergence(p: np.ndarray, q: np.ndarray, alpha: float) -> np.ndarray:
    """Compute D_alpha^sym over the last axis: the larger of both directions."""
    log_p, log_q = np.log(np.maximum(p, _TINY)), np.log(np.maximum(q, _TINY))

    def one(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        exponents = alpha * a + (1 - alpha) * b
        top = exponents.max(axis=-1, keepdims=True)
        total = np.log(np.exp(exponents - top).sum(axis=-1)) + top[..., 0]
        return np.asarray(total / (alpha - 1))

    return np.maximum(np.maximum(one(log_p, log_q), one(log_q, log_p)), 0.0)


def mixing_weights(
    public: np.ndarray, private: np.ndarray, limit: float, alpha: float, *, published: bool = False
) -> np.ndarray:
    """Find lambda_i of step 2, float64 [B], by bisection, from public p_0 [vocab] and private p_i
    [B, vocab].
    """

    def meets(weights: np.ndarray) -> np.ndarray:
        mixed = weights[:, None] * private + (1 - weights[:, None]) * public
        return divergence(public[None], mixed, alpha) <= limit

    low, high = np.zeros(len(private)), np.ones(len(private))
    free = meets(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = meets(middle)
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.where(free, 0.0 if published else 1.0, low)


def for_budget(
    epsilon: float,
    delta: float,
    *,
    batch: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    published: bool = False,
) -> Method:
    """Return the method that stops at this epsilon."""
    check_budget(epsilon, delta)
    settings = AdaPMixED(
        epsilon,
        delta,
        batch,
        max_new_tokens,
        temperature,
        published=published,
        replace=not published,
    )

    def begin(present: np.ndarray, prg: Prg) -> Next:
        return _State(settings, present, prg).token

    return Method(
        "adapmixed-published" if published else "adapmixed",
        batch,
        max_new_tokens,
        dp_event.UnsupportedDpEvent(),
        begin,
        asdict(settings),
        "no differential privacy: a loss that depends on the data, for these references alone",
    )


class _State:
    def __init__(self, settings: AdaPMixED, present: np.ndarray, prg: Prg) -> None:
        self._settings, self._present, self._prg = settings, present, prg
        self.charges = 0.0

    def token(self, public: np.ndarray, private: np.ndarray) -> int | None:
        s, prg = self._settings, self._prg
        p_0 = _softmax(public, s.temperature)
        p_i = np.where(self._present[:, None], _softmax(private, s.temperature), p_0[None])
        charges = self.charges + s.screening_charge
        if self._over(charges):
            return None
        if self._screened(p_0, p_i):
            self.charges = charges
            return draw(np.maximum(p_0, _TINY), prg)
        weights = mixing_weights(p_0, p_i, s.beta * s.alpha, s.alpha, published=s.published)
        mixed = weights[:, None] * p_i + (1 - weights[:, None]) * p_0
        mean = mixed.mean(axis=0)
        charges += float(divergence(mean[None], without(mixed, p_0, s.replace), s.alpha).max())
        if self._over(charges):
            return None
        self.charges = charges
        return draw(np.maximum(mean, _TINY), prg)

    def _over(self, charges: float) -> bool:
        s = self._settings
        return epsilon_after(charges, s.alpha, s.delta) > s.epsilon

    def _screened(self, p_0: np.ndarray, p_i: np.ndarray) -> bool:
        s = self._settings
        likeliest = np.argsort(-p_0, kind="stable")[:SCREENED]
        mixed = s.mixing * p_i.mean(axis=0) + (1 - s.mixing) * p_0
        noisy = mixed[likeliest] + s.noise * gaussian(likeliest.shape, self._prg)
        # Of numbers below zero the size counts, as in the odd powers of the authors' program.
        noisy = np.maximum(np.abs(noisy), _TINY)
        own = p_0[likeliest]
        apart = divergence(own / own.sum(), noisy / noisy.sum(), s.alpha)
        return bool(apart > s.threshold)


def without(mixed: np.ndarray, public: np.ndarray, replace: bool) -> np.ndarray:
    """Compute pbar_-i of every i, float64 [B, vocab]."""
    count = len(mixed)
    if replace:
        return np.asarray(mixed.mean(axis=0)[None] + (public[None] - mixed) / count)
    if count == 1:
        return public[None]
    return np.asarray((mixed.sum(axis=0)[None] - mixed) / (count - 1))


def _softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    scores = sanitised(logits) / temperature
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
