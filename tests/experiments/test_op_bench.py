"""`bench op`: what it refuses, how it compares, table, plot and notebook, and one real session."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.experimental import enable_x64

from experiments.benchmarks import op_bench, op_report
from experiments.benchmarks.op_cases import ALIASES, OPS, Input, choose, integers, wrong
from protocols.arithmetic.truncate import truncate
from spu_llm.app import cli
from spu_llm.core.errors import InputError
from spu_llm.core.values import CLIENT
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from tests.experiments.op_rows import cost, row

RESULT: dict[str, Any] = {
    "network": "lan",
    "repeat": 3,
    "rows": [row(10), row(2000)],
    "memory_after_warm_up": {"client": 690 << 20, "provider": 590 << 20},
    "notes": ["a note"],
    "failures": [],
}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "NAME"),
        (["sing"], "unknown op 'sing'; choose from sign-12, sign-16, sign-24"),
        (["sign,all"], "unknown op 'all'"),
        (["sign", "--size", "1,x"], "expected numbers like 1,2,4, found '1,x'"),
        (["sign", "--size", "0"], "--size of sign-24 must be 1 to 1000000 values, found 0"),
        (["sign,matmul", "--size", "10000"], "--size of matmul must be 1 to 512 matrices"),
        (["sign", "--repeat", "0"], "--repeat must be at least 1, found 0"),
        (["sign", "--network", "moon"], "unknown network 'moon'"),
        (["sign", "--json", "/nowhere/a"], "--json: /nowhere is not a directory"),
        (["sign", "--plot", "/nowhere/a"], "--plot: /nowhere is not a directory"),
    ],
)
def test_bad_input(arguments: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "op", *arguments])
    assert end.value.code == 2
    assert wanted in capsys.readouterr().err


def test_every_known_name_is_listed() -> None:
    with pytest.raises(InputError) as error:
        choose(["?"], None)
    assert all(name in str(error.value) for name in [*OPS, *ALIASES])


def test_names_become_ops_with_sizes() -> None:
    chosen = choose(["select", "sign", "sign-24"], [5, 2, 5])
    assert [(case.name, sizes) for case, sizes in chosen] == [
        ("select", [5, 2]),
        ("sign-24", [5, 2]),
    ]
    everything = choose(["all"], None)
    assert [case.name for case, _ in everything] == list(OPS)
    assert all(1 <= size <= case.largest for case, sizes in everything for size in sizes)


def test_wrong_results_are_counted() -> None:
    x = integers(np.random.default_rng(0), 64, 50)
    assert {np.iinfo(np.int64).min, np.iinfo(np.int64).max, 0, -1} < set(x.tolist())
    off = x.copy()
    off[3:6] += np.array([1, -2, 3])
    assert [wrong(off, x, 64, slack) for slack in (0, 1, 2, 3)] == [3, 2, 1, 0]
    assert wrong(x + (1 << 24), x, 24, 0) == 0 and wrong(x + (1 << 24), x, 25, 0) == 50
    assert wrong(np.array([True, False]), np.array([True, True]), 64, 1) == 1
    fixed = np.array([0.5, np.nan, 1.0], np.float32)
    assert wrong(fixed, np.array([0.5 + 2.0**-17, 1.0, 1.0 + 2.0**-15]), 64, 0) == 2
    assert wrong(fixed, np.array([0.5 + 2.0**-13, 0.0, 1.0 + 2.0**-10]), 64, 128) == 2
    assert wrong(x[:3], x, 64, 0) == 50
    near = np.array([0.501, 10.01, -10.1], np.float32)
    assert wrong(near, np.array([0.5, 10.0, -10.0]), 64, 0, error=2e-3) == 1


def test_ratios_of_nothing_are_left_out() -> None:
    ours = cost(1, 0, 0, 0) | {"offline": cost(1, 5, 5, 1)}
    assert op_report.ratios(ours, cost(2, 10, 10, 2)) == {
        "seconds": 0.5,
        "bytes": 0,
        "messages": 0,
        "seconds_with_offline": 1,
        "bytes_with_offline": 0.5,
    }
    assert op_report.ratios(ours, cost(2, 0, 0, 0))["bytes"] is None


def test_the_table_shows_both_ways() -> None:
    lines = op_report.table(RESULT).splitlines()
    assert lines[0].startswith("network lan: medians of 3 runs")
    assert "square: x * x mod 2^64; sizes in values" in lines
    assert lines[-8:] == [
        "| 10 | ours | 0.0100 |  | 80 | 80 |  | 2 | 1 | 0.0700 | 1,520 | 8 | 20, 9 |",
        "|  | SPU: x * x | 0.0400 | 0.250 (2.000) | 320 | 320 | 0.250 (2.625) | 4 |  |  |  |  "
        "| 20, 9 |",
        "| 2000 | ours | 2.0000 |  | 16,000 | 16,000 |  | 2 | 1 | 14.00 | 304,000 | 8 | 20, 9 |",
        "|  | SPU: x * x | 8.0000 | 0.250 (2.000) | 64,000 | 64,000 | 0.250 (2.625) | 4 |  |  |  "
        "|  | 20, 9 |",
        "",
        "note: a note",
        "",
        "results: all as in plaintext",
    ]


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    silent = copy.deepcopy(RESULT)
    for one in silent["rows"]:
        one["ours"] |= {"client_to_provider": 0, "provider_to_client": 0}
    file = tmp_path / "ops.png"
    op_report.plot([RESULT, silent], file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_what_is_wrong_or_large_is_said() -> None:
    bad = copy.deepcopy(RESULT["rows"][1])
    first = RESULT["memory_after_warm_up"]
    assert op_report.failures(bad, "lan") == [] == op_report.notes(bad, first)
    bad["stock"][0]["wrong"] = 7
    bad["ours"]["as_priced"] = False
    bad["ours"]["memory_growth"] = {"client": 300 << 20, "provider": 500 << 20}
    assert op_report.failures(bad, "lan") == [
        "square, 2000 values, lan: x * x: 7 of 2 x 2000 values are wrong",
        "square, 2000 values, lan: bytes or messages other than the op's price",
    ]
    (note,) = op_report.notes(bad, first)
    assert note.endswith("ours: up to 500 MiB at the provider, on top of 590 MiB")


def test_a_failure_is_written_and_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = RESULT | {"failures": ["square is wrong"]}
    monkeypatch.setattr(op_bench, "measure", lambda *args: failed)
    file = tmp_path / "ops.json"
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "op", "square", "--network", "lan,wan", "--json", str(file)])
    assert end.value.code == 1
    written = capsys.readouterr()
    assert "square is wrong" in written.err and written.out.count("| 2000 | ours |") == 2
    assert len(json.loads(file.read_text(encoding="utf-8"))["networks"]) == 2


def test_a_wrong_op_is_found(simulation: Simulation) -> None:
    """Local truncation of numbers that are too large for it."""
    case = dataclasses.replace(
        OPS["truncate-local"],
        inputs=lambda rng, size: [Input(integers(rng, 64, size)), Input(np.zeros(size, bool))],
        ours=lambda x, _: truncate(x, shift=18, how="local", bits=24),
        stock={"copy": lambda x, _: x + x},
    )

    def program(session: PartySession) -> Any:
        with enable_x64():
            return op_bench.Bench(session, repeat=1).measure(case, 200)

    result = simulation.run(program)[CLIENT]
    assert result["ours"]["wrong"] > 50 and result["stock"][0]["wrong"] == 0
    assert "are wrong" in op_report.failures(result, "memory")[0]


@pytest.mark.slow
def test_two_ops_between_two_processes(tiny_pair: tuple[Path, Path]) -> None:
    result = op_bench.measure(tiny_pair[0], ["sign", "square"], [10], 2, "local")
    assert result["passed"] and result["failures"] == [] == result["notes"]
    assert (result["network"], result["repeat"]) == ("local", 2)
    assert json.loads(json.dumps(result)) == result
    assert all(size > 50 << 20 for size in result["memory_after_warm_up"].values())
    assert all(size > 0 for size in result["wire_bytes"].values())
    learned = result["learned"]
    assert "results (study): 60 x 1 bit in 6 openings" in learned["client"]
    assert "results (study): 60 x 64 bit in 6 openings" in learned["client"]
    assert "start of a run (study): 12 x 64 bit in 12 openings" in learned["provider"]
    assert all("known seed" in facts[0] for facts in learned.values())
    sign, square = result["rows"]
    assert [(r["op"], r["size"], r["values"]) for r in (sign, square)] == [
        ("sign-24", 10, 10),
        ("square", 10, 10),
    ]
    assert (sign["ours"]["rounds"], square["ours"]["rounds"]) == (3, 1)
    assert square["ours"]["units"] == {"square pair of own words": 10}
    assert square["ours"]["stored_bytes_per_value"] == 8
    assert square["ours"]["client_to_provider"] == square["ours"]["provider_to_client"] == 80
    for one in (sign, square):
        ours, (stock,) = one["ours"], one["stock"]
        for figures in (ours, stock):
            assert len(figures["runs"]) == 2 and figures["wrong"] == 0
            assert all(0 < seconds < 60 for seconds in figures["runs"])
            assert all(size > 50 << 20 for size in figures["peak_memory"].values())
            assert all(0 <= size < 1 << 30 for size in figures["memory_growth"].values())
        assert ours["as_priced"] and ours["messages"] < stock["messages"] + 1
        assert 0 < ours["offline"]["seconds"] < 5 and 0 < ours["offline"]["messages"] < 10
        assert ours["offline"]["client_to_provider"] > 0 < ours["offline"]["provider_to_client"]
        assert stock["ratio"]["seconds"] == ours["seconds"] / stock["seconds"]
    assert "| 10 | ours |" in op_report.table(result)


def test_an_approximation_says_how_far_it_is_off(simulation: Simulation) -> None:
    """Ours within its bound; SPU's own, which is further off, is measured and not judged."""

    def program(session: PartySession) -> Any:
        with enable_x64():
            return op_bench.Bench(session, repeat=1).measure(OPS["gelu"], 100)

    result = simulation.run(program)[CLIENT]
    ours, (stock,) = result["ours"], result["stock"]
    assert ours["wrong"] == stock["wrong"] == 0 and ours["as_priced"]
    assert 0 < ours["largest_error"] < 3e-3 < stock["largest_error"]
    assert (ours["messages"], ours["rounds"]) == (10, 5)
    assert op_report.failures(result, "memory") == []
    text = op_report.table(RESULT | {"rows": [result]})
    assert f"largest error, ours: {ours['largest_error']:.2g}" in text
