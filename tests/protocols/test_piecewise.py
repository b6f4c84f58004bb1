"""Pieces of functions: fits as stated, look-ups, and lines over any range that words can hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.arithmetic.narrow import FRAC_BITS
from protocols.functions.activations import GELU, SILU
from protocols.functions.fits import DEVIATION, FITTED, REACH, error_of, quadratics
from protocols.functions.lookup import Table, lookup
from protocols.functions.norms import NORM_LOW, norm_high, norm_lines
from protocols.functions.piecewise import MAX_ERROR, Lines, Quadratics, lines

STATED = {"gelu": GELU, "silu": SILU}


@pytest.mark.parametrize("name", STATED)
def test_stated_errors_hold_at_every_point(name: str) -> None:
    """Also where a piece is taken one unit beyond its end; more thresholds, smaller errors."""
    errors = []
    for count, function in STATED[name].items():
        assert len(function.thresholds) == count == len(function.pieces) + 1
        actual = error_of(function, FITTED[name], REACH[name])
        assert actual == pytest.approx(function.error, rel=0.05)
        # Far away only the two outermost pieces are left.
        assert error_of(function, FITTED[name], 60.0) == pytest.approx(actual)
        errors.append(actual)
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(("name", "count"), [("gelu", 6), ("silu", 6)])
def test_coefficients_are_the_fit(name: str, count: int) -> None:
    actual, stated = quadratics(FITTED[name], REACH[name], count), STATED[name][count]
    np.testing.assert_allclose(actual.thresholds, stated.thresholds, atol=1)
    np.testing.assert_allclose(actual.pieces, stated.pieces, atol=20)
    assert actual.error == pytest.approx(stated.error, rel=0.05)


def _values(function: Quadratics, x: np.ndarray) -> np.ndarray:
    piece = np.searchsorted(np.array(function.thresholds) / 16, x, side="right")
    a, b, c = np.array(function.all_pieces())[piece].T / 2.0**16
    return a * x**2 + b * x + c


@pytest.mark.parametrize(
    ("name", "count", "bound"), [("gelu", 6, 9e-4), ("silu", 6, 2.3e-3), ("silu", 8, 1.2e-3)]
)
@pytest.mark.parametrize(("mean", "deviation"), [(0, 0.5), (0, 1), (-2, 1), (0, 2), (0, 4)])
def test_errors_are_small_in_the_mean_wherever_inputs_lie(
    name: str, count: int, bound: float, mean: float, deviation: float
) -> None:
    """The smallest largest errors, 2.0e-3 and 2.4e-3, go with 1.2e-3 and 1.6e-3 here."""
    x = np.linspace(mean - 6 * deviation, mean + 6 * deviation, 20001)
    weights = np.exp(-0.5 * ((x - mean) / deviation) ** 2)
    off = _values(STATED[name][count], x) - FITTED[name](x)
    assert np.sqrt(np.sum(weights * off**2) / np.sum(weights)) < bound


def test_no_thresholds_are_better() -> None:
    """All pairs, with a piece between them from NumPy's least squares."""
    reach, f = 1.5, FITTED["gelu"]
    x = (np.arange(-24 * 8, 24 * 8) + 0.5) / 128
    w, y = np.exp(-0.5 * (x / DEVIATION) ** 2), f(x)

    def cost(low: int, high: int) -> float:
        """Return each piece taken one unit beyond its end, too."""
        inside = (x > low / 16) & (x < (high + 1) / 16)
        points, roots = x[inside], np.sqrt(w[inside])
        off = np.polyval(np.polyfit(points, y[inside], 2, w=roots), points) - y[inside]
        zero, last = x < (low + 1) / 16, x > high / 16
        left, right = np.sum((w * y**2)[zero]), np.sum((w * (y - x) ** 2)[last])
        return float(np.sum((roots * off) ** 2) + left + right)

    pairs = [(low, high) for low in range(-24, 24) for high in range(low + 1, 24)]
    assert quadratics(f, reach, 2).thresholds == min(pairs, key=lambda pair: cost(*pair))


@given(st.lists(st.integers(-(2**59), 2**59), min_size=2, max_size=9))
def test_look_up_of_any_words(words: list[int]) -> None:
    """In plaintext, every piece: what the bits [x < t_j] choose is the table's entry."""
    table = Table.of(words)
    entries = np.array(table.entries(), np.float64)
    slack = 2.0**-23 * sum(map(abs, (*table.steps, table.base, 1)))
    assert np.max(np.abs(entries - np.array(words, np.float64))) <= slack
    pieces = np.arange(len(words))
    below = (pieces[None] <= np.arange(len(words) - 1)[:, None]).astype(np.int32)
    actual = np.asarray(lookup(below, [table, table]), np.float64) * 2.0**FRAC_BITS
    assert np.max(np.abs(actual - entries)) <= 4 * slack


def _passes(x: int, function: Lines, less: Sequence[bool]) -> bool:
    """Return whether the word x is taken for one in range; `less`: narrow words that are one unit
    low.
    """

    def below(top: int, threshold: int) -> bool:
        return (top - threshold) % 2**function.bits >= 2 ** (function.bits - 1)

    words = [(function.drop, function.thresholds[0], function.thresholds[-1])]
    words += [(drop, -1, above) for drop, above in function.above]
    assert words[-1][0] + function.bits >= 64
    return all(
        not below((x >> drop) - low, first) and below((x >> drop) - low, last)
        for (drop, first, last), low in zip(words, less, strict=False)
    )


SUMS = lines(lambda x: 1 / x, 0.9, 128.5, FRAC_BITS, 26)  # few bits: several words above
NORMS = [norm_lines(d, 1e-5, 1.0, NORM_LOW, norm_high(d))[0] for d in (16, 256, 2048)]


@given(st.sampled_from([SUMS, *NORMS]), st.data())
@settings(deadline=None, max_examples=300)
def test_only_a_value_in_range_passes_of_all_64_bit_words(
    function: Lines, data: st.DataObject
) -> None:
    """Also where a narrow word is that of a value in range, whether or not it is one low, and for
    words that are negative.
    """
    low, high = (t << function.drop for t in (function.thresholds[0], function.thresholds[-1]))
    inside = data.draw(st.integers(low, high - 1))
    bit = data.draw(st.integers(0, 63))
    aliases = st.sampled_from([inside, inside + (1 << bit), -inside, inside - (1 << bit), ~inside])
    x = data.draw(aliases | st.integers(-(2**63), 2**63 - 1) | st.integers(low - 9, low + 9))
    x = (x + 2**63) % 2**64 - 2**63
    less = data.draw(st.lists(st.booleans(), min_size=4, max_size=4))
    unit = 1 << function.drop
    if not low <= x < high + unit:
        assert not _passes(x, function, less)
    if low + unit <= x < high:
        assert _passes(x, function, less)


def _evaluated(x: np.ndarray, low: bool, function: Lines, position: int) -> np.ndarray:
    """Evaluate in whole numbers, as shares compute: x words, `low`: narrow words are one unit
    less.
    """
    top = (x >> function.drop) - int(low)
    piece = np.searchsorted(function.thresholds, top, side="right")
    slopes, intercepts = (
        np.array(t.entries(), object)[piece] for t in (function.slopes, function.intercepts)
    )
    product = slopes * (x >> function.cut).astype(object) + intercepts
    assert np.all(np.abs(product.astype(np.float64)) < 2.0**62)
    return (product >> function.shift).astype(np.float64) * 2.0**-position


@given(st.integers(-8, 8), st.floats(1, 2), st.integers(1, 20), st.sampled_from([0.5, 1.0]))
@settings(max_examples=30, deadline=None)
def test_lines_are_as_close_as_they_say(
    octave: int, part: float, octaves: int, power: float
) -> None:
    low = part * 2.0**octave
    high, position, out = low * 2.0**octaves, 28, 26

    def f(x: np.ndarray) -> np.ndarray:
        return x**-power

    try:
        function = lines(f, low, high, position, out)
    except ValueError:
        # Only what words of 64 bits, or 26 fraction bits of the result, cannot hold.
        assert power * octaves > 14 or f(np.array([high]))[0] < 2.0 ** (11 - out)
        return
    assert function.error <= MAX_ERROR
    x = (np.geomspace(low, high * 0.999, 3001) * 2.0**position).astype(np.int64)
    for one_less in (False, True):
        actual = _evaluated(x, one_less, function, out)
        inside = (x >> function.drop) - one_less >= function.thresholds[0]
        exact = f(x * 2.0**-position)
        assert np.max((np.abs(actual - exact) / exact)[inside]) <= function.error * 1.001


@pytest.mark.parametrize(
    ("low", "high", "position"), [(2.0**-20, 2.0**14, 36), (2.0, 2.0**30, 36), (1.0, 2.0**28, 18)]
)
def test_ranges_that_words_cannot_hold_are_refused(low: float, high: float, position: int) -> None:
    with pytest.raises(ValueError, match="words"):
        lines(lambda x: 1 / x, low, high, position, 26)
