"""The tables in docs/results and protocols/README.md: where each comes from, and exact figures as
the code has them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.experimental import enable_x64

import experiments
from experiments import render
from experiments.common import claims, saved
from experiments.common.measured import summed
from experiments.common.replay import dry_parties
from experiments.common.report import both_ways
from experiments.completions import exact, exact_cells
from experiments.cost_model.prices import Prices
from models.cache import FEW
from models.hf import load_config
from spu_llm.api.defaults import shipped
from spu_llm.app import cli
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.values import Arith
from tests.experiments.committed_results import EXACT, MACHINE, SUMMARY, origin_mistakes, tables
from tests.experiments.headline_results import committed
from tests.experiments.latency_results import results as latency_results

FOLDER = Path(experiments.__file__).parent
COMPLETIONS = render.RESULTS / "completions.md"


@pytest.mark.parametrize("page", render.pages(), ids=lambda page: page.stem)
def test_every_table_says_where_it_comes_from(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    failures = [m for lines, under in tables(text) for m in origin_mistakes(lines, under, FOLDER)]
    assert failures == []
    assert len(list(tables(text))) == len(re.findall(r"^\|[-|: ]+\|$", text, re.M))


def test_every_file_of_data_is_in_the_index() -> None:
    """But for the index itself, and for prompts, which studies take."""
    files, prompts = {file.name for file in saved.DATA.iterdir()}, ("prompts", "drafts_texts")
    assert files == {f"{name}.json" for name in (*saved.load("index"), "index", *prompts)}


@pytest.mark.parametrize("name", saved.load("index"))
def test_the_index_has_a_command_for_it(name: str) -> None:
    program, *arguments = shlex.split(saved.load("index")[name]["command"])
    if program == "spu-llm":
        assert callable(cli.command_line().parse_args(arguments).run)
    else:
        assert (program, arguments[0]) == ("python", "-m")
        assert importlib.util.find_spec(arguments[1])
    if "--json" in arguments:
        written = arguments[arguments.index("--json") + 1]
        assert written in (f"experiments/data/{name}.json", "FILE")


LINE = "*Commit 1234567, 2026-11-22; 2 cores, 24 GiB; load 0.1; {}.*"


@pytest.mark.parametrize(
    ("under", "wanted"),
    [
        (LINE.format(saved.link("right")), ""),
        (EXACT, ""),
        (SUMMARY, "'| 1 | 2 |' links to no section"),
        ("- A point.", "not where it comes from"),
        (LINE.format("no JSON kept"), "not where it comes from"),
        (LINE.format(saved.link("right")).replace("load 0.1; ", ""), "not where it comes"),
        (LINE.format(saved.link("missing")), "is not there"),
        (LINE.format(saved.link("other")), "is of [('7654321', '2026-11-22'"),
        (LINE.format(saved.link("right")).replace("11-22", "11-21"), "the table of"),
        (LINE.format(saved.link("right")).replace("2 cores", "4 cores"), "the table of"),
        (LINE.format(saved.link("nothing")), "is of []"),
        (LINE.format(f"{saved.link('right')}, {saved.link('other')}"), "other.json is of"),
    ],
)
def test_a_table_without_its_origin_is_found(under: str, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, commit in (("right", "1234567"), ("other", "7654321")):
        text = json.dumps({"networks": [{"machine": MACHINE | {"commit": commit}}] * 2})
        (tmp_path / "data" / f"{name}.json").write_text(text, encoding="utf-8")
    (tmp_path / "data" / "nothing.json").write_text("{}", encoding="utf-8")
    ((lines, line),) = tables(f"Text.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n{under}\n")
    failures = origin_mistakes(lines, line, tmp_path)
    assert len(failures) == bool(wanted) and all(wanted in text for text in failures)


def test_a_summary_links_to_what_it_sums_up(tmp_path: Path) -> None:
    rows = "| a | 1 | [b](#b) |\n| c | not tried: no d | |\n"
    ((lines, line),) = tables(f"Text.\n\n| a | b | c |\n|---|---|---|\n{rows}\n{SUMMARY}\n")
    assert origin_mistakes(lines, line, tmp_path) == []


QUICK = "*Tests: `pytest tests/test_a.py`; run in `make test`.*"
SLOW = QUICK.replace(".*", ", slow ones in `make test-slow`.*")


@pytest.mark.parametrize(
    ("cell", "under", "wanted"),
    [
        ("`test_a::test_quick`", QUICK, ""),
        ("`test_a::test_quick`, `test_a::test_slow`", SLOW, ""),
        ("`test_a::test_cases`", SLOW, ""),
        ("by hand", QUICK, "names no test"),
        ("`test_a::test_gone`, `test_a::test_quick`", QUICK, "there is no test_a::test_gone"),
        ("`test_b::test_quick`, `test_a::test_quick`", QUICK, "there is no test_b::test_quick"),
        ("`test_a::test_quick`", QUICK.replace("test_a", "test_c"), "test_c.py"),
        ("`test_a::test_quick`", QUICK.replace(".py", ".py tests/test_b.py"), "['test_b']"),
        ("`test_a::test_slow`", QUICK, "disagree"),
        ("`test_a::test_quick`", SLOW, "disagree"),
    ],
)
def test_a_row_without_its_test_is_found(
    cell: str, under: str, wanted: str, tmp_path: Path
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "def test_quick(): ...\n@pytest.mark.slow\ndef test_slow(): ...\n"
        "@parametrize('x', [param(1, marks=pytest.mark.slow)])\ndef test_cases(x): ...\n"
    )
    (tmp_path / "tests" / "test_b.py").write_text("def test_other(): ...\n")
    ((lines, line),) = tables(f"| a | test |\n|---|---|\n| 1 | {cell} |\n\n{under}\n")
    failures = origin_mistakes(lines, line, tmp_path / "experiments")
    assert bool(failures) == bool(wanted) == any(wanted in text for text in failures), failures


# ---- tables that are made of the committed files


@pytest.mark.parametrize("page", render.pages(), ids=lambda page: page.stem)
def test_tables_between_marks_are_those_of_the_committed_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert render.with_tables(text) == text


def test_every_table_that_is_made_has_a_place() -> None:
    """In one page, and there once."""
    texts = [page.read_text(encoding="utf-8") for page in render.pages()]
    for mark in (mark for mark, made in render.TABLES.items() if saved.there(*made.names)):
        assert sum(text.count(render.BEGIN.format(mark)) for text in texts) == 1, mark


def test_every_headline_figure_stands_in_the_page_that_it_names() -> None:
    for claim in claims.CLAIMS:
        page, _, section = claim.section.partition("#")
        text = (render.RESULTS / f"{page}.md").read_text(encoding="utf-8")
        assert section in {"", *map(slug, re.findall(r"^#+ (.+)$", text, re.M))}, section
        figures = re.findall(r"\d[\d,.]*\d%?|\d+(?= of \d)", claim.words)
        shown = [f for f in figures if f not in text and f.rstrip("%") not in text]
        assert not shown, (claim.words, shown)


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("quiet", [True, False])
def test_a_table_is_of_what_a_quiet_machine_measured(
    quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = {"latency": {"command": "spu-llm", "quiet": quiet}}
    files = {"index": index, "latency": {"networks": latency_results()}}
    monkeypatch.setattr(saved, "load", files.__getitem__)
    before = COMPLETIONS.read_text(encoding="utf-8")
    after = render.with_tables(before)
    begin, end = (mark.format("latency") for mark in (render.BEGIN, render.END))
    part = after.split(begin)[1].split(end)[0]
    assert ("| 8 | 1.6 | 3.6 |" in part) == quiet == (after != before)
    assert render.with_tables(after) == after


def test_a_further_network_has_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    results = committed()
    monkeypatch.setattr(saved, "load", results.__getitem__)
    text = render.with_tables(COMPLETIONS.read_text(encoding="utf-8"))
    for name in results["index"]:
        begin, end = (mark.format(name) for mark in (render.BEGIN, render.END))
        part = text.split(begin)[1].split(end)[0]
        assert {under for _, under in tables(part)} == {
            "*Commit 0123456, 2026-01-02; 2 cores, 24 GiB; load of other work 0.00 to 0.00 cores; "
            f"[data](../../experiments/data/{name}.json).*"
        }
        assert len(list(tables(part))) == 4 and "| ours, drafted, greedy | 2 |" in part
        assert part.count("###") == part.count("- criterion online") == (name == "completions_lan")
    assert "as above, from `spu-llm completions_lan`.\n" in text
    assert render.with_tables(text) == text


# ---- exact figures


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """Return the figures of the code; those of text of the provider's own are as they were
    stored.
    """
    stored = exact_cells.stored(exact.FILE)["own text"]
    return exact.quick_figures(shipped("private")) | {"own text": stored}


def test_exact_figures_are_those_of_the_code(figures: dict[str, Any]) -> None:
    assert not (stale := stale_of(figures)), stale


@pytest.mark.slow
def test_exact_figures_of_the_providers_text_are_the_codes() -> None:
    assert not (stale := stale_of({"own text": exact.own_text_figures(shipped("private"))})), stale


def stale_of(figures: dict[str, Any]) -> str:
    stored = exact_cells.stored(exact.FILE)
    stale = exact_cells.documents(stored | figures, write=False)
    for part, rows in figures.items():
        if stored.get(part) != rows:
            stale.append(f"{exact.FILE.name}: {part}")
    return "\n".join([f"stale; `{exact_cells.COMMAND}` mends it:", *stale]) if stale else ""


def test_all_tables_of_exact_figures_stand_somewhere(figures: dict[str, Any]) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in exact_cells.DOCUMENTS)
    assert set(re.findall(r"<!-- exact: (.+) -->", text)) == set(exact_cells.cells(figures))


@pytest.mark.slow
def test_what_tokens_of_the_providers_own_cost() -> None:
    """Little beside none; a step never more than with as many as shared rows, in messages, online
    bytes, and bytes and priced seconds ahead, and less where they do not fit into a tile that is
    there anyway.
    """
    works, prices = exact.own_text(load_config(shipped("private"))), Prices.load()

    def costs(tokens: int, way: str) -> dict[str, float]:
        step = works[tokens, way][1]
        ahead = summed(prices.of_material(step).values())
        return {
            "messages": step.counts["messages"],
            "online": both_ways(step.counts),
            "ahead": both_ways(ahead),
            "seconds ahead": ahead["seconds"],
        }

    alone = costs(0, "the prompt alone")
    for tokens in exact.OWN_TEXT:
        own, others = costs(tokens, "a system prompt"), costs(tokens, "in the prompt")
        assert all(own[what] <= others[what] for what in own), (tokens, own, others)
        few = tokens <= FEW
        assert all((own[x] == others[x]) == few for x in ("online", "ahead", "seconds ahead"))
        assert own["messages"] <= 1.03 * alone["messages"]
        assert own["online"] <= (1.35 if tokens <= 128 else 1.45) * alone["online"]
        # A prefill's maxima are of what its rows see: of more columns they take more levels.
        for name in ("messages", "rounds"):
            before = works[0, "the prompt alone"][0].counts[name]
            assert works[tokens, "a system prompt"][0].counts[name] <= 1.20 * before


def test_a_comparison_keeps_what_its_dry_run_takes(figures: dict[str, Any]) -> None:
    with enable_x64():
        for row in figures["comparisons"]:
            fn, owners, _, _ = exact._ops()[f"sign {row['bits']}"]
            values, client = row["values"], dry_parties()[0]
            words = Arith(np.zeros(values, np.uint64), np.dtype(np.int64), 0)
            client.call(SecureFunction(fn, owners, "sign"), words)
            (noted,) = client.taken()
            taken = noted.demand.correlations.values()
            assert (
                sum(64 * x.units * x.correlation.results[0].size for x in taken)
                == row["sums"] * values
            )


TEXT = """\
<!-- exact: steps -->
| | messages | bytes = | seconds |
|---|---|---|---|
| `one` | 5 | **7** | 3.1 |
| two, [rows](x.md) | 6 | 8 | 3.2 |

Text.
"""
WANTED = {"steps": {"one": {"messages": "5", "bytes": "7"}, "two, rows": {"messages": "60"}}}


def test_stale_cells_are_found_and_mended() -> None:
    right, stale = exact_cells.checked(TEXT, WANTED)
    assert stale == [
        "line 5, table steps, row 'two, rows', 'messages': found '6', the code says '60'"
    ]
    assert right == TEXT.replace("| 6 |", "| 60 |")
    assert exact_cells.checked(right, WANTED) == (right, [])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({}, "nothing of this name"),
        ({"steps": {"three": {"messages": "1"}}}, "no such row"),
        ({"steps": {"one": {"rounds": "1"}}}, "no such column"),
    ],
)
def test_what_is_not_in_a_table_is_stale(wanted: exact_cells.Cells, words: str) -> None:
    right, (cell,) = exact_cells.checked(TEXT, wanted)
    assert right == TEXT and words in cell


def test_the_command_finds_and_mends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "tables.md"
    document.write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(exact, "figures", lambda model: {"steps": [1]})
    monkeypatch.setattr(exact, "FILE", tmp_path / "exact.json")
    monkeypatch.setattr(exact_cells, "ROOT", tmp_path)
    monkeypatch.setattr(exact_cells, "DOCUMENTS", (document,))
    monkeypatch.setattr(exact_cells, "cells", lambda figures: WANTED)
    monkeypatch.setattr(exact_cells, "table", lambda figures: "the table")

    def run(*options: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["experiment", "exact", *options])
        return int(end.value.code or 0), capsys.readouterr().err

    code, error = run()
    assert code == 1 and "tables.md: line 5" in error and f"{exact_cells.COMMAND} mends" in error
    assert "2 stale" in error  # that, and there is no JSON
    assert run("--write") == (0, "")
    assert document.read_text(encoding="utf-8") == TEXT.replace("| 6 |", "| 60 |")
    assert run() == (0, "")
    (tmp_path / "exact.json").write_text("{}", encoding="utf-8")
    assert run()[0] == 1
    code, error = run("--write", "--model", "elsewhere")
    assert code == 2 and "leave --model out" in error
