"""The study of long marked texts: groups of prompts, scores by length, and how they are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.watermark import long
from experiments.watermark.texts import Method
from spu_llm.app import cli
from spu_llm.core.errors import InputError


def run(command: list[str]) -> None:
    options = cli.command_line().parse_args(command)
    options.run(options)


def test_groups_are_of_one_size_and_in_the_order_of_entropy() -> None:
    entropy = np.array([3.0, 1.0, 2.0, 8.0, 5.0, 4.0, 7.0, 6.0])
    # Prompts of more entropy are told apart, the others are not.
    of = np.where(entropy > 4, 2.0, 0.0)[:, None]
    nulls = [np.ones((8, 3)) * (entropy > 4)[:, None]]
    groups = long.by_entropy(entropy, of, nulls)
    assert [group["nats"] for group in groups] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [group["auc"][0] for group in groups] == [0.5, 0.5, 1.0, 1.0]


def test_the_ratio_is_a_score_of_uniform_chunks_alone() -> None:
    chunked = [method for method in long.METHODS if method.k > 1]
    assert {method.family for method in chunked} == {"uniform", "gamma"}
    assert {method.k for method in chunked} == {50}
    assert Method("flat", 1024) in long.METHODS


@pytest.mark.slow
def test_a_cell_and_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the shipped model, four short texts: all scores are there, and a run goes on."""
    methods = (Method("flat", 16), Method("flat", 2, 50))
    monkeypatch.setattr(long, "METHODS", methods)
    monkeypatch.setattr(long, "LENGTHS", (25, 50))
    file = tmp_path / "long.json"
    command = ["experiment", "watermark-long", "--texts", "4", "--tokens", "60"]
    command += ["--temperatures", "1", "--json", str(file)]
    run(command)
    result = json.loads(file.read_text())
    first, chunked = result["rows"]
    assert list(first["scores"]) == ["sum"] and list(chunked["scores"]) == ["sum", "ratio"]
    for of in (first["scores"]["sum"], chunked["scores"]["ratio"]):
        assert list(of["by_length"]) == ["25", "50", "60"]
        assert len(of["by_entropy"]) == long.GROUPS
    # Sixteen candidates at five bits a token: no unmarked text looks so.
    assert first["scores"]["sum"]["by_length"]["60"]["auc"][0] > 0.95
    assert first["scores"]["sum"]["replaced"]["auc"][0] < 1
    lines = long.rows(result)
    assert lines[0].startswith("| method | temperature | AUC, %, at 25 tokens |")
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| flat, k = 1, m = 16",
        "| flat, k = 50, m = 2",
        "| flat, k = 50, m = 2, likelihood ratio",
    ]
    assert len(long.entropy_rows(result)) == len(lines)

    def nothing(*of_cell: Any) -> dict[str, Any]:
        raise AssertionError("a cell that is there is not made again")

    monkeypatch.setattr(long, "cell", nothing)
    run(command)
    assert json.loads(file.read_text())["rows"] == result["rows"]


def test_texts_longer_than_the_model_are_refused() -> None:
    with pytest.raises(InputError, match="the model has 256 positions"):
        run(["experiment", "watermark-long", "--texts", "4", "--tokens", "1000"])
