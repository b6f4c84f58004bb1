"""Latency against input length, by kind of layer: Figures 1, 2 and 5 of the POST paper, for us.

Two paths at 1, 2, 4, 8, 16 positions: ours (`experiments.benchmarks.step_sweep`: real decode steps,
whose ops say which layer they belong to), and the stock path's layers, each alone
(`experiments.spu_baseline.layers`).

A kind's seconds consist of

    compute       its seconds on the local network, where nothing else takes time
    transmission  bytes / bandwidth: of the busier direction for ours, whose parties send at the
                  same time; of both directions for SPU's, which mostly take turns
    delay         ours: its messages that wait for one another, times the one-way delay;
                  stock: what is left of the measured seconds, for SPU tells no such chain

Ours adds up to a prediction, which stands beside what was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks import step_sweep
from experiments.benchmarks.op_report import count_text
from experiments.common import commands, report
from experiments.common.kinds import KINDS
from experiments.spu_baseline import layers as spu_layers
from models.training.evaluate import expected_tokens
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.net.shaping import NetworkShape, shape_of

PARTS = ("delay", "transmission", "compute")


def check(
    model: Path, draft_model: Path, prompt: str, positions: Sequence[int], repeat: int
) -> None:
    """Raise InputError for what cannot be measured."""
    step_sweep.check(model, draft_model, prompt, positions, repeat, 0.0)
    if positions[0] != 1:
        raise InputError("--positions must begin with 1, which the others are compared with")


def measure(
    model: Path,
    draft_model: Path,
    prompt: str,
    positions: Sequence[int],
    repeat: int,
    network: str,
    *,
    stock: bool,
    local: dict[str, Any] | None,
) -> dict[str, Any]:
    """Run one network's sessions; return the result as JSON fields. `local`: the result on the
    local network, which comes first; `stock`: the stock path's layers, too, which take minutes.
    """
    ours = step_sweep.measure(model, draft_model, prompt, positions, repeat, network, 0.0)
    peers = None
    if stock:
        peers = spu_layers.measure(model, positions, ours["capacity"], network)
    return analyse(ours, peers, local) | {
        "machine": asdict(machine()),
        "config": ours["config"],
        "learned": ours["learned"],
    }


# ---- analysis


def analyse(
    ours: dict[str, Any], stock: dict[str, Any] | None, local: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the figures of one network."""
    shape = shape_of(ours["network"])
    before = local["paths"] if local is not None else {}
    paths = {"ours": _ours(ours, shape, before.get("ours"))}
    if stock is not None:
        paths["stock"] = _stock(stock, shape, before.get("stock"))
    return {"network": ours["network"], "capacity": ours["capacity"], "paths": paths}


def _ours(
    sweep: dict[str, Any], shape: NetworkShape, local: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    steps = []
    for i, step in enumerate(sweep["steps"]):
        kinds = {}
        for kind, cost in step["median"]["kinds"].items():
            busier = max(cost["client_to_provider"], cost["provider_to_client"])
            chain = step["chain"].get(kind, 0)
            kinds[kind] = _costs(cost, local[i]["kinds"][kind] if local else cost) | {
                "chain": chain,
                "delay": chain * shape.delay_s,
                "transmission": _sending(busier, shape),
            }
        steps.append(
            {
                "positions": step["positions"],
                "seconds": step["median"]["seconds"],
                "segments": step["segments"],
                "kinds": kinds,
            }
        )
    return steps


def _stock(
    measured: dict[str, Any], shape: NetworkShape, local: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    steps = []
    for i, step in enumerate(measured["steps"]):
        kinds = {}
        for layer in step["layers"]:
            cost, kind = spu_layers.scaled(layer), layer["kind"]
            cell = _costs(cost, local[i]["kinds"][kind] if local else cost)
            cell["transmission"] = _sending(cell["bytes"], shape)
            left = cell["seconds"] - cell["compute"] - cell["transmission"]
            kinds[kind] = cell | {"delay": max(0.0, left) if local else 0.0}
        steps.append(
            {
                "positions": step["positions"],
                "kinds": kinds,
                "seconds": sum(cell["seconds"] for cell in kinds.values()),
            }
        )
    return steps


def _costs(cost: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    return {
        "seconds": cost["seconds"],
        "bytes": report.both_ways(cost),
        "messages": cost["messages"],
        "compute": local["seconds"],
    }


def _sending(count: float, shape: NetworkShape) -> float:
    return 8 * count / shape.bits_per_s if shape.bits_per_s else 0.0


def parts_of(step: dict[str, Any]) -> dict[str, float]:
    """Return delay, transmission and compute of a whole step, in seconds."""
    return {part: sum(cell[part] for cell in step["kinds"].values()) for part in PARTS}


def kinds_of(path: Sequence[dict[str, Any]]) -> list[str]:
    """Return the kinds that occur, in the order of a forward."""
    return [kind for kind in KINDS if any(kind in step["kinds"] for step in path)]


def growth(path: Sequence[dict[str, Any]]) -> list[float]:
    """Divide the seconds of each step by the first step's, which has one position."""
    return [step["seconds"] / path[0]["seconds"] for step in path]


def speedup(path: Sequence[dict[str, Any]], alpha: float, draft_length: int) -> float:
    """Return the speed-up of drafted over standard decoding on this path, when every draft is
    accepted with chance `alpha` on its own (the paper's Figure 5; the client's drafting is not
    counted there).
    """
    seconds = {step["positions"]: step["seconds"] for step in path}
    tokens = float(draft_length + 1) if alpha == 1 else expected_tokens(alpha, draft_length)
    return tokens * seconds[1] / seconds[draft_length + 1]


# ---- the table


# Of the stock path, each layer is measured once and counted as often as the model has it.
_NAMES = {"ours": "ours", "stock": "stock (layers alone) ˢ"}
_PARTS_ARE = {"ours": "ᵖ", "stock": "ᵃ"}


def table(result: dict[str, Any]) -> str:
    """Return one network's figures as Markdown."""
    lines = [
        f"network {result['network']}, both parties on {result['machine']['cores']} cores, cache "
        f"of {result['capacity']} positions; seconds of one step. `parts`: delay + transmission + "
        "compute, which for ours is a prediction; `x`: in steps of one position."
    ]
    for name in result["paths"]:
        lines += ["", *by_kind(result, name)]
    if segments := result["paths"]["ours"][0]["segments"]:
        lines += [
            "",
            f"note: {segments} segments of a step run in SPU; their delay is not in `parts`",
        ]
    return "\n".join(lines)


def by_kind(result: dict[str, Any], name: str) -> list[str]:
    """Return the seconds of one path's steps by kind of layer, with messages and bytes of the first
    and last step, as a table.
    """
    path = result["paths"][name]
    kinds = kinds_of(path)
    heads = [
        f"{_NAMES[name]}, {result['network']}: positions",
        *kinds,
        "in all",
        "x",
        f"parts {_PARTS_ARE[name]}",
    ]
    rows = [
        [
            str(step["positions"]),
            *_cells(step, kinds, "seconds", report.three),
            report.three(step["seconds"]),
            f"{times:.2f}",
            " + ".join(map(report.three, parts_of(step).values())),
        ]
        for step, times in zip(path, growth(path), strict=True)
    ] + [
        [
            f"{figure} at {step['positions']}",
            *_cells(step, kinds, figure, count_text),
            count_text(sum(cell[figure] for cell in step["kinds"].values())),
            "",
            "",
        ]
        for figure in ("messages", "bytes")
        for step in (path[0], path[-1])
    ]
    return report.table(heads, rows)


def by_network(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the seconds of whole steps on all networks, as a table; of the last network in steps
    of one position, and as a share of the stock path's, too.
    """
    last = results[-1]
    network, paths = last["network"], last["paths"]
    columns = [("positions", [str(step["positions"]) for step in paths["ours"]])]
    for name, path in paths.items():
        mark = " ˢ" if name == "stock" else ""
        for result in results:
            seconds = [report.three(step["seconds"]) for step in result["paths"][name]]
            columns.append((f"{name}, {result['network']}{mark}", seconds))
        times = [f"{x:.2f}" for x in growth(path)]
        columns.append((f"{name}, {network}, in steps of one", times))
    if "stock" in paths:
        pairs = zip(paths["ours"], paths["stock"], strict=True)
        shares = [report.three(own["seconds"] / peers["seconds"]) for own, peers in pairs]
        columns.append((f"ours / stock, {network}", shares))
    heads, cells = zip(*columns, strict=True)
    return report.table(heads, zip(*cells, strict=True))


def _cells(
    step: dict[str, Any], kinds: Sequence[str], figure: str, text: Callable[[float], str]
) -> list[str]:
    return [text(step["kinds"][k][figure]) if k in step["kinds"] else "" for k in kinds]


# ---- plots


# FLAN-T5-XL on 1 Gbps and 10 ms: seconds at these positions in those at one (Figure 1).
PAPER_GROWTH = {"lan": {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.2, 16: 1.5}}
_COLORS = {"delay": "C0", "transmission": "C2", "compute": "C1"}


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw all three figures in one file; InputError without matplotlib."""
    names = list(results[0]["paths"])
    figure = report.figure(13, 4 + 3.6 * len(names))
    rows = figure.subfigures(1 + len(names), 1)
    top = rows[0].subplots(1, 1 + len(results))
    draw_growth(top[0], results)
    for axes, result in zip(top[1:], results, strict=True):
        draw_speedup(axes, result)
    for part, name in zip(rows[1:], names, strict=True):
        draw_breakdown(part.subplots(1, 1), results, name)
    report.save(figure, path, dpi=110)


def draw_growth(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    """Draw Figure 1: seconds of a step against its positions, divided by a step's of one
    position.
    """
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
    axes.set(
        xticks=[step["positions"] for step in results[0]["paths"]["ours"]],
        ylim=(0, None),
        xlabel="positions in one step",
        ylabel="latency, in steps of one position",
    )
    axes.set_title("latency against input length (Figure 1)", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)


def draw_speedup(axes: Any, result: dict[str, Any]) -> None:
    """Draw Figure 5: speed-up of drafted over standard decoding on our path against acceptance."""
    path = result["paths"]["ours"]
    alphas = np.linspace(0, 0.98, 99)
    lengths = [step["positions"] - 1 for step in path if step["positions"] > 1]
    for i, count in enumerate(lengths):
        ys = [speedup(path, float(alpha), count) for alpha in alphas]
        axes.plot(alphas, ys, color=f"C{i}", label=f"{count} drafts")
    axes.axhline(1.0, color="red", linestyle=":", label="standard")
    axes.set(xlabel="acceptance ratio", ylabel="speed-up", ylim=(0, None))
    axes.set_title(f"drafting, {result['network']} (Figure 5)", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)


def draw_breakdown(axes: Any, results: Sequence[dict[str, Any]], name: str) -> None:
    """Draw Figure 2: delay, transmission and compute of each kind of layer, a group of bars per
    kind and network, a bar per number of positions; for our path, strokes where it was measured.
    """
    kinds = [k for k in kinds_of(results[0]["paths"][name]) if k != "other"]
    bars = len(results[0]["paths"][name])
    ticks, labels, places, cells = [], [], [], []
    at = 0.0
    for kind in kinds:
        for result in results:
            ticks.append(at + (bars - 1) / 2)
            labels.append(result["network"])
            for i, step in enumerate(result["paths"][name]):
                if kind in step["kinds"]:
                    places.append(at + i)
                    cells.append(step["kinds"][kind])
            at += bars + 1.0
        axes.text(
            at - 1 - (bars + 1) * len(results) / 2,
            1.01,
            kind,
            ha="center",
            va="bottom",
            fontsize=8,
            transform=axes.get_xaxis_transform(),
        )
        axes.axvline(at + 0.2, color="0.8", linewidth=0.8)
        at += 1.5
    bottom = np.zeros(len(cells))
    for part in PARTS:
        heights = np.array([cell[part] for cell in cells])
        axes.bar(places, heights, 0.9, bottom=bottom, color=_COLORS[part], label=part)
        bottom = bottom + heights
    if name == "ours":
        seconds = [cell["seconds"] for cell in cells]
        axes.scatter(places, seconds, marker="_", color="black", s=14)
    axes.set_xticks(ticks, labels, fontsize=7)
    axes.margins(x=0.01)
    axes.set_ylabel(f"{name}: seconds of one step")
    positions = ", ".join(str(s["positions"]) for s in results[0]["paths"][name])
    stroke = "; strokes: measured" if name == "ours" else ""
    axes.set_xlabel(f"bars: {positions} positions{stroke} (Figure 2)", fontsize=8)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7)


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_network(parser, "lan,wan", "lan, wan, after local (default: %(default)s)")
    parser.add_argument(
        "--no-stock",
        dest="stock",
        action="store_false",
        help="leave the stock path's layers out, which take minutes",
    )
    step_sweep.add_sweep(parser, "draw all figures into a file")


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    asked = step_sweep.asked(options)
    check(*asked)
    first: list[dict[str, Any]] = []

    def once(network: str) -> dict[str, Any]:
        local = first[0] if first else None
        first.append(measure(*asked, network, stock=options.stock, local=local))
        return first[-1]

    # What computing takes is seen where the network takes no time.
    options.network = dict.fromkeys(["local", *options.network])
    commands.each_network(options, once, table, plot)
