"""The figures of `experiment latency` for people: tables, and plots after the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.op_report import count_text, seconds_text
from experiments.claims.latency import PARTS, growth, kinds_of, parts_of, speedup
from spu_llm.core.errors import InputError

# FLAN-T5-XL on 1 Gbps and 10 ms: seconds at these positions in those at one (Figure 1).
PAPER_GROWTH = {"lan": {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.2, 16: 1.5}}
_NAMES = {"ours": "ours", "stock": "stock (layers alone)"}


def table(result: dict[str, Any]) -> str:
    """One network's figures as Markdown."""
    lines = [
        f"network {result['network']}, both parties on {result['machine']['cores']} cores, cache "
        f"of {result['capacity']} positions; seconds of one step. `parts`: delay + transmission + "
        "compute, which for ours is a prediction; `x`: in steps of one position.",
    ]
    for name, path in result["paths"].items():
        kinds = kinds_of(path)
        lines += [
            "",
            f"| {_NAMES[name]}: positions | " + " | ".join(kinds) + " | in all | x | parts |",
            "|---" * (len(kinds) + 4) + "|",
        ]
        for step, times in zip(path, growth(path), strict=True):
            cells = [
                seconds_text(step["kinds"][k]["seconds"]) if k in step["kinds"] else ""
                for k in kinds
            ]
            parts = " + ".join(seconds_text(s) for s in parts_of(step).values())
            lines.append(
                _line([str(step["positions"]), *cells, seconds_text(step["seconds"]),
                       f"{times:.2f}", parts])
            )  # fmt: skip
        for figure in ("messages", "bytes"):
            for step in (path[0], path[-1]):
                cells = [
                    count_text(step["kinds"][k][figure]) if k in step["kinds"] else ""
                    for k in kinds
                ]
                total = count_text(sum(c[figure] for c in step["kinds"].values()))
                lines.append(
                    _line([f"{figure} at {step['positions']}", *cells, total, "", ""])
                )
    if segments := result["paths"]["ours"][0]["segments"]:
        lines += ["", f"note: {segments} segments of a step run in SPU; their delay is not in "
                  "`parts`"]  # fmt: skip
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# ---- plots


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """All three figures in one file; InputError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from None
    names = list(results[0]["paths"])
    figure = pyplot.figure(figsize=(13, 4 + 3.6 * len(names)), layout="constrained")
    rows: Any = figure.subfigures(1 + len(names), 1)
    top = rows[0].subplots(1, 1 + len(results))
    draw_growth(top[0], results)
    for axes, result in zip(top[1:], results, strict=True):
        draw_speedup(axes, result)
    for part, name in zip(rows[1:], names, strict=True):
        draw_breakdown(part.subplots(1, 1), results, name)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)


def draw_growth(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    """Figure 1: seconds of a step against its positions, in those of one position."""
    for i, result in enumerate(results):
        for name, style in (("ours", "o-"), ("stock", "x--")):
            if name in result["paths"]:
                path = result["paths"][name]
                xs = [step["positions"] for step in path]
                label = f"{name}, {result['network']}"
                axes.plot(xs, growth(path), style, color=f"C{i}", label=label, markersize=4)
        last = result["paths"]["ours"][-1]["positions"]
        paper = PAPER_GROWTH.get(result["network"], {})
        if shown := {n: times for n, times in paper.items() if n <= last}:
            axes.plot(list(shown), list(shown.values()), "k:", label=f"paper, {result['network']}")
    axes.set_xticks([step["positions"] for step in results[0]["paths"]["ours"]])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("positions in one step")
    axes.set_ylabel("latency, in steps of one position")
    axes.set_title("latency against input length (Figure 1)", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)


def draw_speedup(axes: Any, result: dict[str, Any]) -> None:
    """Figure 5: speed-up of drafted over standard decoding on our path against acceptance."""
    path = result["paths"]["ours"]
    alphas = np.linspace(0, 0.98, 99)
    lengths = [step["positions"] - 1 for step in path if step["positions"] > 1]
    for i, count in enumerate(lengths):
        ys = [speedup(path, float(alpha), count) for alpha in alphas]
        axes.plot(alphas, ys, color=f"C{i}", label=f"{count} drafts")
    axes.axhline(1.0, color="red", linestyle=":", label="standard")
    axes.set_xlabel("acceptance ratio")
    axes.set_ylabel("speed-up")
    axes.set_ylim(bottom=0)
    axes.set_title(f"drafting, {result['network']} (Figure 5)", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)


_COLORS = {"delay": "C0", "transmission": "C2", "compute": "C1"}


def draw_breakdown(axes: Any, results: Sequence[dict[str, Any]], name: str) -> None:
    """Figure 2: delay, transmission and compute of each kind of layer, a group of bars per kind and
    network, a bar per number of positions; for our path, strokes where it was measured.
    """
    kinds = [k for k in kinds_of(results[0]["paths"][name]) if k != "other"]
    bars = len(results[0]["paths"][name])
    ticks, labels, measured = [], [], []
    at = 0.0
    for kind in kinds:
        for result in results:
            ticks.append(at + (bars - 1) / 2)
            labels.append(result["network"])
            for i, step in enumerate(result["paths"][name]):
                bottom, cell = 0.0, step["kinds"].get(kind)
                if cell is None:
                    continue
                for part in PARTS:
                    axes.bar(at + i, cell[part], 0.9, bottom=bottom, color=_COLORS[part])
                    bottom += cell[part]
                measured.append((at + i, cell["seconds"]))
            at += bars + 1.0
        axes.text(
            at - 1 - (bars + 1) * len(results) / 2, 1.01, kind, ha="center", va="bottom",
            fontsize=8, transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        axes.axvline(at + 0.2, color="0.8", linewidth=0.8)
        at += 1.5
    if name == "ours":
        axes.scatter(*zip(*measured, strict=True), marker="_", color="black", s=14)
    for part in PARTS:
        axes.bar([0], [0], color=_COLORS[part], label=part)
    axes.set_xticks(ticks)
    axes.set_xticklabels(labels, fontsize=7)
    axes.margins(x=0.01)
    axes.set_ylabel(f"{name}: seconds of one step")
    positions = ", ".join(str(s["positions"]) for s in results[0]["paths"][name])
    stroke = "; strokes: measured" if name == "ours" else ""
    axes.set_xlabel(f"bars: {positions} positions{stroke} (Figure 2)", fontsize=8)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7)
