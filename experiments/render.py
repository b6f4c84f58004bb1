"""Rendering of committed results: the outputs of notebooks, the README's figure and headline, and
the tables between marks in docs/results (`TABLES`).

    python -m experiments.render

It measures nothing and takes about a minute. Run it after a change of a notebook or of a file in
`experiments/data/`. A file is used once `index.json` names it.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import headline, measured_tables
from experiments.benchmarks import connection, network_bench, producers, products_bench
from experiments.common import claims, saved
from experiments.common.report import Files
from experiments.completions import alignment, drafts, lengths, shipped, speedup, transcript, trees
from experiments.completions import report as completions_report
from experiments.confidential import attack_tables, fakes, obfuscation, personal, vault_memory
from experiments.confidential import report as confidential_report
from experiments.cost_model import capacity
from experiments.dp_text import report as dp_text_report
from experiments.dp_text import tempered as dp_text_tempered
from experiments.fidelity import answers, logits
from experiments.fidelity import pieces as fidelity
from experiments.gateway import chatting
from experiments.gateway import report as gateway_report
from experiments.split import client as split_client
from experiments.split import parts as noir_parts
from experiments.split import programs as split_programs
from experiments.split import report as noir_report
from experiments.split import runs as split_runs
from experiments.split import tuning_report as noir_tuning
from experiments.spu_baseline import options
from experiments.watermark import drawing as watermark_drawing
from experiments.watermark import entropy as watermark_entropy
from experiments.watermark import long as watermark_long
from experiments.watermark import report as watermark_report
from experiments.watermark import runs as watermark_runs
from experiments.watermark import variants as watermark_variants
from spu_llm.app.printing import show

FOLDER = Path(__file__).parent
NOTEBOOKS = FOLDER / "notebooks"
TRAFFIC = FOLDER / "figures" / "traffic.svg"
README = FOLDER.parent / "README.md"
RESULTS = FOLDER.parent / "docs" / "results"
CLUSTER = FOLDER.parent / "docs" / "how-to" / "cluster.md"
BEGIN, END = "<!-- {}: made by experiments.render -->\n", "<!-- end of {} -->\n"
# Outputs are committed: small pictures.
SMALL = "%matplotlib inline\n%config InlineBackend.rc = {'figure.dpi': 60}"


def execute(path: Path, parameters: str = "") -> Any:
    """Execute the notebook at `path` and return it with fresh outputs. The code `parameters` runs
    after the cell with the tag "parameters".
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    notebook.cells[0:0] = [nbformat.v4.new_code_cell(SMALL)]
    (cell,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    cell.source += f"\n{parameters}"
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER.parent)}},
    ).execute()
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
    """Return the committed results of complete generations, by file name."""
    names = [name for name in saved.load("index") if name.startswith("completions")]
    return {name: saved.load(name) for name in names}


def main_study() -> tuple[dict[str, Any], str]:
    """Return the runs of all complete generations, and the name of the file that has the headline's
    runs.
    """
    known = studies()
    together = {"runs": [run for data in known.values() for run in data["runs"]]}
    group = headline.main_group(together)
    name = next(name for name, data in known.items() if group in completions_report.groups(data))
    return together, name


def between(document: str, mark: str, *paragraphs: str) -> str:
    """Replace the text between the two comments of a mark in a document by paragraphs."""
    begin, end = BEGIN.format(mark), END.format(mark)
    before, rest = document.split(begin)
    text = "\n\n".join(paragraphs)
    return f"{before}{begin}\n{text}\n\n{end}{rest.split(end)[1]}"


def with_headline(readme: str) -> str:
    """Return the README with the headline of complete generations between its marks."""
    data, name = main_study()
    text = headline.headline(data, timed=saved.timed(name))
    fetched = completions_report.hints(data["runs"])
    elsewhere = fetched and not completions_report.hints(saved.load(name)["runs"])
    words = "All but the hint" if elsewhere else "All of it"
    return between(readme, "headline", text, _filled(f"{words} {saved.origin(name)}."))


def completions(files: Files) -> list[str]:
    """Return the paragraphs, mostly tables, of one network's complete generations."""
    ((name, data),) = files.items()
    return completions_report.in_results(data, name)


def further_completions(files: Files) -> list[str]:
    """Return a section about one network's complete generations: their origin, their tables, and
    the project's criteria.
    """
    ((name, data),) = files.items()
    ((network, tokens), records) = next(iter(completions_report.groups(data).items()))
    criteria = completions_report.criteria(records, network)
    return [
        f"### {saved.title(name) or f'Complete generations on {network}'}",
        _filled(f"Completions of {tokens} tokens as above, {saved.origin(name)}."),
        *completions(files),
        "\n".join(f"- {text}" for text in criteria),
    ]


def standard(files: Files) -> list[str]:
    """Return seconds and traffic, network by network, of runs without a comparison."""
    return [text for name, data in files.items() for text in completions({name: data})[:4]]


@dataclass(frozen=True)
class Tables:
    """The text between two marks of a page in docs/results."""

    names: tuple[str, ...]
    paragraphs: Callable[[Files], list[str]]
    seconds: bool = True


def single(
    name: str, paragraphs: Callable[[dict[str, Any], str], list[str]], *, seconds: bool = True
) -> Tables:
    """Return the tables of one result; `paragraphs` takes the result and the line that tells its
    origin.
    """

    def of(files: Files) -> list[str]:
        ((_, data),) = files.items()
        machine = data["machine"]
        load = saved.NO_SECONDS.format(*machine["load"])
        origin = saved.under_table(files, [machine], "" if seconds else load)
        return paragraphs(data, origin)

    return Tables((name,), of, seconds)


def printed(name: str, table: Callable[[dict[str, Any]], str], *, seconds: bool = True) -> Tables:
    """Return the tables of one result as its study prints them, with `table`."""

    def paragraphs(data: dict[str, Any], origin: str) -> list[str]:
        rows = [line for line in table(data).splitlines() if line.startswith("|")]
        return ["\n".join(rows), origin]

    return single(name, paragraphs, seconds=seconds)


_OPS = ("ops", "ops_networks")
_VERIFY = ("verify", "verify_wan", "verify_50257", "verify_151936")
TABLES: dict[str, Tables] = {
    "claims": Tables(("completions_lan",), lambda files: claims.paragraphs(), seconds=False),
    "shipped": single("shipped", shipped.in_results, seconds=False),
    "products": printed("products", products_bench.table),
    "completions": Tables(("completions",), completions),
    "completions_lan": Tables(("completions_lan",), further_completions),
    "standard": Tables(("standard", "standard_lan"), standard),
    "completions_wan": Tables(("completions_wan",), further_completions),
    "demo": single("demo", shipped.demo_in_results),
    "smollm2": Tables(("smollm2",), answers.in_results),
    "smollm2_drafted": Tables(("smollm2_drafted",), answers.in_results),
    "fidelity": Tables(
        ("fidelity", "fidelity_shares", "fidelity_dealt"), fidelity.in_results, seconds=False
    ),
    "speedup": Tables(("speedup",), speedup.tables),
    "speedup_wan": Tables(("speedup_wan",), speedup.tables, seconds=False),
    "align_tasks": Tables(("align_tasks",), alignment.tables, seconds=False),
    "align_tasks_t5": Tables(("align_tasks_t5",), alignment.tables, seconds=False),
    "backends": Tables(("backends",), speedup.tables),
    "speedup_t5": Tables(("speedup_t5",), speedup.tables),
    "drafts_t5": printed("drafts_t5", drafts.table, seconds=False),
    "trees": printed("trees", trees.table, seconds=False),
    "lengths": printed("lengths", lengths.table, seconds=False),
    "drafts_shipped": printed("drafts_shipped", drafts.table, seconds=False),
    "drafts_smollm2": printed("drafts_smollm2", drafts.table, seconds=False),
    "drafts_questions": printed("drafts_questions", drafts.table, seconds=False),
    "align_smollm2": printed("align_smollm2", drafts.curve_table, seconds=False),
    "latency": Tables(("latency",), measured_tables.latency),
    "latency_positions": Tables(("latency_positions",), measured_tables.latency),
    "stock_options": printed("stock_options", options.table, seconds=False),
    "logits": printed("logits", logits.table, seconds=False),
    "verify": Tables(_VERIFY, measured_tables.verification),
    "chain": Tables(("chain",), measured_tables.chain),
    "functions": Tables(("ops",), measured_tables.functions),
    "ops": Tables(_OPS, measured_tables.ops),
    "transcript": single("transcript", transcript.in_results, seconds=False),
    "network": printed("network", network_bench.table),
    "connection": printed("connection", connection.table),
    "gateway_load": single("gateway_load", gateway_report.load_in_results),
    "gateway_memory": single("gateway_memory", gateway_report.load_in_results),
    "gateway_chat": printed("gateway_chat", chatting.table),
    "gateway_faults": printed("gateway_faults", gateway_report.faults_table),
    "confidential": single("confidential", confidential_report.in_results),
    "obfuscation": printed("obfuscation", obfuscation.table),
    "fakes": printed("fakes", fakes.table, seconds=False),
    "personal": Tables(("personal",), personal.in_results, seconds=False),
    "vault_memory": printed("vault_memory", vault_memory.table, seconds=False),
    "dp_text": single("dp_text", dp_text_report.in_results, seconds=False),
    "dp_text_more": single("dp_text_more", dp_text_report.in_results, seconds=False),
    "dp_text_temperatures": single(
        "dp_text_temperatures", dp_text_tempered.in_results, seconds=False
    ),
    "dp_text_hotter": single("dp_text_hotter", dp_text_tempered.in_results, seconds=False),
    "dp_text_batches": single("dp_text_batches", dp_text_report.over_batches, seconds=False),
    "dp_text_smollm2": Tables(("dp_text_smollm2",), dp_text_report.with_seconds, seconds=False),
    "dp_text_library": Tables(
        ("dp_text_library", "dp_text_library_baselines"), dp_text_report.with_seconds, seconds=False
    ),
    "noir": single("noir", noir_report.in_results, seconds=False),
    "noir_more": single("noir_more", noir_report.in_results, seconds=False),
    "noir_codebooks": single("noir_codebooks", noir_report.in_results, seconds=False),
    "noir_parts": single("noir_parts", noir_parts.in_results, seconds=False),
    "noir_tuning": Tables(
        ("noir_tuning_smollm2", "noir_tuning"), noir_tuning.in_results, seconds=False
    ),
    "split_attacks": Tables(attack_tables.SPLIT_NAMES, attack_tables.in_results, seconds=False),
    "split_programs": single("split_programs", split_programs.in_results, seconds=False),
    "split_runs": Tables(("split_runs",), split_runs.in_results),
    "split_client": Tables(
        ("split_client", "split_client_smollm2"), split_client.in_results, seconds=False
    ),
    "watermark": single("watermark", watermark_report.in_results, seconds=False),
    **{
        name: printed(name, watermark_drawing.table, seconds=False)
        for name in ("watermark_drawing", "watermark_drawing_1")
    },
    "watermark_long": single("watermark_long", watermark_long.in_results, seconds=False),
    **{
        name: single(name, watermark_entropy.in_results, seconds=False)
        for name in ("watermark_entropy", "watermark_entropy_cold")
    },
    "watermark_variants": single(
        "watermark_variants", watermark_variants.in_results, seconds=False
    ),
    "watermark_runs": Tables(("watermark_runs",), watermark_runs.in_results),
    "producers": printed("producers", producers.table),
    "capacity": single("capacity", capacity.in_page, seconds=False),
    "attacks": Tables(attack_tables.NAMES, attack_tables.in_results, seconds=False),
}


def pages() -> list[Path]:
    """Return the paths of the pages of results, and of the page on more machines than one."""
    return [*sorted(RESULTS.glob("*.md")), CLUSTER]


def with_tables(page: str) -> str:
    """Return a page of results with all tables that it has marks for and whose results exist."""
    for mark, tables in TABLES.items():
        if BEGIN.format(mark) not in page:
            continue
        files = {
            name: saved.load(name)
            for name in saved.there(*tables.names)
            if saved.timed(name) or not tables.seconds
        }
        if tables.names[0] in files:
            paragraphs = tables.paragraphs(files)
            page = between(page, mark, *map(_paragraph, paragraphs))
    return page


def _paragraph(text: str) -> str:
    """Wrap prose at 100 characters; leave tables, lists, headings and marks as they are."""
    return text if text[0] in "|*-#<" else _filled(text)


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False)


def main() -> None:
    import nbformat

    if len(sys.argv) > 1:
        sys.exit(f"experiments.render takes no arguments, found {sys.argv[1]}")
    data, name = main_study()
    headline.plot_traffic(data, TRAFFIC, timed=saved.timed(name))
    README.write_text(with_headline(README.read_text(encoding="utf-8")), encoding="utf-8")
    for page in pages():
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        show(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
