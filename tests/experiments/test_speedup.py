"""The study of what drafts save: its runs, figures and table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.common.prompts import Prompt
from experiments.completions import speedup
from experiments.completions.plan import PARTS
from spu_llm.app.cli import main
from tests.kit.pair import Pair

PROMPTS = [Prompt(1, "a", "def f"), Prompt(2, "b", "class A")]


def record(
    prompt: str, drafts: int, seconds: float, stayed: list[int], **more: Any
) -> dict[str, Any]:
    asked = {"network": "lan", "mode": "greedy", "backend": "own", "tokens": 5, "prompt": prompt}
    part = {"seconds": seconds, "client_to_provider": 10**6, "provider_to_client": 10**6}
    return {
        "asked": asked | {"drafts": drafts},
        "costs": {"hint": part} | dict.fromkeys(PARTS, part),
        "stayed": stayed,
        "steps": len(stayed),
        "emitted": 1 + sum(stayed) + len(stayed),
    } | more


def run_command(*options: str) -> Any:
    """Return the exit code of the study's command."""
    with pytest.raises(SystemExit) as end:
        main(["experiment", "speedup", *options])
    return end.value.code


def test_runs_that_are_compared_stand_next_to_each_other() -> None:
    runs = [r for r, _ in speedup.matrix(PROMPTS, ["own"], ["lan", "wan"], ["greedy"], [4, 8], 9)]
    groups = [runs[i : i + 3] for i in range(0, len(runs), 3)]
    assert len(runs) == len(set(runs)) == 12
    for group in groups:
        assert {r.drafts for r in group} == {0, 4, 8}
        assert len({(r.prompt, r.network) for r in group}) == 1
    assert [g[0].drafts for g in groups] == [4, 4, 8, 8]
    again = speedup.matrix(PROMPTS, ["own", "own"], ["lan", "wan"], ["greedy"], [4, 8, 4], 9)
    assert [r for r, _ in again] == runs


def test_acceptance_is_of_drafts_that_are_looked_at() -> None:
    """A step that accepts all of its drafts looks at no rejected one."""
    runs = [record("a", 2, 1.0, [2, 0, 1, 0])]
    assert speedup.acceptance(runs) == pytest.approx(3 / 6)
    assert speedup.tokens_per_step(runs) == pytest.approx(7 / 4)
    assert speedup.acceptance([record("a", 2, 1.0, [2])]) == 1
    assert speedup.expected(0.5, 2) == pytest.approx(1.75)
    assert speedup.expected(1.0, 4) == 5


def test_figures_are_those_of_the_process_that_made_the_steps() -> None:
    """Steps of a known acceptance, texts ending after so many tokens: neither figure is off."""
    rng, alpha, drafts = np.random.default_rng(3), 0.8, 16
    runs = []
    for _ in range(2000):
        stayed: list[int] = []
        while 1 + sum(stayed) + len(stayed) < 32:
            stayed.append(int(min(rng.geometric(1 - alpha) - 1, drafts)))
        runs.append(record("a", drafts, 1.0, stayed, emitted=32))
    # 4 deviations of some 14,000 steps.
    assert speedup.acceptance(runs) == pytest.approx(alpha, abs=0.006)
    assert speedup.tokens_per_step(runs) == pytest.approx(speedup.expected(alpha, drafts), abs=0.2)


def test_a_speedup_is_of_one_prompt() -> None:
    standard = [record("a", 0, 8.0, [0] * 3), record("b", 0, 4.0, [0] * 3)]
    drafted = [record("a", 4, 2.0, [3]), record("b", 4, 4.0, [3]), record("c", 4, 9.0, [3])]
    each = speedup.speedups(drafted, standard, speedup.EVERYTHING)
    # Records have 4 tokens standard, 5 drafted.
    assert each == pytest.approx([(8 / 4) / (2 / 5), (4 / 4) / (4 / 5)])
    lines = speedup.table([*standard, *drafted])
    assert len(lines) == 4
    assert "| – | – |" in lines[2] and "3.12 (1.25 to 5.00)" in lines[3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backend", "tpu"], "there is no 'tpu'"),
        (["--modes", "beam"], "there is no 'beam'"),
        (["--drafts", "0"], "--drafts must be 1 to 32"),
        (["--network", "moon"], "unknown network 'moon'"),
        (["--tokens", "1"], "--tokens must be 2 or more"),
    ],
)
def test_what_cannot_be_measured(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("--prompts", "1", *options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["own", "spu"])
def test_runs_of_a_tiny_pair(pair: Pair, tmp_path: Path, backend: str) -> None:
    """Whole runs between two processes, drafted and standard; the file has all of them."""
    file = tmp_path / "speedup.json"
    options = ["--model", str(pair.private), "--draft-model", str(pair.public), "--prompts", "1"]
    options += ["--network", "1000mbps-0ms", "--drafts", "2", "--modes", "sampled"]
    options += ["--tokens", "4", "--backend", backend, "--json", str(file)]
    assert run_command(*options) == 0
    runs = json.loads(file.read_text())["runs"]
    assert {r["asked"]["drafts"] for r in runs} == {0, 2}
    for run in runs:
        assert run["config"]["backend"] == backend
        assert run["config"]["network"] == "1000mbps-0ms"
        assert run["costs"]["whole"]["seconds"] > run["costs"]["decode"]["seconds"] > 0
        assert len(run["stayed"]) == run["steps"]
    assert run_command(*options) == 0  # nothing is left to run
    assert len(json.loads(file.read_text())["runs"]) == 2
