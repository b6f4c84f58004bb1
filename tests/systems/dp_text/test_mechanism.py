"""One token: clipping, candidates, the distribution; what one reference can change, and what it
cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from spu_llm.systems.dp_text.mechanism import (
    FRAC_BITS,
    LARGEST,
    clipped_differences,
    clipped_sum,
    expanded_top_k,
    grid_clip,
    mean_logits,
    probabilities,
    sanitised,
)
from spu_llm.systems.dp_text.methods import token_weights
from spu_llm.systems.dp_text.parameters import Parameters

PUBLIC = np.array([2.0, 1.0, 0.0, -1.0])
PRIVATE = np.array([[3, 1, -2, -1], [2, 2.5, 0, -1.2]])
ALL = np.ones(2, bool)

Sum = Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]


def distribution(
    public: np.ndarray, private: np.ndarray, present: np.ndarray, p: Parameters
) -> np.ndarray:
    """Return the distribution over the whole vocabulary."""
    candidates, actual = token_weights(p, public, private, present)
    out = np.zeros(len(public))
    out[candidates] = actual / actual.sum()
    return out


# ---- the worked example


def test_worked_mean() -> None:
    total = clipped_sum(PUBLIC, PRIVATE, ALL, 0.5)
    np.testing.assert_allclose(
        mean_logits(PUBLIC, total, 2), [2.25, 1.25, -0.25, -1.1], atol=2.0**-FRAC_BITS
    )


@pytest.mark.parametrize(
    "k, tau, expected",
    [
        (1, 1.0, [1.0]),
        (2, 1.0, [0.73106, 0.26894]),
        (2, 1.2, [0.69706, 0.30294]),
        (3, 1.0, [0.68967, 0.25372, 0.05661]),
    ],
)
def test_worked_distribution(k: int, tau: float, expected: list[float]) -> None:
    actual = distribution(PUBLIC, PRIVATE, ALL, Parameters(2, 0.5, tau, 10, k))
    np.testing.assert_allclose(actual, expected + [0.0] * (4 - len(expected)), atol=6e-6)


# ---- candidates


def test_the_fixed_counterexample_of_top_k_plus() -> None:
    """Four references that agree move a token by C: V_k+ has no room for it."""
    public, push = np.array([3.0, 2.0, 1.0, 0.0]), np.array([-2.0, -2.0, 2.0, 0.0])
    assert expanded_top_k(public, 1, 2.0, 4).tolist() == [0, 1]
    total = clipped_sum(public, np.tile(public + push, (4, 1)), np.ones(4, bool), 2.0)
    assert int(np.argmax(mean_logits(public, total, 4))) == 2
    # With slack 2 C it would be one.
    assert 2 in expanded_top_k(public, 1, 2.0, 1)


def test_candidates_hold_the_top_k_of_each_reference() -> None:
    source = np.random.default_rng(3)
    missed = 0
    for _ in range(3000):
        size, batch = int(source.integers(4, 12)), int(source.integers(1, 6))
        k, clip = int(source.integers(1, size)), float(source.uniform(0.1, 3))
        public = source.normal(size=size)
        rows = public + source.normal(size=(batch, size)) * 2
        candidates = set(expanded_top_k(public, k, clip, batch).tolist())
        parts = clipped_differences(public, rows, clip)
        for part in parts:
            alone = public + part / batch
            assert set(np.argsort(-alone)[:k].tolist()) <= candidates
        mean = mean_logits(public, parts.sum(axis=0), batch)
        missed += not set(np.argsort(-mean)[:k].tolist()) <= candidates
    assert 100 < missed < 2000


def test_ties_at_the_threshold_are_all_candidates() -> None:
    assert expanded_top_k(np.array([1.0, 0.0, 1.0, 1.0]), 2, 0.0, 1).tolist() == [0, 2, 3]
    assert expanded_top_k(PUBLIC, None, 0.5, 2).tolist() == [0, 1, 2, 3]
    assert expanded_top_k(PUBLIC, 9, 0.5, 2).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="1 or more"):
        expanded_top_k(PUBLIC, 0, 0.5, 2)


# ---- sensitivity, attained and never exceeded

finite = st.floats(-50, 50, width=32)
wild = st.one_of(finite, st.sampled_from([np.nan, np.inf, -np.inf, 2.0**100, -(2.0**100)]))


def logits(*shape: int) -> st.SearchStrategy[np.ndarray]:
    return arrays.arrays(np.float32, shape, elements=wild)


def change_by_null(total: Sum, public: np.ndarray, rows: np.ndarray, clip: float) -> float:
    """Return the most that S moves by when reference 0 becomes null."""
    there, gone = np.ones(len(rows), bool), np.ones(len(rows), bool)
    gone[0] = False
    return float(np.abs(total(public, rows, there, clip) - total(public, rows, gone, clip)).max())


def change_by_other(total: Sum, public: np.ndarray, rows: np.ndarray, clip: float) -> float:
    """Return the same when another one takes its place: the last row."""
    there = np.ones(len(rows) - 1, bool)
    other = np.concatenate([rows[-1:], rows[1:-1]])
    return float(
        np.abs(total(public, rows[:-1], there, clip) - total(public, other, there, clip)).max()
    )


@given(logits(6), logits(4, 6), st.floats(0, 20), st.booleans())
def test_sensitivity_is_never_exceeded(
    public: np.ndarray, rows: np.ndarray, clip: float, centre: bool
) -> None:
    total = partial(clipped_sum, centre=centre)
    # Exactly: not by a last bit.
    assert change_by_null(total, public, rows, clip) <= grid_clip(clip) <= clip
    assert change_by_other(total, public, rows, clip) <= 2 * grid_clip(clip)


@pytest.mark.parametrize("clip", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_sensitivity_is_attained(clip: float, batch: int) -> None:
    rows = np.tile(PUBLIC, (batch, 1))
    rows[0] += 10 * clip
    total = clipped_sum(PUBLIC, rows, np.ones(batch, bool), clip)
    none = clipped_sum(PUBLIC, rows, np.arange(batch) > 0, clip)
    assert np.abs(total - none).max() / batch == clip / batch
    np.testing.assert_allclose(
        mean_logits(PUBLIC, total, batch) - PUBLIC, clip / batch, rtol=0, atol=1e-15
    )
    # Swapped for its opposite: twice that.
    both = np.concatenate([rows, PUBLIC[None] - 10 * clip])
    assert change_by_other(clipped_sum, PUBLIC, both, clip) == 2 * clip


def run_the_empty_prompt(
    public: np.ndarray, private: np.ndarray, present: np.ndarray, clip: float
) -> np.ndarray:
    """Broken: a null reference is the private prompt without a reference, which differs from the
    public one.
    """
    rows = np.where(present[:, None], private, public - 10 * clip)
    return clipped_differences(public, rows, clip).sum(axis=0)


def clip_logits(
    public: np.ndarray, private: np.ndarray, present: np.ndarray, clip: float
) -> np.ndarray:
    """Broken: the sum is clipped, not what is in it."""
    return np.clip(((private - public) * present[:, None]).sum(axis=0), -4 * clip, 4 * clip)


@pytest.mark.parametrize("broken", [run_the_empty_prompt, clip_logits])
def test_broken_sums_exceed_the_sensitivity(broken: Sum) -> None:
    rows = np.tile(PUBLIC, (4, 1))
    rows[0] += 10.0
    assert change_by_null(clipped_sum, PUBLIC, rows, 1.0) == 1.0
    assert change_by_null(broken, PUBLIC, rows, 1.0) > 1.5


@given(logits(5), logits(3, 5), logits(5), st.floats(0, 5), st.booleans())
def test_a_null_reference_adds_an_exact_zero(
    public: np.ndarray, rows: np.ndarray, other: np.ndarray, clip: float, centre: bool
) -> None:
    present = np.array([True, False, True])
    total = clipped_sum(public, rows, present, clip, centre=centre)
    rows[1] = other
    assert total.tobytes() == clipped_sum(public, rows, present, clip, centre=centre).tobytes()
    nothing = clipped_sum(public, rows, np.zeros(3, bool), clip, centre=centre)
    assert not nothing.any()


def test_a_null_that_is_run_is_no_exact_zero() -> None:
    actual = run_the_empty_prompt(PUBLIC, PRIVATE, np.zeros(2, bool), 0.5)
    assert actual.any()


# ---- limits and invariances


@pytest.mark.parametrize("k", [1, 2, 3, None])
def test_without_clip_norm_or_references_it_is_the_public_model(k: int | None) -> None:
    kept = expanded_top_k(PUBLIC, k, 0.0, 2)
    plain = np.zeros(4)
    plain[kept] = np.exp(PUBLIC[kept]) / np.exp(PUBLIC[kept]).sum()
    without = distribution(PUBLIC, PRIVATE, ALL, Parameters(2, 0.0, 1.0, 10, k))
    np.testing.assert_allclose(without, plain, rtol=1e-14)
    tiny = distribution(PUBLIC, PRIVATE, ALL, Parameters(2, 1e-9, 1.0, 10, k))
    np.testing.assert_allclose(tiny, plain, rtol=1e-7)
    null = distribution(PUBLIC, PRIVATE, np.zeros(2, bool), Parameters(2, 1e-3, 1.0, 10, k))
    np.testing.assert_allclose(null, plain, rtol=1e-14)


def test_constants() -> None:
    p = Parameters(2, 0.5, 1.0, 10, 3)
    plain = distribution(PUBLIC, PRIVATE, ALL, p)
    np.testing.assert_allclose(distribution(PUBLIC + 4, PRIVATE + 4, ALL, p), plain, rtol=1e-12)
    # To the references' logits alone, the constant counts, unless their centre is taken out.
    rows = np.random.default_rng(0).normal(size=(2, 4))
    assert (
        np.abs(distribution(PUBLIC, rows + 2, ALL, p) - distribution(PUBLIC, rows, ALL, p)).max()
        > 1e-2
    )
    centred = Parameters(2, 0.5, 1.0, 10, 3, centre=True)
    np.testing.assert_allclose(
        distribution(PUBLIC, rows + 2, ALL, centred),
        distribution(PUBLIC, rows, ALL, centred),
        rtol=1e-6,
    )


def test_the_centre_is_of_one_reference_alone() -> None:
    rows = np.random.default_rng(0).normal(size=(3, 9))
    public = rows[0] + 0.1
    whole = clipped_differences(public, rows, 1.0, centre=True)
    for i in range(3):
        one = clipped_differences(public, rows[i : i + 1], 1.0, centre=True)
        assert one[0].tobytes() == whole[i].tobytes()


def test_what_is_no_number_is_sanitised_before_the_difference() -> None:
    actual = sanitised(np.array([np.nan, np.inf, -np.inf, 1e30, 1.0], np.float32))
    assert actual.tolist() == [-LARGEST, LARGEST, -LARGEST, LARGEST, 1.0]
    masked = np.array([-np.inf, 1.0])
    rows = np.array([[-np.inf, 2.0], [np.nan, 1.0]])
    assert clipped_differences(masked, rows, 0.5).tolist() == [[0.0, 0.5], [0.0, 0.0]]
    with np.errstate(invalid="ignore"):
        assert np.isnan((rows - masked)[0, 0])  # what subtracting first would give


@given(logits(6), logits(2, 6), st.floats(0, 50), st.floats(0.05, 5), st.integers(1, 6))
def test_every_candidate_can_come(
    public: np.ndarray, rows: np.ndarray, clip: float, tau: float, k: int
) -> None:
    p = Parameters(2, clip, tau, 10, k)
    candidates, actual = token_weights(p, public, rows, ALL)
    assert len(candidates) >= k and np.all(np.isfinite(actual)) and np.all(actual > 0)


@given(
    arrays.arrays(np.float32, 6, elements=finite),
    arrays.arrays(np.float32, (4, 6), elements=wild),
    st.floats(0.001, 5),
    st.floats(0.3, 2),
    st.integers(1, 6),
    st.booleans(),
)
def test_the_loss_of_a_token_is_within_what_is_charged(
    public: np.ndarray, rows: np.ndarray, clip: float, tau: float, k: int, centre: bool
) -> None:
    """The range of the log-ratio of both distributions, with and without reference 0, of the
    weights that are drawn by.
    """
    p = Parameters(4, clip, tau, 10, k, centre=centre)
    gone = np.array([False, True, True, True])
    _, one = token_weights(p, public, rows, np.ones(4, bool))
    _, other = token_weights(p, public, rows, gone)
    ratios = np.log(one) - np.log(other)
    assert ratios.max() - ratios.min() <= p.token_event.range


def test_gumbel_noise_of_one_party_and_of_two() -> None:
    """The argmax of logits with Gumbel noise has the distribution of softmax; with noise of both
    parties it is flatter. 400,000 draws of a fixed seed: five standard deviations are 0.004.
    """
    plain = probabilities(PUBLIC, PUBLIC, 1.0)
    np.testing.assert_allclose(plain, [0.6439, 0.2369, 0.0871, 0.0321], atol=6e-5)
    noise = np.random.default_rng(7).gumbel(size=(2, 400_000, 4))
    for of, expected in ((1, plain), (2, [0.535, 0.270, 0.132, 0.063])):
        drawn = np.argmax(PUBLIC + noise[:of].sum(axis=0), axis=1)
        share = np.bincount(drawn, minlength=4) / len(drawn)
        np.testing.assert_allclose(share, expected, atol=0.005)
