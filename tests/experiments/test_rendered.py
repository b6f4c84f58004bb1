"""Committed notebooks and figures show what the committed results give."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from experiments import headline, render
from experiments.common import saved
from tests.experiments.cost_results import result as cost_result
from tests.experiments.latency_results import results as latency_results

NAMES = (
    "quickstart",
    "primitives",
    "cost",
    "latency",
    "confidential",
    "dp_text",
    "split",
    "watermark",
)
LARGEST = 400_000  # bytes of a committed notebook


@pytest.fixture(autouse=True)
def own_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels write nothing into the user's home."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def shown(cell: Any) -> list[str]:
    """Return what a code cell printed, and that it drew. Of a cell with the tag "varies" (noise of
    shares, seconds of this run) numbers and spacing do not count; warnings of libraries never do.
    """
    varies = "varies" in cell.metadata.get("tags", [])
    collected = []
    for output in cell.outputs:
        if output.output_type == "stream":
            text = output.text if output.name == "stdout" else ""
            if varies:
                text = re.sub(r" +", " ", re.sub(r"\d[\d.,]*", "#", text))
            collected += [text] if text else []
        else:
            collected.append("picture" if "image/png" in output.data else str(output.data))
    return collected


def outputs(notebook: Any) -> list[list[str]]:
    return [shown(cell) for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: Any) -> str:
    return "\n".join(text for cell in outputs(notebook) for text in cell)


SLOW = ("confidential", "dp_text", "primitives", "quickstart", "split", "watermark")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES]
)
def test_a_committed_notebook_is_as_it_runs(name: str) -> None:
    path = render.NOTEBOOKS / f"{name}.ipynb"
    committed = nbformat.read(path, as_version=4)
    nbformat.validate(committed)
    assert path.stat().st_size < LARGEST
    assert "picture" in sum(outputs(committed), [])
    assert outputs(render.execute(path)) == outputs(committed)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_notebook_imports_is_there(name: str) -> None:
    """Quick, since most notebooks run among the slow tests alone."""
    cells = nbformat.read(render.NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    asked = [
        f"{node.module}.{alias.name}"
        for cell in cells
        if cell.cell_type == "code"
        for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    for place in asked:
        pkgutil.resolve_name(place)
    assert asked


def test_the_figure_is_that_of_the_committed_results(tmp_path: Path) -> None:
    def texts(path: Path) -> list[str]:
        return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))

    fresh = tmp_path / "traffic.svg"
    data, name = render.main_study()
    headline.plot_traffic(data, fresh, timed=saved.timed(name))
    assert texts(render.TRAFFIC) == texts(fresh)
    assert any("online" in text for text in texts(fresh))


@pytest.mark.parametrize(
    ("name", "said", "pictures"),
    [
        ("cost", "lan: 2.00 s for one position, ", 2),
        ("latency", "lan,  8 positions: measured 3.60 s", 5),
    ],
)
def test_seconds_are_shown_where_nothing_else_ran(
    name: str, said: str, pictures: int, tmp_path: Path
) -> None:
    results = {"cost": lambda: [cost_result()], "latency": latency_results}[name]()
    (tmp_path / f"{name}.json").write_text(json.dumps({"networks": results}), encoding="utf-8")
    index = {name: {"command": "spu-llm", "quiet": True}}
    (tmp_path / "index.json").write_text(json.dumps(index), encoding="utf-8")
    folder = f"type(saved.DATA)({str(tmp_path)!r})"
    setting = f"from experiments.common import saved; saved.DATA = {folder}"
    notebook = render.execute(render.NOTEBOOKS / f"{name}.ipynb", setting)
    text = printed(notebook)
    assert said in text and "not shown" not in text and "upper bounds" not in text
    assert text.count("picture") == pictures


@pytest.mark.slow
def test_quickstart_runs_two_processes() -> None:
    notebook = render.execute(render.NOTEBOOKS / "quickstart.ipynb", "FRESH, NEW_TOKENS = True, 8")
    text = printed(notebook)
    assert "\n8 tokens in " in text and "place of the token" in text
    assert "row of the distribution" not in text and "committed" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "smaller"),
    [
        ("primitives", "OPS, SIZES, NETWORKS, REPEAT = ['multiply'], [1], ['local'], 1"),
        ("cost", ""),
        ("latency", "NETWORKS, POSITIONS = ['local'], [1, 2]"),
    ],
)
def test_a_study_is_measured_again(name: str, smaller: str, tiny_pair: tuple[Path, Path]) -> None:
    folder = str(tiny_pair[0].parent)
    assert tiny_pair == (Path(folder) / "private", Path(folder) / "public")
    setting = (
        f"from pathlib import Path\nfrom spu_llm.api import defaults\n"
        f"defaults.shipped = lambda name: Path({folder!r}) / name\nFRESH = True\n{smaller}"
    )
    text = printed(render.execute(render.NOTEBOOKS / f"{name}.ipynb", setting))
    assert "not shown" not in text and "from `spu-llm" not in text
    assert "picture" in text and "client learned" in text or name == "latency"
