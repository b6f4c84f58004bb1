"""Privacy accounting: what a run of token mechanisms spends, in zCDP, and as (epsilon, delta).

Events are those of `dp_accounting`, which compose; three are our own, as the library lacks them:
`BoundedRangeDpEvent`, an exponential mechanism; `DisjointDpEvent`, mechanisms on disjoint parts of
a fixed partition; `ApproximateDpEvent`, one whose distribution is nearly an ideal one's. The
accountant refuses what it cannot account for (`UnsupportedEventError`).

Sources: Bun and Steinke 2016 (zCDP, composition); Cesar and Rogers 2021, lemma 3.2 (a mechanism
whose privacy loss has range eta is eta^2 / 8-zCDP); Canonne, Kamath and Steinke 2020, proposition
12 (Renyi to approximate differential privacy); InvisibleInk, section 2 and theorem 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
from dp_accounting import dp_event
from dp_accounting.privacy_accountant import NeighboringRelation, PrivacyAccountant

# How far one reference may move S, in units of C: replaced by nothing (a term that is exactly 0),
# by logits that are all 0 (a term within [-C, C]), or by any other reference; or one more or less,
# where the others keep their batches.
ADD_OR_REMOVE = "add-or-remove"
REACH = {"replace-by-null": 1, "zero-out": 2, "replace-one": 2, ADD_OR_REMOVE: 1}
ADJACENCIES = tuple(REACH)
_RELATIONS = {
    "replace-by-null": NeighboringRelation.REPLACE_SPECIAL,
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": NeighboringRelation.REPLACE_ONE,
    ADD_OR_REMOVE: NeighboringRelation.ADD_OR_REMOVE_ONE,
}


@attrs.frozen
class BoundedRangeDpEvent(dp_event.DpEvent):  # type: ignore[misc]
    """A mechanism whose log-probability ratio between neighbours varies by `range` at most over its
    outputs: with scores of sensitivity Delta drawn at temperature tau, range = 2 Delta / tau.
    """

    range: float

    @property
    def rho(self) -> float:
        return self.range**2 / 8


@attrs.frozen
class DisjointDpEvent(dp_event.DpEvent):  # type: ignore[misc]
    """Events on disjoint parts of the references, fixed without looking at them; a neighbour
    differs in one part alone.
    """

    events: tuple[dp_event.DpEvent, ...]


@attrs.frozen
class ApproximateDpEvent(dp_event.DpEvent):  # type: ignore[misc]
    """`event`, but for a probability of `delta`: what noise of finite precision or range is, whose
    distribution is within `delta` (total variation) of an ideal one's, whatever the references are.
    """

    event: dp_event.DpEvent
    delta: float


class Spent(NamedTuple):
    """Within `delta` (total variation) of a distribution that is rho-zCDP. Such distances add up;
    which tokens an ideal distribution could draw and the real one cannot may depend on the
    references, so that this is less than delta-approximate zCDP.
    """

    rho: float
    delta: float = 0.0


class ZcdpAccountant(PrivacyAccountant):  # type: ignore[misc]
    """Adds up rho of zCDP, and the distance of what is only nearly it.

    Where the ideal distributions are (epsilon, delta)-private, distributions within d of them are
    (epsilon, delta + (1 + e^epsilon) d)-private: P(A) <= P'(A) + d <= e^epsilon Q'(A) + delta + d,
    Q'(A) <= Q(A) + d.
    """

    def __init__(self, adjacency: str = "replace-by-null") -> None:
        super().__init__(_RELATIONS[adjacency])
        self.adjacency = adjacency
        self.rho = 0.0
        self.delta = 0.0

    def _maybe_compose(self, event: dp_event.DpEvent, count: int, do_compose: bool) -> Any:
        try:
            spent = spent_by(event)
        except _Unknown as unknown:
            return self.CompositionErrorDetails(
                invalid_event=unknown.event, error_message="its zCDP is not known here"
            )
        if do_compose:
            self.rho += count * spent.rho
            self.delta += count * spent.delta
        return None

    def get_epsilon(self, target_delta: float) -> float:
        """Return epsilon at this delta; infinite where the events' distances leave none of it."""
        epsilon, before = 0.0, -1.0
        while (
            epsilon > before
        ):  # upwards to the least epsilon that its own distance leaves room for
            left = target_delta - _costs(self.delta, epsilon)
            if not left > 0:
                return math.inf
            epsilon, before = max(epsilon, epsilon_of(self.rho, left)), epsilon
        return epsilon

    def get_delta(self, target_epsilon: float) -> float:
        ideal = delta_of(self.rho, target_epsilon)
        return min(1.0, ideal + _costs(self.delta, target_epsilon))


def _costs(distance: float, epsilon: float) -> float:
    """Return what both neighbours' distances from the ideal distributions add to delta."""
    return distance * (1 + math.exp(min(epsilon, 700.0))) if distance else 0.0


class _Unknown(Exception):
    def __init__(self, event: dp_event.DpEvent) -> None:
        self.event = event


def spent_by(event: dp_event.DpEvent) -> Spent:
    """Return what an event spends; raises for one that is not known."""
    if isinstance(event, DisjointDpEvent):
        parts = [spent_by(part) for part in event.events]
        return Spent(*(max(values) for values in zip(Spent(0.0), *parts, strict=True)))
    if isinstance(event, dp_event.ComposedDpEvent):
        parts = [spent_by(part) for part in event.events]
        return Spent(*(math.fsum(values) for values in zip(Spent(0.0), *parts, strict=True)))
    if isinstance(event, dp_event.SelfComposedDpEvent) and event.count >= 0:
        one = spent_by(event.event)
        return Spent(event.count * one.rho, event.count * one.delta)
    if isinstance(event, ApproximateDpEvent) and 0 <= event.delta < 1:
        inner = spent_by(event.event)
        return Spent(inner.rho, inner.delta + event.delta)
    return Spent(_rho_of(event))


def _rho_of(event: dp_event.DpEvent) -> float:
    """Return rho of an event without parts, in zCDP."""
    if isinstance(event, BoundedRangeDpEvent):
        rho = event.rho
    elif isinstance(event, dp_event.ZCDpEvent) and event.xi == 0:
        rho = event.rho
    elif isinstance(event, dp_event.GaussianDpEvent):
        s = event.noise_multiplier
        rho = 1 / (2 * s**2) if s > 0 else math.inf
    elif isinstance(event, dp_event.LaplaceDpEvent):  # 1 / s pure
        s = event.noise_multiplier
        rho = 1 / (2 * s**2) if s > 0 else math.inf
    elif isinstance(event, dp_event.NoOpDpEvent):
        rho = 0.0
    elif isinstance(event, dp_event.NonPrivateDpEvent):
        rho = math.inf
    else:
        raise _Unknown(event)
    if not rho >= 0:  # NaN
        raise _Unknown(event)
    return float(rho)


# ---- rho and (epsilon, delta)

_ROUNDS, _POINTS = 6, 65


def epsilon_of(rho: float, delta: float) -> float:
    """Compute the tight conversion of rho to epsilon: inf over alpha > 1 of

        alpha rho + ln(1 / (alpha delta)) / (alpha - 1) + ln(1 - 1 / alpha),

    never below 0. Every alpha gives a bound, so that a minimum missed by a little is still one.
    """
    check_delta(delta)
    if not rho > 0:
        return 0.0
    if math.isinf(rho):
        return math.inf

    def bound(above: np.ndarray) -> np.ndarray:  # alpha - 1 = e^above
        less = np.exp(above)
        alpha = 1 + less
        rest = -(np.log(alpha) + math.log(delta)) / less
        return alpha * rho + rest + above - np.log(alpha)

    return max(0.0, _least(bound))


def loose_epsilon_of(rho: float, delta: float) -> float:
    """Return rho + 2 sqrt(rho ln(1 / delta)) (Bun and Steinke), for comparison."""
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def delta_of(rho: float, epsilon: float) -> float:
    """Compute the tight conversion of rho to delta: inf over alpha > 1 of exp((alpha - 1)(alpha rho
    - epsilon)) / alpha (1 - 1 / alpha)^(alpha - 1).
    """
    if not rho > 0:
        return 0.0
    if math.isinf(rho):
        return 1.0

    def bound(above: np.ndarray) -> np.ndarray:
        less = np.exp(above)
        alpha = 1 + less
        inner = alpha * rho - epsilon + above - np.log(alpha)
        return less * inner - np.log(alpha)

    return min(1.0, math.exp(min(0.0, _least(bound))))


def rho_for(epsilon: float, delta: float) -> float:
    """Return the largest rho whose tight epsilon at `delta` is `epsilon` or less (by bisection,
    from below).
    """
    check_delta(delta)
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, got {epsilon:g}")
    low, high = 0.0, 1.0
    while epsilon_of(high, delta) <= epsilon:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if epsilon_of(middle, delta) <= epsilon else (low, middle)
    return low


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, got {delta:g}")


def _least(bound: Any) -> float:
    """Return the least value of `bound` on ever finer grids of ln(alpha - 1)."""
    low, high = -20.0, 40.0
    best = math.inf
    for _ in range(_ROUNDS):
        points = np.linspace(low, high, _POINTS)
        with np.errstate(over="ignore"):
            values = bound(points)
        at = int(np.argmin(values))
        best = min(best, float(values[at]))
        low, high = points[max(0, at - 1)], points[min(_POINTS - 1, at + 1)]
    return best


def total(events: Sequence[dp_event.DpEvent], adjacency: str) -> ZcdpAccountant:
    """Return an accountant of all of these events, one after the other on the same references."""
    accountant = ZcdpAccountant(adjacency)
    for event in events:
        accountant.compose(event)
    return accountant
