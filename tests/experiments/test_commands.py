"""What `bench` and `experiment` refuse before any process starts, and how a study ends."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.common import commands
from spu_llm.app import cli, studies
from spu_llm.core.errors import SpuLlmError


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["bench"], "part"),
        (["bench", "step", "--positions", "1,x"], "expected numbers like 1,2,4, found '1,x'"),
        (["bench", "step", "--positions", "1,40"], "--positions must be 1 to 33, found 40"),
        (["bench", "step", "--network", "lan,moon"], "unknown network 'moon'"),
        (["bench", "step", "--repeat", "0"], "--repeat must be at least 1, found 0"),
        (["bench", "step", "--plot", "/nowhere/a.png"], "--plot: /nowhere is not a directory"),
        (["bench", "step", "--plot", "/tmp/a.jpg"], "--plot: a.jpg must end with .png, .svg, .pdf"),
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


@pytest.mark.parametrize("command", ["", "bench", "experiment"])
def test_a_list_of_commands_is_quick(command: str) -> None:
    """Nothing of a study, nor JAX, is imported for it."""
    code = (
        "import sys; from spu_llm.app import cli\n"
        f"try: cli.command_line().parse_args([*{command!r}.split(), '--help'])\n"
        "except SystemExit: print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    help_text, _, modules = run.stdout.strip().rpartition("\n")
    names = [name.split()[-1] for name in studies.STUDIES if name.startswith(command)]
    assert len(names) >= 4 and all(name in help_text for name in names if command)
    assert not {"jax", "numpy", "spu", "experiments"} & set(modules.split())


@pytest.mark.parametrize("command", studies.STUDIES)
def test_a_command_has_options_and_a_function(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.command_line().parse_args([*command.split(), "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: spu-llm {command}" in text and "--json FILE" in text and "--debug" in text


@pytest.mark.parametrize("failures", [[], ["largest error 0.0800 exceeds 0.05"]])
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
