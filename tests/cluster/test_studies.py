"""Studies whose cells a cluster measures: the rows, their order, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from experiments.common import cells as common  # noqa: E402
from experiments.common.cells import Cells, with_rows  # noqa: E402
from experiments.split import parts, study  # noqa: E402
from experiments.watermark import command, drawing, long  # noqa: E402
from experiments.watermark.plan import WatermarkPlan  # noqa: E402
from spu_llm.app import cli  # noqa: E402
from spu_llm.core.errors import InputError, SpuLlmError  # noqa: E402
from spu_llm.core.machine import machine  # noqa: E402
from tests.cluster.cores import cluster_of, lose  # noqa: E402
from tests.kit.models import make_pair  # noqa: E402

Row = dict[str, Any]


class Sums:
    """What cells of a toy study share. loads: a file with a line for each process that has it."""

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self.numbers = np.arange(1000, dtype=np.float32)
        say("loaded")
        with (directory / "loads").open("a") as file:
            file.write("x\n")

    def row(self, cell: int, say: Callable[[str], None]) -> Row:
        if cell == 13:
            raise InputError("13 is not for us")
        if cell == 14:
            raise ValueError("odd\nnumber")
        noise = np.random.default_rng(cell).standard_normal(1000, np.float32)
        return {"cell": cell, "sum": float(self.numbers @ noise)}


def toy(
    directory: Path, planned: list[int], timed: bool = False, reads: tuple[Path, ...] = ()
) -> Cells[Sums, int]:
    return Cells(
        planned,
        load=partial(Sums, directory),
        row=Sums.row,
        key=lambda cell: cell,
        key_of=lambda row: row["cell"],
        reads=reads,
        facts=lambda sums: {"of": len(sums.numbers)},
        timed=timed,
    )


def measured(
    cells: Cells[Any, Any], rows: list[Row], ray: str | None
) -> tuple[Row, list[Row], list[str]]:
    """Return the result, what was kept on the way, and what was said."""
    kept: list[Row] = []
    said: list[str] = []
    keep: Callable[[Row], None] = lambda so_far: kept.append(json.loads(json.dumps(so_far)))  # noqa: E731
    return with_rows({"rows": list(rows)}, cells, said.append, keep, ray), kept, said


def without_machine(rows: list[Row]) -> list[Row]:
    return [{name: x for name, x in row.items() if name != "machine"} for row in rows]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster_of(2) as cluster:
        yield cluster.address


def test_a_cluster_measures_the_same_rows_in_their_order(address: str, tmp_path: Path) -> None:
    cells = toy(tmp_path, [5, 3, 8, 1, 2, 9])
    here, _, said = measured(cells, [], None)
    assert said == ["reading", "loaded"] and "machine" not in here["rows"][0]
    there, kept, said = measured(cells, [], address)
    assert without_machine(there["rows"]) == here["rows"]
    assert len(kept) == 6 and [len(so_far["rows"]) for so_far in kept] == [1, 2, 3, 4, 5, 6]
    assert said[0] == f"6 cells to measure on {address}" and said[-1].startswith("6 of 6 cells: ")
    assert there["of"] == 1000
    for row in there["rows"]:
        assert {**row["machine"], "date": 0, "load": 0} == {
            **asdict(machine()),
            "date": 0,
            "load": 0,
        }
    # A run here goes on with rows of a cluster that lack one in between.
    rows = [row for row in there["rows"] if row["cell"] not in (3, 2)]
    again, kept, _ = measured(cells, rows, None)
    assert len(kept) == 2 and without_machine(again["rows"]) == here["rows"]
    # Here once in each of two runs, and once in each process of the cluster at most.
    assert 2 < len((tmp_path / "loads").read_text().split()) <= 4


def test_an_error_of_a_cell_keeps_what_is_finished(address: str, tmp_path: Path) -> None:
    kept: list[Row] = []
    with pytest.raises(InputError, match="^13 is not for us$"):
        with_rows({"rows": []}, toy(tmp_path, [1, 2, 3, 13]), print, kept.append, address)
    assert kept and set(row["cell"] for row in kept[-1]["rows"]) <= {1, 2, 3}


def test_a_timed_row_says_its_machine_here_too(address: str, tmp_path: Path) -> None:
    cells = toy(tmp_path, [2, 1], timed=True)
    here, there = (measured(cells, [], ray)[0] for ray in (None, address))
    for result in (here, there):
        assert result["machine"] == result["rows"][0]["machine"]
        assert all(row["machine"]["cores"] == machine().cores for row in result["rows"])
    assert without_machine(here["rows"]) == without_machine(there["rows"])


def test_a_machine_with_other_code_or_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "weights"
    file.write_bytes(b"1")
    cells = toy(tmp_path, [1], reads=(tmp_path / "model",))
    code, digest = common._code(), common._digest(cells.reads)
    row, facts, where = common._task(cells, 1, code, digest)
    assert row["cell"] == 1 and facts == {"of": 1000} and row["machine"] == where
    with pytest.raises(InputError, match=f"runs {code}; this command other$"):
        common._task(cells, 1, "other", digest)
    with pytest.raises(SpuLlmError, match="^14: ValueError: odd number$"):
        common._task(cells, 14, code, digest)
    file.write_bytes(b"2")
    with pytest.raises(InputError, match="has other files in .*model$"):
        common._task(cells, 1, code, digest)


def test_cells_are_sent_without_what_they_share() -> None:
    from ray import cloudpickle

    model, plan = Path("model"), WatermarkPlan()
    studies: list[Cells[Any, Any]] = [
        *(of.all_cells(model, model, plan) for of in (command, drawing, long)),
        parts.all_cells(model, parts.PartsPlan()),
        study.all_cells(model, study.NoirPlan()),
    ]
    for cells in studies:
        size = len(cloudpickle.dumps(partial(common._task, cells, cells.planned[0], "", "")))
        assert size < 20_000, (cells.load, size)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["watermark-long", "--ray", "127.0.0.1:1"], 2, "--ray 127.0.0.1:1: nobody answers there"),
        (["fakes", "--ray", "127.0.0.1:1"], 2, "there is no option --ray"),
    ],
)
def test_the_command_says_what_is_wrong(
    options: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["experiment", *options])
    assert end.value.code == code and words in capsys.readouterr().err


@pytest.mark.slow
def test_a_study_is_the_same_when_a_machine_is_lost(tmp_path: Path) -> None:
    pair, plan = make_pair(tmp_path), WatermarkPlan(temperatures=(1.0,), texts=4, tokens=20)
    here = drawing.measure(*pair, plan, lambda words: None)
    with cluster_of(1) as cluster:
        other = cluster.add_node(num_cpus=1, object_store_memory=100 * 1024 * 1024)
        rows: list[int] = []

        def keep(result: Row) -> None:
            rows.append(len(result["rows"]))
            if len(rows) == 3:
                lose(cluster, other)

        there = drawing.measure(*pair, plan, lambda words: None, keep, (), cluster.address)
    assert rows == list(range(1, len(drawing.WAYS) + 1))
    assert without_machine(there["rows"]) == here["rows"]
