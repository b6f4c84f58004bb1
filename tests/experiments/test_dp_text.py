"""The study of differentially private text: its corpus, its metrics, its cells and its report."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.common import commands
from experiments.common.saved import DATA
from experiments.dp_text import command as dp_text_command
from experiments.dp_text import docstrings, metrics
from experiments.dp_text import inputs as dp_text_inputs
from experiments.dp_text import report as dp_text_report
from experiments.dp_text import study as dp_text
from experiments.dp_text.plan import CONTROL, REAL, DpTextCell, DpTextPlan, cell_of, cells
from models.hf import load_model
from models.scoring import Scorer
from models.tokenizer import Tokenizer
from spu_llm.app import cli
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.corpus import method_for
from spu_llm.systems.dp_text.lanes import folded
from tests.experiments.dp_text_results import made_up, not_run, row, untimed
from tests.kit.library import make_library

TESTS = dp_text_inputs.ORIGINS["tests"]

# ---- the corpus


def test_texts_are_of_tests_alone_in_the_order_of_files(
    tmp_path: Path, tiny_pair: tuple[Path, Path]
) -> None:
    library = make_library(tmp_path)
    tokenizer = Tokenizer.load(tiny_pair[0])
    actual = dp_text_inputs.corpus(tokenizer, 40, TESTS, library)
    of = dict((text, path) for path, text in docstrings.of_tests(library))
    assert len(of) == 3 * 24 and set(of) == {*actual.references, *actual.real}
    assert [text for text in of if dp_text_inputs.is_real(text)] == actual.real
    assert [text for text in of if not dp_text_inputs.is_real(text)] == actual.references
    for i, text in enumerate(actual.real):  # its file's references stand at its place
        mine = [t for t in actual.references if of[t] == of[text]]
        assert actual.beside(i, len(mine)) == mine or not mine
    sides = actual.facts["sides"]
    assert sides["references"]["texts"] == len(actual.references) > len(actual.real) > 0
    assert actual == dp_text_inputs.corpus(tokenizer, 40, TESTS, library)
    (library / "test" / "test_0.py").write_text('"""Another text is here."""', encoding="utf-8")
    other = dp_text_inputs.corpus(tokenizer, 40, TESTS, library)
    assert other.facts["sha256"] != actual.facts["sha256"]
    few = dp_text_inputs.corpus(tokenizer, 18, TESTS, library).references
    assert 0 < len(few) < len(actual.references)
    assert all(8 <= len(tokenizer.encode(text)) <= 18 for text in few)


def test_batches_are_disjoint_while_there_are_enough() -> None:
    of = dp_text_inputs.Corpus([str(i) for i in range(23)], [], [], {})
    actual = of.batches(3, 5)
    assert [len(batch) for batch in actual] == [3] * 5 and len(set(sum(actual, []))) == 15
    assert actual[-1][0] == "15"  # spread over 7 batches
    again = of.batches(10, 5)
    assert max(map(again.count, again)) == 3 == math.ceil(5 / 2)
    assert of.batches(63, 2) == [of.references] * 2


# ---- metrics


def sample(count: int, at: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(at, 1.0, (count, 6))


def test_mauve_of_known_cases() -> None:
    """1 for the same sample, near it for the same distribution, 0 for another place, between them
    falling with the distance.
    """
    real = sample(200, 0.0, 1)
    assert metrics.mauve(real, real, 0)[0] == pytest.approx(1.0, abs=1e-9)
    values = [metrics.mauve(sample(100, at, 2), real, 0)[0] for at in (0.0, 0.5, 1.0, 20.0)]
    assert values[0] > 0.9 and values[-1] < 0.01
    assert all(a > b + 0.01 for a, b in zip(values, values[1:], strict=False))
    value, half = metrics.mauve(sample(100, 0.4, 2), real, 0)
    assert (value, half) == metrics.mauve(sample(100, 0.4, 2), real, 0) and 0 < half < 0.3


def test_the_interval_of_mauve_is_as_wide_as_samples_differ() -> None:
    """Its standard deviation beside that over 12 fresh pairs of samples: within a factor of 2.5,
    which chance leaves in 1 of 1,000 cases.
    """
    collected = [
        metrics.mauve(sample(80, 0.5, 10 + i), sample(160, 0.0, 50 + i), 0, clusterings=2)
        for i in range(12)
    ]
    spread = float(np.std([value for value, _ in collected], ddof=1))
    said = float(np.mean([half for _, half in collected])) / metrics.Z
    assert 1 / 2.5 < said / spread < 2.5


def test_the_area_under_a_frontier() -> None:
    """Of disjoint distributions it is that under x = (1 - s)^c, y = s^c: for c = 1 a half."""
    p, q = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert metrics.frontier_area(p, q, 1.0) == pytest.approx(0.5, abs=2e-3)
    exact = 5 * math.gamma(5) * math.gamma(6) / math.gamma(11)  # c B(c, c + 1)
    assert metrics.frontier_area(p, q) == pytest.approx(exact, abs=2e-3)
    assert metrics.frontier_area(p, p) == pytest.approx(1.0)
    half = np.array([0.5, 0.5])
    assert metrics.frontier_area(p, half) == pytest.approx(metrics.frontier_area(half, p))


@pytest.mark.parametrize("known", [1, 3])
def test_perplexity_is_that_of_the_model(tiny_pair: tuple[Path, Path], known: int) -> None:
    config, params = load_model(tiny_pair[1])
    context, texts = [5, 6, 7][:known], [[8, 9, 10], [11], [], [12, 13, 14, 15, 16]]
    actual = metrics.Perplexity(config, folded(config, params), context, 5).of(texts)
    scorer = Scorer(config, params, 16)
    for text, value in zip(texts, actual, strict=True):
        if text:
            total = scorer.log_probability(context, np.array([text]))[0]
            assert value == pytest.approx(math.exp(-total / len(text)), rel=1e-4)
    assert np.isnan(actual[2])
    assert metrics.mean(actual)[0] == pytest.approx(actual[[0, 1, 3]].mean())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Return the name of it. Then end.", 0),
        ("Calls os.path.join() and close().", 2),
        ("A file_name, _private, of ValueError in camelCase", 4),
        ("See SSL, or ask Tim about AF_INET", 3),
    ],
)
def test_names_are_what_looks_like_one(text: str, count: int) -> None:
    assert metrics.names(text) == count


def test_means_and_distances() -> None:
    mean, half = metrics.mean([1.0, 2.0, 3.0, math.nan])
    assert mean == 2.0 and half == pytest.approx(2.576 / math.sqrt(3))
    assert math.isnan(metrics.mean([1.0])[0])
    assert metrics.distance(np.array([1, 2]), np.array([1, 2])) == 0
    assert metrics.distance(np.array([1, 2]), np.array([2, 3])) == 0.5
    assert metrics.distance(np.array([1, 2]), np.array([3, 3])) == 1


# ---- cells


def test_the_grid_has_every_method_once() -> None:
    plan = DpTextPlan(epsilons=(3.0, 10.0), batches=(3, 7), top_k=(50, None))
    actual = cells(plan)
    assert len(actual) == len(set(actual)) == 2 + 2 * (1 + 2 + 2 + 1 + 3 + 1 + 1)
    states = {
        (cell.epsilon, cell.batch): cell.state(plan)
        for cell in actual
        if cell.method == "amin-published"
    }
    assert states == {  # as in table 2 of the paper: its test alone takes too much
        (3.0, 31): "INF",
        (3.0, 63): "run",
        (3.0, 127): "TLE",
        (10.0, 31): "run",
        (10.0, 63): "run",
        (10.0, 127): "TLE",
    }
    others = {cell.state(plan) for cell in actual if cell.method != "amin-published"}
    assert others == {"run"}
    assert DpTextCell("public-only", None, 1, 50, 1.2).state(DpTextPlan(most_calls=10)) == "TLE"


COMMITTED = ("", "_more", "_temperatures", "_hotter", "_batches", "_smollm2")


@pytest.mark.parametrize("name", [f"dp_text{part}" for part in COMMITTED])
def test_committed_files_are_of_a_plan_that_goes_on(name: str) -> None:
    index = json.loads((DATA / "index.json").read_text(encoding="utf-8"))
    options = cli.command_line().parse_args(index[name]["command"].split()[1:])
    plan = dp_text_command.plan_of(options)
    rows = commands.earlier(DATA / f"{name}.json", plan)
    assert [cell_of(row) for row in rows] == [REAL, *cells(plan)]
    with pytest.raises(InputError, match="no cells of this very plan"):
        commands.earlier(DATA / f"{name}.json", replace(plan, iterations=(2,)))


@pytest.mark.slow
def test_the_command_measures_a_tiny_model(
    tmp_path: Path,
    tiny_pair: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = make_library(tmp_path / "library")
    monkeypatch.setattr(dp_text_inputs, "library_directory", lambda: library)
    monkeypatch.setattr(dp_text_inputs, "QUERY", "def")
    file, picture = tmp_path / "found.json", tmp_path / "figure.png"
    arguments = [
        "experiment",
        "dp-text",
        "--model",
        str(tiny_pair[0]),
        "--draft-model",
        str(tiny_pair[1]),
        "--epsilon",
        "10",
        "--batch",
        "2",
        "--baseline-batch",
        "2,63",
        "--top-k",
        "5,full",
        "--texts",
        "3",
        "--tokens",
        "20",
        "--most-calls",
        "3000",
        "--json",
        str(file),
        "--plot",
        str(picture),
    ]
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert not end.value.code
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = {(row["method"], row["batch"], row["top_k"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 1 + 2 + 1 + 1 + 1 + 2 + 2 + 2 + 1
    states = {at: row["state"] for at, row in rows.items()}
    assert states["amin-published", 2, None] == "INF" and states["amin", 63, None] == "TLE"
    assert rows["public-only", 1, 5]["calls"] == rows["null-references", 1, 5]["calls"] == 1
    assert rows["augpe", 1, 5]["calls"] >= 8
    for at in (("invisibleink", 2, 5), ("full-vocabulary", 2, None)):
        assert rows[at]["calls"] == 3 and rows[at]["reads"] == 1
        assert 0 <= rows[at]["mauve"][0] <= 1 and rows[at]["length"][0] <= 20
    saved = {row["epsilon"]: row["saved"][0] for row in result["worth"]}
    assert set(saved) == {10.0, None} and saved[10.0] != saved[None]
    printed = capsys.readouterr().out
    assert "| Amin et al., as published, B = 2 | – | INF |" in printed
    assert "criterion ε = 10" in printed and picture.stat().st_size > 1000
    # The same command goes on with the cells that a file lacks.
    some = {**result, "rows": [row for i, row in enumerate(result["rows"]) if i not in (0, 4)]}
    file.write_text(json.dumps(some), encoding="utf-8")
    with pytest.raises(SystemExit):
        cli.main(arguments)
    again = json.loads(file.read_text(encoding="utf-8"))
    assert untimed(again["rows"]) == untimed(result["rows"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--methods", "magic"], "there is no 'magic'"),
        (["--texts", "1"], "--texts must be at least 2"),
        (["--epsilon", "0"], "epsilon must be above 0"),
        (["--top-k", "0"], "top-k must be 1 or more"),
        (["--tokens", "300"], "the model has"),
    ],
)
def test_nonsense_is_refused(
    options: list[str],
    words: str,
    tiny_pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = make_library(tmp_path)
    monkeypatch.setattr(dp_text_inputs, "library_directory", lambda: library)
    with pytest.raises(SystemExit) as end:
        cli.main(["experiment", "dp-text", "--model", str(tiny_pair[0]), *options])
    assert end.value.code == 2 and words in capsys.readouterr().err


# ---- the report


def test_tables_have_infeasible_cells_in_their_places() -> None:
    result = made_up(
        row("public-only", None, 1, 1.0, 0.7, 50),
        row("invisibleink", 1.0, 7, 8.0, 0.71, 50),
        row("invisibleink", 10.0, 7, 8.0, 0.75, 50),
        not_run("amin-published", 1.0, 63, "INF"),
        row("amin-published", 10.0, 63, 64.0, 0.74),
        not_run("amin-published", 1.0, 127, "INF"),
        not_run("amin-published", 10.0, 127, "TLE"),
    )
    text = dp_text_report.table(result)
    assert "| public only, k = 50 | 1 | 70.0 ± 5.0 | 70.0 ± 5.0 |" in text
    assert "| InvisibleInk, k = 50, B = 7 | 8 | 71.0 ± 5.0 | 75.0 ± 5.0 |" in text
    assert "| Amin et al., as published, B = 63 | 64 | INF | 74.0 ± 5.0 |" in text
    assert "| Amin et al., as published, B = 127 | – | INF | TLE |" in text
    assert "| 7 | 5.000 ± 0.100 | 0.010 ± 0.020 (C = 0.50) |" in text
    assert dp_text_report.in_results(result, "*origin*").count("*origin*") == 4


def test_results_of_the_same_texts_are_shown_together() -> None:
    """Two processes measured them; what both measured stands there once."""
    real = row("real texts", None, None, None, 1.0)
    ours = made_up(real, row("invisibleink", 10.0, 7, 8.0, 0.75, 50, processor_s=0.0213))
    others = made_up(real, row("augpe", 10.0, 1, 8.0, 0.7, 50, iterations=1))
    machine = {"commit": "abc", "cores": 2, "memory_gib": 24.0, "date": "2026-11-01"}
    files = {
        "one": ours | {"machine": machine | {"load": [1.0, 4.0]}},
        "two": others | {"machine": machine | {"load": [3.0, 2.0]}},
    }
    shown = "\n\n".join(dp_text_report.with_seconds(files))
    assert shown.count("| real texts | – |") == 2  # of MAUVE, and of perplexity
    assert "| InvisibleInk, k = 50, B = 7 | 8 |" in shown and "| 21.3 |" in shown
    assert "| AugPE, k = 50, 1 iteration | 8 |" in shown
    assert "load 3.0 before, 4.0 at the end" in shown and "data/two.json" in shown
    files["two"]["machine"] = files["two"]["machine"] | {"commit": "other"}
    with pytest.raises(ValueError, match="several commits"):
        dp_text_report.with_seconds(files)


def test_batches_are_shown_with_the_length_of_texts() -> None:
    """A budget that ends early cuts texts short, which MAUVE alone does not tell."""
    rows = [
        row("public-only", None, 1, 1.0, 0.5),
        row("adapmixed-published", 10.0, 3, 4.0, 0.6, length=[3.2, 0.5]),
        row("adapmixed-published", 10.0, 7, 8.0, 0.4),
    ]
    shown = "\n\n".join(dp_text_report.over_batches(made_up(*rows), "*origin*"))
    assert "| AdaPMixED, as published, B = 3 | 4 |  | 60.0 ± 5.0 (3.2) |" in shown
    assert shown.count("*origin*") == 2
    assert "in 1 of 2 cells (AdaPMixED, as published, B = 3 at ε = 10), the other way" in shown


def test_the_criterion_goes_by_the_figures() -> None:
    ours, others = row("invisibleink", 10.0, 7, 8.0, 0.75, 50), row("amin", 10.0, 63, 64.0, 0.74)
    (line,) = dp_text_report.criteria(made_up(ours, others))
    assert "ε = 10" in line and "8 times fewer" in line and line.endswith(": holds")
    (line,) = dp_text_report.criteria(made_up(ours | {"calls": 16.0}, others))
    assert "4 times fewer" in line and line.endswith("does not hold")
    (line,) = dp_text_report.criteria(made_up(ours | {"mauve": [0.7, 0.1]}, others))
    assert "none as good" in line and line.endswith("does not hold")
    # The best baseline is the one that counts, however cheap.
    (line,) = dp_text_report.criteria(made_up(ours, others, row("augpe", 10.0, 1, 8.0, 0.745)))
    assert "AugPE" in line and line.endswith("does not hold")
    lines = dp_text_report.criteria(made_up(ours, not_run("amin", 10.0, 63, "INF")))
    assert lines == []


def test_references_help_above_the_public_model() -> None:
    public = row("public-only", None, 1, 1.0, 0.6, 50), row("public-only", None, 1, 1.0, 0.6)
    near = row("invisibleink", 1.0, 7, 8.0, 0.66, 50)
    far = row("invisibleink", 10.0, 7, 8.0, 0.7, 50, perplexity_gap=[40.0, 5.0])
    worse = row("full-vocabulary", 1.0, 7, 8.0, 0.4)
    mauve, gap = dp_text_report.criteria(made_up(*public, near))
    assert "in 0 of 1 cells, the other way round in 0" in mauve and "in 0 of 1 cells" in gap
    mauve, gap = dp_text_report.criteria(made_up(*public, near, far, worse))
    actual = "in 1 of 3 cells (InvisibleInk, k = 50, B = 7 at ε = 10), the other way round in "
    assert f"{actual}1" in mauve and f"{actual}0" in gap
    # The control has the candidates that epsilon gives: it is what counts where it is.
    control = row("null-references", 10.0, 1, 1.0, 0.68, 50, perplexity_gap=[42.0, 5.0])
    mauve, gap = dp_text_report.criteria(made_up(*public, control, far))
    assert "in 0 of 1 cells" in mauve and "in 0 of 1 cells" in gap


def test_the_control_is_the_method_without_its_references() -> None:
    """The same distribution as with nulls alone, and no row of a reference is looked at."""
    plan = DpTextPlan(tokens=12)
    (cell,) = [c for c in cells(plan) if c.method == CONTROL and c.epsilon == 10.0][:1]
    method = method_for(cell.wanted(plan))
    control = dp_text.without_references(method)
    public = np.random.default_rng(3).normal(0, 2, 200).astype(np.float32)
    none, nulls = np.zeros((1, 0), np.float32), np.full((1, 200), 50.0, np.float32)
    draws = [
        [token(public, rows) for _ in range(50)]
        for token, rows in (
            (control.begin(np.ones(1, bool), Prg.from_seed(1, "t")), none),
            (method.begin(np.zeros(1, bool), Prg.from_seed(1, "t")), nulls),
        )
    ]
    assert draws[0] == draws[1] and len(set(draws[0])) > 3 and not control.reads
