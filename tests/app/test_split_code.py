"""`spu-llm split solve` and `split score`: from a model to Pass@r by two commands."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import pytest

from spu_llm.app import cli
from tests.kit.command_line import refused
from tests.kit.paths import ROOT
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import Start, all_processes
from tests.systems.split.sessions import make_model

OWN = ROOT / "experiments" / "split" / "tasks.jsonl"


def tasks_in(folder: Path) -> Path:
    """Return a file with two tasks of ours, one of each layout."""
    lines = OWN.read_text().splitlines(keepends=True)
    path = folder / "tasks.jsonl"
    path.write_text(lines[0] + lines[-1])
    return path


def completions_in(folder: Path, *texts: str) -> Path:
    """Return a file with these completions of both tasks."""
    ids = [json.loads(line)["task_id"] for line in tasks_in(folder).read_text().splitlines()]
    path = folder / "completions.jsonl"
    rows = [{"task_id": of, "completion": text} for of in ids for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_scores_are_shown_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = completions_in(tmp_path, "    return a + b\n", "    return 1\n")
    result = tmp_path / "result.json"
    command = ["split", "score", "--tasks", str(tasks_in(tmp_path)), "--completions", str(texts)]
    with pytest.raises(SystemExit) as end:
        cli.main([*command, "--r", "1,2", "--json", str(result)])
    assert not end.value.code
    said = capsys.readouterr()
    rows = {line.split("  ")[0]: line for line in said.out.splitlines()}
    assert "25.0%" in rows["Pass@1"] and "50.0%" in rows["Pass@2"] and "25.0%" in rows["Fusi"]
    assert "1 of 2 tasks" in rows["functionality won"]
    assert "passed 3, wrong 3" in said.out and "error IndentationError 6" in said.out
    assert "running programs" in said.err
    content = json.loads(result.read_text())
    assert content["pass_at"]["2"]["mean"] == 0.5 and content["machine"]["cores"] >= 1
    assert content["per_task"][0]["completions"][0] == ["passed"] * 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--r", "1,x"], "--r must be whole numbers like 1,10"),
        (["--r", "2"], "Pass@2 needs 2 completions of each task; a task has 1"),
        (["--seconds", "0"], "--seconds must be"),
        (["--memory", "1"], "--memory must be"),
        (["--jobs", "0"], "--jobs must be"),
        (["--json", "/nowhere/x"], "--json: /nowhere is not a directory"),
        (["--tasks", "/nowhere/x"], "cannot read /nowhere/x, of --tasks"),
        (["--completions", "/nowhere/x"], "cannot read /nowhere/x, of --completions"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    texts = completions_in(tmp_path, "    return 1\n")
    command = ["split", "score", "--tasks", str(tasks_in(tmp_path)), "--completions", str(texts)]
    assert said in refused(capsys, *command, *more)
    texts.write_text(texts.read_text().splitlines(keepends=True)[0])
    assert "has no completion" in refused(capsys, *command)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_nothing_is_left_running(signum: int, code: int, start: Start, tmp_path: Path) -> None:
    texts = completions_in(tmp_path, "    while True: pass\n", "while True: pass\n")
    paths = ["--tasks", str(tasks_in(tmp_path)), "--completions", str(texts)]
    command = start("split", "score", *paths, "--seconds", "3600", "--jobs", "2")

    def programs() -> list[int]:
        return [p.pid for p in all_processes() if p.parent == command.pid]

    assert eventually(lambda: len(programs()) == 2, END_S)
    running = programs()
    command.send(signum)
    assert command.wait(END_S) == code, command.stderr
    assert not [p for p in all_processes() if p.pid in running]
    assert not os.listdir(command.tmp)


@pytest.mark.slow
def test_from_a_model_to_pass_at_r(start: Start, tmp_path: Path) -> None:
    """What is there already is not made again, and the file is its owner's alone."""
    model, tasks, made = make_model(tmp_path / "model"), tasks_in(tmp_path), tmp_path / "made.jsonl"
    tasks.write_text(tasks.read_text().splitlines(keepends=True)[0])  # whose prompt is short
    here = ["--insecure", "--mode", "plain", "--model", str(model)]
    provider = start("split", "serve", *here, "--listen", "127.0.0.1:0")
    where = ["--server", f"127.0.0.1:{provider.until_listening()}"]
    paths = ["--tasks", str(tasks), "--completions", str(made)]

    def solved(samples: int) -> list[str]:
        options = ["--samples", str(samples), "--max-new-tokens", "4", "--seed", "1"]
        there = len(made.read_text().splitlines()) if made.exists() else 0
        command = start("split", "solve", *here, *where, *paths, *options)
        assert command.wait(RUN_S) == 0, command.stderr
        assert "is insecure" in command.stderr
        assert ("task own/0, 1 of 1" in command.stderr) == (there < samples)
        return made.read_text().splitlines()

    two = solved(2)
    assert len(two) == 2 and stat.S_IMODE(made.stat().st_mode) == 0o600
    assert solved(2) == two
    three = solved(3)
    assert three[:2] == two and len(three) == 3
    command = start("split", "score", *paths)
    assert command.wait(END_S) == 0 and "1 tasks, 3 completions" in command.stdout


@pytest.mark.slow
def test_a_tuned_model_solves_tasks(start: Start, tmp_path: Path) -> None:
    """In noir, under secrets that a round of tuning made, with random letters before prompts."""
    model, tasks, made = make_model(tmp_path / "model"), tasks_in(tmp_path), tmp_path / "made.jsonl"
    tasks.write_text(tasks.read_text().splitlines(keepends=True)[0])
    texts, secrets = tmp_path / "texts.jsonl", tmp_path / "secrets"
    texts.write_text(40 * '{"text": "def read(path):\\n    return alpha beta gamma"}\n')
    here = ["--insecure", "--mode", "noir", "--model", str(model)]
    provider = start("split", "serve", *here, "--listen", "127.0.0.1:0")
    here += ["--server", f"127.0.0.1:{provider.until_listening()}", "--secrets", str(secrets)]
    small = ["--rounds", "1", "--batch", "4", "--length", "16", "--epsilon", "4"]
    tuned = start("split", "tune", *here, "--texts", str(texts), *small)
    assert tuned.wait(RUN_S) == 0, tuned.stderr
    paths = ["--tasks", str(tasks), "--completions", str(made)]
    command = start("split", "solve", *here, *paths, "--max-new-tokens", "4", "--random-prefix")
    assert command.wait(RUN_S) == 0 and "insecure" not in command.stderr, command.stderr
    assert len(made.read_text().splitlines()) == 2
    assert "Pass@2" in solved_scores(start, paths)


def solved_scores(start: Start, paths: list[str]) -> str:
    command = start("split", "score", *paths, "--r", "2")
    assert command.wait(END_S) == 0, command.stderr
    return command.stdout
