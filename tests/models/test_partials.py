"""Theorem 4.1 of "Confidential Prompting": partial results of attention merge without loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.partials import Partial, merged, partial

WITHIN = 4e-15  # in float64; the largest of 12,000 is 1.3e-15, of scale 1


def full(query: Any, keys: Any, values: Any) -> Any:
    """Attention in the widest floating point there is."""
    query, keys, values = (a.astype(np.longdouble) for a in (query, keys, values))
    scores = query @ keys.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ values / weights.sum(-1, keepdims=True)


def drawn(seed: int, scale: float, rows: int) -> tuple[Any, Any, Any]:
    source = np.random.default_rng(seed)
    query = scale * source.standard_normal((2, 3, 16)) / 4
    return query, source.standard_normal((2, rows, 16)), source.standard_normal((2, rows, 16))


def parts_of(query: Any, keys: Any, values: Any, cuts: Sequence[int]) -> list[Partial]:
    """Return the partial results of blocks between these rows; some blocks may be empty."""
    ends = [0, *sorted(cuts), keys.shape[1]]
    return [
        partial(query, keys[:, a:b], values[:, a:b]) for a, b in zip(ends, ends[1:], strict=False)
    ]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 97),
    scale=st.sampled_from([1.0, 30, 300]),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    shuffle=st.randoms(use_true_random=False),
)
def test_blocks_in_any_number_and_order_make_full_attention(
    seed: int, rows: int, scale: float, cuts: list[float], shuffle: Any
) -> None:
    """Also where blocks are empty, and where the printed alpha = exp(m_1 - m_2) overflows."""
    query, keys, values = drawn(seed, scale, rows)
    parts = parts_of(query, keys, values, [int(c * rows) for c in cuts])
    shuffle.shuffle(parts)
    while len(parts) > 1:  # neighbours first, or the ends: any tree
        at = shuffle.randrange(len(parts) - 1)
        parts[at : at + 2] = [merged(parts[at], parts[at + 1])]
    assert np.isfinite(parts[0].out).all()
    # Of larger scores, q k^T itself has lost more.
    assert np.abs(parts[0].out - full(query, keys, values)).max() <= WITHIN * scale


@pytest.mark.parametrize("scale,single", [(1, 5e-8), (30, 1e-6), (300, 4e-6)])
def test_single_precision_is_no_worse_than_one_attention(scale: float, single: float) -> None:
    worst = {"merged": 0.0, "whole": 0.0}
    for seed in range(20):
        inputs = drawn(seed, scale, 64)
        exact = full(*inputs)
        query, keys, values = (a.astype(np.float32) for a in inputs)
        one, other = parts_of(query, keys, values, [40])
        for name, out in (
            ("merged", merged(one, other).out),
            ("whole", partial(query, keys, values).out),
        ):
            assert out.dtype == np.float32
            worst[name] = max(worst[name], float(np.abs(out - exact).mean()))
    assert worst["merged"] <= 1.5 * worst["whole"]
    assert worst["merged"] <= 4 * single


def test_printed_formula_is_the_same_where_it_is_finite() -> None:
    query, keys, values = drawn(3, 1.0, 20)
    pvt, pub = parts_of(query, keys, values, [12])
    alpha = np.exp(pub.shift - pvt.shift)
    printed = (pvt.mass / (pvt.mass + alpha * pub.mass))[..., None] * pvt.out
    printed += (pub.mass / (pvt.mass / alpha + pub.mass))[..., None] * pub.out
    assert np.abs(printed - merged(pvt, pub).out).max() < WITHIN


def test_rows_that_are_not_visible_do_not_count() -> None:
    query, keys, values = drawn(5, 1.0, 10)
    visible = np.arange(10) < 6
    hidden = partial(query, keys, values, visible)
    assert np.allclose(hidden.out, partial(query, keys[:, :6], values[:, :6]).out, atol=1e-14)
    none = partial(query, keys, values, np.zeros(10, bool))
    assert (none.mass == 0).all() and (none.out == 0).all()
    together = merged(none, none)
    assert (together.mass == 0).all() and (together.out == 0).all()
