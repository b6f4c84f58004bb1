"""Tables in docs/results that are made of committed measurements, but for complete generations.

Each takes results by name and gives paragraphs: tables, with where they come from under each.
Columns marked with = are not measured: they say what the code does now
(`experiments.completions.exact_cells`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from experiments.benchmarks import verify_report
from experiments.benchmarks.op_report import count_text
from experiments.common import saved
from experiments.common.report import (
    Column,
    Files,
    both_ways,
    bytes_text,
    duration_text,
    rows_table,
)
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


class _Op(NamedTuple):
    """An op at a size, as it was measured, and its exact cells by column."""

    name: str
    size: int
    row: dict[str, Any]
    exact: Mapping[str, str] = {}

    @property
    def ours(self) -> dict[str, Any]:
        cost: dict[str, Any] = self.row["ours"]
        return cost

    @property
    def stock(self) -> dict[str, Any]:
        """Return the fastest of SPU's own ways."""
        fastest: dict[str, Any] = min(self.row["stock"], key=lambda way: way["seconds"])
        return fastest

    @property
    def seconds(self) -> str:
        return f"{duration_text(self.ours['seconds'])} / {duration_text(self.stock['seconds'])}"


def functions(files: Files) -> list[str]:
    """Return approximated functions beside SPU's own, on one network."""
    (result,) = _sessions(files)
    there = {(row["op"], row["size"]): row for row in result["rows"]}
    exact = exact_cells.cells(saved.load("exact"))["functions"]
    columns: list[Column[_Op]] = [
        Column("function", lambda op: op.name),
        Column("messages =", lambda op: op.exact["messages"]),
        Column("largest error", lambda op: f"{op.ours['largest_error']:.2g}"),
        Column("bytes online per value =", lambda op: op.exact["bytes online per value"]),
        Column(
            "bytes ahead per value",
            lambda op: count_text(both_ways(op.ours["offline"]) / op.row["values"]),
        ),
        Column(f"{result['network']}: ours / SPU", lambda op: op.seconds),
        Column(
            "SPU: messages, error",
            lambda op: f"{count_text(op.stock['messages'])}, {op.stock['largest_error']:.2g}",
        ),
    ]
    rows = (_Op(name, case[1], there[case], exact[name]) for name, _, case in exact_cells.FUNCTIONS)
    return _with_origin(files, [exact_cells.MARK.format("functions"), *rows_table(columns, rows)])


def ops(files: Files) -> list[str]:
    """Return ops that are exact beside SPU's fastest way on the first network, which has all of
    them. Ops that were measured on others, too, stand there at every size, and the rest at its
    largest.
    """
    first, *others = _sessions(files)
    exact = exact_cells.cells(saved.load("exact"))["ops"]
    in_full = {row["op"] for other in others for row in other["rows"]}
    largest = {row["op"]: row["size"] for row in first["rows"]}  # sizes increase

    def elsewhere(other: dict[str, Any]) -> Column[_Op]:
        there = {
            (row["op"], row["size"]): _Op(row["op"], row["size"], row).seconds
            for row in other["rows"]
        }
        return Column(
            f"{other['network']}: ours / SPU", lambda op: there.get((op.name, op.size), "–")
        )

    columns: list[Column[_Op]] = [
        Column("op", lambda op: op.name),
        Column("size", lambda op: f"{op.size:,}"),
        Column("messages, ours =", lambda op: op.exact["messages, ours"]),
        Column("messages, SPU", lambda op: count_text(op.stock["messages"])),
        Column("bytes online, ours =", lambda op: op.exact["bytes online, ours"]),
        Column("bytes online, SPU", lambda op: bytes_text(both_ways(op.stock))),
        Column("made ahead, bytes", lambda op: bytes_text(both_ways(op.ours["offline"]))),
        Column(
            f"{first['network']}: ours / SPU (ahead)",
            lambda op: f"{op.seconds} ({duration_text(op.ours['offline']['seconds'])})",
        ),
        *map(elsewhere, others),
    ]
    rows = []
    for row in first["rows"]:
        name, size = row["op"], row["size"]
        key = f"{name}, {size:,}"
        # An op that the code no longer has stands nowhere.
        exactly = "largest_error" not in row["ours"] and key in exact
        if exactly and (name in in_full or size == largest[name]):
            rows.append(_Op(name, size, row, exact[key]))
    return _with_origin(files, [exact_cells.MARK.format("ops"), *rows_table(columns, rows)])


def chain(files: Files) -> list[str]:
    """Return a pass over a prompt, and the tokens decoded one by one after it."""
    (result,) = _sessions(files)
    tokens = result["tokens"]
    columns = [
        Column[_Passes]("", lambda passes: passes.name),
        _mean("seconds online", lambda p: p["seconds"]),
        _mean("seconds ahead", lambda p: p["offline"]["seconds"]),
        _mean("seconds in all", lambda p: p["seconds"] + p["offline"]["seconds"]),
        _mean("MB online", lambda p: both_ways(p) / 1e6),
        _mean("MB ahead", lambda p: both_ways(p["offline"]) / 1e6),
        _mean("MB in all", lambda p: (both_ways(p) + both_ways(p["offline"])) / 1e6),
        _mean("messages", lambda p: p["messages"], ",.0f"),
    ]
    rows = [
        _Passes(f"prefill of {result['shape']['prompt_tokens']} tokens", [result["prefill"]]),
        _Passes(f"a token, mean of {len(tokens)}", tokens),
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
    return [*_with_origin(files, rows_table(columns, rows)), words]


class _Passes(NamedTuple):
    """Passes of a model, and the name of their row."""

    name: str
    costs: Sequence[dict[str, Any]]


def _mean(
    head: str, figure: Callable[[dict[str, Any]], float], form: str = ".1f"
) -> Column[_Passes]:
    """Return a column of a figure's mean over passes."""
    return Column(head, lambda passes: f"{fmean(map(figure, passes.costs)):{form}}")


def _sessions(files: Files) -> list[dict[str, Any]]:
    """Return the results of all networks of all files."""
    return [result for data in files.values() for result in data["networks"]]


def _with_origin(files: Files, *tables: Sequence[str]) -> list[str]:
    """Return tables as paragraphs, each with where it comes from under it."""
    under = saved.under_table(files, (result["machine"] for result in _sessions(files)))
    return [text for rows in tables for text in ("\n".join(rows), under)]
