"""The study of marked private text: what is run, what goes on, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.common.prompts import read_prompts
from experiments.watermark import runs as watermark_runs
from spu_llm.app import cli
from spu_llm.core.errors import InputError, SpuLlmError


def told(tokens: int, seconds: float) -> dict[str, Any]:
    """Return what `demo` writes."""
    ways = {"client_to_provider": 10**6 * tokens, "provider_to_client": 0}
    return {
        "token_ids": [1] * tokens,
        "text": "def read(path):",
        "steps": 3,
        "drafted": 9,
        "accepted": 4,
        "seconds": {"offline": 1.0, "prefill": 1.0, "decode": seconds - 1},
        "bytes": {"offline": ways, "online": ways},
        "messages": {"offline": 4, "online": 8},
        "learned": {},
    }


def test_systems_take_turns_and_stopped_runs_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run fails and is made when the command is given again; ratios are prompt by prompt."""
    seen: list[str] = []
    failing = [True]

    def run(arguments: Sequence[str], json_file: Path) -> dict[str, Any]:
        given = list(arguments)
        options = cli.command_line().parse_args(given)
        assert options.network == "lan" and options.temperature == 0.7
        name = f"{options.candidates} {options.verify}" if options.watermark else "unmarked"
        if name == "1 race" and failing:
            failing.clear()
            raise SpuLlmError("the peer is gone")
        seen.append(f"{name} {options.draft_length}")
        return told(8, {"unmarked": 8.0, "4 token": 16.0, "1 race": 12.0}[name] + len(seen) % 2)

    monkeypatch.setattr(watermark_runs, "run_command", run)
    file = tmp_path / "runs.json"
    command = [
        "experiment",
        "watermark-runs",
        "--prompts",
        "2",
        "--tokens",
        "8",
        "--draft-length",
        "3,2",
        "--json",
        str(file),
    ]

    def start() -> None:
        options = cli.command_line().parse_args(command)
        options.run(options)

    with pytest.raises(SpuLlmError, match="1 of 8 runs failed"):
        start()
    assert seen == [
        "unmarked 4",
        "4 token 3",
        "4 token 2",  # and a race, which failed
        "4 token 3",
        "4 token 2",
        "1 race 4",
        "unmarked 4",
    ]
    start()
    assert len(seen) == 8 and seen[-1] == "1 race 4"
    content = json.loads(file.read_text(encoding="utf-8"))
    assert len(content["runs"]) == 8 and len(content["failed"]) == 1
    assert [run["log10_p"] is None for run in content["runs"]].count(True) == 2
    lines = [
        line for line in watermark_runs.table(content).splitlines() if "candidates of 3" in line
    ]
    # 16 s in 9 s at one prompt, 16 s in 9 s at the other; eight tokens each.
    (line,) = lines
    assert line.startswith("| lan, 8 tokens: 4 candidates of 3 drafts, token | 2 | 2 (2 to 2) |")
    assert "1.78" in line and watermark_runs.table(content) in capsys.readouterr().out


def test_what_cannot_be_run(tmp_path: Path) -> None:
    for options, words in (
        (["--only", "marked"], "no 'marked'"),
        (["--candidates", "1"], "--candidates"),
        (["--draft-length", "0"], "--draft-length"),
        (["--verify", "post"], "no 'post'"),
        (["--prompts", str(len(read_prompts()) + 1)], "--prompts"),
    ):
        given = cli.command_line().parse_args(["experiment", "watermark-runs", *options])
        with pytest.raises(InputError, match=words):
            given.run(given)
