"""The notebooks of cost and latency run from top to bottom on a file of results."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import experiments
from tests.experiments.test_cost import result as cost_result
from tests.experiments.test_latency import results as latency_results

NOTEBOOKS = Path(experiments.__file__).parent / "notebooks"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said", "pictures"), [
    ("cost", "| ours, drafted | 1.0500 | 38.1 |", 1),
    ("latency", "lan,  8 positions: measured 3.60 s", 4),
])  # fmt: skip
def test_a_notebook_runs_on_a_file(name: str, said: str, pictures: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = {"cost": lambda: [cost_result()], "latency": latency_results}[name]()
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"networks": results}), encoding="utf-8")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    (parameters,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    parameters.source = f"FILE = {str(file)!r}"
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert said in "".join(output.get("text", "") for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures
