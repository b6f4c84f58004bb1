"""Products from prepared correlations: exact mod 2^64, one message each way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.arithmetic.product import (
    LIFT,
    linear,
    matmul,
    multiply,
    scale_rows,
    square,
    sum_squares,
    times_whole,
)
from spu_llm.core.op import ProtocolOp
from spu_llm.core.party import Party
from spu_llm.core.values import CLIENT, Arith, Value
from spu_llm.testing import FRAC_BITS, Case, OpContract, reconstruct_words, run_op
from spu_llm.testing.run import Outcome
from tests.protocols.composed import ComposedContract

INTEGERS = np.array([3, -1, 0, 2**62, -(2**63), 7])
INT64 = st.integers(-(2**63), 2**63 - 1)
MATRIX = np.array([[1, -2, 3], [2**40, 5, -(2**63)]])  # [2, 3]
ROWS = np.array([[3, -1], [2**62, 0]])
# What `linear` multiplies must leave room for its lift, and for an offset of 2^62.
WEIGHTS = np.array([[1, -2, 3], [2**30, 5, -(2**24)]])
INPUTS = np.array([[3, -1], [2**12, 2**13 - 1]])


class TestMultiply(OpContract):
    op = multiply
    fresh = True
    cases = [
        Case((INTEGERS, INTEGERS[::-1]), ("arith", "arith")),
        Case((INTEGERS, INTEGERS[::-1]), ("degenerate", "provider")),
        Case((INTEGERS[:0], INTEGERS[:0]), ("arith", "arith")),
    ]


class TestSquare(OpContract):
    op = square
    fresh = True
    cases = [Case((INTEGERS,), (form,)) for form in ("arith", "degenerate", "client")]


class TestTimesWhole(OpContract):
    op = times_whole
    masks = False
    cases = [
        Case((INTEGERS, np.array([1, 5, -7, 3, 2**20 + 1, -1])), (form, "public"))
        for form in ("arith", "degenerate", "client")
    ]


class TestMatmul(ComposedContract):
    op = matmul
    fresh = True
    elementwise = False
    cases = [Case((ROWS[:, None, :], ROWS[:, :, None]), ("arith",) * 2)]


class TestSumSquares(ComposedContract):
    op = sum_squares
    fresh = True
    elementwise = False
    cases = [Case((ROWS,), (form,)) for form in ("arith", "degenerate")]


class TestScaleRows(ComposedContract):
    op = scale_rows
    fresh = True
    elementwise = False
    cases = [Case((MATRIX, ROWS[:, 0]), ("arith",) * 2)]


class TestLinear(ComposedContract):
    op = linear
    elementwise = False
    whole = (1,)
    cases = [
        Case((INPUTS, WEIGHTS), (form, "provider"), {"label": "w", **more})
        for form, more in (("arith", {}), ("degenerate", {"lift": 18}))
    ]

    def hidden(self, own: list[Value], peer: list[Value], case: Case) -> list[np.ndarray]:
        lift = np.uint64(case.static.get("lift", LIFT))
        return [x.words << lift for x in peer if isinstance(x, Arith)]

    def _distinguish(self, case: Case, rank: int, twin: type[Party] | None = None) -> list[str]:
        if twin is not None and rank == CLIENT:
            # The provider sends a truncation's bits alone, of words that no view here has: a broken
            # mask shows in the exact check, and in the truncation's own contract.
            return ["bits of the truncation"]
        return super()._distinguish(case, rank, twin)


# Products are multiples of 2^18, which a truncation by 18 bits keeps exact.
EVEN = np.array([3 << 10, -(1 << 10), 0, (1 << 30), -(1 << 31)])


class TestShiftedMultiply(ComposedContract):
    op = multiply
    cases = [Case((EVEN, EVEN[::-1] >> 2), ("arith", "arith"), {"shift": 18})]


@given(st.lists(st.tuples(INT64, INT64), min_size=1, max_size=9))
def test_product_of_any_ring_values(pairs: list[tuple[int, int]]) -> None:
    x, y = np.array(pairs, np.int64).T
    outcome = run_op(multiply, Case((x, y), ("arith", "arith")))
    words = reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(words, x * y)


def test_product_of_matrices() -> None:
    x, y = np.stack([MATRIX, -MATRIX]), np.stack([MATRIX.T, MATRIX.T])
    outcome = run_op(matmul, Case((x, y), ("arith", "arith")))
    words = reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)
    np.testing.assert_array_equal(words, x @ y)


def test_price_of_a_product() -> None:
    """One message and 16 bytes per value each way; a square takes half."""
    x = np.zeros(1000, np.int64)
    for op, inputs, size in ((multiply, (x, x), 16_000), (square, (x,), 8_000)):
        traffic = run_op(op, Case(inputs, ("arith",) * len(inputs))).traffic[CLIENT]
        assert (traffic.sent_messages, traffic.received_messages) == (1, 1)
        assert (traffic.sent_bytes, traffic.received_bytes) == (size, size)


def test_fixed_point_is_within_one_unit() -> None:
    """Floats are truncated after the product: the error is below one unit in the last place."""
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-(2**24), 2**24, 500) / 2.0**FRAC_BITS for _ in range(2))
    for op, inputs in ((multiply, (x, y)), (square, (x,))):
        outcome = run_op(op, Case(inputs, ("client",) * len(inputs)))
        shares = [o[0] for o in outcome.outputs]
        assert all(isinstance(s, Arith) and s.frac_bits == FRAC_BITS for s in shares)
        total = sum(s.words for s in shares).view(np.int64) / 2.0**FRAC_BITS  # type: ignore[attr-defined]
        expected = inputs[0] * inputs[-1]
        assert np.max(np.abs(total - expected)) < 2.0**-FRAC_BITS


def words_of(outcome: Outcome) -> np.ndarray:
    """Return the first result's words, signed."""
    return reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)


@pytest.mark.parametrize("shift", [0, 7, 30, None])
@pytest.mark.parametrize("op", [multiply, square, sum_squares, scale_rows, matmul, linear])
def test_shift_is_what_the_reference_says(op: ProtocolOp, shift: int | None) -> None:
    """Within a unit of the floats' meaning, product 2^(18 - shift); exact without truncation."""
    rng = np.random.default_rng(1)
    shapes = {
        multiply: ((6,),) * 2,
        square: ((6,),),
        sum_squares: ((3, 4),),
        scale_rows: ((3, 4), (3,)),
        matmul: ((2, 3, 4), (2, 4, 5)),
        linear: ((3, 4), (4, 5)),
    }[op]
    inputs = tuple(rng.integers(-(2**20), 2**20, s) / 2.0**FRAC_BITS for s in shapes)
    forms = ("client", "provider")[: len(inputs)]
    static: dict[str, Any] = {"shift": shift} | ({"label": "w"} if op is linear else {})
    outcome = run_op(op, Case(inputs, forms, static))
    words = words_of(outcome) / 2.0**FRAC_BITS
    wanted = np.asarray(op.reference(*inputs, **static), np.float64)
    assert np.max(np.abs(words - wanted)) < (2.0**-FRAC_BITS if shift != 0 else 1e-12)
    cost = op.cost(*outcome.inputs[CLIENT], **static)
    assert sum(t.sent_messages for t in outcome.traffic) == cost.messages
    assert [t.sent_bytes for t in outcome.traffic] == [
        cost.client_to_provider,
        cost.provider_to_client,
    ]


def test_scaling_rows_opens_a_factor_once() -> None:
    rows, factors = np.arange(12).reshape(3, 4), np.array([2, -1, 5])
    outcome = run_op(scale_rows, Case((rows, factors), ("arith",) * 2))
    np.testing.assert_array_equal(words_of(outcome), rows * factors[:, None])
    assert [t.sent_bytes for t in outcome.traffic] == [8 * 3 * 5] * 2


def test_sums_of_squares() -> None:
    outcome = run_op(sum_squares, Case((ROWS,), ("arith",)))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(words_of(outcome), (ROWS * ROWS).sum(axis=1))
    assert [t.sent_bytes for t in outcome.traffic] == [8 * ROWS.size] * 2


def test_narrow_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="mod 2\\^24"):
        run_op(square, Case((np.arange(3),), ("arith24",)))


def test_whole_numbers_are_public_and_whole() -> None:
    for factor, form in ((INTEGERS, "client"), (INTEGERS.astype(np.float32), "public")):
        with pytest.raises(ValueError, match="whole numbers that both parties know"):
            run_op(times_whole, Case((INTEGERS, factor), ("arith", form)))


def test_linear_wants_a_matrix_of_the_provider() -> None:
    with pytest.raises(ValueError, match="private to the provider"):
        run_op(linear, Case((ROWS, MATRIX), ("arith", "arith"), {"label": "w"}))
