"""Products by way of the field: the contract of each op, how they round, and what they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.arithmetic import field_product
from protocols.arithmetic.field import LIMIT_BITS
from protocols.arithmetic.field_product import field_multiply, field_scale_rows, field_square
from spu_llm.core import field
from spu_llm.core.channel import MemoryChannel
from spu_llm.core.correlation import Correlation, Correlations
from spu_llm.core.errors import WireError
from spu_llm.core.op import ProtocolOp
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import to_bytes
from spu_llm.testing import FRAC_BITS, Case, OpContract, reconstruct_words, run_op
from tests.protocols.composed import ComposedContract

INTEGERS = np.array([0, 1, -1, 2**22, -(2**22) + 1, 12345], np.int64)
NARROW = np.array([0, 1, -1, 2**22 - 1, -(2**22), 12345], np.int64)
MATRIX = np.array([[1, -(2**20)], [2**22, 0], [-5, 7]], np.int64)
LARGEST = (1 << LIMIT_BITS) - (1 << field.MAX_SHIFT)
NO_CUTS = {"cuts": (0, 0)}
ELEMENTS = st.integers(0, field.P - 1)


class FieldContract(OpContract):
    """What a broken mask of the middle step leaves open is a share of the field, which follows from
    prepared words that no view here has: the exact check notices it, samples do not.
    """

    fresh = True

    def _distinguish(self, case: Case, rank: int, twin: type[Party] | None = None) -> list[str]:
        if twin is not None:
            return ["an element opened"]
        return super()._distinguish(case, rank, twin)


class TestFieldMultiply(FieldContract):
    op = field_multiply
    cases = [
        Case((INTEGERS, INTEGERS[::-1].copy()), ("arith", "arith"), NO_CUTS),
        Case((INTEGERS, INTEGERS[::-1].copy()), ("degenerate", "provider"), NO_CUTS),
        Case((INTEGERS[:0], INTEGERS[:0]), ("arith", "arith"), NO_CUTS),
        Case((NARROW, INTEGERS), ("arith24", "arith"), NO_CUTS),
        Case((NARROW, NARROW[::-1].copy()), ("arith24", "arith30"), NO_CUTS),
    ]


class TestFieldSquare(FieldContract):
    op = field_square
    cases = [
        Case((INTEGERS,), (form,), {"cuts": (0,)}) for form in ("arith", "degenerate", "client")
    ]


class TestFieldScaleRows(FieldContract, ComposedContract):
    op = field_scale_rows
    elementwise = False
    cases = [Case((MATRIX, INTEGERS[:3]), ("arith",) * 2, NO_CUTS)]


# ---- what they open


def opened(monkeypatch: pytest.MonkeyPatch, op: ProtocolOp, masked: bool) -> np.ndarray:
    """Return all elements that 4096 equal products open, all the same without their masks."""
    x = np.full(4096, 12345, np.int64)
    inputs = {field_square: (x,), field_scale_rows: (x[:, None], x)}.get(op, (x, x))
    sums: list[np.ndarray] = []
    opening, take = field_product._opened, Party.take

    def spied(party: Party, shares: np.ndarray) -> np.ndarray:
        total = opening(party, shares)
        sums.append(total.reshape(-1))
        return total

    def bare(party: Party, correlation: Correlation, units: int) -> Correlations:
        taken = take(party, correlation, units)
        if correlation.by_slots is None:
            return taken
        zeros = (list(map(np.zeros_like, part)) for part in (taken.masks, taken.results))
        return Correlations(*zeros)

    with monkeypatch.context() as patch:
        patch.setattr(field_product, "_opened", spied)
        if not masked:
            patch.setattr(Party, "take", bare)
        result(op, inputs, cuts=(0,) * len(inputs))
    one, other = sums  # each party's: both open the same
    assert (one == other).all()
    return one


@pytest.mark.parametrize("op", [field_multiply, field_square, field_scale_rows])
def test_opened_elements_are_uniform(monkeypatch: pytest.MonkeyPatch, op: ProtocolOp) -> None:
    """And fresh. Chi-squared of 63 degrees is above 150 once in 200 million runs, and more than one
    pair of equal elements is there once in 10^12.
    """

    def statistic(elements: np.ndarray) -> float:
        counts = np.bincount((elements * 64.0 / field.P).astype(int), minlength=64)
        return float(((counts - len(elements) / 64) ** 2).sum() / (len(elements) / 64))

    uniform = opened(monkeypatch, op, masked=True)
    assert statistic(uniform) < 150 and len(np.unique(uniform)) >= len(uniform) - 1
    assert statistic(opened(monkeypatch, op, masked=False)) > 1000


# ---- what they hold


def result(op: ProtocolOp, inputs: tuple[np.ndarray, ...], **static: Any) -> np.ndarray:
    forms = ("arith",) * len(inputs)
    outcome = run_op(op, Case(inputs, forms, static))
    return reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)


@given(st.lists(st.tuples(*[st.integers(-(2**23) + 2, 2**23 - 2)] * 2), min_size=1, max_size=9))
def test_any_product_below_the_limit_is_exact(pairs: list[tuple[int, int]]) -> None:
    x, y = np.array(pairs, np.int64).T
    assert (result(field_multiply, (x, y), cuts=(0, 0)) == x * y).all()


@given(
    st.integers(3, 63).flatmap(
        lambda bits: st.tuples(
            st.just(bits),
            st.integers(0, bits - 2),
            st.lists(st.integers(-(1 << bits - 2), (1 << bits - 2) - 1), min_size=1, max_size=9),
        )
    )
)
def test_a_narrow_factor_enters_the_field(given: tuple[int, int, list[int]]) -> None:
    """Whole where nothing is cut, and else rounded down or up."""
    bits, cut, numbers = given
    cut = max(cut, bits - LIMIT_BITS)
    x = np.array(numbers, np.int64)
    case = Case((x, np.ones_like(x)), (f"arith{bits}", "arith"), {"cuts": (cut, 0), "shift": cut})
    (client,), (provider,) = run_op(field_multiply, case).outputs
    made = reconstruct_words([client, provider]).view(np.int64)
    assert (client.bits, provider.bits) == (64, 64)
    assert ((made == x >> cut) | (made == -(-x >> cut))).all()


def test_a_narrow_factor_is_rounded_without_a_bias() -> None:
    """4096 times one number, 6 deviations."""
    ones = np.ones(4096, np.int64)
    case = Case((-12345 * ones, ones), ("arith24", "arith"), {"cuts": (6, 0), "shift": 6})
    (client,), (provider,) = run_op(field_multiply, case).outputs
    made = reconstruct_words([client, provider]).view(np.int64)
    assert set(made) == {-193, -192}
    assert abs(made.mean() + 12345 / 64) <= 6 * made.std() / 64


@pytest.mark.parametrize("op", [field_square, field_scale_rows])
def test_what_needs_no_narrow_factor_refuses_one(op: ProtocolOp) -> None:
    inputs = (INTEGERS,) if op is field_square else (MATRIX, INTEGERS[:3])
    case = Case(inputs, ("arith24", "arith")[: len(inputs)], {"cuts": (0,) * len(inputs)})
    with pytest.raises(ValueError, match=r"mod 2\^64, found one mod 2\^24"):
        run_op(op, case)


def test_factors_of_two_types_are_refused() -> None:
    with pytest.raises(ValueError, match="factors of field_multiply must be of one type"):
        result(field_multiply, (INTEGERS, INTEGERS.astype(np.float32)), cuts=(0, 0))


@pytest.mark.parametrize("z", [LARGEST - 1, -LARGEST])
def test_the_limit_is_as_stated(z: int) -> None:
    """Beyond it, a wrap is taken for none: the result is off by p."""
    one, many = np.ones(64, np.int64), np.full(64, z, np.int64)
    assert (result(field_multiply, (many, one), cuts=(0, 0)) == z).all()
    beyond = result(field_multiply, (many * 3 // 2, one), cuts=(0, 0)) - z * 3 // 2
    assert set(np.abs(beyond) // (field.P - 1)) <= {0, 1} and np.abs(beyond).max() > 0


@pytest.mark.parametrize(
    ("cuts", "shift"), [((4, 4), 18), ((0, 0), 18), ((4, 4), 8), ((2, 7), 26), ((4, 4), 0)]
)
def test_results_are_rounded_without_a_bias(cuts: tuple[int, int], shift: int) -> None:
    """Each cut rounds its factor to one of the two next multiples, and the rest the product, on
    average to what it is; 4096 runs of one product, 6 deviations.
    """
    x, y = 3_141_592, -2_718_281
    ones = np.ones(4096, np.int64)
    made = result(field_multiply, (x * ones, y * ones), cuts=cuts, shift=shift)
    exact = x * y / 2.0**shift
    unit = max(1.0, 2.0 ** (sum(cuts) - shift))
    most = (abs(x) * 2.0 ** cuts[1] + abs(y) * 2.0 ** cuts[0]) / 2.0**shift + unit
    assert np.abs(made - exact).max() <= most
    assert abs(made.mean() - exact) <= 6 * made.std() / 64 + 2.0**-15 * unit


def test_a_larger_truncation_is_refused() -> None:
    with pytest.raises(ValueError, match="a truncation by 21 bits; give 0 to 20"):
        result(field_multiply, (INTEGERS, INTEGERS), cuts=(0, 0), shift=21)


# ---- the field


@given(st.lists(st.tuples(ELEMENTS, ELEMENTS), min_size=1, max_size=20))
def test_arithmetic_of_the_field(pairs: list[tuple[int, int]]) -> None:
    x, y = np.array([*pairs, (field.P - 1, field.P - 1), (0, field.P - 1)], np.uint64).T
    a, b = x.astype(object), y.astype(object)
    assert (field.added(x, y) == (a + b) % field.P).all()
    assert (field.subtracted(x, y) == (a - b) % field.P).all()
    assert (field.multiplied(x, y) == a * b % field.P).all()


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1))
def test_integers_of_the_field(values: list[int]) -> None:
    x = np.array(values, np.int64)
    assert (field.of_integers(x) == x.astype(object) % field.P).all()


def test_uniform_elements_are_drawn_by_rejection() -> None:
    class Large(Prg):
        """Its first words are no elements."""

        def __init__(self) -> None:
            self._first = True

        def words(self, shape: tuple[int, ...]) -> np.ndarray:
            words = np.full(shape, 2**64 - 1 if self._first else 5 << 16, np.uint64)
            self._first = False
            return words

    assert (field.uniform(Large(), (3,)) == 5).all()
    drawn = field.uniform(Prg.from_os(), (1 << 16,))
    assert (drawn < field.P).all() and abs(drawn.mean() / field.P - 0.5) < 0.01


def test_what_is_no_element_ends_the_session() -> None:
    ends = MemoryChannel.pair()
    party = Party(0, ends[0], Prg.from_os(), FRAC_BITS, None, Prg.from_os())  # type: ignore[arg-type]
    ends[1].send(to_bytes(np.array([3, field.P], np.uint64), field.BITS).tobytes())
    with pytest.raises(WireError, match="expected elements of the field"):
        party.recv_field((2,))
