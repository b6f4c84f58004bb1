"""Whether a value is below public thresholds, under one mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.bits import masked_number as numbers
from protocols.bits.masked_number import digits, masked_number, number_gate
from protocols.bits.stars import stars
from protocols.bits.thresholds import below
from spu_llm.core.values import CLIENT
from spu_llm.testing import Case, OpContract, reconstruct_words, run_op

AROUND = (-7, 0, 3, 8)


def edges(bits: int, some: tuple[int, ...]) -> np.ndarray:
    """Values on both sides of thresholds, and the ends of what is held: one column."""
    half = 1 << (bits - 1)
    ends = [max(some) - half, min(some) + half - 1]
    return np.array([*ends, *(t + d for t in some for d in (-1, 0, 1))], np.int64)[:, None]


class TestBelow(OpContract):
    op = below
    elementwise = False
    fresh = True
    cases = [
        Case((edges(9, AROUND),), ("arith",), {"thresholds": (AROUND,), "bits": 9}),
        Case((edges(14, (5,))[:2],), ("degenerate",), {"thresholds": ((5,),), "bits": 14}),
        Case(
            (np.array([[3, -3], [40, 2]]),),
            ("arith24",),
            {"thresholds": ((0, 1), (2,)), "bits": 17},
        ),
        Case((np.zeros((0, 1), np.int64),), ("arith",), {"thresholds": ((3,),), "bits": 8}),
    ]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(5, 32))
def test_any_value_and_any_thresholds(data: Any, bits: int) -> None:
    """Of columns with numbers of thresholds of their own."""
    quarter = 1 << (bits - 2)
    rows, values = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70))
    number = st.integers(-quarter, quarter - 1)
    some = tuple(tuple(data.draw(st.lists(number, min_size=1, max_size=4))) for _ in range(rows))
    x = np.array(
        data.draw(
            st.lists(
                st.lists(number, min_size=values, max_size=values), min_size=rows, max_size=rows
            )
        ),
        np.int64,
    )
    case = Case((x.T,), ("arith",), {"thresholds": some, "bits": bits})
    outcome = run_op(below, case)
    made = reconstruct_words([o[0] for o in outcome.outputs])
    wanted = [row < t for row, own in zip(x, some, strict=True) for t in own]
    np.testing.assert_array_equal(made, wanted)
    assert outcome.rounds == 2


def test_bytes_do_not_grow_with_comparisons_but_by_gates() -> None:
    """14 bits of a value, and half a byte of each threshold, each way."""
    for count in (1, 6):
        some = (tuple(range(count)),)
        x = np.zeros((800, 1), np.int64)
        outcome = run_op(below, Case((x,), ("arith",), {"thresholds": some, "bits": 14}))
        assert outcome.traffic[CLIENT].sent_bytes == 800 * (14 + 4 * count) // 8


@pytest.mark.parametrize("bits", range(5, 33))
def test_digits_are_all_but_the_top_bit(bits: int) -> None:
    layout = digits(bits)
    assert [first for first, _ in layout] == [
        sum(size for _, size in layout[:i]) for i in range(len(layout))
    ]
    assert sum(size for _, size in layout) == bits - 1
    assert 2 <= min(size for _, size in layout) and max(size for _, size in layout) <= 5
    # Of each bit but the top one, the chooser's share is a transfer's choice: R's words need it.
    for first in (0, 1):
        plan = stars(number_gate(bits), first, alone=True)
        assert {star.chooser for star in plan} == {first}
        assert set(numbers._choices(bits, first)) == set(range(bits - 1))


def test_a_range_one_bit_short_is_wrong() -> None:
    """What differences fit is the caller's to say."""
    x = edges(9, AROUND)
    outcome = run_op(below, Case((x,), ("arith",), {"thresholds": (AROUND,), "bits": 8}))
    made = reconstruct_words([o[0] for o in outcome.outputs])
    assert (made != np.stack([x[:, 0] < t for t in AROUND])).any()


def test_numbers_are_named_after_their_digits() -> None:
    names = {masked_number(bits).name for bits in range(5, 33)}
    assert len(names) == 28
