"""Row maxima by a tournament: exact, with ties, for any number of words and any plan of matches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.bits import gates
from protocols.functions import maximum
from protocols.functions.maximum import all_of, fan_ins
from spu_llm.core.values import CLIENT
from spu_llm.runtime.simulation import Simulation
from spu_llm.testing import Case, reconstruct_words, run_op
from tests.protocols.composed import ComposedContract
from tests.protocols.made_correlations import check, made

BITS = 26
HALF = 2 ** (BITS - 2)  # differences of words in [-HALF, HALF) fit BITS bits


class TestMaximum(ComposedContract):
    op = maximum.maximum
    fresh = True
    elementwise = False
    cases = [
        # One match of three: comparisons, a gate and two products.
        Case((np.array([[1, 1, -2], [-2, 0, 1]]),), ("arith",), {"bits": 3}),
        Case((np.array([[1, 1, -2]]),), ("arith20",), {"bits": 3}),
        Case((np.zeros((0, 3), np.int64),), ("arith",), {"bits": BITS}),
    ]


def maximum_of(x: np.ndarray, form: str = "arith", bits: int = BITS) -> np.ndarray:
    outcome = run_op(maximum.maximum, Case((x,), (form,), {"bits": bits}))
    cost = maximum.maximum.cost(*outcome.inputs[CLIENT], bits=bits)
    sizes = [t.sent_bytes for t in outcome.traffic]
    assert sizes == [cost.client_to_provider, cost.provider_to_client]
    assert outcome.rounds == cost.rounds
    return reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)


@given(st.data(), st.integers(1, 3), st.integers(1, 20), st.sampled_from([2, HALF]))
@settings(max_examples=40)
def test_maximum_of_any_rows(data: Any, rows: int, n: int, half: int) -> None:
    """Also of many equal words, and around any word of the ring."""
    word = st.integers(-half, half - 1)
    x = np.array(data.draw(st.lists(word, min_size=rows * n, max_size=rows * n))).reshape(rows, n)
    centre = np.int64(data.draw(st.sampled_from([0, 2**40, -(2**62)])))
    np.testing.assert_array_equal(maximum_of(x + centre), x.max(axis=1) + centre)


@pytest.mark.parametrize("fan_in", range(2, 9))
def test_every_plan_finds_it(fan_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and short last matches, wherever the maximum stands."""
    for n in range(2, 18):
        levels = next(k for k in itertools.count() if fan_in**k >= n)
        with monkeypatch.context() as context:
            context.setattr(maximum, "fan_ins", lambda *_, k=levels: (fan_in,) * k)
            x = np.where(np.eye(n, dtype=bool), HALF - 1, -HALF)
            np.testing.assert_array_equal(maximum_of(x), np.full(n, HALF - 1))


@pytest.mark.parametrize("form", ["client", "provider", "public", f"bool{BITS}"])
def test_any_form(form: str) -> None:
    x = np.array([[-5, 7, 7], [2, 1, 0], [-3, -2, -1]])
    x = x - x.min() if form.startswith("bool") else x
    np.testing.assert_array_equal(maximum_of(x, form), x.max(axis=1))


def test_of_narrow_shares() -> None:
    """Differences fit as many bits as the shares have; four bytes a word are enough."""
    rng = np.random.default_rng(0)
    x = rng.integers(-HALF, HALF, (3, 21))
    x[0, :3] = HALF - 1, -HALF, HALF - 1
    np.testing.assert_array_equal(maximum_of(x, f"arith{BITS}"), x.max(axis=1))
    narrow, wide = (maximum.maximum_cost(3, 21, BITS, width) for width in (BITS, 64))
    assert narrow.client_to_provider < wide.client_to_provider
    with pytest.raises(ValueError, match="give 2 to 20"):
        maximum_of(x, "arith20")


def test_one_word_is_its_own_maximum() -> None:
    x = np.array([[-7], [2**63 - 1]])
    outcome = run_op(maximum.maximum, Case((x,), ("arith",), {"bits": BITS}))
    assert outcome.rounds == 0
    np.testing.assert_array_equal(maximum_of(x), x[:, 0])


@pytest.mark.parametrize("shape", [(3, 0), (3,), (1, 2, 3)])
def test_what_has_no_row_maxima_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected rows"):
        run_op(maximum.maximum, Case((np.zeros(shape, np.int64),), ("arith",), {"bits": BITS}))


@pytest.mark.parametrize("fan_in", [2, 3, 4])
def test_a_match_has_one_winner(fan_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every order of the words, equal ones included: two winners or none would show in the sum."""
    monkeypatch.setattr(maximum, "fan_ins", lambda *_: (fan_in,))
    x = np.array(list(itertools.product(range(fan_in), repeat=fan_in))) - 1
    np.testing.assert_array_equal(maximum_of(x), x.max(axis=1))


def test_rounds_and_bytes() -> None:
    x = np.arange(16).reshape(2, 8)
    outcome = run_op(maximum.maximum, Case((x,), ("arith",), {"bits": BITS}))
    assert (fan_ins(2, 8, BITS), outcome.rounds) == ((8,), 5)
    # 56 comparisons in bits: 13 leaves of 3, 3 nodes of 8, a root of 7. Then 7 ands of 7, 14 muxes.
    each = 7 * (39 + 24 + 7) + 7 * 7 + 2 + 8 * 14
    assert [t.sent_bytes for t in outcome.traffic] == [each, each]


def test_matches_grow_as_words_become_fewer() -> None:
    """Where words are many, comparisons of matches are few; where they are few, so are rounds."""
    assert fan_ins(9, 32_000, BITS) == (2, 2, 2, 2, 2, 3, 6, 7, 8)
    assert fan_ins(1, 32_000, BITS) == (2, 2, 3, 6, 7, 8, 8)
    cost = maximum.maximum_cost(9, 32_000, BITS)
    assert (cost.messages, cost.rounds) == (86, 43)
    sent = cost.client_to_provider + cost.provider_to_client
    assert 36.5 < sent / (9 * 32_000) < 36.6


def test_spu_makes_what_the_widest_gate_needs(simulation: Simulation) -> None:
    correlation = gates.correlation(all_of(7))
    both, _ = made(simulation, correlation)
    check(correlation, both)
