"""Task sets: real text of four kinds, from packages that the environment pins, none of which a
shipped model has seen. Nothing is downloaded, and nothing of it is part of a result but figures.

About one document in eight is held out, by the hash of its name, so that the split is the same on
every machine that has the same packages.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

HELD_OUT_ONE_IN = 8
_LEAST = 400  # characters of a document


class Document(NamedTuple):
    """A text of a task set; `name` is the same on every machine."""

    name: str
    text: str


@dataclass(frozen=True)
class TaskSet:
    """Text of one kind: what a model learns from, and held-out documents."""

    learnt: list[Document]
    held_out: list[Document]


def _files(package: str, suffix: str) -> Iterator[Document]:
    for file in sorted(metadata.files(package) or [], key=str):
        if file.suffix == suffix and "test" not in str(file):
            text = Path(str(file.locate())).read_text(encoding="utf-8", errors="replace")
            yield Document(f"{package}:{file}", text)


def _docstrings() -> Iterator[Document]:
    for name, text in _files("scipy", ".py"):
        nodes = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        ]
        written = [inspect.cleandoc(said) for node in nodes if (said := ast.get_docstring(node))]
        yield Document(f"{name} docstrings", "\n\n".join(written))


def _descriptions() -> Iterator[Document]:
    packages = {one.metadata["Name"]: one for one in metadata.distributions()}
    for name in sorted(packages):
        text = packages[name].metadata.get_payload()  # type: ignore[attr-defined]
        if name != "spu-llm" and isinstance(text, str):
            yield Document(name, text)


TASKS: dict[str, Callable[[], Iterator[Document]]] = {
    "Python": lambda: _files("matplotlib", ".py"),
    "docstrings": _docstrings,  # of scipy: English about mathematics
    "C headers": lambda: _files("numpy", ".h"),
    "descriptions": _descriptions,  # of all packages: English in Markdown or RST
}


def task_set(name: str) -> TaskSet:
    """Return the task set `name` of TASKS."""
    documents = [one for one in TASKS[name]() if len(one.text) >= _LEAST]
    halves: dict[bool, list[Document]] = {False: [], True: []}
    for one in documents:
        digest = hashlib.sha256(one.name.encode()).digest()
        halves[digest[0] % HELD_OUT_ONE_IN == 0].append(one)
    return TaskSet(halves[False], halves[True])
