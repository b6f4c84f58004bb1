"""Programming tasks with tests, and completions of them, as benchmarks publish them: JSON Lines.

| layout    | fields of a task                                                  | a completion     |
|-----------|-------------------------------------------------------------------|------------------|
| HumanEval | task_id, prompt, canonical_solution, test, entry_point            | goes on after    |
|           |                                                                   | the prompt       |
| MBPP      | task_id, text (sanitised: prompt), code, test_list, and perhaps   | is the program   |
|           | test_setup_code (sanitised: test_imports)                         |                  |

Other fields do not count. A completion is {"task_id": ..., "completion": "..."}. A unit test is an
entry of MBPP's list; of HumanEval's function `check`, each statement of its body that asserts
something, behind those before it that do not, and what stands behind the last of these, where it
calls something. Definitions assert nothing and call nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spu_llm.core.errors import InputError
from spu_llm.core.text_files import read_json_lines
from spu_llm.systems.split import python_code

MAX_TESTS = 1000  # of a task
_LIKE_TASK = '{"task_id": "...", ...}, as HumanEval or MBPP have it'
_LIKE_COMPLETION = '{"task_id": "...", "completion": "..."}'
# What ends a completion, since it begins something else, as is usual with the benchmarks.
STOPS = {
    "humaneval": ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@"),
    "mbpp": ("\nassert", "\nprint", "\nif", '\n"""', "\n'''", "\n#"),
}


@dataclass(frozen=True)
class CodeTask:
    """prompt: what a model is given. lead: what a program has before the completion. reference: the
    completion that is right. tests: sources that run after the program.
    """

    id: str
    layout: str  # "humaneval" or "mbpp"
    prompt: str
    lead: str
    reference: str
    tests: tuple[str, ...]

    def program(self, completion: str) -> str:
        return self.lead + completion


def read_tasks(path: Path, option: str = "--tasks") -> list[CodeTask]:
    """Return the tasks of a JSON Lines file. InputError names the line that is none, that has no
    test, or whose id is another's.
    """
    tasks: dict[str, CodeTask] = {}
    for number, row in enumerate(read_json_lines(path, option, _LIKE_TASK), 1):
        where = f"{path}, of {option}, line {number}"
        task = _task(row, where)
        if task.id in tasks:
            raise InputError(f"{where}: there is another task {task.id}")
        if not 1 <= len(task.tests) <= MAX_TESTS:
            raise InputError(f"{where}: must have 1 to {MAX_TESTS} tests, found {len(task.tests)}")
        tasks[task.id] = task
    if not tasks:
        raise InputError(f"{path}, of {option}: there is no task in it")
    return list(tasks.values())


def read_completions(
    path: Path, tasks: Iterable[CodeTask], option: str = "--completions"
) -> dict[str, list[str]]:
    """Return the completions of each task, by its id, in the file's order; an empty list for a task
    that has none. InputError for a line that is no completion, or of no task.
    """
    completions: dict[str, list[str]] = {task.id: [] for task in tasks}
    for number, row in enumerate(read_json_lines(path, option, _LIKE_COMPLETION), 1):
        where = f"{path}, of {option}, line {number}"
        of, text = _id(row, where), _text(row, "completion", where)
        if of not in completions:
            raise InputError(f"{where}: there is no task {of}")
        completions[of].append(text)
    return completions


def _task(row: dict[str, Any], where: str) -> CodeTask:
    if "test_list" in row:
        return _of_mbpp(row, where)
    if "entry_point" in row:
        return _of_humaneval(row, where)
    raise InputError(
        f"{where}: must have the fields of HumanEval (entry_point, ...) or MBPP (test_list, ...)"
    )


def _of_humaneval(row: dict[str, Any], where: str) -> CodeTask:
    names = ("prompt", "canonical_solution", "test", "entry_point")
    prompt, solution, test, entry = (_text(row, name, where) for name in names)
    if not entry.isidentifier():
        raise InputError(f"{where}: entry_point must be the name of a function")
    tests = tuple(f"{one}\ncheck({entry})\n" for one in _checks(test))
    return CodeTask(_id(row, where), "humaneval", prompt, prompt, solution, tests)


def _of_mbpp(row: dict[str, Any], where: str) -> CodeTask:
    text = _text(row, "text" if "text" in row else "prompt", where)
    tests = _texts(row, "test_list", where)
    before = [*_texts(row, "test_imports", where, []), _text(row, "test_setup_code", where, "")]
    setup = "".join(f"{line}\n" for line in before if line)
    # The prompt as Fried et al. (InCoder, 2022) have it: text and tests in a docstring.
    asked = "\n".join((text, *tests))
    return CodeTask(
        _id(row, where),
        "mbpp",
        f'"""\n{asked}\n"""\n',
        "",
        _text(row, "code", where),
        tuple(setup + test for test in tests),
    )


def _checks(test: str) -> list[str]:
    """Return a source for each statement of `check` that asserts something, with those of its
    statements before it that do not, and one for what calls something behind the last of these; the
    source as it is where there are none.
    """
    try:
        return _parts(test)
    except RecursionError:  # an expression too deep to look into
        return [test]


def _parts(test: str) -> list[str]:
    tree = python_code.parsed(test)
    body = [] if tree is None else tree.body
    functions = [n for n in body if isinstance(n, ast.FunctionDef) and n.name == "check"]
    if tree is None or len(functions) != 1:
        return [test]
    (check,) = functions
    sources: list[str] = []
    before: list[ast.stmt] = []
    behind = False
    for statement in check.body:
        if _has(statement, ast.Assert):
            check.body = [*before, statement]
            sources.append(ast.unparse(tree))
            behind = False
        else:
            before.append(statement)
            behind = behind or _has(statement, ast.Call)
    if sources and behind:
        check.body = before
        sources.append(ast.unparse(tree))
    return sources or [test]


def _has(node: ast.AST, kind: type[ast.AST]) -> bool:
    """Return whether a node of a kind runs with a statement: not in a definition, which runs when
    it is called.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    return isinstance(node, kind) or any(_has(one, kind) for one in ast.iter_child_nodes(node))


# ---- fields


def _id(row: dict[str, Any], where: str) -> str:
    """Return a task's id as text: MBPP has numbers."""
    value = row.get("task_id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{where}: task_id must be a text or a whole number")
    return str(value)


def _text(row: dict[str, Any], name: str, where: str, default: str | None = None) -> str:
    value = row.get(name, default)
    if not isinstance(value, str):
        raise InputError(f"{where}: {name} must be a text")
    return value.replace("\r\n", "\n")


def _texts(
    row: dict[str, Any], name: str, where: str, default: Sequence[str] | None = None
) -> list[str]:
    value = row.get(name, default)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InputError(f"{where}: {name} must be a list of texts")
    return [one.replace("\r\n", "\n") for one in value]
