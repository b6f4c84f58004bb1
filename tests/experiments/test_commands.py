"""What `bench` and `experiment` refuse before any process starts, and how a study ends."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from experiments.common import commands
from spu_llm.app import cli
from spu_llm.core.errors import SpuLlmError


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["bench"], "part"),
        (["bench", "step", "--positions", "1,x"], "expected numbers like 1,2,4, found '1,x'"),
        (["bench", "step", "--positions", "1,40"], "--positions must be 1 to 17, found 40"),
        (["bench", "step", "--network", "lan,moon"], "unknown network 'moon'"),
        (["bench", "step", "--repeat", "0"], "--repeat must be at least 1, found 0"),
        (["bench", "step", "--plot", "/nowhere/a.png"], "--plot: /nowhere is not a directory"),
        (["experiment"], "claim"),
        (["experiment", "logits", "--positions", "1"], "--positions must be at least 2, found 1"),
        (["experiment", "logits", "--pieces-positions", "1"], "--pieces-positions must be at"),
        (["experiment", "logits", "--model", "/nowhere"], "/nowhere is not a directory"),
        (["experiment", "transcript", "--json", "/nowhere/a"], "--json: /nowhere is not"),
        (["experiment", "cost", "--network", "local,moon"], "unknown network 'moon'"),
        (["experiment", "cost", "--steps", "0"], "--steps must be at least 1, found 0"),
        (["experiment", "cost", "--draft-length", "16"], "--draft-length must be 1 to 15"),
        (["experiment", "cost", "--plot", "/nowhere/a.png"], "--plot: /nowhere is not"),
        (["experiment", "latency", "--positions", "4,8"], "--positions must begin with 1"),
        (["experiment", "latency", "--json", "/nowhere/a"], "--json: /nowhere is not"),
    ],
)
def test_bad_input(arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("failures", [[], ["largest error 0.0800 exceeds 0.07"]])
def test_a_failed_criterion_is_written_and_ends_in_an_error(
    failures: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result: dict[str, Any] = {"failures": failures}
    options = argparse.Namespace(json=tmp_path / "result.json")
    if failures:
        with pytest.raises(SpuLlmError, match="does not hold: largest error") as error:
            commands.conclude(options, result, "the table")
        assert error.value.exit_code == 1
    else:
        commands.conclude(options, result, "the table")
    assert capsys.readouterr().out == "the table\n"
    assert json.loads(options.json.read_text(encoding="utf-8")) == result
