"""The study of tuning's tokens: its cells on a tiny model, LoRA at the client, and the tables."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from experiments.split import tuning, tuning_report
from experiments.split.low_rank import LowRankClient
from models.family import Params, family_of, logits
from models.gpt2 import GPT2Config
from models.split import Split
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.split.boundary import Boundary
from spu_llm.systems.split.ends import client_ends
from spu_llm.systems.split.tuning import Batches, halves, tune

CONFIG = GPT2Config(vocab_size=64, n_positions=64, n_embd=8, n_layer=3, n_head=2)
PLAN = tuning.TuningPlan(
    epsilons=(0.5, 6.0),
    rounds=4,
    clean_rounds=2,
    batch=2,
    learning_rates=(1e-2,),
    trial=2,
    lora=2,
    windows=3,
)
CLEAN, CODEBOOK = tuning.Variant("none", None), tuning.Variant("grr", 0.5)


class Study(tuning.TuningStudy):
    """A study of a tiny model and of a text that repeats itself."""

    def __init__(self, params: Params) -> None:
        self.plan, self.config, self.params, self._drawn = PLAN, CONFIG, params, None
        tokens = (7 * np.arange(400, dtype=np.int32)) % 16
        windows = tokens[:195].reshape(3, 65)
        self.texts = tuning.Texts(tokens, windows[:2], windows, (2, 1, 1))


@pytest.fixture(scope="module")
def params() -> Params:
    return family_of(CONFIG).init(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def rows(params: Params) -> list[dict[str, Any]]:
    """Return all rows of the plan."""
    study = Study(params)
    tried = [study.row(cell, lambda words: None) for cell in tuning.trials(PLAN)]
    curves = [study.row(cell, lambda words: None) for cell in tuning.curves(PLAN, tried)]
    return [*tried, *curves]


def test_each_kind_has_trials_and_each_variant_a_curve(rows: list[dict[str, Any]]) -> None:
    kinds = [CLEAN, CODEBOOK, replace(CLEAN, lora=2), replace(CODEBOOK, lora=2)]
    tried = [tuning.key_of(row) for row in rows if row["trial"]]
    assert tried == [(kind, 1e-2, True) for kind in kinds]
    curves = [row for row in rows if not row["trial"]]
    assert [tuning.variant_of(row) for row in curves] == tuning.variants(PLAN)
    seen = [[point["tokens"] for point in row["points"]] for row in curves]
    assert seen[0] == seen[3] == seen[4] == [0, 128, 256]
    assert seen[1] == seen[2] == [0, 128, 256, 512]


def test_the_best_rate_of_a_kind_is_taken() -> None:
    def tried(variant: tuning.Variant, rate: float, perplexity: float) -> dict[str, Any]:
        points = [{"perplexity": [perplexity, 0.1]}]
        return {**asdict(variant), "learning_rate": rate, "trial": True, "points": points}

    plan = replace(PLAN, learning_rates=(1e-3, 1e-2), lora=0)
    trials = [
        tried(CLEAN, 1e-3, 4.0),
        tried(CLEAN, 1e-2, 5.0),
        tried(CODEBOOK, 1e-3, 9.0),
        tried(CODEBOOK, 1e-2, 7.0),
    ]
    rates = [cell.learning_rate for cell in tuning.curves(plan, trials)]
    assert rates == [1e-3, 1e-2, 1e-2]


def test_a_curve_begins_with_the_whole_model(rows: list[dict[str, Any]], params: Params) -> None:
    windows = Study(params).texts.held_out
    whole = jax.vmap(lambda text: logits(params, CONFIG, text))(windows[:, :-1])
    log_p = np.asarray(jax.nn.log_softmax(whole), np.float64)
    nats = -np.take_along_axis(log_p, windows[:, 1:, None], axis=-1).mean(axis=(1, 2))
    of_clean = [r for r in rows if r["mechanism"] == "none" and not r["trial"]]
    assert len(of_clean) == 2
    for row in of_clean:  # with LoRA, too, which changes nothing at first
        np.testing.assert_allclose(row["points"][0]["nats"], nats, atol=2e-4)


def test_perplexity_is_of_the_labels(rows: list[dict[str, Any]]) -> None:
    (row,) = (r for r in rows if tuning.variant_of(r) == CODEBOOK and not r["trial"])
    perplexities = [point["perplexity"][0] for point in row["points"]]
    assert perplexities[-1] < perplexities[0]
    for point in row["points"]:
        assert point["perplexity"][0] == pytest.approx(np.exp(np.mean(point["nats"])), rel=1e-3)


def test_a_round_of_lora_is_a_step_of_the_whole_model(params: Params) -> None:
    split, labels = Split(1, 1), np.arange(64)[::-1].copy()
    boundary = Boundary(CONFIG.width, "float32")
    tokens = np.random.default_rng(1).integers(0, 64, 200)
    batches = Batches(tokens, 2, 64, bytes(range(32)))
    front, back = client_ends(params, CONFIG, split)
    client = LowRankClient(CONFIG, front, back, labels, 1e-2, 2, Prg.from_seed(0, "lora"))
    before = jax.device_get(client.weights)
    _, host = halves(
        params, CONFIG, split, codebook=None, labels=labels, boundary=boundary, learning_rate=1e-2
    )
    windows = batches.windows(0)
    (loss,) = tune(client, host, boundary, batches, range(1))
    whole = jax.vmap(lambda text: logits(params, CONFIG, text))(windows[:, :-1])
    wanted = optax.softmax_cross_entropy_with_integer_labels(whole, labels[windows[:, 1:]])
    assert loss == pytest.approx(float(wanted.mean()), rel=1e-4)
    # b is zero at first, so that it alone has a gradient.
    assert set(before["back"][-1]) == {"head"} and len(before["back"]) == 2
    for name in ("front", "back"):
        for old, new in zip(before[name], client.weights[name], strict=True):
            for matrix in old:
                assert np.array_equal(old[matrix]["a"], new[matrix]["a"])
                assert not old[matrix]["b"].any() and np.any(np.asarray(new[matrix]["b"]))
    tuned_front, tuned_back = tuning.ends_of(client)
    assert np.array_equal(tuned_front["wte"], front["wte"])
    assert not np.array_equal(tuned_back["head"]["weight"], back["head"]["weight"])
    assert np.array_equal(tuned_back["head"]["bias"], back["head"]["bias"])


def test_points_are_at_the_last_doublings() -> None:
    assert tuning.measured_at(8) == [0, 1, 2, 4, 8]
    assert tuning.measured_at(256) == [0, 8, 16, 32, 64, 128, 256]


def test_shares_of_tokens_are_a_model_without_context() -> None:
    tokens = np.array([3, 3, 3, 1])
    windows = np.array([[0, 3, 3], [0, 3, 1]])
    actual = tuning.without_context(tuning.Texts(tokens, windows, windows, (1, 1, 1)), 4)
    likely, other = np.log(4 / 8), np.log(2 / 8)
    assert actual["nats"] == pytest.approx([-likely, -(likely + other) / 2], abs=1e-4)
    assert actual["accuracy"][0] == 0.75


def test_tables_have_every_row(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    result = {
        "model": "m",
        "plan": asdict(PLAN),
        "files": (2, 1, 1),
        "text": 400,
        "without_context": {"perplexity": [300.0, 0.1], "accuracy": [0.03, 0.01]},
        "rows": rows,
    }
    tried, by_tokens, ends = tuning_report.tables(result)
    assert len(tried) == 2 + 4 and tried[0].count("|") == 3
    assert [line.split("|")[1].strip() for line in by_tokens[2:]] == ["0", "128", "256", "512"]
    assert len(ends) == 2 + len(tuning.variants(PLAN))
    assert "grr, ε / m = 0.5, LoRA of rank 2 at the ends" in ends[-1]
    assert "1 + 1 blocks" in tuning_report.table(result)
    tuning_report.plot(result, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_what_the_trend_says() -> None:
    def row(*nats: float) -> dict[str, Any]:
        return {"points": [{"nats": [x, x + 0.2]} for x in nats]}

    untouched = {"nats": [2.0, 2.2]}
    assert tuning_report.doublings_text(row(2.5, 2.04), untouched) == "0"
    assert tuning_report.doublings_text(row(5.0, 4.0), untouched) == "1.95"
    assert tuning_report.doublings_text(row(4.0, 4.0), untouched).startswith("does not fall")


def test_options_that_are_none_are_refused() -> None:
    parser = argparse.ArgumentParser()
    tuning.add_options(parser)
    assert tuning.plan_of(parser.parse_args([])) == replace(tuning.TuningPlan(), mechanisms=["grr"])
    for wrong, words in (
        (["--rounds", "12"], "--rounds must be a power of two, 2 or more, found 12"),
        (["--learning-rates", "0"], "--learning-rates must be above 0"),
        (["--mechanisms", "noise"], "there is no 'noise'"),
        (["--epsilons", "0"], "--epsilon must be above 0"),
        (["--windows", "1"], "--windows must be at least 2"),
        (["--split", "1"], "--split must be F,B"),
    ):
        with pytest.raises(InputError, match=words):
            tuning.plan_of(parser.parse_args(wrong))
