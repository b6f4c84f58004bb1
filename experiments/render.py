"""Make notebooks' outputs and the README's figure and headline anew from committed results.

    python -m experiments.render

Nothing is measured; takes about a minute. Run it after a change of a notebook or of a file in
`experiments/data/`.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from experiments.claims import headline
from experiments.common import saved

FOLDER = Path(__file__).parent
NOTEBOOKS = FOLDER / "notebooks"
TRAFFIC = FOLDER / "figures" / "traffic.svg"
README = FOLDER.parent / "README.md"
BEGIN, END = "<!-- headline: made by experiments.render -->\n", "<!-- end of headline -->\n"
# Outputs are committed: small pictures.
SMALL = "%matplotlib inline\n%config InlineBackend.rc = {'figure.dpi': 60}"


def execute(path: Path, parameters: str = "") -> Any:
    """The notebook at `path` with fresh outputs; `parameters` runs after the cell of that tag."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    notebook.cells[0:0] = [nbformat.v4.new_code_cell(SMALL)]
    (cell,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    cell.source += f"\n{parameters}"
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER.parent)}},
    ).execute()  # fmt: skip
    del notebook.cells[0]
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
    for count, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
    return notebook


def with_headline(readme: str) -> str:
    """The README with what the completions study says between its two marks."""
    before, rest = readme.split(BEGIN)
    text = headline.headline(saved.load("completions"), timed=saved.timed("completions"))
    origin = textwrap.fill(
        f"All of it {saved.origin('completions')}.", 100, break_on_hyphens=False
    )
    return f"{before}{BEGIN}\n{text}\n\n{origin}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    import nbformat

    timed = saved.timed("completions")
    headline.plot_traffic(saved.load("completions"), TRAFFIC, timed=timed)
    README.write_text(with_headline(README.read_text(encoding="utf-8")), encoding="utf-8")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
