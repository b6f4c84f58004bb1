"""Pass@r, Fusi and who wins, of programs whose tests are run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from spu_llm.api.code_scores import MAX_SCORED, CodeScores, Mean, TaskScore, score_programs
from spu_llm.core.errors import InputError
from spu_llm.service.untrusted import PASSED, WRONG, Limits
from spu_llm.systems.outcome import wilson
from spu_llm.systems.split.code_tasks import CodeTask, read_tasks
from spu_llm.systems.split.scores import pass_at
from tests.kit.paths import ROOT
from tests.kit.processes import all_processes

OWN = ROOT / "experiments" / "split" / "tasks.jsonl"
TASK = CodeTask(
    "t",
    "mbpp",
    "",
    "",
    "def f(x):\n    return {0: 1, 1: 1, 3: 1}.get(x, 0)",
    tuple(f"assert f({i}) == 1" for i in range(4)),
)


def test_scores_by_hand() -> None:
    """The reference passes tests 0, 1 and 3, the first completion 1 and 2: Fusi of 1 / 3."""
    near = "def f(x):\n    return {1: 1, 2: 1}.get(x, 0)"
    right = "def f(x): return 1"
    done: list[tuple[int, int]] = []
    scores = score_programs(
        [TASK], {"t": [near, right, "def"]}, (1, 2), on_program=lambda *of: done.append(of)
    )
    (task,) = scores.tasks
    assert task.reference == [PASSED, PASSED, WRONG, PASSED]
    assert task.fusi == pytest.approx([1 / 3, 1, 0]) and task.right == 1
    assert scores.pass_at[1] == Mean(1 / 3, *wilson(1 / 3, 1), 1)
    assert scores.pass_at[2].mean == pytest.approx(pass_at(3, 1, 2))
    assert scores.fusi is not None and scores.fusi.mean == pytest.approx(4 / 9)
    assert scores.failing_references == ["t"] and done == [(i, 4) for i in range(1, 5)]
    assert {rule: rate.wins for rule, rate in scores.won.items()} == {
        "privacy": 1,
        "confidentiality": 1,
        "functionality": 1,
    }
    content = json.loads(json.dumps(scores.to_json()))
    assert content["jobs"] == len(os.sched_getaffinity(0))
    assert content["per_task"][0]["completions"][2] == ["error SyntaxError"] * 4


def test_a_long_completion_is_compared_as_an_empty_text() -> None:
    long = TASK.reference + "\n" + "#" * MAX_SCORED
    (task,) = score_programs([TASK], {"t": [long, "x = 1"]}).tasks
    assert task.right == 0 and task.completions[0] == task.reference
    assert task.codebleu[0] == 0 and not task.private and not task.confidential
    (task,) = score_programs([TASK], {"t": [long[:MAX_SCORED]]}).tasks
    assert task.codebleu[0] > 90 and task.private and task.confidential


def test_our_tasks_pass_their_references() -> None:
    """And a blind guess is no reference."""
    tasks = read_tasks(OWN)
    wrong = {"humaneval": "    return None\n", "mbpp": "x = 1\n"}
    guesses = {t.id: [t.reference, wrong[t.layout]] for t in tasks}
    scores = score_programs(tasks, guesses)
    assert scores.failing_references == [] and [t.right for t in scores.tasks] == [1] * len(tasks)
    assert scores.r == (1,) and scores.pass_at[1].mean == scores.won["functionality"].rate / 2
    assert scores.fusi is not None and scores.fusi.mean == 0.5


def test_r_is_as_far_as_completions_go() -> None:
    texts = {"t": ["def f(x): return 1"] * 10}
    assert score_programs([TASK], texts).r == (1, 10)
    assert score_programs([TASK], {"t": texts["t"][:9]}).r == (1,)
    with pytest.raises(InputError, match="Pass@11 needs 11 completions of each task; a task has"):
        score_programs([TASK], texts, (1, 11))
    with pytest.raises(InputError, match="Pass@0 needs"):
        score_programs([TASK], texts, (0,))
    with pytest.raises(InputError, match="task t has no completion"):
        score_programs([TASK], {"t": []})
    with pytest.raises(InputError, match="--jobs must be"):
        score_programs([TASK], texts, jobs=0)


def test_a_reference_that_passes_nothing_has_no_fusi() -> None:
    task = TaskScore("t", [WRONG], [[PASSED]], [0.0], False, False)
    scores = CodeScores([task], (1,), Limits())
    assert scores.fusi is None and "functionality" not in scores.won
    assert scores.to_json()["fusi"] is None and scores.pass_at[1].mean == 1
    other = TaskScore("u", [PASSED], [[WRONG], [PASSED]], [0.0, 0.0], False, False)
    both = CodeScores([task, other], (1,), Limits())
    assert both.fusi == Mean.of([0.5]) and both.won["functionality"].texts == 1


def test_intervals_are_wide_where_all_tasks_fail() -> None:
    assert Mean.of([0.0] * 12) == Mean(0, *wilson(0, 12), 12)
    assert Mean.of([0.0] * 12).high > 0.2
    assert Mean.of([0.1] * 3 + [0.7] * 7).low == pytest.approx(wilson(5.2, 10)[0])
    assert Mean.of([1.0] * 3).high == 1.0


def test_what_is_interrupted_ends_its_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    endless = ["x = 1", *["while True: pass"] * 5]
    with pytest.raises(KeyboardInterrupt):
        score_programs(
            [TASK], {"t": endless}, limits=Limits(seconds=3600), jobs=2, on_program=interrupt
        )
    assert not [p for p in all_processes() if p.parent == os.getpid() and "untrusted" in p.argv]
