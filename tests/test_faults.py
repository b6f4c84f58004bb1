"""The table of faults: complete, and every test that it names is there."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.faults import FAULTS, TABLE, seconds_of

FOLDER = Path(__file__).parent


def test_every_test_that_is_named_is_there() -> None:
    for met in FAULTS:
        for name in met.tests:
            file, _, function = name.partition("::")
            tree = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
            collected = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function.partition("[")[0] in collected, name


def test_the_table_has_every_fault() -> None:
    text = TABLE.read_text(encoding="utf-8")
    assert len(FAULTS) >= 26 and text.count("\n| ") == len(FAULTS) + 1
    for i, met in enumerate(FAULTS, 1):
        assert f"| {i} | {met.fault} | {met.expected} | " in text


def test_seconds_are_those_of_the_longest_case() -> None:
    took = {"a.py::b[1]": 2.0, "a.py::b[2]": 3.0, "a.py::bc": 9.0}
    assert seconds_of(("a.py::b",), took) == 3.0
    assert seconds_of(("a.py::b[1]",), took) == 2.0
    assert seconds_of(("a.py::x",), took) is None
