"""Tables in docs/results that are made of committed measurements, but for complete generations.

Each takes results by name and gives paragraphs: tables, with where they come from under each.
Columns marked with = are not measured: they say what the code does now
(`experiments.completions.exact_cells`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.benchmarks import verify_report
from experiments.benchmarks.op_report import count_text
from experiments.common import report, saved
from experiments.common.report import Files, both_ways, bytes_text, duration_text
from experiments.completions import exact_cells
from experiments.completions import latency as latency_study


def latency(files: Files) -> list[str]:
    """Return the seconds of steps on all networks, and on the last one by kind of layer."""
    results = _sessions(files)
    last = results[-1]
    kinds = [latency_study.by_kind(last, name) for name in last["paths"]]
    return _with_origin(files, latency_study.by_network(results), *kinds)


def verification(files: Files) -> list[str]:
    """Return what verification takes, on all networks and for all vocabularies."""
    return _with_origin(files, verify_report.together(_sessions(files)))


def functions(files: Files) -> list[str]:
    """Return approximated functions beside SPU's own, on one network."""
    (result,) = _sessions(files)
    there = {(row["op"], row["size"]): row for row in result["rows"]}
    exact = exact_cells.cells(saved.load("exact"))["functions"]
    heads = (
        "function",
        "messages =",
        "largest error",
        "bytes online per value =",
        "bytes ahead per value",
        f"{result['network']}: ours / SPU",
        "SPU: messages, error",
    )
    rows = [_of_function(name, there[case], exact[name]) for name, _, case in exact_cells.FUNCTIONS]
    return _with_origin(files, [exact_cells.MARK.format("functions"), *report.table(heads, rows)])


def _of_function(name: str, row: dict[str, Any], exact: Mapping[str, str]) -> list[str]:
    ours, stock = row["ours"], _fastest(row)
    return [
        name,
        exact["messages"],
        f"{ours['largest_error']:.2g}",
        exact["bytes online per value"],
        count_text(both_ways(ours["offline"]) / row["values"]),
        _seconds(row),
        f"{count_text(stock['messages'])}, {stock['largest_error']:.2g}",
    ]


def ops(files: Files) -> list[str]:
    """Return ops that are exact beside SPU's fastest way on the first network, which has all of
    them. Ops that were measured on others, too, stand there at every size, and the rest at its
    largest.
    """
    first, *others = _sessions(files)
    exact = exact_cells.cells(saved.load("exact"))["ops"]
    elsewhere = [{(row["op"], row["size"]): row for row in other["rows"]} for other in others]
    in_full = {op for rows in elsewhere for op, _ in rows}
    largest = {row["op"]: row["size"] for row in first["rows"]}  # sizes increase
    heads = (
        "op",
        "size",
        "messages, ours =",
        "messages, SPU",
        "bytes online, ours =",
        "bytes online, SPU",
        "made ahead, bytes",
        f"{first['network']}: ours / SPU (ahead)",
        *(f"{other['network']}: ours / SPU" for other in others),
    )
    table = []
    for row in first["rows"]:
        op, size = row["op"], row["size"]
        key, ours, stock = f"{op}, {size:,}", row["ours"], _fastest(row)
        approximated = "largest_error" in ours
        # An op that the code no longer has stands nowhere.
        if approximated or key not in exact or not (op in in_full or size == largest[op]):
            continue
        table.append(
            [
                op,
                f"{size:,}",
                exact[key]["messages, ours"],
                count_text(stock["messages"]),
                exact[key]["bytes online, ours"],
                bytes_text(both_ways(stock)),
                bytes_text(both_ways(ours["offline"])),
                f"{_seconds(row)} ({duration_text(ours['offline']['seconds'])})",
                *(_seconds(rows[op, size]) if (op, size) in rows else "–" for rows in elsewhere),
            ]
        )
    return _with_origin(files, [exact_cells.MARK.format("ops"), *report.table(heads, table)])


def chain(files: Files) -> list[str]:
    """Return a pass over a prompt, and the tokens decoded one by one after it."""
    (result,) = _sessions(files)
    tokens = result["tokens"]
    heads = (
        "",
        "seconds online",
        "seconds ahead",
        "seconds in all",
        "MB online",
        "MB ahead",
        "MB in all",
        "messages",
    )
    rows = [
        _of_passes(f"prefill of {result['shape']['prompt_tokens']} tokens", [result["prefill"]]),
        _of_passes(f"a token, mean of {len(tokens)}", tokens),
    ]
    whole = [t["seconds"] + t["offline"]["seconds"] for t in tokens]
    gaps, memory = result["gaps"], result["peak_memory"]
    same, others = sum(gap == 0 for gap in gaps), ""
    if max(gaps):
        others = f"; the logits of the others are {max(gaps):.4f} below the largest at most"
    sizes = ", ".join(f"{role} {size / 2**30:.2f} GiB" for role, size in memory.items())
    words = (
        f"A token took {min(whole):.1f} to {max(whole):.1f} s in all. {same} of {len(gaps)} tokens "
        f"are those of float32 in plaintext{others}. Peak memory, worker of each party: {sizes}."
    )
    return [*_with_origin(files, report.table(heads, rows)), words]


def _of_passes(name: str, passes: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row of the means of passes."""
    online = fmean(both_ways(p) for p in passes) / 1e6
    made = fmean(both_ways(p["offline"]) for p in passes) / 1e6
    seconds = fmean(p["seconds"] for p in passes)
    ahead = fmean(p["offline"]["seconds"] for p in passes)
    return [
        name,
        f"{seconds:.1f}",
        f"{ahead:.1f}",
        f"{seconds + ahead:.1f}",
        f"{online:.1f}",
        f"{made:.1f}",
        f"{online + made:.1f}",
        f"{fmean(p['messages'] for p in passes):,.0f}",
    ]


def _fastest(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fastest of SPU's own ways."""
    fastest: dict[str, Any] = min(row["stock"], key=lambda way: way["seconds"])
    return fastest


def _seconds(row: dict[str, Any]) -> str:
    times = row["ours"]["seconds"], _fastest(row)["seconds"]
    return " / ".join(map(duration_text, times))


def _sessions(files: Files) -> list[dict[str, Any]]:
    """Return the results of all networks of all files."""
    return [result for data in files.values() for result in data["networks"]]


def _with_origin(files: Files, *tables: Sequence[str]) -> list[str]:
    """Return tables as paragraphs, each with where it comes from under it."""
    under = saved.under_table(files, (result["machine"] for result in _sessions(files)))
    return [text for rows in tables for text in ("\n".join(rows), under)]
