"""The loop of a study whose cells are measured one by one: here, or as tasks of the cluster at the
address of `--ray`. The rows are the same either way, in the order of the plan.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.core.machine import machine
from spu_llm.core.printable import one_line

Study = TypeVar("Study")
Cell = TypeVar("Cell")
Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Cells(Generic[Study, Cell]):
    """A study's cells, and how they are measured. All of it can be pickled, and is small: what is
    large is loaded by the process that measures.

    load: what all cells share, from files; given what shows progress. row: measure a cell. key,
    key_of: equal for a cell and its row. reads: files and directories that `load` and `row` read.
    facts: what a study says beside its rows, after each. timed: the seconds in rows count, so that
    a cell has a machine for itself, and its row says what that machine did before.
    """

    planned: Sequence[Cell]
    load: Callable[[Say], Study]
    row: Callable[[Study, Cell, Say], Row]
    key: Callable[[Cell], Hashable]
    key_of: Callable[[Row], Hashable]
    reads: tuple[Path, ...] = ()
    facts: Callable[[Study], Row] = lambda study: {}
    timed: bool = False


def with_rows(
    result: Row,
    cells: Cells[Study, Cell],
    say: Say,
    keep: Callable[[Row], None],
    ray: str | None = None,
    study: Study | None = None,
) -> Row:
    """Measure the cells that the result has no rows of, and add each row to it, in the order of the
    plan; `keep` is given the result after each. ray: the address of the cluster that measures them,
    whose rows each say on which machine. study: what `cells.load` would load, where it is loaded.
    """
    places = {cells.key(cell): i for i, cell in enumerate(cells.planned)}
    there = {cells.key_of(row) for row in result["rows"]}
    left = [cell for cell in cells.planned if cells.key(cell) not in there]
    measured = _here(cells, left, say, study) if ray is None else _there(cells, left, say, ray)
    for row, facts, where in measured:
        result["rows"].append(row)
        result["rows"].sort(key=lambda row: places.get(cells.key_of(row), len(places)))
        result.update(facts)
        result["machine"] = result["rows"][0]["machine"] if cells.timed else where
        keep(result)
    return result


Measured = tuple[Row, Row, dict[str, Any]]  # a row, facts of its study, and the machine


def _here(
    cells: Cells[Study, Cell], left: Sequence[Cell], say: Say, study: Study | None
) -> Iterator[Measured]:
    if study is None:
        say("reading")
    shared = cells.load(say) if study is None else study
    for cell in left:
        yield _measured(cells, shared, cell, say)


def _measured(cells: Cells[Study, Cell], study: Study, cell: Cell, say: Say) -> Measured:
    before = asdict(machine())
    row = cells.row(study, cell, say)
    if cells.timed:
        return {**row, "machine": before}, cells.facts(study), before
    return row, cells.facts(study), asdict(machine())


# ---- on a cluster


def _there(
    cells: Cells[Study, Cell], left: Sequence[Cell], say: Say, address: str
) -> Iterator[Measured]:
    """Measure cells as tasks, and yield each when it is finished."""
    from spu_llm.cluster.connection import joined
    from spu_llm.cluster.tasks import as_finished

    digest = _digest(cells.reads)
    calls = [partial(_task, cells, cell, _code(), digest) for cell in left]
    with joined(address) as ray:
        say(f"{len(left)} cells to measure on {address}")
        measured = as_finished(ray, address, calls, alone=cells.timed)
        for count, (number, (row, facts, where)) in enumerate(measured, 1):
            say(f"{count} of {len(left)} cells: {cells.key(left[number])}")
            yield row, facts, where


def _task(cells: Cells[Study, Cell], cell: Cell, code: str, digest: str) -> Measured:
    """Measure a cell in a process of a cluster. InputError where it has other code or other models
    than whoever asks; SpuLlmError, which names the cell, for an error that is not foreseen.
    """
    name, own = os.uname().nodename, _code()
    if own != code:
        raise InputError(f"--ray: {name} runs {own}; this command {code}")
    if _digest(cells.reads) != digest:
        raise InputError(f"--ray: {name} has other files in {' or '.join(map(str, cells.reads))}")
    try:
        row, facts, where = _measured(cells, _loaded(cells), cell, _silent)
    except SpuLlmError:
        raise
    except Exception as exc:
        raise SpuLlmError(f"{cells.key(cell)}: {type(exc).__name__}: {one_line(str(exc))}") from exc
    return {**row, "machine": where}, facts, where


def _code() -> str:
    """Name the code that this process runs; texts of several studies are Python's library."""
    own = machine()
    return f"commit {own.commit} in Python {own.python} with spu {own.spu}"


_kept: dict[bytes, Any] = {}  # the study that this process measured a cell of


def _loaded(cells: Cells[Study, Cell]) -> Study:
    """Return what cells share: a process that measures several loads it once."""
    from spu_llm.cluster.connection import imported

    name = imported().cloudpickle.dumps(cells.load)
    if name not in _kept:
        _kept.clear()
        _kept[name] = cells.load(_silent)
    study: Study = _kept[name]
    return study


def _digest(paths: Sequence[Path]) -> str:
    """Hash files, and those of directories, by name; a path that is missing has none."""
    whole = hashlib.sha256()
    for path in paths:
        for file in [path, *sorted(path.glob("*"))]:
            if file.is_file():
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                whole.update(f"{file.name} {digest}\n".encode())
    return whole.hexdigest()


def _silent(words: str) -> None:
    """Show no progress."""
