"""Products of words and encoded weights on doubles: exact mod 2^64."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core import integers
from spu_llm.core.integers import factor_of, times_factor

WORDS = st.sampled_from([0, 1, 2**22 - 1, 2**44 - 1, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(
    0, 2**64 - 1
)


def exact(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x w mod 2^64 by Python's integers."""
    return np.array((x.astype(object) @ w.astype(object)) % 2**64, np.uint64).reshape(
        len(x), w.shape[1]
    )


@given(st.data(), st.integers(1, 62), st.integers(1, 4), st.integers(1, 5))
def test_any_words_by_any_weights(data: st.DataObject, bits: int, rows: int, k: int) -> None:
    weight = st.sampled_from([-(1 << bits), (1 << bits) - 1]) | st.integers(-(1 << bits), 1 << bits)
    x = np.array(data.draw(st.lists(WORDS, min_size=rows * k, max_size=rows * k)), np.uint64)
    w = np.array(data.draw(st.lists(weight, min_size=3 * k, max_size=3 * k)), np.int64)
    x, w = x.reshape(rows, k), w.reshape(k, 3)
    np.testing.assert_array_equal(times_factor(x, factor_of(w, 0)), exact(x, w))


@pytest.mark.parametrize("bits", [1, 20, 24, 25, 26])
def test_long_sums_of_the_largest_numbers(bits: int) -> None:
    """As many terms as it takes to leave what a double holds, all of them at their largest."""
    k = 20_000
    w = np.full((k, 2), (1 << bits) - 1, np.int64)
    w[:, 1] *= -1
    x = np.array([np.full(k, 2**64 - 1), np.full(k, 2**22 - 1), np.full(k, 2**63)], np.uint64)
    np.testing.assert_array_equal(times_factor(x, factor_of(w, 0)), x @ w.view(np.uint64))


def test_weights_are_encoded_once_and_dropped_with_their_array() -> None:
    w = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    first = factor_of(w, 18)
    assert factor_of(w, 18) is first and factor_of(w.copy(), 18) is not first
    np.testing.assert_array_equal(first.entries, np.round(w.astype(np.float64) * 2**18))
    assert factor_of(w, 10).bits < first.bits
    gone = weakref.ref(w)
    before = len(integers._factors)
    del w
    gc.collect()
    assert gone() is None and len(integers._factors) < before


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**50])
def test_weights_outside_the_ring_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="fixed-point ring"):
        factor_of(np.array([[1.0], [bad]]), 18)
