"""Amin et al. 2024, private prediction with a sparse vector test: the white-box baseline.

As the InvisibleInk paper and its authors' program have it (spec 3.1). A token t of a text:

1. z_i = clip_C(phi_i - max phi_i + C), zbar = mean of z_i           (a null reference: z_i = 0)
2. dhat = || softmax(zbar) - softmax(phi_pub) ||_1 + Lap(2 sigma)
3. dhat <= thetahat: draw from softmax(phi_pub / tau_pub), which costs nothing more
4. else from softmax(zbar / tau_prv), and thetahat = theta + Lap(sigma) anew, r = r + 1
5. until the text ends, for T tokens, or r = T_prv

As published, r times C^2 / (2 B^2 tau_prv^2) + 2 / (B sigma)^2 is charged, r = T_prv. Of two slips
one is gone here: C / B is the sensitivity of zbar only if clipped logits of a null reference are 0
(it is 2 C / B where an empty prompt is run instead, a gift of the paper's), and here they are. The
other one stays in it: softmax(zbar) moves not by 1 / B but by up to 2 tanh(C / 2B) in L1, which is
more as soon as C is somewhat above 1.

Corrected, the test is charged what it costs: AboveThreshold with noise sigma and 2 sigma on a
distance of sensitivity s is 2 s / sigma-differentially private, hence 2 s^2 / sigma^2-zCDP, where s
= 2 tanh(Delta / 2), Delta the sensitivity of zbar in the adjacency at hand. C is the largest that
the budget allows.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from dp_accounting import dp_event

from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.accounting import REACH, BoundedRangeDpEvent, rho_for
from spu_llm.systems.dp_text.mechanism import SPAN, sanitised
from spu_llm.systems.dp_text.methods import HOLDS_BUT_FOR_ROUNDING, Method, Next
from spu_llm.systems.dp_text.parameters import check_budget
from spu_llm.systems.dp_text.sampling import draw, laplace

THRESHOLD, NOISE, PRIVATE_TOKENS = 0.7, 0.3, 100
LARGEST_CLIP = 100.0


@dataclass(frozen=True)
class Amin:
    """theta, sigma, tau_prv, tau_pub, T_prv; B and C."""

    batch: int
    clip: float
    max_new_tokens: int
    temperature: float = 1.0
    public_temperature: float = 1.0
    threshold: float = THRESHOLD
    noise: float = NOISE
    private_tokens: int = PRIVATE_TOKENS
    adjacency: str = "replace-by-null"


def published_test_rho(batch: int, noise: float = NOISE) -> float:
    """Return what the sparse vector test is charged for a private token: 2 / (B sigma)^2."""
    return 2 / (batch * noise) ** 2


def published_clip(
    rho: float,
    batch: int,
    temperature: float,
    private_tokens: int = PRIVATE_TOKENS,
    noise: float = NOISE,
) -> float | None:
    """Return C = B tau sqrt(2 (rho / T_prv - 2 / (B sigma)^2)); None (the paper's INF) where the
    test alone takes more than there is.
    """
    left = rho / private_tokens - published_test_rho(batch, noise)
    return batch * temperature * math.sqrt(2 * left) if left > 0 else None


def token_events(amin: Amin) -> list[dp_event.DpEvent]:
    """Return what one private token spends, corrected: the draw, and the test before it."""
    moved = REACH[amin.adjacency] * amin.clip / amin.batch
    distance = 2 * math.tanh(moved / 2)
    test = dp_event.ZCDpEvent(2 * (distance / amin.noise) ** 2)
    return [BoundedRangeDpEvent(2 * moved / amin.temperature), test]


def corrected_clip(rho: float, amin: Amin) -> float:
    """Return the largest C with which T_prv private tokens spend rho (by bisection, from below)."""
    low, high = 0.0, LARGEST_CLIP
    for _ in range(60):
        middle = (low + high) / 2
        spent = amin.private_tokens * _rho(Amin(**{**asdict(amin), "clip": middle}))
        low, high = (middle, high) if spent <= rho else (low, middle)
    return low


def _rho(amin: Amin) -> float:
    draw_event, test = token_events(amin)
    return float(draw_event.rho + test.rho)


def for_budget(
    epsilon: float,
    delta: float,
    *,
    batch: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    adjacency: str = "replace-by-null",
    published: bool = False,
    private_tokens: int = PRIVATE_TOKENS,
) -> Method:
    """Return the method at this budget. InputError where there is none."""
    check_budget(epsilon, delta)
    private_tokens = min(private_tokens, max_new_tokens)
    rho = rho_for(epsilon, delta)
    plain = Amin(
        batch, 0.0, max_new_tokens, temperature, adjacency=adjacency, private_tokens=private_tokens
    )
    if not published:
        amin = Amin(**{**asdict(plain), "clip": corrected_clip(rho, plain)})
        one = dp_event.ComposedDpEvent(token_events(amin))
        return method(amin, "amin", dp_event.SelfComposedDpEvent(one, private_tokens))
    clip = published_clip(rho, batch, temperature, private_tokens)
    if clip is None:
        raise InputError(
            f"Amin et al. as published is infeasible at epsilon {epsilon:g} with a batch of "
            f"{batch}: its test alone takes more; use larger batches"
        )
    amin = Amin(**{**asdict(plain), "clip": clip})
    return method(
        amin,
        "amin-published",
        dp_event.UnsupportedDpEvent(),
        "as published; its test is charged too little from C = 1 on, so this is no guarantee",
    )


def method(
    amin: Amin, name: str, event: dp_event.DpEvent, guarantee: str = HOLDS_BUT_FOR_ROUNDING
) -> Method:
    """Return steps 1 to 5 as a method."""

    def begin(present: np.ndarray, prg: Prg) -> Next:
        state = _State(amin, present, prg)
        return state.token

    facts: dict[str, Any] = asdict(amin)
    return Method(name, amin.batch, amin.max_new_tokens, event, begin, facts, guarantee)


class _State:
    def __init__(self, amin: Amin, present: np.ndarray, prg: Prg) -> None:
        self._amin, self._present, self._prg = amin, present, prg
        self._private = 0  # r
        self._threshold = amin.threshold + laplace(amin.noise, prg)

    def token(self, public: np.ndarray, private: np.ndarray) -> int | None:
        amin, prg = self._amin, self._prg
        if self._private == amin.private_tokens:
            return None
        mean = mean_clipped(private, self._present, amin.clip)
        distance = np.abs(_softmax(mean) - _softmax(sanitised(public))).sum()
        if distance + laplace(2 * amin.noise, prg) <= self._threshold:
            return draw(_weights(sanitised(public), amin.public_temperature), prg)
        self._threshold = amin.threshold + laplace(amin.noise, prg)
        self._private += 1
        return draw(_weights(mean, amin.temperature), prg)


def mean_clipped(private: np.ndarray, present: np.ndarray, clip: float) -> np.ndarray:
    """Compute zbar, float64 [vocab], of private [B, vocab]: step 1."""
    logits = sanitised(private)
    z = np.clip(logits - logits.max(axis=1, keepdims=True) + clip, -clip, clip)
    return np.asarray(np.where(present[:, None], z, 0.0).sum(axis=0) / len(present))


def _weights(scores: np.ndarray, temperature: float) -> np.ndarray:
    return np.exp(np.clip((scores - scores.max()) / temperature, -SPAN, SPAN))


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = _weights(scores, 1.0)
    return np.asarray(weights / weights.sum())
