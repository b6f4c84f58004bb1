"""The study of confidential prompting: its systems as processes, and the arithmetic of its
report.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.confidential import report as confidential_report
from experiments.confidential import study as confidential
from experiments.confidential.inputs import Texts
from experiments.confidential.study import (
    ALL,
    LAMBDA,
    OBFUSCATED,
    ConfidentialCell,
    ConfidentialPlan,
)
from experiments.confidential.systems import SYSTEMS, Caller, System, resident, started, timed
from models.hf import load_model
from models.tokenizer import Tokenizer
from spu_llm.app import cli
from spu_llm.core.errors import InputError, PeerError
from tests.experiments import costs
from tests.kit.vaults import is_greedy

PLAN = ConfidentialPlan(
    users=(1, 2),
    at=2,
    lengths=(16, 6),
    inputs=(16, 24),
    outputs=(6,),
    lambdas=(0, 2),
    repeat=1,
    larger=(2, 32, 2),
)


@pytest.fixture(scope="module")
def texts(tiny_pair: tuple[Path, Path]) -> Texts:
    return Texts(tiny_pair[0])


# ---- what is run


def test_excerpts_have_the_text_of_the_whole_model(
    texts: Texts, tiny_pair: tuple[Path, Path]
) -> None:
    actual = texts.get(18, *PLAN.lengths)
    config, params = load_model(tiny_pair[0])
    assert len({tuple(prompt) for prompt, _ in actual}) == 18
    for prompt, text in actual:
        assert len(prompt) == 16 and len(text) == 6
        assert not Tokenizer.load(tiny_pair[0]).eos_ids & set(text)
        is_greedy(config, params, prompt, text)
    assert texts.get(3, *PLAN.lengths) == actual[:3]
    with pytest.raises(InputError, match="too few prompts of 40 tokens"):
        texts.get(10**6, 40, 3)


@pytest.mark.slow
def test_two_users_through_all_systems_have_one_text(
    texts: Texts, tiny_pair: tuple[Path, Path]
) -> None:
    """As they are compared, and the bytes that they hold when everybody's prompt is there."""
    cells = [
        ConfidentialCell("users", "tiny", name, 2, 16, 6, LAMBDA if name == OBFUSCATED else 0)
        for name in ALL
    ]
    held: dict[str, list[int]] = {}
    with started(SYSTEMS, tiny_pair[0], 2, 2 * (LAMBDA + 1)) as systems:
        of = {system.name: system for system in systems}
        shown: list[str] = []
        runs = list(confidential.compare(cells, of, texts, 2, shown.append))
        prompts = [[row] for row, _ in texts.get(2, *PLAN.lengths)]
        for name, system in of.items():
            pids = [p.pid for group in system.processes(2).values() for p in group]

            def look(name: str = name, pids: list[int] = pids) -> None:
                held[name] = pids
                for actual in map(resident, pids):
                    assert 0 < actual["own"] <= actual["pss"] <= actual["rss"]

            actual = timed(system, prompts, 6, look)
            assert actual.texts == [[text] for _, text in texts.get(2, *PLAN.lengths)]
    assert len(shown) == 12 and [run["turn"] for run in runs] == [0] * 4 + [1] * 4
    for run in runs:
        assert run["failures"] == []
        assert len(run["first"]) == len(run["token"]) == (1 if "no" in run["system"] else 2)
        assert 0 < max(run["first"]) < run["whole"] and min(run["token"]) > 0
        if run["system"] in ("vault", OBFUSCATED):
            # Five steps of both, of which the first may have been of one of them.
            assert run["spent"]["steps"] in (5, 6)
            assert min(run["spent"].values()) > 0
        else:
            assert run["spent"] == {}
    assert [len(held[name]) for name in SYSTEMS] == [1, 2, 3]
    for pid in (pid for pids in held.values() for pid in pids):
        assert not Path(f"/proc/{pid}").exists()


class _Said(System):
    """In place of processes: what it is made with is what it says."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__("no protection", [], [], [])
        self.said = texts

    def callers(self, prompts: Any, count: int) -> list[Caller]:
        def call(on_tokens: Callable[[], None]) -> list[list[list[int]]]:
            for _ in range(count):
                on_tokens()
            if not self.said:
                raise PeerError("it has ended")
            return [[text] for text in self.said]

        return [Caller(call, lambda: None)]


def test_another_text_is_a_failure(texts: Texts) -> None:
    cell = ConfidentialCell("users", "tiny", "no protection", 1, 16, 6, 0)
    ((_, right),) = texts.get(1, *PLAN.lengths)
    good = confidential.measure(cell, _Said([right]), texts, 0)
    assert good["failures"] == []
    wrong = confidential.measure(cell, _Said([[*right[:-1], right[-1] + 1]]), texts, 0)
    assert wrong["failures"] == ["no protection, 1 users: 1 texts differ"]
    with pytest.raises(PeerError, match="it has ended"):
        confidential.measure(cell, _Said([]), texts, 0)


def test_a_run_that_breaks_off_ends_no_other(texts: Texts) -> None:
    cell = ConfidentialCell("users", "tiny", "no protection", 1, 16, 6, 0)
    ((_, right),) = texts.get(1, *PLAN.lengths)
    system, shown = _Said([right]), list[str]()
    runs = confidential.compare([cell], {cell.process: system}, texts, 3, shown.append)
    assert next(runs)["failures"] == []
    system.said = []
    assert next(runs)["error"] == "it has ended"
    system.said = [right]
    assert next(runs)["turn"] == 2


def test_a_process_that_cannot_start_is_one_error(tmp_path: Path) -> None:
    with (
        pytest.raises(PeerError, match="a process of the study has ended"),
        started(["full isolation"], tmp_path, 1, 1),
    ):
        pass


def test_cells_that_are_compared_differ_in_one_thing() -> None:
    models = ["shipped", "larger"]
    for part in ("users", "sizes", "lengths"):
        for group in confidential.cells_of(part, PLAN, models):
            assert [cell.system for cell in group] == list(ALL)
            same = {replace(cell, system="", fakes=0) for cell in group}
            assert len(same) == 1
    (group,) = confidential.cells_of("lambda", PLAN, models)
    assert [cell.fakes for cell in group] == [0, 2]
    sizes = confidential.cells_of("sizes", PLAN, models)
    assert [group[0].model for group in sizes] == models
    assert confidential.cells_of("memory", PLAN, models) == []


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--parts", "users,moon"], "--parts: there is no 'moon'"),
        (["--users", "0,1"], "--users must be 1 to 28, found 0"),
        (["--repeat", "0"], "--repeat must be at least 1"),
        (["--model", "SMALL"], "--model: a context of 64 is too short, 192 tokens are measured"),
        (["--plot", "/nowhere/a.png"], "--plot: /nowhere is not a directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str],
    wanted: str,
    tiny_pair: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [a.replace("SMALL", str(tiny_pair[0])) for a in arguments]
    with pytest.raises(SystemExit) as end:
        cli.main(["experiment", "confidential", *arguments])
    assert end.value.code == 2
    assert wanted in capsys.readouterr().err


# ---- the report

SECONDS = {"no protection": 0.004, "full isolation": 0.032, "vault": 0.010, OBFUSCATED: 0.020}


def run(part: str, system: str, users: int, turn: int, **more: Any) -> dict[str, Any]:
    """Return a made-up run: all systems have the first token after 0.1 s; turn 1 is twice as
    slow.
    """
    token = SECONDS[system] * (1 + turn)
    spent = (
        {
            "steps": 10,
            "model": 0.04,
            "send_query": 0.01,
            "own_attention": 0.005,
            "wait": 0.02,
            "merge": 0.005,
        }
        if "vault" in system
        else {}
    )
    return {
        "part": part,
        "model": "shipped",
        "system": system,
        "users": users,
        "input": 16,
        "output": 32,
        "fakes": LAMBDA if system == OBFUSCATED else 0,
        "turn": turn,
        "first": [0.1] * users,
        "token": [token - 0.001, token + 0.001],
        "spent": spent,
        "whole": 0.1 + 31 * token,
        "others": 0.0,
        "failures": [],
    } | more


def result() -> dict[str, Any]:
    both = [(turn, system) for turn in (0, 1) for system in ALL]
    runs = [run("users", s, users, turn) for users in (1, 8) for turn, s in both]
    runs += [run("sizes", s, 8, turn, model=m) for m in ("shipped", "larger") for turn, s in both]
    runs += [run("lengths", s, 1, turn, input=n) for n in (16, 64) for turn, s in both]
    runs += [
        run("lambda", "vault", 1, turn, fakes=n, token=[0.01 * (1 + n)])
        for n in (0, 8)
        for turn in (0, 1)
    ]
    of = {"processes": 1, "rss": 300, "pss": 200, "own": 100}
    memory = [
        {
            "part": "memory",
            "model": "shipped",
            "system": s,
            "users": 8,
            "roles": {"owner": of, "users": {k: n * v for k, v in of.items()}},
            "needed": {"weights": 10, "rows": 5},
        }
        for s, n in (("no protection", 0), ("full isolation", 8), ("vault", 2), (OBFUSCATED, 3))
    ]
    two = {
        "drafted": False,
        "input": 16,
        "output": 32,
        "same": 32,
        "first_token_seconds": 20.0,
        "seconds": {"decode": 62.0},
        "elapsed_seconds": 96.0,
        "steps": 31,
        "others": 0.0,
    }
    model = {"layers": 4, "width": 256, "weights": 21_000_000, "row": 8192}
    return {
        "plan": {"at": 8},
        "runs": runs,
        "memory": memory,
        "failures": [],
        "machine": costs.MACHINE,
        "two-party": [two, {**two, "drafted": True}],
        "models": {"shipped": model, "larger": model},
    }


def test_figures_of_a_run() -> None:
    vault = run("users", "vault", 2, 0)
    assert confidential_report.token_seconds(vault) == pytest.approx(0.010)
    assert confidential_report.first_seconds(vault) == pytest.approx(0.1)
    assert confidential_report.decoding(vault) == pytest.approx(2 / 0.010)
    assert confidential_report.throughput(vault) == pytest.approx(2 * 32 / (0.1 + 0.31))
    parts = confidential_report.step_parts(vault)
    assert parts["model"] == pytest.approx(0.004) and parts["wait"] == pytest.approx(0.002)
    assert parts["other"] == pytest.approx(0.002)
    assert sum(parts.values()) == pytest.approx(0.010)


def test_ratios_are_of_runs_of_one_turn() -> None:
    runs = [run("users", s, 8, turn) for turn in (0, 1) for s in ALL]
    alone, vault = (confidential_report.choose(runs, system=s) for s in ("full isolation", "vault"))
    figure = confidential_report.token_seconds
    assert confidential_report.ratios(alone, vault, figure) == pytest.approx([3.2, 3.2])
    assert confidential_report.ratios(alone, vault[1:], figure) == pytest.approx([3.2])


def test_seconds_of_a_two_party_token() -> None:
    actual = confidential_report.per_token(result()["two-party"][0])
    assert actual == {"decode": 2.0, "everything": 3.0}


def test_the_tables() -> None:
    text = confidential_report.table(result())
    assert "| full isolation | 48 (32 to 64) | 3.20 (3.20 to 3.20) | 100 (100 to 100) |" in text
    assert "| 8 | 90 (90 to 90) | 9.00 (9.00 to 9.00) | 100 (100 to 100) |" in text  # lambda
    assert "| shipped | 8 | full isolation | 9 | 2.7 kB | 1.8 kB | 900 B | 10 B | 5 B |" in text
    assert "| two-party, drafted | 16 in, 32 out | 2 | 3 | 20 | 32 of 32 |" in text
    assert "than full isolation: 3.20 (3.20 to 3.20): holds" in text
    assert "4 times less of memory (PSS): 3.00: does not hold" in text
    assert text.endswith("outcomes: all texts are the same")
    assert "NOT QUIET" not in text


@pytest.mark.parametrize("parts", ["users", "memory", "all", "two-party"])
def test_the_plot_is_drawn_of_what_there_is(parts: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    actual = result()
    if parts != "all":
        actual["runs"] = [r for r in actual["runs"] if r["part"] == parts]
        actual["memory"] = actual["memory"] if parts == "memory" else []
    confidential_report.table(actual)
    confidential_report.plot(actual, tmp_path / "all.png")
    assert os.path.exists(tmp_path / "all.png") == (parts != "two-party")
