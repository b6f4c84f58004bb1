"""Clipping on shares: exact, bounded for every word of the ring, exactly zero for a null row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.dp import clip as clipping
from protocols.dp.clip import clip
from spu_llm.core.values import CLIENT
from spu_llm.testing import Case, reconstruct_words, run_op
from tests.protocols.composed import ComposedContract

K = 5


class TestClip(ComposedContract):
    op = clip
    fresh = True
    elementwise = False
    cases = [
        Case((np.array([[-9], [4]]), np.array([True, True])), ("arith33", "client"), {"bound": K})
    ]

    @pytest.mark.slow
    def test_each_broken_correlation_is_caught(self) -> None:
        """Slow, since no share of fewer bits will do."""
        super().test_each_broken_correlation_is_caught()


@pytest.mark.parametrize("whose", ["client", "provider", "public"])
@pytest.mark.parametrize("form", ["arith33", "arith", "arith40", "degenerate", "provider"])
def test_any_form(form: str, whose: str) -> None:
    d, live = np.array([[-9, 3, 5], [9, -3, 1]]), np.array([True, False])
    outcome = run_op(clip, Case((d, live), (form, whose), {"bound": K}))
    words = reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)
    np.testing.assert_array_equal(words, [[-5, 3, 5], [0, 0, 0]])
    cost = clip.cost(*outcome.inputs[CLIENT], bound=K)
    sent = [cost.client_to_provider, cost.provider_to_client]
    assert [t.sent_bytes for t in outcome.traffic] == sent and outcome.rounds == cost.rounds


def clipped(d: np.ndarray, live: np.ndarray, bound: int, form: str = "arith33") -> np.ndarray:
    case = Case((d, live), (form, "client"), {"bound": bound})
    return reconstruct_words([o[0] for o in run_op(clip, case).outputs]).view(np.int64)


WORDS = st.one_of(
    st.sampled_from([0, 1, -1, K - 1, K, K + 1, -K - 1, -K, 1 - K, 2**32 - 1, -(2**32), 2**32]),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**32) - 2 * K, -(2**32) + 2 * K),
)


@given(st.lists(WORDS, min_size=1, max_size=40), st.sampled_from(["arith33", "arith"]), st.data())
def test_no_word_whatever_contributes_more(words: list[int], form: str, data: Any) -> None:
    """Every word of the ring is within the bound, and an integer that the share holds is clipped;
    rows that are not live are zero.
    """
    d = np.array(words)[:, None]
    live = np.array(data.draw(st.lists(st.booleans(), min_size=len(d), max_size=len(d))))
    actual = clipped(d, live, K, form)
    assert np.abs(actual).max() <= K
    assert not actual[~live].any()
    half = 2 ** (32 if form == "arith33" else 63) - K
    held = (np.abs(d.astype(object)) < half)[:, 0] & live
    np.testing.assert_array_equal(actual[held], np.clip(d, -K, K)[held])


def test_a_row_depends_on_itself_alone() -> None:
    """One row is garbage in one run and null in another; others stay, and it moves them by K."""
    rng = np.random.default_rng(2)
    d = rng.integers(-2 * K, 2 * K, (4, 9))
    garbage = d.copy()
    garbage[1] = rng.integers(-(2**63), 2**63 - 1, 9)
    live = np.ones(4, bool)
    here = clipped(garbage, live, K)
    null = clipped(garbage, np.array([True, False, True, True]), K)
    rest = [0, 2, 3]
    np.testing.assert_array_equal(here[rest], null[rest])
    assert np.abs((here - null).sum(axis=0)).max() <= K


def test_a_difference_of_noisy_rows_is_no_null() -> None:
    """The broken twin: a null row computed as a copy of the public one, with a unit of noise."""
    noisy = np.array([[1, -1, 0]])
    assert clipped(noisy, np.array([True]), K).any()
    assert not clipped(noisy, np.array([False]), K).any()


def test_shares_without_room_for_exact_products_are_refused() -> None:
    d, live = np.array([[1]]), np.array([True])
    with pytest.raises(ValueError, match="give 33 or more"):
        clipped(d, live, K, "arith32")
    with pytest.raises(ValueError, match="no bound"):
        clipped(d, live, 2**31)
    with pytest.raises(ValueError, match="rows"):
        clipped(d, np.array([True, True]), K)
    with pytest.raises(ValueError, match="somebody knows"):
        run_op(clip, Case((d, live), ("arith33", "bool1"), {"bound": K}))


def test_rounds_and_bytes_of_a_token() -> None:
    """57 candidates and 7 references: 798 comparisons of 33 bits, 798 products."""
    shape = 7, 57
    case = Case((np.zeros(shape, np.int64), np.ones(7, bool)), ("arith33", "client"), {"bound": K})
    outcome = run_op(clip, case)
    cost = clip.cost(*outcome.inputs[CLIENT], bound=K)
    assert [t.sent_bytes for t in outcome.traffic] == [cost.client_to_provider] * 2
    assert (cost.messages, cost.rounds) == (10, 5)
    comparisons = clipping.sign_cost(2 * 7 * 57, 33)
    assert (comparisons.messages, comparisons.client_to_provider) == (6, 8_700)
    assert cost.client_to_provider == 8_700 + 3 * 50 + 100 + 5 * 798
