"""The study of what each part of NOIR is for: its cells on a tiny model, and how they are shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.split import parts
from experiments.split.study import Corpus
from models.family import ModelConfig, Params, family_of
from models.gpt2 import GPT2Config
from models.split import Split
from spu_llm.core.prg import Prg
from spu_llm.systems.split import vocabulary
from spu_llm.systems.split.modes import BACK, CODEBOOK, PERMUTATION

CONFIG = GPT2Config(vocab_size=64, n_positions=64, n_embd=8, n_layer=4, n_head=2)
PLAN = parts.PartsPlan(rounds=2, texts=4)


class Study(parts.PartsStudy):
    """A study of a tiny model and of random text, without attacks."""

    def __init__(self, params: Params) -> None:
        self.plan, self.config, self.params = PLAN, CONFIG, params
        tokens = np.random.default_rng(0).integers(0, 64, 400, dtype=np.int32)
        self.corpus = Corpus(tokens, tokens[:260].reshape(4, 65), (1, 1))


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(family_of(CONFIG).init(CONFIG, jax.random.key(0)))


def row(study: Study, name: str) -> dict[str, Any]:
    (cell,) = (cell for cell in parts.CELLS if cell.name == name)
    return study.row(replace(cell, attacked=False), lambda words: None)


def test_cells_leave_out_what_they_say() -> None:
    left_out = {cell.name: cell.leave_out for cell in parts.CELLS}
    assert left_out["codebook alone"] == (PERMUTATION,)
    assert left_out["permutation alone"] == (CODEBOOK,)
    assert left_out[parts.NOIR] == ()
    assert [cell.tuned for cell in parts.CELLS].count(BACK) == 1
    assert {cell.split for cell in parts.CELLS} == {Split(1, 1), Split(1, 2), Split(2, 1)}
    # The inverters of attacks are of one split.
    assert {cell.split for cell in parts.CELLS if cell.attacked} == {Split(1, 1)}


def test_an_untouched_model_is_the_whole_model(study: Study) -> None:
    from models.family import logits

    actual = row(study, parts.UNTOUCHED)
    windows = study.corpus.evaluated
    whole = jax.vmap(lambda text: logits(study.params, CONFIG, text))(windows[:, :-1])
    log_p = np.asarray(jax.nn.log_softmax(whole), np.float64)
    nats = -np.take_along_axis(log_p, windows[:, 1:, None], axis=-1).mean()
    assert actual["perplexity"][0] == pytest.approx(float(np.exp(nats)), rel=1e-4)
    assert actual["loss"] is None


def test_cells_are_of_the_same_secrets(study: Study) -> None:
    alone, whole = row(study, "codebook alone"), row(study, parts.NOIR)
    assert alone["distances"] == whole["distances"] is not None
    assert row(study, "permutation alone")["distances"] is None
    # The labels differ, so the losses do.
    assert alone["loss"] != whole["loss"]


def test_without_the_providers_blocks_rows_come_back(study: Study) -> None:
    """The whole model is then the client's blocks alone."""
    from models.family import logits

    (cell,) = (cell for cell in parts.CELLS if not cell.middle)
    bare = replace(
        cell, leave_out=(CODEBOOK, PERMUTATION), tunes=False, attacked=False, split=Split(1, 1)
    )
    actual = study.row(bare, lambda words: None)
    params = {**study.params, "blocks": [study.params["blocks"][i] for i in (0, 3)]}
    config: ModelConfig = replace(CONFIG, n_layer=2)
    windows = study.corpus.evaluated
    whole = jax.vmap(lambda text: logits(params, config, text))(windows[:, :-1])
    log_p = np.asarray(jax.nn.log_softmax(whole), np.float64)
    nats = -np.take_along_axis(log_p, windows[:, 1:, None], axis=-1).mean()
    assert actual["perplexity"][0] == pytest.approx(float(np.exp(nats)), rel=1e-4)


def test_distances_of_a_table_that_is_kept_are_zero() -> None:
    table = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    kept = vocabulary.Codebook(table, np.full(32, 4), 0.0)
    of_kept = parts.distances_of(table, kept)
    assert of_kept["kept"] == 4 and of_kept["l1"] == 0
    assert of_kept["angle"] == pytest.approx(0, abs=1e-2) and of_kept["resampled"] > 1
    drawn = vocabulary.draw(table, "grr", 0.01, Prg.from_seed(0, "codebook"))
    of_drawn = parts.distances_of(table, drawn)
    assert of_drawn["angle"] == pytest.approx(of_drawn["angle_to_another"], abs=25)
    assert of_drawn["l1"] == pytest.approx(of_drawn["resampled"], rel=0.3)


def test_tables_have_every_cell_and_every_attack(tmp_path: Path) -> None:
    outcome = {
        "attack": "A8",
        "what": "the right token in its place, by trying all",
        "rate": 0.25,
        "interval": [0.125, 0.5],
        "at_chance": False,
    }
    rows = [
        {
            "name": cell.name,
            "distances": None,
            "loss": 1.0 if cell.tunes else None,
            "perplexity": [40.0, 0.1],
            "accuracy": [0.5, 0.02],
            "outcomes": [outcome] if cell.attacked else [],
        }
        for cell in parts.CELLS
    ]
    result = {"plan": parts.asdict(PLAN), "rows": rows}
    lines = parts.rows(result)
    assert len(lines) == 2 + len(parts.CELLS)
    assert lines[2] == "| untouched | 40 (× or / 1.11) | 50.0 ± 2.0 % |"
    assert lines[6] == "| NOIR | 40 (× or / 1.11) | 50.0 ± 2.0 % |"
    of_attacks = parts.attack_rows(result)
    assert of_attacks[0].count("|") == 2 + sum(cell.attacked for cell in parts.CELLS)
    assert of_attacks[2].count("25.0 (12.5 to 50.0)") == 6
    assert "grr, ε / m = 9; 2 rounds" in parts.table(result)
