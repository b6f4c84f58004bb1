"""The comparison of logits on made-up arrays, and one real session."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from experiments import logits
from experiments.logits import compare, perplexity, windows_from
from models.tokenizer import Tokenizer
from spu_llm.errors import InputError

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(30, size=(4, 25)).astype(np.int32)
REFERENCE = RNG.normal(0, 3, (4, 25, 30)).astype(np.float32)


def test_equal_logits_pass() -> None:
    result = compare(TOKENS, REFERENCE, REFERENCE)
    assert result.failures == []
    assert (result.positions, result.largest_error, result.mean_error) == (100, 0.0, 0.0)
    assert (result.agreement, result.flips) == (1.0, [])
    assert result.perplexity_float32 == result.perplexity_secure


def test_one_logit_far_off_fails() -> None:
    secure = REFERENCE.copy()
    secure[2, 7, REFERENCE[2, 7].argmin()] += 0.06
    result = compare(TOKENS, REFERENCE, secure)
    assert result.largest_error == pytest.approx(0.06, abs=1e-5)
    assert result.mean_error == pytest.approx(0.06 / REFERENCE.size, rel=1e-3)
    assert result.agreement == 1.0
    assert result.failures == ["largest error 0.0600 exceeds 0.05"]


def test_a_value_that_is_no_number_fails() -> None:
    secure = REFERENCE.copy()
    secure[0, 0, 0] = np.nan
    assert compare(TOKENS, REFERENCE, secure).failures


def test_flips_are_listed_and_too_many_fail() -> None:
    reference = REFERENCE.copy()
    for i in range(3):  # near-ties at positions 0, 1 and 2 of the second window
        order = np.argsort(reference[1, i])
        reference[1, i, order[-2]] = reference[1, i, order[-1]] - 0.01
    secure = reference.copy()
    for i in range(2):
        secure[1, i, np.argsort(reference[1, i])[-2]] += 0.02
    two = compare(TOKENS, reference, secure)
    assert [f.position for f in two.flips] == [25, 26]
    assert all(f.margin == pytest.approx(0.01, abs=1e-5) for f in two.flips)
    assert all(f.margin < 2 * two.largest_error for f in two.flips)
    assert two.failures == ["top-1 agreement 98.00% is below 99%"]
    secure[1, 0] = reference[1, 0]
    assert compare(TOKENS, reference, secure).failures == []  # one of a hundred


def test_perplexity_of_known_distributions() -> None:
    assert perplexity(TOKENS, np.zeros((4, 25, 30))) == pytest.approx(30)
    certain = np.zeros((4, 25, 30))
    # Row i predicts token i + 1: three nats above the other 29.
    np.put_along_axis(certain[:, :-1], TOKENS[:, 1:, None], 3.0, axis=-1)
    wanted = (math.exp(3) + 29) / math.exp(3)
    assert perplexity(TOKENS, certain) == pytest.approx(wanted)


def test_windows_come_from_all_over_the_text(tiny_pair: tuple[Path, Path]) -> None:
    tokenizer = Tokenizer.load(tiny_pair[0])
    texts = [chr(ord("a") + i) * 9 for i in range(6)]
    found = windows_from(texts, tokenizer, count=3, length=4)
    assert found.shape == (3, 4)
    assert [tokenizer.decode(ids) for ids in found] == ["aaaa", "cccc", "eeee"]
    with pytest.raises(InputError, match="fewer"):
        windows_from(texts, tokenizer, count=13, length=4)


def test_a_session_opens_all_logits(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Two processes, one window; the secure forward is close to float32's."""
    held_out = tmp_path / "held_out.jsonl"
    line = {"file": "a.py", "text": "def read(path):\n    return path\n" * 3}
    held_out.write_text(json.dumps(line) + "\n", encoding="utf-8")
    result = logits.measure(tiny_pair[0], held_out, positions=6)
    # Six positions of random weights may hold a near-tie; nothing else may be wrong.
    assert result["positions"] == 6
    assert 0 < result["largest_error"] < 0.05
    assert all(flip["margin"] < 2 * result["largest_error"] for flip in result["flips"])
    assert all("top-1" in failure for failure in result["failures"])
    assert result["perplexity_secure"] == pytest.approx(result["perplexity_float32"], rel=0.02)
    assert result["learned"] == {
        "client": [
            "whether activations stayed in range: 1 x 64 bit in 1 openings",
            "logits (study): 1728 x 64 bit in 1 openings",
        ],
        "provider": [],
    }
    assert "| positions | 6 |" in logits.table(result)
