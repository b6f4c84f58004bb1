"""Boolean to arithmetic shares."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protocols.bits.convert import shared_bit, shared_bits, to_arith, twice_product_of_bits
from spu_llm.core.correlation import deal
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.testing import Case, OpContract, reconstruct_words, run_op
from tests.protocols.composed import ComposedContract

INTEGERS = np.array([[3, -1, 0], [2**62, -(2**63), 7]])


class TestToArith(OpContract):
    """Not fresh beyond its view: the lowest bit of a share is that of what came in or of a mask."""

    op = to_arith
    cases = [
        Case((np.array([True, False, True]),), ("bool1",)),
        Case((np.array([5, 0, 6]),), ("bool3",)),
        Case((np.zeros((0, 2), bool),), ("bool1",)),
    ]


class TestToArithOfWholeWords(ComposedContract):
    """Bit by bit as those of three bits."""

    op = to_arith
    cases = [Case((INTEGERS,), ("bool64",))]


class TestToArithWithoutMessages(OpContract):
    op = to_arith
    masks = False
    cases = [Case((INTEGERS,), (form,)) for form in ("arith", "client", "provider")]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), st.integers(1, 64))
def test_any_value_of_any_width(values: list[int], bits: int) -> None:
    x = np.array(values, np.int64)
    if bits < 64:
        x &= 2**bits - 1
    outcome = run_op(to_arith, Case((x,), (f"bool{bits}",)))
    words = reconstruct_words([o[0] for o in outcome.outputs])
    np.testing.assert_array_equal(words.view(np.int64), x)


def test_one_prepared_bit_serves_both_uses_exactly() -> None:
    """All values of both masks and both opened bits: the sum of the shares is the meaning."""
    for c in (0, 1):
        for p in (0, 1):
            masks = [
                [np.array([c], np.uint64), np.zeros(1, np.uint64)],
                [np.zeros(1, np.uint64), np.array([p], np.uint64)],
            ]
            (w_c,), (w_p,) = deal(shared_bits(64), masks, Prg.from_os())
            own = np.array([c], np.uint64), np.array([p], np.uint64)
            for d in (0, 1):
                opened = np.array([d], np.uint64)
                total = shared_bit(CLIENT, opened, w_c) + shared_bit(PROVIDER, opened, w_p)
                assert total == d ^ c ^ p
                for e in (0, 1):
                    other = np.array([e], np.uint64)
                    total = twice_product_of_bits(CLIENT, opened, other, own[0], w_c)
                    total += twice_product_of_bits(PROVIDER, opened, other, own[1], w_p)
                    assert total == 2 * (d ^ c) * (e ^ p)
