"""The accountant's figures: the oracles of InvisibleInk's paper, computed elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.privacy_accountant import UnsupportedEventError
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.core.errors import InputError
from spu_llm.systems.dp_text.accounting import (
    ADJACENCIES,
    ApproximateDpEvent,
    BoundedRangeDpEvent,
    DisjointDpEvent,
    ZcdpAccountant,
    delta_of,
    epsilon_of,
    loose_epsilon_of,
    rho_for,
    total,
)
from spu_llm.systems.dp_text.corpus import check_texts
from spu_llm.systems.dp_text.parameters import Parameters

DELTA = 1e-6
ORDERS = (1 + np.geomspace(1e-2, 1e4, 1000)).tolist()
CONVERSIONS = [
    (0.01, 0.6217, 0.7534),
    (0.1, 2.1419, 2.4508),
    (0.5, 5.2215, 5.7565),
    (1.0, 7.7662, 8.4338),
    (2.0, 11.6886, 12.5130),
]
# epsilon, rho, C / B, C, C by the loose bound, C in the paper's table 12.
TABLE_12 = [
    (1.0, 0.0243560, 0.011844, 0.08291, 0.0702, 0.08),
    (3.0, 0.1850698, 0.032650, 0.22855, 0.2039, 0.23),
    (5.0, 0.4630650, 0.051645, 0.36152, 0.3298, 0.36),
    (10.0, 1.5392788, 0.094161, 0.65913, 0.6180, 0.66),
]


@pytest.mark.parametrize("rho, tight, loose", CONVERSIONS)
def test_zcdp_as_epsilon(rho: float, tight: float, loose: float) -> None:
    assert epsilon_of(rho, DELTA) == pytest.approx(tight, abs=5e-5)
    assert loose_epsilon_of(rho, DELTA) == pytest.approx(loose, abs=5e-5)
    assert delta_of(rho, epsilon_of(rho, DELTA)) == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.parametrize("epsilon, rho, per, clip, loose, printed", TABLE_12)
def test_clip_norms_of_table_12(
    epsilon: float, rho: float, per: float, clip: float, loose: float, printed: float
) -> None:
    tokens = Parameters.for_budget(epsilon, DELTA, batch=7, temperature=1.2, max_new_tokens=500)
    assert tokens.rho == pytest.approx(rho, abs=5e-8)
    assert tokens.clip / 7 == pytest.approx(per, abs=6e-7)
    assert tokens.clip == pytest.approx(clip, abs=6e-6)
    assert round(tokens.clip, 2) == printed
    assert tokens.epsilon(DELTA) <= epsilon
    assert tokens.epsilon(DELTA) == pytest.approx(epsilon, rel=1e-9)
    # The loose bound gives another one.
    root = math.sqrt(math.log(1 / DELTA) + epsilon) - math.sqrt(math.log(1 / DELTA))
    by_loose = 7 * 1.2 * math.sqrt(2 * root**2 / 500)
    assert by_loose == pytest.approx(loose, abs=6e-5) and round(by_loose, 2) != printed


@pytest.mark.parametrize(
    "batch, clip, tokens, rho, epsilon",
    [
        (8, 1.0, 100, 0.78125, 6.7342),
        (128, 1.0, 500, 0.0152588, 0.7788),
        (15, 0.5, 200, 1 / 9, 2.2685),
    ],
)
def test_theorem_2(batch: int, clip: float, tokens: int, rho: float, epsilon: float) -> None:
    actual = Parameters(batch, clip, 1.0, tokens)
    assert actual.rho == pytest.approx(rho, rel=1e-6)
    assert actual.epsilon(DELTA) == pytest.approx(epsilon, abs=5e-5)
    assert actual.rho_token == pytest.approx(clip**2 / (2 * batch**2), rel=1e-6)
    for other in ("zero-out", "replace-one"):
        assert replace(actual, adjacency=other).rho == pytest.approx(4 * rho, rel=1e-6)
    assert replace(actual, adjacency="add-or-remove").rho == actual.rho


@pytest.mark.parametrize(
    "clip, printed, tight, loose", [(0.1, 1.3, 1.2226, 1.4347), (1.0, 17.6, 16.5630, 17.5359)]
)
def test_caption_of_figure_9_is_neither_bound(
    clip: float, printed: float, tight: float, loose: float
) -> None:
    rho = Parameters(7, clip, 1.2, 500).rho
    assert epsilon_of(rho, DELTA) == pytest.approx(tight, abs=5e-5)
    assert loose_epsilon_of(rho, DELTA) == pytest.approx(loose, abs=5e-5)
    assert abs(epsilon_of(rho, DELTA) - printed) > 0.05


def test_a_text_needs_a_batch_of_its_own() -> None:
    """TAB has 1013 texts: 7 full batches of 127, where the paper says 8, which needs 1016."""
    assert 1013 // 127 == 7
    check_texts(7, [7 * 127], 127)
    with pytest.raises(InputError, match="must be 1 to 7, found 8"):
        check_texts(8, [7 * 127], 127)
    check_texts(8, [1013], 127)  # the last one filled up with nulls
    with pytest.raises(InputError):
        check_texts(9, [1013], 127)
    # Those of each label make batches of their own.
    check_texts(9, [500, 513], 127)
    with pytest.raises(InputError):
        check_texts(9, [508, 505], 127)


@settings(max_examples=25)
@given(st.floats(1e-6, 50), st.floats(1e-12, 1e-2))
def test_ways_there_and_back(rho: float, delta: float) -> None:
    epsilon = epsilon_of(rho, delta)
    assert epsilon <= loose_epsilon_of(rho, delta) * (1 + 1e-12)
    if epsilon > 0:
        assert rho_for(epsilon, delta) == pytest.approx(rho, rel=1e-6)
        assert epsilon_of(rho_for(epsilon, delta), delta) <= epsilon
        assert delta_of(rho, epsilon) == pytest.approx(delta, rel=1e-5)


@settings(max_examples=20)
@given(st.floats(0.001, 3), st.integers(1, 500))
def test_the_library_agrees(rho: float, count: int) -> None:
    """Its accountant searches some orders alone, so that its epsilon is the larger one."""
    event = dp_event.ZCDpEvent(rho / count)
    theirs = RdpAccountant(ORDERS).compose(event, count).get_epsilon(DELTA)
    ours = ZcdpAccountant().compose(event, count).get_epsilon(DELTA)
    assert ours <= theirs * (1 + 1e-9) and ours == pytest.approx(theirs, rel=1e-4)


def test_events_compose() -> None:
    one = BoundedRangeDpEvent(0.25)
    assert one.rho == 1 / 128
    text = dp_event.SelfComposedDpEvent(one, 100)
    # Disjoint batches: the worst of them; further texts of the same references add up.
    corpus = DisjointDpEvent((text, dp_event.SelfComposedDpEvent(one, 10), dp_event.NoOpDpEvent()))
    assert total([corpus], "replace-by-null").rho == pytest.approx(100 / 128)
    assert total([corpus, text], "replace-by-null").rho == pytest.approx(200 / 128)
    both = dp_event.ComposedDpEvent([text, dp_event.GaussianDpEvent(2.0)])
    assert total([both], "replace-one").rho == pytest.approx(100 / 128 + 1 / 8)
    assert math.isinf(total([dp_event.NonPrivateDpEvent()], "zero-out").get_epsilon(DELTA))
    assert ZcdpAccountant().get_epsilon(DELTA) == 0


def test_noise_that_is_not_quite_the_ideal_one_costs_delta() -> None:
    one = BoundedRangeDpEvent(0.25)
    nearly = ApproximateDpEvent(one, 1e-9)
    text = dp_event.SelfComposedDpEvent(nearly, 100)
    actual = total([DisjointDpEvent((text, nearly))], "replace-by-null")
    assert (actual.rho, actual.delta) == pytest.approx((100 / 128, 1e-7))
    assert actual.get_delta(6.0) == pytest.approx(
        delta_of(actual.rho, 6.0) + (1 + math.exp(6.0)) * 1e-7
    )
    # No epsilon leaves room for 1e-7 e^epsilon in 1e-6 where the ideal distribution has 6.7.
    assert math.isinf(actual.get_epsilon(DELTA))
    close = total(
        [ApproximateDpEvent(dp_event.SelfComposedDpEvent(one, 100), 1e-11)], "replace-by-null"
    )
    epsilon = close.get_epsilon(DELTA)
    assert epsilon_of(close.rho, DELTA) < epsilon < 1.001 * epsilon_of(close.rho, DELTA)
    assert close.get_delta(epsilon) == pytest.approx(DELTA)
    assert math.isinf(actual.get_epsilon(1e-7))


def test_a_distance_from_the_ideal_counts_more_than_once() -> None:
    """A token that the real distribution of one neighbour can no longer draw, and that the other
    one's draws e^2 times as often as the ideal one would: all of that is beyond any epsilon.
    """
    rare, likelier = 1e-9, math.exp(2)
    ideal, real = np.array([1 - rare, rare]), np.array([1.0, 0.0])
    other = np.array([1 - likelier * rare, likelier * rare])
    ratios = np.log(other / ideal)
    near = ZcdpAccountant().compose(
        ApproximateDpEvent(BoundedRangeDpEvent(float(np.ptp(ratios))), rare)
    )
    for epsilon in (5.0, 20.0):
        lost = float(np.maximum(other - math.exp(epsilon) * real, 0).sum())
        assert lost == pytest.approx(likelier * rare)
        assert near.get_delta(epsilon) >= lost


@pytest.mark.parametrize(
    "event",
    [
        dp_event.UnsupportedDpEvent(),
        dp_event.PoissonSampledDpEvent(0.1, BoundedRangeDpEvent(0.1)),
        dp_event.ZCDpEvent(0.1, 0.1),
        BoundedRangeDpEvent(math.nan),
        dp_event.SelfComposedDpEvent(BoundedRangeDpEvent(0.1), -1),
        DisjointDpEvent((BoundedRangeDpEvent(0.1), dp_event.UnsupportedDpEvent())),
        ApproximateDpEvent(dp_event.UnsupportedDpEvent(), 1e-9),
        ApproximateDpEvent(BoundedRangeDpEvent(0.1), -1e-9),
        ApproximateDpEvent(BoundedRangeDpEvent(0.1), math.nan),
    ],
    ids=repr,
)
def test_what_is_not_known_is_refused_before_anything_is_added(event: dp_event.DpEvent) -> None:
    accountant = ZcdpAccountant()
    with pytest.raises(UnsupportedEventError):
        accountant.compose(dp_event.ComposedDpEvent([BoundedRangeDpEvent(1.0), event]))
    assert accountant.rho == 0


NONSENSE = {
    "adjacency": {"adjacency": "of-friends"},
    "batch": {"batch": 0},
    "tokens": {"max_new_tokens": 0},
    "top-k": {"top_k": 0},
    "temperature": {"temperature": 0.0},
    "clip": {"clip": -1.0},
    "nan": {"clip": math.nan},
    "infinite": {"temperature": math.inf},
}


@pytest.mark.parametrize("change", NONSENSE.values(), ids=list(NONSENSE))
def test_parameters_refuse_nonsense(change: dict[str, object]) -> None:
    good = Parameters(8, 1.0, 1.0, 100, 50)
    with pytest.raises(InputError):
        replace(good, **change)


@pytest.mark.parametrize("epsilon, delta", [(0, 1e-6), (-1, 1e-6), (1, 0), (1, 1), (np.nan, 1e-6)])
def test_budgets_refuse_nonsense(epsilon: float, delta: float) -> None:
    with pytest.raises(InputError):
        Parameters.for_budget(epsilon, delta, batch=8, temperature=1.0, max_new_tokens=10)


@settings(max_examples=25)
@given(
    st.floats(0.01, 50),
    st.integers(1, 200),
    st.floats(0.05, 3),
    st.integers(1, 2000),
    st.sampled_from(ADJACENCIES),
)
def test_a_budget_is_kept_and_used(
    epsilon: float, batch: int, temperature: float, tokens: int, adjacency: str
) -> None:
    actual = Parameters.for_budget(
        epsilon,
        DELTA,
        batch=batch,
        temperature=temperature,
        max_new_tokens=tokens,
        adjacency=adjacency,
    )
    assert epsilon * (1 - 1e-6) <= actual.epsilon(DELTA) <= epsilon


def renyi(p: np.ndarray, q: np.ndarray, alpha: float) -> float:
    return float(np.logaddexp.reduce(alpha * np.log(p) + (1 - alpha) * np.log(q)) / (alpha - 1))


@pytest.mark.parametrize("change, most", [(0.1, 0.009983), (1.0, 0.8676)])
def test_bounded_range_bounds_renyi_divergence(change: float, most: float) -> None:
    """Two tokens whose logits move by +change and -change, at the worst base: D_2 near rho alpha,
    never above it.
    """
    rho = BoundedRangeDpEvent(2 * change).rho
    worst = 0.0
    for base in np.linspace(-6, 6, 2401):
        p, q = (np.exp([b, 0]) / np.exp([b, 0]).sum() for b in (base, base + 2 * change))
        worst = max(worst, renyi(p, q, 2.0), renyi(q, p, 2.0))
    assert worst == pytest.approx(most, rel=1e-4) and worst <= 2 * rho


def test_no_random_instance_exceeds_rho() -> None:
    source = np.random.default_rng(1)
    for _ in range(4000):
        alpha, change, tau = source.uniform(1.01, 30), source.uniform(0, 2), source.uniform(0.5, 2)
        base = source.normal(size=source.integers(2, 12)) * 3
        moved = base + source.choice([-change, change], base.shape)
        p, q = (np.exp(x / tau) / np.exp(x / tau).sum() for x in (base, moved))
        rho = BoundedRangeDpEvent(2 * change / tau).rho
        assert renyi(p, q, alpha) <= rho * alpha * (1 + 1e-9) + 1e-12
