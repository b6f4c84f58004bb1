"""Narrow shares of the top bits of words, the way back, integers as units: exact as modelled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.arithmetic.narrow import in_units, narrow, units, widen
from protocols.arithmetic.truncate import share_of
from spu_llm.core.values import CLIENT, Arith, Value
from spu_llm.testing import FRAC_BITS, Case, OpContract, reconstruct_words, run_op
from spu_llm.testing.run import common_stream

WIDE = np.array([0, 1, -1, 2**62, -(2**63), 12345 << 18, 2**30 - 1])
INT64 = st.integers(-(2**63), 2**63 - 1)


class TestNarrow(OpContract):
    op = narrow
    masks = False
    cases = [
        Case((WIDE,), ("arith",), {"drop": 18, "bits": 32}),
        Case((WIDE,), ("degenerate",), {"drop": 0, "bits": 9}),
        Case((WIDE,), ("provider",), {"drop": 50, "bits": 14}),
        Case((WIDE[:0],), ("arith",), {"drop": 3, "bits": 4}),
    ]


FITS_24 = np.array([0, 1, -1, 2**22 - 1, -(2**22), 12345])


class TestWiden(OpContract):
    op = widen
    cases = [Case((FITS_24,), ("arith24",)), Case((FITS_24[:0],), ("arith24",))]

    def hidden(self, own: list[Value], peer: list[Value], case: Case) -> list[np.ndarray]:
        """Return the top bit of either refreshed share, which the message carries."""
        shift, words = common_stream().words(peer[0].shape), share_of(peer[0])
        both = words + shift + np.uint64(1 << 22), words - shift
        return [(s >> np.uint64(23)) & np.uint64(1) for s in both]


class TestUnits(OpContract):
    op = units
    masks = False
    cases = [Case((WIDE,), (form,)) for form in ("arith", "client", "provider")]


class TestInUnits(OpContract):
    op = in_units
    masks = False
    cases = [Case((WIDE,), (form,), {"bits": 33}) for form in ("arith", "client", "arith40")]


def top(x: np.ndarray, drop: int, bits: int) -> np.ndarray:
    return ((x >> drop) + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


@given(st.lists(INT64, min_size=1, max_size=30), st.integers(0, 40), st.integers(2, 24))
def test_floor_or_one_less(values: list[int], drop: int, bits: int) -> None:
    x = np.array(values)
    outcome = run_op(narrow, Case((x,), ("arith",), {"drop": drop, "bits": bits}))
    shares = [o[0] for o in outcome.outputs]
    assert all(isinstance(s, Arith) and s.bits == bits for s in shares)
    words = reconstruct_words(shares).view(np.int64)
    floor, less = top(x, drop, bits), top((x >> drop) - 1, 0, bits)
    assert np.all((words == floor) | ((words == less) & (drop > 0)))
    assert outcome.rounds == 0
    np.testing.assert_array_equal(narrow.reference(x, drop=drop, bits=bits), floor)


def test_one_less_comes_from_the_sharing() -> None:
    """Both cases occur, each as often as the dropped bits of a random share say."""
    x = np.full(4096, (7 << 18) + (1 << 16))
    outcome = run_op(narrow, Case((x,), ("arith",), {"drop": 18, "bits": 20}))
    words = reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)
    assert set(words) == {6, 7}
    assert abs(np.mean(words == 6) - 3 / 4) < 6 * np.sqrt(3 / 16 / 4096)


def test_of_a_float_and_of_a_narrow_share() -> None:
    x = np.array([1.5, -1.5, 7.99, -8.0, 100.0])
    wanted = np.array([24, -24, 127, -128, 64], np.int32)  # 100 is 1600, or 64 mod 2^8
    actual = narrow.reference(x, drop=FRAC_BITS - 4, bits=8)
    np.testing.assert_array_equal(actual, wanted)
    np.testing.assert_array_equal(narrow(x.astype(np.float32), drop=14, bits=8), wanted)
    narrower = run_op(narrow, Case((np.array([-5, 6]),), ("arith20",), {"drop": 0, "bits": 4}))
    shares = [o[0] for o in narrower.outputs]
    np.testing.assert_array_equal(reconstruct_words(shares).view(np.int64), [-5, 6])


@given(st.data(), st.integers(3, 63))
def test_widening_keeps_the_value(data: Any, bits: int) -> None:
    half = 1 << (bits - 2)
    x = np.array(data.draw(st.lists(st.integers(-half, half - 1), min_size=1, max_size=20)))
    outcome = run_op(widen, Case((x,), (f"arith{bits}",)))
    shares = [o[0] for o in outcome.outputs]
    assert all(isinstance(s, Arith) and s.bits == 64 for s in shares)
    np.testing.assert_array_equal(reconstruct_words(shares).view(np.int64), x)
    assert [t.sent_bytes for t in outcome.traffic] == [-(-len(x) // 8)] * 2


@pytest.mark.parametrize("form", ["arith", "client", "arith2"])
def test_only_narrow_shares_are_widened(form: str) -> None:
    with pytest.raises(ValueError, match="narrow share"):
        run_op(widen, Case((np.array([0]),), (form,)))


@pytest.mark.parametrize(
    ("form", "drop", "bits"), [("arith", 18, 33), ("arith", 40, 25), ("arith20", 4, 17)]
)
def test_too_many_bits_are_refused(form: str, drop: int, bits: int) -> None:
    with pytest.raises(ValueError, match="of a share of"):
        run_op(narrow, Case((WIDE,), (form,), {"drop": drop, "bits": bits}))


def test_units_and_back() -> None:
    x = np.array([1.5, -(2.0**-18), 0.1, -8191.75], np.float32)
    np.testing.assert_array_equal(in_units(x, bits=33), np.round(x * 2.0**FRAC_BITS))
    with pytest.raises(ValueError, match="give 1 to that"):
        run_op(in_units, Case((WIDE,), ("arith20",), {"bits": 21}))


def test_units_are_the_same_words() -> None:
    np.testing.assert_array_equal(units(np.array([3, -1])), np.array([3, -1]) * 2.0**-FRAC_BITS)
    outcome = run_op(units, Case((WIDE,), ("arith",)))
    shares = [o[0] for o in outcome.outputs]
    assert all(isinstance(s, Arith) and s.frac_bits == FRAC_BITS for s in shares)
    assert outcome.traffic[CLIENT].sent_messages == 0
