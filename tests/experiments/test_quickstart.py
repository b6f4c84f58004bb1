"""The quickstart notebook runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import experiments

NOTEBOOK = Path(experiments.__file__).parent / "notebooks" / "quickstart.ipynb"


@pytest.mark.slow
def test_quickstart_runs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=500, kernel_name="python3").execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "def read_config(path):" in printed
    assert "place of the token" in printed and "row of the distribution" not in printed
    assert "tokens per secure step" in printed
