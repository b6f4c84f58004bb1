"""Report of `bench op`: ratios, failures, a table, and a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.common import report
from experiments.common.report import both_ways

MEMORY_LIMIT = 1 << 30  # bytes of one party


def ratios(ours: dict[str, Any], stock: dict[str, Any]) -> dict[str, float | None]:
    """Divide our figures by SPU's: seconds, bytes and messages online, and seconds and bytes
    including the offline phase; None where SPU's figure is 0.
    """

    def ratio(a: float, b: float) -> float | None:
        return a / b if b else None

    offline = ours["offline"]
    return {
        "seconds": ratio(ours["seconds"], stock["seconds"]),
        "bytes": ratio(both_ways(ours), both_ways(stock)),
        "messages": ratio(ours["messages"], stock["messages"]),
        "seconds_with_offline": ratio(ours["seconds"] + offline["seconds"], stock["seconds"]),
        "bytes_with_offline": ratio(both_ways(ours) + both_ways(offline), both_ways(stock)),
    }


def failures(row: dict[str, Any], network: str) -> list[str]:
    """Describe the failures of one row: wrong values, and costs other than the op's price."""
    where = f"{row['op']}, {row['size']} {row['unit']}, {network}"
    reasons = [
        f"{where}: {runs.get('way', 'ours')}: {runs['wrong']} of {1 + len(runs['runs'])} x "
        f"{row['values']} values are wrong"
        for runs in (row["ours"], *row["stock"])
        if runs["wrong"]
    ]
    if not row["ours"]["as_priced"]:
        reasons.append(f"{where}: bytes or messages other than the op's price")
    return reasons


def notes(row: dict[str, Any], first: dict[str, int]) -> list[str]:
    """Describe the ways that alone would bring a worker above MEMORY_LIMIT; `first`: the workers'
    resident bytes after the warm-up.
    """
    return [
        f"{row['op']}, {row['size']} {row['unit']}: {name}: up to {mib_text(size)} MiB at the "
        f"{role}, on top of {mib_text(first[role])} MiB"
        for name, runs in ways(row)
        for role, size in runs["memory_growth"].items()
        if first[role] + size > MEMORY_LIMIT
    ]


def only(result: dict[str, Any], ops: Sequence[str]) -> dict[str, Any]:
    """Return one network's result with only the rows of `ops`, and their notes."""
    rows = [row for row in result["rows"] if row["op"] in ops]
    remarks = [text for row in rows for text in notes(row, result["memory_after_warm_up"])]
    return result | {"rows": rows, "notes": remarks}


def ways(row: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the figures of every way of a row, our way first."""
    yield "ours", row["ours"]
    for other in row["stock"]:
        yield f"SPU: {other['way']}", other


# ---- the table


def table(result: dict[str, Any]) -> str:
    """Format one network's medians as Markdown, one table per op."""
    first = result["memory_after_warm_up"]
    lines = [
        f"network {result['network']}: medians of {result['repeat']} runs; in brackets with what "
        "is made ahead of time.",
        "SPU fills stocks of its own inside its runs, for thousands of values at once: small runs "
        "seldom pay for it.",
        f"resident after warm-up: {mib_text(first['client'])} MiB client, "
        f"{mib_text(first['provider'])} MiB provider",
    ]
    for op in dict.fromkeys(row["op"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["op"] == op]
        lines += ["", f"{op}: {rows[0]['does']}; sizes in {rows[0]['unit']}", ""]
        heads = (
            "size",
            "way",
            "seconds",
            "ours/SPU",
            "bytes C→P",
            "bytes P→C",
            "ours/SPU",
            "messages",
            "rounds",
            "ahead: seconds",
            "ahead: bytes",
            "stored B/value",
            "own MiB C, P",
        )
        lines += report.table(heads, [_cells(row, *way) for row in rows for way in ways(row)])
        lines += ["", *_errors(rows)] if "largest_error" in rows[0]["ours"] else []
    lines += ["", *(f"note: {text}" for text in result["notes"])] if result["notes"] else []
    lines += ["", "results: " + ("; ".join(result["failures"]) or "all as in plaintext")]
    return "\n".join(lines)


def _errors(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for same in zip(*map(ways, rows), strict=True):
        largest = max(figures["largest_error"] for _, figures in same)
        yield f"largest error, {same[0][0]}: {largest:.2g}"


def _cells(row: dict[str, Any], name: str, figures: dict[str, Any]) -> list[str]:
    if "offline" in figures:  # ours
        offline, stored = figures["offline"], figures["stored_bytes_per_value"]
        size, of_seconds, of_bytes, rounds = str(row["size"]), "", "", str(figures["rounds"])
        ahead = seconds_text(offline["seconds"]), count_text(both_ways(offline)), f"{stored:.3g}"
    else:
        of_seconds, of_bytes = (_ratio(figures["ratio"], unit) for unit in ("seconds", "bytes"))
        size, rounds, ahead = "", "", ("", "", "")
    return [
        size,
        name,
        seconds_text(figures["seconds"]),
        of_seconds,
        count_text(figures["client_to_provider"]),
        count_text(figures["provider_to_client"]),
        of_bytes,
        count_text(figures["messages"]),
        rounds,
        *ahead,
        ", ".join(map(mib_text, figures["memory_growth"].values())),
    ]


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 10 else f"{seconds:.4f}"


def count_text(number: float) -> str:
    return f"{round(number):,}"


def mib_text(size: int) -> str:
    return f"{size / 2**20:.0f}"


def _ratio(ratio: dict[str, float | None], name: str) -> str:
    alone, both = ratio[name], ratio[f"{name}_with_offline"]
    return f"{alone:.3f} ({both:.3f})" if alone is not None and both is not None else ""


# ---- the plot


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the figure of `draw` to a file; InputError without matplotlib."""
    report.save(draw(results), path, dpi=120)


def draw(results: Sequence[dict[str, Any]]) -> Any:
    """Draw all networks' results: per op, a panel of seconds against size for each network, and one
    of bytes. Return the matplotlib figure.
    """
    ops = list(dict.fromkeys(row["op"] for result in results for row in result["rows"]))
    each = len(results) + 1  # panels of an op
    across = min(len(ops), max(1, 4 // each))
    down = -(-len(ops) // across)
    figure = report.figure(3.1 * across * each, 2.7 * down)
    grid = figure.subplots(down, across * each, squeeze=False)
    panels = grid.reshape(-1, each)
    for op, axes in zip(ops, panels, strict=False):
        for result, axis in zip(results, axes, strict=False):
            rows = [row for row in result["rows"] if row["op"] == op]
            _lines(axis, rows, lambda cost: cost["seconds"])
            axis.set_title(f"{op}: s, {result['network']}", fontsize=9)
        rows = [row for row in results[0]["rows"] if row["op"] == op]
        _lines(axes[-1], rows, both_ways)
        axes[-1].set_title(f"{op}: bytes", fontsize=9)
        axes[-1].legend(fontsize=6.5, loc="best", framealpha=0.6)
        for axis in axes:
            axis.set_xlabel(rows[0]["unit"], fontsize=8)
    for axis in panels[len(ops) :].flat:
        axis.remove()
    return figure


def _lines(axis: Any, rows: Sequence[dict[str, Any]], figure_of: Callable[[Any], float]) -> None:
    """Draw a line for every way, and one for our way including the offline phase."""
    from matplotlib.ticker import NullFormatter

    rows = sorted(rows, key=lambda row: int(row["size"]))
    sizes = [row["size"] for row in rows]
    anything: list[bool] = []

    def line(values: list[float], label: str, style: str, color: str) -> None:
        shown = [value or float("nan") for value in values]  # a logarithm has no zero
        anything.append(any(values))
        axis.plot(sizes, shown, style, label=label, color=color, markersize=4, linewidth=1.2)

    for i, same in enumerate(zip(*map(ways, rows), strict=True)):
        line([figure_of(figures) for _, figures in same], same[0][0], "o-", f"C{i}")
    offline = [figure_of(row["ours"]) + figure_of(row["ours"]["offline"]) for row in rows]
    line(offline, "ours, made ahead too", "o:", "C0")
    axis.set_xscale("log")
    if any(anything):  # some ops send nothing at all
        axis.set_yscale("log")
        low, high = axis.get_ylim()  # whole decades, so that each panel has labels
        axis.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3)
