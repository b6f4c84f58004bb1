"""What tests of committed results share."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import render
from experiments.common import saved
from experiments.completions import exact_cells

LINK = r"\[data\]\(\.\./\.\./experiments/(data/[\w.-]+\.json)\)"


MEASURED = re.compile(
    r"Commit (?P<commit>[0-9a-f]{7}), (?P<days>\d{4}-\d{2}-\d{2}( to \d{4}-\d{2}-\d{2})?); "
    r"(?P<machine>(?:1 core|\d+ cores), \d+ GiB); load [^;]+; "
    rf"(?P<data>{LINK}(, {LINK})*)\.\*$"
)


EXACT = f"*Exact: computed from the code, compared with it by the tests; {saved.link('exact')}.*"


SUMMARY = "*Sums up sections of these pages, which have the data.*"
TESTED = re.compile(
    r"\*Tests: `pytest (?P<files>[\w/. ]+)`; run in `make test`"
    r"(?P<slow>, slow ones in `make test-slow`)?\.\*$"
)


LARGEST = 300_000  # bytes of a JSON file


def tables(text: str) -> Iterator[tuple[list[str], str]]:
    """Yield the lines of every table, and the paragraph under it."""
    lines = text.splitlines()
    starts = [
        i
        for i, line in enumerate(lines)
        if line.startswith("|") and (i == 0 or not lines[i - 1].startswith("|"))
    ]
    for i in starts:
        after = i
        while after < len(lines) and lines[after].startswith("|"):
            after += 1
        under = next((line for line in lines[after:] if line.strip()), "")
        yield lines[i:after], under


def origin_mistakes(lines: list[str], under: str, folder: Path) -> list[str]:
    """Return what is wrong with the line under a table of a document in `folder`."""
    if under == EXACT:
        return []
    if under == SUMMARY:
        return [
            f"the row {line[:60]!r} links to no section"
            for line in lines[2:]
            if "](" not in (cells := exact_cells.split(line))[-1]
            and not cells[1].startswith("not tried")
        ]
    if tested := TESTED.match(under):
        return mistakes_in_rows(lines, tested, folder.parent)
    actual = MEASURED.search(under)
    if not under.startswith("*") or actual is None:
        return [f"under the table {lines[0][:60]!r} stands {under[:80]!r}, not where it comes from"]
    mistakes = []
    for name in re.findall(LINK, actual["data"]):
        file = folder / name
        if not file.is_file() or file.stat().st_size > LARGEST:
            mistakes.append(f"{name} is not there, or larger than {LARGEST:,} bytes")
            continue
        of = set(origins(json.loads(file.read_text(encoding="utf-8"))))
        days = actual["days"].split(" to ")
        said = {(actual["commit"], day, actual["machine"]) for day in days}
        if (
            not of
            or {(a, c) for a, _, c in of} != {(a, c) for a, _, c in said}
            or not all(days[0] <= day <= days[-1] for _, day, _ in of)
        ):
            mistakes.append(f"{name} is of {sorted(of)}, the table of {sorted(said)}")
    return mistakes


def mistakes_in_rows(lines: list[str], under: re.Match[str], root: Path) -> list[str]:
    """Return what is wrong with a table whose rows are results of tests, which their last cells
    name.
    """
    files = {Path(name).stem: root / name for name in under["files"].split()}
    if missing := [str(path) for path in files.values() if not path.is_file()]:
        return [f"there is no {missing[0]}"]
    known = {name: slow_by_test(path) for name, path in files.items()}
    wrong, named = [], []
    for line in lines[2:]:
        tests = re.findall(r"`(\w+)::(\w+)`", exact_cells.split(line)[-1])
        named += tests
        if not tests:
            wrong.append(f"the row {line[:60]!r} names no test")
    wrong += [f"there is no {a}::{b}" for a, b in named if b not in known.get(a, {})]
    if unused := known.keys() - {file for file, _ in named}:
        wrong.append(f"no row names a test of {sorted(unused)}")
    if any(known.get(a, {}).get(b) for a, b in named) != bool(under["slow"]):
        wrong.append(f"slow tests and {under[0]!r} disagree")
    return wrong


def slow_by_test(file: Path) -> dict[str, bool]:
    """Return whether a test is marked slow, or some of its cases are, by the names of a file's
    tests.
    """
    return {
        node.name: any("mark.slow" in ast.unparse(mark) for mark in node.decorator_list)
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def origins(result: Any) -> Iterator[tuple[str, str, str]]:
    """Commit, day and machine of every machine in a study's JSON, as tables say them."""
    for of in saved.machines(result):
        cores = "1 core" if of["cores"] == 1 else f"{of['cores']} cores"
        yield of["commit"], of["date"][:10], f"{cores}, {of['memory_gib']:.0f} GiB"


MACHINE = {
    "cores": 2,
    "memory_gib": 23.5,
    "load": [0.1, 0.4],
    "commit": "1234567",
    "date": "2026-11-22T10:00:00+00:00",
}


def mistakes_of(name: str, data: Any, folder: Path) -> list[str]:
    """Return what is wrong under the tables in docs/results that would be made from this file."""
    (folder / "data").mkdir()
    (folder / "data" / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
    table = list(tables("\n\n".join(render.TABLES[name].paragraphs({name: data}))))
    assert table
    return [m for lines, under in table for m in origin_mistakes(lines, under, folder)]
