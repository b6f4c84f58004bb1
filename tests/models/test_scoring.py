"""Scores of many texts that begin alike are those of the whole model."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from models.family import ModelConfig, logits
from models.scoring import Scorer
from tests.kit.models import LLAMA, PRIVATE, tiny_params


@pytest.mark.parametrize("config", [PRIVATE, LLAMA], ids=["gpt2", "llama"])
def test_scores_are_those_of_each_text_alone(config: ModelConfig) -> None:
    params = tiny_params(config, 3)
    scorer, source = Scorer(config, params, 32), np.random.default_rng(0)
    context = source.integers(1, 288, 5)
    texts = scorer.begin(context.tolist())
    texts = scorer.extended(texts, np.zeros(70, int), source.integers(1, 288, (70, 1)))
    texts = scorer.chosen(texts, np.arange(69, -1, -1))
    texts = scorer.extended(texts, np.array([0, 69, 5]), source.integers(1, 288, (3, 6)))
    for row, total, after in zip(texts.tokens, texts.total, texts.next, strict=True):
        assert row[:5].tolist() == context.tolist() and len(row) == 12
        logs = np.asarray(jax.nn.log_softmax(logits(params, config, row)), np.float64)
        assert abs(logs[4:-1][np.arange(7), row[5:]].sum() - total) < 2e-3
        assert np.abs(logs[-1] - after).max() < 1e-3


def test_a_text_that_is_too_long_is_refused() -> None:
    scorer = Scorer(PRIVATE, tiny_params(PRIVATE, 3), 8)
    texts = scorer.begin([1] * 6)
    with pytest.raises(ValueError, match="9 tokens do not fit"):
        scorer.extended(texts, np.zeros(1, int), np.ones((1, 3)))
