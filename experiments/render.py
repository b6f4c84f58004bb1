"""Make anew from committed results: notebooks' outputs, the README's figure and headline, and
tables of RESULTS.md.

    python -m experiments.render

Nothing is measured; takes about a minute. Run it after a change of a notebook or of a file in
`experiments/data/`.

Complete generations have a file for each network: `completions`, and for another network
`completions_lan` or `completions_wan`. One counts as soon as `index.json` names it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.benchmarks import network_bench, products_bench
from experiments.claims import completions_report, headline, logits, shipped, transcript
from experiments.common import report, saved
from experiments.spu_baseline import options

FOLDER = Path(__file__).parent
NOTEBOOKS = FOLDER / "notebooks"
TRAFFIC = FOLDER / "figures" / "traffic.svg"
README = FOLDER.parent / "README.md"
RESULTS = FOLDER / "RESULTS.md"
BEGIN, END = "<!-- {}: made by experiments.render -->\n", "<!-- end of {} -->\n"
# Outputs are committed: small pictures.
SMALL = "%matplotlib inline\n%config InlineBackend.rc = {'figure.dpi': 60}"
Paragraphs = Callable[[dict[str, Any], str], list[str]]  # of a result, and of its file's name


def printed(table: Callable[[dict[str, Any]], str], note: str = "") -> Paragraphs:
    """The table that a study prints, and where it comes from; `note`: as in `report.origin`."""

    def paragraphs(data: dict[str, Any], file: str) -> list[str]:
        rows = [line for line in table(data).splitlines() if line.startswith("|")]
        return ["\n".join(rows), report.origin(data["machine"], file, note)]

    return paragraphs


# What makes the tables of a file between the marks of its name, once `index.json` names it.
TABLES: dict[str, Paragraphs] = {
    "shipped": shipped.in_results,
    "products": printed(products_bench.table),
    "stock_options": printed(options.table, "counts only"),
    "logits": printed(logits.table, "no seconds in it"),
    "transcript": transcript.in_results,
    "network": printed(network_bench.table),
}


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


def studies() -> dict[str, dict[str, Any]]:
    """The committed runs of complete generations, by the name of their file."""
    names = [name for name in saved.load("index") if name.startswith("completions")]
    return {name: saved.load(name) for name in names}


def main_study() -> tuple[dict[str, Any], str]:
    """All runs together, and the name of the file that the headline's are in."""
    found = studies()
    together = {"runs": [run for data in found.values() for run in data["runs"]]}
    group = headline.main_group(together)
    name = next(name for name, data in found.items() if group in completions_report.groups(data))
    return together, name


def between(document: str, mark: str, *paragraphs: str) -> str:
    """The document with other paragraphs between the two comments of this mark."""
    begin, end = BEGIN.format(mark), END.format(mark)
    before, rest = document.split(begin)
    text = "\n\n".join(paragraphs)
    return f"{before}{begin}\n{text}\n\n{end}{rest.split(end)[1]}"


def with_headline(readme: str) -> str:
    """The README with what complete generations say between its two marks."""
    data, name = main_study()
    text = headline.headline(data, timed=saved.timed(name))
    return between(readme, "headline", text, _filled(f"All of it {saved.origin(name)}."))


def with_tables(results: str) -> str:
    """RESULTS.md with the tables of each file between its two marks. Complete generations on a
    further network are a section of their own, with what made them and what the project asks for.
    """
    for name, data in studies().items():
        paragraphs = completions_report.in_results(data, f"data/{name}.json")
        if name != "completions":
            ((network, tokens), records) = next(iter(completions_report.groups(data).items()))
            criteria = completions_report.criteria(records, network)
            paragraphs = [
                f"### Complete generations on {network}",
                _filled(f"Completions of {tokens} tokens as above, {saved.origin(name)}."),
                *paragraphs,
                "\n".join(f"- {text}" for text in criteria),
            ]
        results = between(results, name, *paragraphs)
    for name in TABLES.keys() & saved.load("index").keys():
        paragraphs = TABLES[name](saved.load(name), f"data/{name}.json")
        filled = [text if text[0] in "|*" else _filled(text) for text in paragraphs]
        results = between(results, name, *filled)
    return results


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False)


def main() -> None:
    import nbformat

    data, name = main_study()
    headline.plot_traffic(data, TRAFFIC, timed=saved.timed(name))
    README.write_text(with_headline(README.read_text(encoding="utf-8")), encoding="utf-8")
    RESULTS.write_text(with_tables(RESULTS.read_text(encoding="utf-8")), encoding="utf-8")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
