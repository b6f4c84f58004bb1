"""Siblings without replacement: the token has the model's distribution, whatever the drafts are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from experiments.completions import siblings
from models.draft import Proposer
from protocols.verification.distribution import Sampling, Streams
from spu_llm.core.prg import Prg


def of_token(
    p: np.ndarray, q: np.ndarray | None, most: int, after: Any = siblings.after_rejection
) -> np.ndarray:
    """Distribution of the token after up to `most` siblings, by enumeration of all of them."""
    if most == 0 or q is None:
        return p
    total = np.zeros_like(p)
    for sibling in np.flatnonzero(q):
        stays = siblings.kept(p, q, sibling)
        total[sibling] += q[sibling] * stays
        if stays < 1:
            left, others = after(p, q, sibling)
            total += q[sibling] * (1 - stays) * of_token(left, others, most - 1, after)
    return total


def distributions(size: int) -> st.SearchStrategy[np.ndarray]:
    weights = st.lists(st.integers(0, 20), min_size=size, max_size=size)
    return weights.filter(any).map(lambda w: np.array(w) / sum(w))


@given(distributions(5), distributions(5), st.integers(0, 5))
def test_the_token_has_the_models_distribution(p: np.ndarray, q: np.ndarray, most: int) -> None:
    np.testing.assert_allclose(of_token(p, q, most), p, atol=1e-12)


def test_the_enumeration_sees_a_wrong_rule() -> None:
    """One that decides on the second sibling as if the first had not been rejected."""

    def after(p: np.ndarray, q: np.ndarray, sibling: int) -> tuple[np.ndarray, np.ndarray | None]:
        return p, siblings.after_rejection(p, q, sibling)[1]

    p, q = np.array([0.1, 0.5, 0.4]), np.array([0.8, 0.1, 0.1])
    assert np.abs(of_token(p, q, 2) - p).max() < 1e-12
    assert np.abs(of_token(p, q, 2, after) - p).max() > 0.01


class Drawn(Proposer):
    """Has logits that depend on the last token alone, as a table [vocab, vocab]."""

    vocab_size = 4

    def __init__(self, seed: int) -> None:
        self._table = np.random.default_rng(seed).normal(size=(4, 4))

    def logits(self, tokens: list[int]) -> np.ndarray:
        return self._table[tokens[-1]]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_steps_write_the_models_text(count: int) -> None:
    """Pairs of the first two tokens of 6,000 texts; chi-squared, a false alarm in a million."""
    model, drafter, sampling = Drawn(0), Drawn(1), Sampling(1.0)
    streams = Streams(Prg.from_seed(7, "drafts"), Prg.from_seed(7, "sampling"))
    pairs = np.zeros((4, 4))
    for _ in range(6000):
        text = [0]
        while len(text) < 3:
            text += siblings.step(text, model, drafter, count, 2, sampling, streams)
        pairs[text[1], text[2]] += 1
    p = np.array([sampling.distribution(model.logits([token])) for token in range(4)])
    wanted = 6000 * p[0][:, None] * p
    statistic = float(((pairs - wanted) ** 2 / wanted).sum())
    assert wanted.min() > 5 and chi2.sf(statistic, 15) > 1e-6
