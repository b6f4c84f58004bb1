"""Products of words and encoded weights on doubles: exact mod 2^64."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core import integers
from spu_llm.core.integers import Factor, times_factor
from spu_llm.core.values import PROVIDER, Private

WORDS = st.sampled_from([0, 1, 2**22 - 1, 2**44 - 1, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(
    0, 2**64 - 1
)


def private(w: np.ndarray) -> Private:
    return Private(PROVIDER, w.shape, w.dtype, w)


def factor_of(w: np.ndarray, frac_bits: int) -> Factor:
    return integers.factor_of(private(w), frac_bits)


def exact(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return x w mod 2^64 by Python's integers."""
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


def test_weights_are_encoded_once_whatever_array_has_them() -> None:
    w = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    value = private(w)
    first = integers.factor_of(value, 18)
    assert integers.factor_of(value, 18) is first
    assert factor_of(w, 18) is first and factor_of(w.copy(), 18) is first
    assert factor_of(np.asfortranarray(w), 18) is first
    np.testing.assert_array_equal(first.entries, np.round(w.astype(np.float64) * 2**18))
    assert factor_of(w, 10).bits < first.bits


@pytest.mark.parametrize(
    "other", [lambda w: w + np.float32(0.5), lambda w: w.T, lambda w: w.astype(np.float64)]
)
def test_other_weights_are_encoded_on_their_own(other: Callable[[np.ndarray], np.ndarray]) -> None:
    w = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    value = private(w)
    first, second = integers.factor_of(value, 18), factor_of(other(w), 18)
    assert second is not first
    np.testing.assert_array_equal(second.entries, np.round(other(w).astype(np.float64) * 2**18))


def test_an_encoding_goes_with_the_last_of_its_users() -> None:
    """Of the values that have it, and of what was made of it."""
    w = np.random.default_rng(2).normal(size=(4, 3)).astype(np.float32)
    one, other = private(w), private(w.copy())
    digest, factor = integers.factor_of(one, 18).digest, integers.factor_of(other, 18)
    del one, other
    gc.collect()
    assert factor_of(w, 18) is factor and factor.digest == digest
    key = private(w).digest, 18
    assert key in integers._factors
    del factor
    gc.collect()
    assert key not in integers._factors


@pytest.mark.parametrize("w", [np.ones((2, 2)), np.full((2, 2), 1 << 40)])
def test_nobody_writes_into_an_encoding(w: np.ndarray) -> None:
    for factor in (factor_of(w, 0), integers.factor_from(w.astype(np.uint64))):
        with pytest.raises(ValueError, match="read-only"):
            factor.entries[0, 0] = 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**50])
def test_weights_outside_the_ring_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="fixed-point ring"):
        factor_of(np.array([[1.0], [bad]]), 18)
