"""A shared bit times a shared word."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protocols.bits.mux import BIT_TIMES_NARROW_WORD, BIT_TIMES_WORD, mux
from spu_llm.core.values import Arith
from spu_llm.runtime.simulation import Simulation
from spu_llm.testing import Case, OpContract, reconstruct_words, run_op
from tests.protocols.made_correlations import check, made

BITS = np.array([True, False, True, False])
WORDS = np.array([-(2**63), 2**63 - 1, 5, 0])


class TestMux(OpContract):
    op = mux
    fresh = True
    cases = [
        Case((BITS, WORDS), ("bool1", "arith")),
        Case((BITS[::-1], WORDS), ("bool1", "degenerate")),
        Case((BITS, WORDS), ("client", "arith")),
        Case((BITS, WORDS), ("bool1", "provider")),
        Case((BITS, WORDS % 2**23), ("bool1", "arith24")),
        Case((BITS[:0], WORDS[:0]), ("bool1", "arith")),
    ]


@given(st.lists(st.tuples(st.booleans(), st.integers(-(2**63), 2**63 - 1)), max_size=40))
def test_mux_of_any_ring_value(pairs: list[tuple[bool, int]]) -> None:
    bits = np.array([b for b, _ in pairs], bool)
    words = np.array([x for _, x in pairs], np.int64)
    outcome = run_op(mux, Case((bits, words), ("bool1", "arith")))
    actual = reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)
    np.testing.assert_array_equal(actual, bits * words)


def test_one_round_and_eight_bytes_a_value() -> None:
    outcome = run_op(mux, Case((np.zeros(800, bool), np.zeros(800, np.int64)), ("bool1", "arith")))
    assert outcome.rounds == 1
    assert [t.sent_bytes for t in outcome.traffic] == [6500, 6500]


def test_a_narrow_word_takes_fewer_bytes_and_stays_narrow() -> None:
    """Also at widths that fill no byte, where the rest of the words is noise."""
    for bits in (1, 8, 13, 26, 63):
        half = 1 << (bits - 1)
        words = np.arange(40) % (2 * half) - half
        chosen = np.arange(40) % 3 == 0
        outcome = run_op(mux, Case((chosen, words), ("bool1", f"arith{bits}")))
        shares = [o[0] for o in outcome.outputs]
        assert all(isinstance(s, Arith) and s.bits == bits for s in shares)
        np.testing.assert_array_equal(reconstruct_words(shares).view(np.int64), chosen * words)
        assert [t.sent_bytes for t in outcome.traffic] == [5 + 40 * -(-bits // 8)] * 2


def test_what_products_send_ahead(simulation: Simulation) -> None:
    """A word, and half a one; homomorphic products would take 200 bytes."""
    for correlation, size in ((BIT_TIMES_WORD, 8), (BIT_TIMES_NARROW_WORD, 4)):
        both, per_unit = made(simulation, correlation)
        check(correlation, both)
        assert per_unit == size
