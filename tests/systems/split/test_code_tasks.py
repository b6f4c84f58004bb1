"""Tasks with tests, in both layouts, and what of a file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spu_llm.api import solving
from spu_llm.core.errors import InputError
from spu_llm.systems.split.code_tasks import CodeTask, _checks, read_completions, read_tasks

CHECK = """
METADATA = {'author': 'us'}
LIMIT = 1e-6

def check(candidate):
    import math
    assert candidate(1) == 2
    values = [1, 2]
    for value in values:
        assert math.isclose(candidate(value), value + 1, abs_tol=LIMIT)
    values.append(3)
    assert candidate(values[-1]) == 4, "the last"
"""
HUMANEVAL = {
    "task_id": "own/0",
    "prompt": "def inc(x):\n",
    "canonical_solution": "    return x + 1\n",
    "test": CHECK,
    "entry_point": "inc",
}
MBPP = {
    "task_id": 7,
    "text": "Add one.",
    "code": "def inc(x):\r\n    return x + 1",
    "test_list": ["assert inc(ONE) == 2", "assert inc(2) == 3"],
    "test_setup_code": "ONE = 1",
    "challenge_test_list": [],
}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def passed(task: CodeTask, completion: str) -> list[bool]:
    """Return what passes, unconfined: the programs are these tests' own."""
    outcomes = []
    for test in task.tests:
        names: dict[str, Any] = {}
        exec(task.program(completion), names)
        try:
            exec(test, names)
        except AssertionError:
            outcomes.append(False)
        else:
            outcomes.append(True)
    return outcomes


def test_each_assertion_of_a_check_is_a_test(tmp_path: Path) -> None:
    (task,) = read_tasks(write(tmp_path / "t", HUMANEVAL))
    assert (task.id, task.layout, task.prompt) == ("own/0", "humaneval", "def inc(x):\n")
    assert passed(task, task.reference) == [True] * 3
    assert passed(task, "    return 2\n") == [True, False, False]
    assert passed(task, "    return 4\n") == [False, False, True]


@pytest.mark.parametrize(
    "test",
    [
        "def check(candidate):\n    verify(candidate)\ndef verify(f):\n    assert f(1) == 2",
        "def check(f):\n    pass\ndef check(f):\n    assert f(1) == 2",
    ],
)
def test_a_check_without_assertions_is_one_test(test: str, tmp_path: Path) -> None:
    (task,) = read_tasks(write(tmp_path / "t", HUMANEVAL | {"test": test}))
    assert passed(task, task.reference) == [True] and passed(task, "    return 1") == [False]


HELPERS = """
def near(a, b):
    assert a == b

def check(f):
    def same(x, y):
        assert f(x) == y
    same(1, 2)
    class Odd:
        assert True
"""


def test_helpers_that_assert_are_no_tests(tmp_path: Path) -> None:
    """What calls them is: by itself, or behind the last statement that asserts something."""
    (task,) = read_tasks(write(tmp_path / "t", HUMANEVAL | {"test": HELPERS}))
    assert passed(task, task.reference) == [True] and passed(task, "    return 1") == [False]
    more = HELPERS + "    assert f(2) == 3\n    x = 4\n    near(f(3), x)\n    y = 1\n"
    (task,) = read_tasks(write(tmp_path / "t", HUMANEVAL | {"test": more}))
    assert passed(task, task.reference) == [True, True]
    assert passed(task, "    return x + 1 if x < 3 else 0") == [True, False]
    assert passed(task, "    return x + 1 if x != 2 else 0") == [False, True]
    quiet = HELPERS + "    assert f(2) == 3\n    x = 4\n    def g(): near(f(3), x)\n"
    (task,) = read_tasks(write(tmp_path / "t", HUMANEVAL | {"test": quiet}))
    assert len(task.tests) == 1


def test_a_list_of_assertions(tmp_path: Path) -> None:
    (task,) = read_tasks(write(tmp_path / "t", MBPP))
    assert (task.id, task.layout, task.lead) == ("7", "mbpp", "")
    assert task.prompt == '"""\nAdd one.\nassert inc(ONE) == 2\nassert inc(2) == 3\n"""\n'
    assert passed(task, task.reference) == [True, True]
    assert passed(task, "def inc(x): return 3") == [False, True]
    sanitised = {k: v for k, v in MBPP.items() if k not in ("text", "test_setup_code")}
    sanitised |= {"prompt": "Add one.", "test_imports": ["from math import pi as ONE"]}
    (other,) = read_tasks(write(tmp_path / "t", sanitised))
    assert other.prompt == task.prompt and passed(other, "def inc(x): return 2") == [True, False]


def test_completions_by_task(tmp_path: Path) -> None:
    tasks = read_tasks(write(tmp_path / "t", HUMANEVAL, MBPP))
    rows = [{"task_id": 7, "completion": "a"}, {"task_id": "7", "completion": "b", "more": 1}]
    assert read_completions(write(tmp_path / "c", *rows), tasks) == {"own/0": [], "7": ["a", "b"]}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "there is no task in it"),
        ([{"task_id": "a"}], "line 1: must have the fields of HumanEval"),
        ([HUMANEVAL, MBPP | {"task_id": "own/0"}], "line 2: there is another task own/0"),
        ([MBPP, MBPP | {"task_id": "7"}], "line 2: there is another task 7"),
        ([HUMANEVAL | {"prompt": 1}], "line 1: prompt must be a text"),
        ([HUMANEVAL | {"entry_point": "f(); g"}], "entry_point must be the name"),
        ([HUMANEVAL | {"task_id": None}], "task_id must be"),
        ([HUMANEVAL | {"task_id": True}], "task_id must be"),
        ([MBPP | {"test_list": "assert x"}], "test_list must be a list of texts"),
        ([MBPP | {"test_list": []}], "must have 1 to 1000 tests, found 0"),
        ([MBPP | {"test_setup_code": None}], "test_setup_code must be a text"),
        (["text"], 'line 1: must be a JSON object like {"task_id"'),
    ],
)
def test_files_that_are_no_tasks(rows: list[Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t", *rows)
    with pytest.raises(InputError) as error:
        read_tasks(path)
    assert said in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"task_id": "x", "completion": "a"}], "line 1: there is no task x"),
        ([{"task_id": 7, "completion": "a"}, {"task_id": 7}], "line 2: completion must be a text"),
        ([[]], 'line 1: must be a JSON object like {"task_id": "...", "completion"'),
    ],
)
def test_files_that_are_no_completions(rows: list[Any], said: str, tmp_path: Path) -> None:
    tasks = read_tasks(write(tmp_path / "t", MBPP))
    with pytest.raises(InputError, match="of --completions") as error:
        read_completions(write(tmp_path / "c", *rows), tasks)
    assert said in str(error.value)


def test_completions_are_one_run_s_and_half_a_line_goes(tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    whole = '{"task_id": "a", "completion": "x"}'
    file.write_text(f'{whole}\n{{"task_id": "a", "compl')
    with solving._held(file) as held:
        assert file.read_text() == f"{whole}\n"
        with (
            pytest.raises(InputError, match="is being written by another run"),
            solving._held(file),
        ):
            pass
        solving._append(held, file, "b", ["y", "z"])
    assert file.read_text().count("\n") == 3
    file.write_text(whole)  # by another program, without its last line's end
    with solving._held(file) as held:
        solving._append(held, file, "b", ["y"])
    assert [json.loads(line)["task_id"] for line in file.read_text().splitlines()] == ["a", "b"]
    with pytest.raises(InputError, match="cannot write .*Is a directory"), solving._held(tmp_path):
        pass


def test_a_test_too_deep_to_look_into_is_one_source() -> None:
    deep = "def check(candidate):\n    assert " + " + ".join(["1"] * 5000) + " == 5000\n"
    assert _checks(deep) == [deep]
