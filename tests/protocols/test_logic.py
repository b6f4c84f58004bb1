"""And and prefix-or of shared bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.bits.logic import and_bits, prefix_or
from spu_llm.testing import Case, OpContract, reconstruct_words, run_op
from tests.protocols.composed import ComposedContract

BITS = np.array([True, False, True, True, False])
WORDS = np.array([[-1, 0], [2**63 - 1, 5]])


class TestAndBits(OpContract):
    op = and_bits
    fresh = True
    cases = [
        Case((BITS, BITS[::-1]), ("bool1", "bool1")),
        Case((np.arange(8), np.arange(8)[::-1]), ("bool3", "bool3")),
        Case((BITS, ~BITS), ("client", "bool1")),
        Case((BITS, ~BITS), ("client", "provider")),
        Case((BITS[:0], BITS[:0]), ("bool1", "bool1")),
    ]


class TestPrefixOr(ComposedContract):
    op = prefix_or
    elementwise = False
    cases = [Case((np.eye(n, dtype=bool)[:, ::-1],), ("bool1",)) for n in (1, 2, 4, 5, 9)] + [
        Case((np.zeros((2, 3), bool),), ("client",))
    ]


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), min_size=1, max_size=9))
def test_and_of_whole_words(pairs: list[tuple[int, int]]) -> None:
    x, y = np.array(pairs, np.int64).T
    outcome = run_op(and_bits, Case((x, y), ("bool64", "bool64")))
    words = reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)
    np.testing.assert_array_equal(words, x & y)


@pytest.mark.parametrize("n", [3, 4, 6])
def test_prefix_or_of_every_row(n: int) -> None:
    x = np.array(list(itertools.product([False, True], repeat=n)))
    outcome = run_op(prefix_or, Case((x,), ("bool1",)))
    words = reconstruct_words([o[0] for o in outcome.outputs])
    np.testing.assert_array_equal(words, np.logical_or.accumulate(x, axis=-1))


@given(st.integers(1, 70), st.integers(1, 3), st.integers(0, 2**32))
def test_prefix_or_of_any_length(n: int, rows: int, seed: int) -> None:
    x = np.random.default_rng(seed).random((rows, n)) < 2 / n
    outcome = run_op(prefix_or, Case((x,), ("bool1",)))
    words = reconstruct_words([o[0] for o in outcome.outputs])
    np.testing.assert_array_equal(words, np.logical_or.accumulate(x, axis=-1))


def test_messages_of_prefix_or() -> None:
    for n, messages in ((4, 2), (8, 4), (20, 6), (36, 8)):
        outcome = run_op(prefix_or, Case((np.zeros((2, n), bool),), ("bool1",)))
        assert outcome.traffic[0].messages == messages
