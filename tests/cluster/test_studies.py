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
from experiments.completions import drafts  # noqa: E402
from experiments.confidential import fakes  # noqa: E402
from experiments.dp_text import study as dp_text  # noqa: E402
from experiments.dp_text.plan import DpTextPlan  # noqa: E402
from experiments.split import parts, study  # noqa: E402
from experiments.watermark import command, drawing, entropy, long  # noqa: E402
from experiments.watermark.plan import WatermarkPlan  # noqa: E402
from spu_llm.api.defaults import shipped  # noqa: E402
from spu_llm.app import cli  # noqa: E402
from spu_llm.core.errors import InputError, SpuLlmError  # noqa: E402
from spu_llm.core.machine import machine  # noqa: E402
from tests.cluster.machines import machines  # noqa: E402
from tests.kit.library import make_library  # noqa: E402
from tests.kit.models import make_pair  # noqa: E402

Row = dict[str, Any]
SHIPPED = shipped("private"), shipped("public")


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


def without_machine(rows: list[Row], *others: str) -> list[Row]:
    """Return rows without what two runs do not share."""
    left_out = ("machine", *others)
    return [{name: x for name, x in row.items() if name not in left_out} for row in rows]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with machines(2) as nodes:
        yield nodes.address


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
        entropy.all_cells(model, [model], entropy.EntropyPlan("", ())),
        parts.all_cells(model, parts.PartsPlan()),
        study.all_cells(model, study.NoirPlan()),
        fakes.all_cells(fakes.FakesPlan()),
        drafts.all_cells(*SHIPPED, None, drafts.DraftsPlan("", "", 8, 2)),
        dp_text.all_cells(model, model, DpTextPlan()),
    ]
    for cells in studies:
        size = len(cloudpickle.dumps(partial(common._task, cells, cells.planned[0], "", "")))
        assert size < 20_000, (cells.load, size)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["watermark-long", "--ray", "127.0.0.1:1"], 2, "--ray 127.0.0.1:1: nobody answers there"),
        (["fakes", "--ray", "127.0.0.1:1"], 2, "--ray 127.0.0.1:1: nobody answers there"),
        (["obfuscation", "--ray", "127.0.0.1:1"], 2, "there is no option --ray"),
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
    with machines(2) as nodes:
        rows: list[int] = []

        def keep(result: Row) -> None:
            rows.append(len(result["rows"]))
            if len(rows) == 3:
                nodes.lose(nodes.nodes[0])

        there = drawing.measure(*pair, plan, lambda words: None, keep, (), nodes.address)
    assert rows == list(range(1, len(drawing.WAYS) + 1))
    assert without_machine(there["rows"]) == here["rows"]


@pytest.mark.slow
def test_fakes_are_the_same_on_a_cluster(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some = (fakes.CELLS[0], fakes.FakesCell("2 tokens", tokens=2, most=32))
    monkeypatch.setattr(fakes, "CELLS", some)
    plan = fakes.FakesPlan(prompts=2)
    here = fakes.measure(plan, lambda words: None)
    there = fakes.measure(plan, lambda words: None, ray=address)
    assert len(here["rows"]) == 6 and all("machine" in row for row in there["rows"])
    assert without_machine(there["rows"], "seconds") == without_machine(here["rows"], "seconds")


@pytest.mark.slow
def test_private_text_is_the_same_on_a_cluster(address: str, tmp_path: Path) -> None:
    library = make_library(tmp_path / "library")
    plan = DpTextPlan((10.0,), (2,), (5,), ("invisibleink", "augpe"), texts=3, tokens=12)
    here = dp_text.measure(*SHIPPED, plan, lambda words: None, library=library)
    # A run on a cluster goes on with rows of this machine.
    done = [row for row in here["rows"] if row["method"] == "augpe"]
    there = dp_text.measure(
        *SHIPPED, plan, lambda words: None, done=done, ray=address, library=library
    )
    assert [row["method"] for row in there["rows"]] == ["real texts", "invisibleink", "augpe"]
    assert without_machine(there["rows"], "processor_s") == without_machine(
        here["rows"], "processor_s"
    )
    assert there["worth"] == here["worth"]


@pytest.mark.slow
def test_drafts_are_the_same_on_a_cluster(address: str) -> None:
    plan = drafts.DraftsPlan("private", "public", tokens=8, draft_length=2)
    here = drafts.measure(*SHIPPED, None, plan, lambda words: None)
    # A run on a cluster goes on with rows of this machine.
    done = here["rows"][::2]
    there = drafts.measure(*SHIPPED, None, plan, lambda words: None, done=done, ray=address)
    assert without_machine(there["rows"]) == here["rows"]
    assert sum("machine" in row for row in there["rows"]) == 30
