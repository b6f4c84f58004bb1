"""Rows of any 64-bit words: short ones pass, long ones do not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.arithmetic.narrow import FRAC_BITS
from protocols.arithmetic.projection import (
    GAP,
    LONGEST,
    PROJECTIONS,
    Bound,
    bound,
    least_bits,
    project,
)
from spu_llm.core.prg import Prg
from spu_llm.core.values import Arith
from spu_llm.testing import Case, OpContract

BITS = 31


class TestProject(OpContract):
    op = project
    masks = False
    cases = [
        Case((np.arange(-5, 7).reshape(2, 6) << 40,), (form,), {"factor_bits": 13})
        for form in ("arith", "degenerate")
    ]


def units_of(x: np.ndarray, limit: Bound) -> np.ndarray:
    """Return the top bits [rows, PROJECTIONS] of projections of words [rows, d] that are shared
    anew.
    """
    mask = Prg.from_os().words(x.shape)
    inputs = [[Arith(w, np.dtype(np.float32), FRAC_BITS)] for w in (x.view(np.uint64) - mask, mask)]
    assert project.model is not None
    (actual,) = project.model(inputs, Prg.from_os(), factor_bits=limit.factor_bits)
    return actual.view(np.int64) >> (64 - limit.bits)


def passing(x: np.ndarray, limit: Bound) -> np.ndarray:
    """Count, for every row, how many of its projections pass, whether or not narrow words are one
    low.
    """
    units = units_of(x, limit)
    return np.sum((units >= -limit.units) & (units <= limit.units), axis=1)


WIDTHS = [
    *((width, LONGEST) for width in (8, 64, 256, 768, 4096)),
    (24, 4.0),
    (1536, 512.0),
    (768, 2.0**13),
]


@pytest.mark.parametrize(("width", "longest"), WIDTHS)
def test_rows_as_long_as_they_may_be_pass(width: int, longest: float) -> None:
    """Rows of one large entry, of equal ones, and random ones. One in 2^40 may fail."""
    limit = bound(width, max(BITS, least_bits(width, longest)), longest)
    rng = np.random.default_rng(0)
    x = np.concatenate([np.eye(width)[:2], np.ones((2, width)), rng.normal(size=(200, width))])
    x *= longest / np.linalg.norm(x, axis=1, keepdims=True)
    words = np.trunc(x * 2.0**FRAC_BITS).astype(np.int64)
    units = units_of(words, limit)
    assert np.all((units >= -limit.units + 1) & (units < limit.units - 1))


@pytest.mark.parametrize(("width", "longest"), WIDTHS)
def test_rows_that_are_too_long_fail(width: int, longest: float) -> None:
    """By as little as GAP, or however far: each projection with one half at least. 400 rows of a
    kind, so that a share of passing projections above 0.55 has a probability below 2^-100.
    """
    limit, rng = bound(width, least_bits(width, longest), longest), np.random.default_rng(1)
    shapes = [
        np.eye(width)[rng.integers(0, width, 400)],
        np.sign(rng.normal(size=(400, width))),
        rng.normal(size=(400, width)),
        np.eye(width)[rng.integers(0, width, 400)] - np.eye(width)[rng.integers(0, width, 400)],
    ]
    for shape in shapes:
        norms = np.maximum(np.linalg.norm(shape, axis=1, keepdims=True), 1e-9)
        shape = shape[norms[:, 0] > 0.1] / norms[norms[:, 0] > 0.1]
        for factor in (1.02, 3.0, 2.0**10, 2.0**20):
            size = min(GAP * longest * factor * 2.0**FRAC_BITS, 2.0**62)
            x = (shape * size).astype(np.int64)
            share = np.mean(passing(x, limit)) / PROJECTIONS
            assert share < 0.55, (factor, share)
            assert not np.any(passing(x, limit) == PROJECTIONS)


@given(st.integers(0, 63), st.integers(1, 9), st.integers(0, 7), st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_no_word_hides_among_others(shift: int, odd: int, at: int, other: int) -> None:
    """Multiples of powers of two, whose projections wrap around to few values, beside any word."""
    width = 256
    limit = bound(width, BITS)
    entry = (odd << shift) % 2**64
    x = np.zeros((1, width), np.uint64)
    x[0, at], x[0, -1] = entry, other % 2**64
    signed = x.view(np.int64).astype(np.float64)
    if np.linalg.norm(signed) * 2.0**-FRAC_BITS >= GAP * LONGEST:
        assert passing(x.view(np.int64), limit)[0] < PROJECTIONS


def test_what_passes_has_a_sum_of_squares_below_2_to_the_64() -> None:
    """For the longest rows of a norm."""
    assert (GAP * LONGEST * 2.0**FRAC_BITS) ** 2 <= 2.0**64
    for width in (8, 256, 4096):
        b = (bound(width, BITS).units + 1) * 2.0 ** (64 - BITS)
        a = bound(width, BITS).factor_bits - 1
        deviation = 2.0**a / math.sqrt(3) * GAP * LONGEST * 2.0**FRAC_BITS
        assert math.sqrt(2) * b / deviation <= 0.5


def test_rows_that_projections_cannot_tell_are_refused() -> None:
    with pytest.raises(ValueError, match="no projections that compare 20 bits"):
        bound(4096, 20)
