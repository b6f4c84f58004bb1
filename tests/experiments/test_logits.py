"""The comparison of logits on made-up arrays, the pieces in plaintext, and one real session."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.fidelity import logits
from experiments.fidelity.logits import compare, windows_from
from models.hf import load_model, save_model
from models.tokenizer import Tokenizer
from models.training.snippets import SHIPPED
from protocols.functions.activations import GELU, activation_bits
from protocols.functions.piecewise import quadratics
from spu_llm.core._jax import ClosedJaxpr, flat_jaxpr, shape_of
from spu_llm.core.errors import InputError

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(30, size=(4, 25)).astype(np.int32)
REFERENCE = RNG.normal(0, 3, (4, 25, 30)).astype(np.float32)

IN_RANGE = "whether activations left their ranges: 1 x 1 bit in 1 openings"


def test_equal_logits_pass() -> None:
    result = compare(TOKENS, REFERENCE, REFERENCE)
    assert result.failures == []
    assert (result.positions, result.largest_error, result.mean_error) == (100, 0.0, 0.0)
    assert (result.agreement, result.flips) == (1.0, [])
    assert result.perplexity_float32 == result.perplexity_secure


def test_one_logit_far_off_fails() -> None:
    secure = REFERENCE.copy()
    secure[2, 7, REFERENCE[2, 7].argmin()] += 0.08
    result = compare(TOKENS, REFERENCE, secure)
    assert result.largest_error == pytest.approx(0.08, abs=1e-5)
    assert result.mean_error == pytest.approx(0.08 / REFERENCE.size, rel=1e-3)
    # The largest of 100 positions: nothing but the last quantile comes near it.
    assert result.quantiles["0.9"] == 0.0 and 0.07 < result.quantiles["0.999"] < 0.08
    assert result.agreement == 1.0
    assert result.failures == ["largest error 0.0800 exceeds 0.05"]


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
    first, second = (np.argsort(reference[1, i])[[-1, -2]].tolist() for i in range(2))
    assert [(f.position, f.reference_token, f.secure_token) for f in two.flips] == [
        (25, *first),
        (26, *second),
    ]
    assert [f.margin for f in two.flips] == pytest.approx([0.01, 0.01], abs=1e-5)
    assert two.largest_error == pytest.approx(0.02, abs=1e-5)
    assert two.failures == ["top-1 agreement 98.00% is below 99%"]
    secure[1, 0] = reference[1, 0]
    assert compare(TOKENS, reference, secure).failures == []  # one of a hundred


def test_perplexity_of_known_distributions() -> None:
    certain = np.zeros((4, 25, 30), np.float32)
    # Row i predicts token i + 1: three nats above the other 29.
    np.put_along_axis(certain[:, :-1], TOKENS[:, 1:, None], 3.0, axis=-1)
    result = compare(TOKENS, np.zeros((4, 25, 30), np.float32), certain)
    assert result.perplexity_float32 == pytest.approx(30)
    assert result.perplexity_secure == pytest.approx((math.exp(3) + 29) / math.exp(3))


def test_windows_come_from_all_over_the_text(tiny_pair: tuple[Path, Path]) -> None:
    tokenizer = Tokenizer.load(tiny_pair[0])
    texts = [chr(ord("a") + i) * 9 for i in range(6)]
    actual = windows_from(texts, tokenizer, count=3, length=4)
    assert actual.shape == (3, 4)
    assert [tokenizer.decode(ids) for ids in actual] == ["aaaa", "cccc", "eeee"]
    with pytest.raises(InputError, match="fewer"):
        windows_from(texts, tokenizer, count=13, length=4)


def test_pieces_stay_within_the_bound() -> None:
    scores = logits.compare_pieces(SHIPPED / "private", SHIPPED / "held_out.jsonl", 400)
    assert (scores.positions, scores.failures) == (400, [])
    # They are an approximation: a comparison of float32 with itself would find nothing.
    assert 0.02 < scores.largest_error < 0.04 and 0.001 < scores.mean_error < 0.0025


def _with_another(
    monkeypatch: pytest.MonkeyPatch, name: str, form: Callable[..., Any] | None
) -> logits.Comparison:
    """Return the logits by pieces, but for the function of this name: in another form, or exact."""
    form_on_shares = logits.form_on_shares

    def chosen(eqn: Any) -> ClosedJaxpr | None:
        if eqn.primitive.name != name:
            return form_on_shares(eqn)
        return None if form is None else flat_jaxpr(form, [shape_of(v) for v in eqn.invars])

    monkeypatch.setattr(logits, "form_on_shares", chosen)
    return logits.compare_pieces(SHIPPED / "private", SHIPPED / "held_out.jsonl", 400)


def test_a_coarser_table_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def coarser(x: Any, bits: int = activation_bits(240)) -> Any:
        return quadratics(x, GELU[4], bits=bits)

    actual = _with_another(monkeypatch, "gelu", coarser)
    assert actual.failures and actual.failures[0].startswith("largest error 0.1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exact", "low", "high"), [("gelu", 0.0, 0.0008), ("rms_norm", 0.0015, 0.002)]
)
def test_most_of_the_error_is_gelus(
    monkeypatch: pytest.MonkeyPatch, exact: str, low: float, high: float
) -> None:
    """With all functions by pieces it is 0.0020 in the mean."""
    assert low < _with_another(monkeypatch, exact, None).mean_error < high


@pytest.mark.slow
def test_pieces_stay_within_the_bound_at_5000_positions() -> None:
    scores = logits.compare_pieces(SHIPPED / "private", SHIPPED / "held_out.jsonl", 5000)
    assert (scores.positions, scores.failures) == (5000, [])


def test_activations_out_of_range_are_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    config, params = load_model(tiny_pair[0])
    huge = tmp_path / "private"
    shutil.copytree(tiny_pair[0], huge)
    # An embedding whose mean square is above what norms hold for.
    save_model(huge, config, params | {"wte": params["wte"] * 1000.0})  # type: ignore[operator]
    with pytest.raises(InputError, match="window 0 .* leaves the ranges"):
        logits.compare_pieces(huge, _held_out(tmp_path), 6)


def _held_out(directory: Path) -> Path:
    """Text at which the tiny model's two largest logits are never closer than 0.28."""
    path = directory / "held_out.jsonl"
    line = {"file": "a.py", "text": "if path:\n" * 8}
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_session_opens_all_logits(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Two processes, one window; every row of the secure forward is close to float32's."""
    result = logits.measure(tiny_pair[0], _held_out(tmp_path), positions=6, pieces_positions=6)
    # No two logits are so close that an error within the bound could flip them.
    assert (result["positions"], result["failures"], result["flips"]) == (6, [], [])
    assert result["agreement"] == 1.0
    # Numbers as they come from shares: near those by pieces, and no two errors are the same.
    assert 0 < result["largest_error"] < 0.03
    assert result["largest_error"] == pytest.approx(result["pieces"]["largest_error"], rel=0.5)
    assert result["largest_error"] != result["pieces"]["largest_error"]
    assert result["perplexity_secure"] == pytest.approx(result["perplexity_float32"], rel=0.02)
    assert result["learned"] == {
        "client": [IN_RANGE, "logits (study): 1728 x 64 bit in 1 openings"],
        "provider": [IN_RANGE],
    }
    assert "| positions | 6 | 6 |" in logits.table(result)
