"""Rows of public lengths of their own: what plaintext gives, and no work for what is cut off."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.functions.maximum import maximum
from protocols.functions.ragged import Ragged
from spu_llm.compiler.plan import OpCall, make_plan
from spu_llm.core._jax import shape_of
from spu_llm.core.values import Owner

BITS = 12
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


def numbers(heads: int, lengths: tuple[int, ...], width: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(-(2**10), 2**10, (heads, len(lengths), width)).astype(np.int32)


@given(LENGTHS, st.integers(1, 3), st.integers(0, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_rows_are_cut_and_filled_up(
    lengths: tuple[int, ...], heads: int, more: int, seed: int
) -> None:
    rows, width = Ragged(lengths), max(lengths) + more
    x = numbers(heads, lengths, width, seed)
    counts = np.arange(width) < np.array(lengths)[:, None]
    flat = rows.flat(jnp.asarray(x))
    np.testing.assert_array_equal(flat, x[:, counts])
    np.testing.assert_array_equal(rows.padded(flat, width), np.where(counts, x, 0))
    per_row = np.broadcast_to(x[:, :, :1], x.shape)
    np.testing.assert_array_equal(rows.spread(jnp.asarray(x[:, :, 0])), per_row[:, counts])


@given(LENGTHS, st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_maxima_are_of_what_counts(lengths: tuple[int, ...], heads: int, seed: int) -> None:
    rows, x = Ragged(lengths), numbers(heads, lengths, max(lengths) + 1, seed)
    counts = np.arange(x.shape[2]) < np.array(lengths)[:, None]
    wanted = np.where(counts, x, -(2**31)).max(axis=2)
    flat = rows.flat(jnp.asarray(x))
    np.testing.assert_array_equal(rows.maxima(flat, bits=BITS), wanted)
    longer, more = rows.with_last(flat, 7)
    assert longer.lengths == tuple(n + 1 for n in lengths)
    np.testing.assert_array_equal(longer.maxima(more, bits=BITS), np.maximum(wanted, 7))


@pytest.mark.parametrize("lengths", [(1, 2, 3, 40), (37, 38, 39, 40), (1, 1, 1, 1)])
def test_matches_are_of_what_counts(lengths: tuple[int, ...]) -> None:
    """On shares all is local but for `maximum`, which sees each word of a longer row once a level
    at most, and a row of one word never.
    """
    rows, size = Ragged(lengths), sum(lengths)
    shapes = [jax.ShapeDtypeStruct((2, size), np.int32)]
    plan = make_plan(lambda x: [rows.maxima(x, bits=BITS)], shapes, [Owner.JOINT])
    calls = [step for step in plan.steps if isinstance(step, OpCall)]
    assert all(call.op is maximum for call in calls)
    assert all(step.local for step in plan.steps if not isinstance(step, OpCall))
    played = [shape_of(call.inputs[0]).shape for call in calls]
    longer = [n for n in lengths if n > 1]
    if not longer:
        assert not played
        return
    matches, words = played[0]
    assert matches == 2 * sum(-(-n // words) for n in longer)
    assert sum(n for n, _ in played) < 2 * sum(longer)
