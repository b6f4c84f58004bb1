"""The place of the largest number of a row."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protocols.functions.argmax import argmax
from spu_llm.testing import Case, reconstruct_words, run_op
from tests.protocols.composed import ComposedContract


class TestArgmax(ComposedContract):
    op = argmax
    elementwise = False
    fresh = True
    cases = [
        Case((np.array([[1, -1], [0, 0]]),), (form,), {"bits": 4}) for form in ("arith", "arith20")
    ]


@given(st.data(), st.integers(1, 40), st.sampled_from([5, 26]))
def test_argmax_of_any_row(data: Any, n: int, bits: int) -> None:
    """Anywhere in the ring, as long as differences fit; ties go to the first."""
    half = 2 ** (bits - 2)
    base = data.draw(st.integers(-(2**30), 2**30))
    number = st.one_of(st.sampled_from([-half + 1, half - 1, 0]), st.integers(-half + 1, half - 1))
    rows = data.draw(st.lists(st.lists(number, min_size=n, max_size=n), min_size=1, max_size=3))
    x = np.array(rows, np.int64) + base
    outcome = run_op(argmax, Case((x,), ("arith",), {"bits": bits}))
    words = reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)
    np.testing.assert_array_equal(words, x.argmax(axis=-1))
