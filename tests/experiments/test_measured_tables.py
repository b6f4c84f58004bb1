"""Tables in docs/results that are made of measurements: what they show, and where from."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from experiments import measured_tables
from experiments.common import saved
from experiments.completions import exact_cells
from tests.experiments import costs
from tests.experiments.latency_results import results as latency_results
from tests.experiments.op_rows import row
from tests.experiments.verify_results import RESULT as VERIFIED

EXACT = exact_cells.cells(saved.load("exact"))


def session(network: str, *rows: dict[str, Any]) -> dict[str, Any]:
    return {"networks": [{"network": network, "rows": list(rows), "machine": costs.MACHINE}]}


def stale(paragraphs: list[str]) -> list[str]:
    """Return what the code says otherwise."""
    return exact_cells.checked("\n\n".join(paragraphs) + "\n", EXACT)[1]


def test_latency_on_all_networks_then_by_kind() -> None:
    files = {"latency": {"networks": latency_results()}}
    together, under, ours, _, stock, _ = measured_tables.latency(files)
    assert under == costs.UNDER.format(saved.link("latency"))
    assert "| 8 | 1.6 | 3.6 | 1.50 |" in together
    assert ours.startswith("| ours, lan: positions |")
    assert stock.startswith("| stock (layers alone) ˢ, lan: positions |")


def test_verification_of_several_files_is_one_table() -> None:
    files = {
        name: {"networks": [VERIFIED | {"machine": costs.MACHINE, "vocab": vocab}]}
        for name, vocab in (("verify", 32000), ("verify_50257", 50257))
    }
    table, under = measured_tables.verification(files)
    assert under == costs.UNDER.format(f"{saved.link('verify')}, {saved.link('verify_50257')}")
    assert table.count("| lan | 32,000 |") == table.count("| lan | 50,257 |") > 2


def test_functions_beside_spu() -> None:
    rows = []
    for _, _, (op, size) in exact_cells.FUNCTIONS:
        one = row(size) | {"op": op}
        one["ours"]["largest_error"], one["stock"][0]["largest_error"] = 0.00123, 0.5
        rows.append(one)
    paragraphs = measured_tables.functions({"ops": session("local", *rows)})
    assert stale(paragraphs) == []
    gelu = EXACT["functions"]["GELU, 6 thresholds (1,024 values)"]
    assert (
        f"| GELU, 6 thresholds (1,024 values) | {gelu['messages']} | 0.0012 | "
        f"{gelu['bytes online per value']} | 152 | 1.02 s / 4.1 s | 4, 0.5 |\n" in paragraphs[0]
    )


def test_ops_on_all_networks() -> None:
    """Those measured on one network alone are shown at their largest size; approximations, and what
    the code no longer has, nowhere.
    """
    slower = row(1000)["stock"][0] | {"way": "slower", "seconds": 99.0}
    several = row(1000)
    several["stock"].append(slower)
    approximation = row(1000) | {"op": "to-arith"}
    approximation["ours"]["largest_error"] = 0.1
    local = session(
        "local",
        several,
        row(10_000),
        row(1000) | {"op": "joint-words"},
        row(10_000) | {"op": "joint-words"},
        approximation,
        row(1000) | {"op": "gone"},
    )
    table, under = measured_tables.ops({"ops": local, "ops_networks": session("lan", several)})
    assert stale([table]) == []
    assert under == costs.UNDER.format(f"{saved.link('ops')}, {saved.link('ops_networks')}")
    exact = [EXACT["ops"][f"square, {size}"] for size in ("1,000", "10,000")]
    small, large = ([x["messages, ours"], x["bytes online, ours"]] for x in exact)
    lines = table.splitlines()
    assert lines[1].endswith("| local: ours / SPU (ahead) | lan: ours / SPU |")
    assert lines[3:5] == [
        f"| square | 1,000 | {small[0]} | 4 | {small[1]} | 64 kB | 152 kB | 1 s / 4 s (7 s) "
        "| 1 s / 4 s |",
        f"| square | 10,000 | {large[0]} | 4 | {large[1]} | 640 kB | 1.52 MB | 10 s / 40 s (70 s) "
        "| – |",
    ]
    assert len(lines) == 6 and lines[5].startswith("| joint-words | 10,000 |")


def test_a_table_is_of_one_commit() -> None:
    other = copy.deepcopy(session("lan", row(1000)))
    other["networks"][0]["machine"]["commit"] = "7654321"
    with pytest.raises(ValueError, match="several commits"):
        measured_tables.ops({"ops": session("local", row(1000)), "ops_networks": other})


def test_the_load_is_that_of_all_runs() -> None:
    loud = costs.MACHINE | {"load": [0.75, 2.0]}
    under = saved.under_table(["ops"], [costs.MACHINE, loud])
    assert "; load 0.10 to 0.75 at the start, nothing else; [data]" in under


@pytest.mark.parametrize(
    ("gaps", "said"),
    [
        ([0.0, 0.0, 0.0], "3 of 3 tokens are those of float32 in plaintext. Peak"),
        (
            [0.0, 0.003, 0.0],
            "2 of 3 tokens are those of float32 in plaintext; the logits of the others "
            "are 0.0030 below the largest at most. Peak",
        ),
    ],
)
def test_a_chain_of_tokens(gaps: list[float], said: str) -> None:
    def part(seconds: float) -> dict[str, Any]:
        offline = costs.figures(2 * seconds, size=4_000_000)
        return costs.figures(seconds, 7, 2_000_000) | {"offline": offline}

    result = {
        "network": "local",
        "shape": {"prompt_tokens": 5},
        "prefill": part(10.0),
        "tokens": [part(1.0), part(2.0)],
        "gaps": gaps,
        "machine": costs.MACHINE,
        "peak_memory": {"client": 2**30, "provider": 2**31},
    }
    table, under, words = measured_tables.chain({"chain": {"networks": [result]}})
    assert "| prefill of 5 tokens | 10.0 | 20.0 | 30.0 | 3.0 | 6.0 | 9.0 | 7 |" in table
    assert "| a token, mean of 2 | 1.5 | 3.0 | 4.5 | 3.0 | 6.0 | 9.0 | 7 |" in table
    assert words.startswith("A token took 3.0 to 6.0 s in all. ") and said in words
    assert words.endswith("client 1.00 GiB, provider 2.00 GiB.")
    before, after = costs.UNDER.format(saved.link("chain")).split("nothing else")
    assert under.startswith(before) and under.endswith(after)  # between them, what ran beside it
