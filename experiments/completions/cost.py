"""What a step costs: the stock path's, of one position, against ours of 1, several and 16.

Per network, one after the other on this machine, with the same private weights and the same cache:
the stock path (`experiments.spu_baseline.whole`), its layers alone
(`experiments.spu_baseline.layers`), and our steps of 1, draft length + 1 and 16 positions
(`experiments.benchmarks.step_sweep`). All of it is greedy.

What a step takes from the pool is priced as its part of the batches that were made. The tiles of
the cache, the rest of a batch and the set-up of a session are not in it: what an emitted token
costs is measured on complete generations (`experiments.completions.study`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks import step_sweep
from experiments.benchmarks.op_report import count_text, mib_text, seconds_text
from experiments.common import commands, report
from experiments.common.measured import FIGURES, medians
from experiments.common.report import Column, rows_table
from experiments.spu_baseline import layers as spu_layers
from experiments.spu_baseline import whole as spu_whole
from models.hf import load_config
from models.tokenizer import Tokenizer
from spu_llm.core.machine import machine

LONGEST = 16  # positions
BLOCK_KINDS = ("norm", "linear", "attention products", "softmax", "GELU")


@dataclass(frozen=True)
class Request:
    """The request of a measurement: `steps` of each kind after one that warms up."""

    prompt: str
    draft_length: int
    steps: int

    def positions(self) -> list[int]:
        return sorted({1, self.draft_length + 1, LONGEST})

    def check(self, model: Path, draft_model: Path) -> None:
        """Raise InputError for what cannot be measured."""
        commands.check_range("--draft-length", self.draft_length, 1, LONGEST - 1)
        commands.check_range("--steps", self.steps, 1)
        config, prompt = load_config(model), Tokenizer.load(draft_model).encode(self.prompt)
        step_sweep.check_positions(config, len(prompt), self.positions(), 0.0)
        capacity = step_sweep.capacity_for(len(prompt), self.positions())
        spu_whole.check(config, len(prompt), capacity, self.steps)


# ---- measuring


def measure(model: Path, draft_model: Path, request: Request, network: str) -> dict[str, Any]:
    """Run one network's sessions; return the result as JSON fields."""
    positions = request.positions()
    length = len(Tokenizer.load(draft_model).encode(request.prompt))
    capacity = step_sweep.capacity_for(length, positions)
    stock = spu_whole.measure(model, request.prompt, capacity, request.steps, network)
    alone = spu_layers.measure(model, [1], capacity, network)
    ours = step_sweep.measure(
        model, draft_model, request.prompt, positions, request.steps, network, 0.0
    )
    return analyse(stock, alone, ours) | {"machine": asdict(machine()), "config": ours["config"]}


# ---- analysis


def analyse(stock: dict[str, Any], alone: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one network."""
    layers = ours["config"]["model.n_layer"]
    stock_step = medians(stock["runs"])
    stock_layers_1 = {layer["kind"]: layer for layer in alone["steps"][0]["layers"]}
    lengths = [
        {name: step[name] for name in ("positions", "segments", "offline", "material")}
        | {name: step["median"][name] for name in FIGURES}
        | {
            "of_stock": step["median"]["seconds"] / stock_step["seconds"],
            "messages_per_block": _block_messages(step["median"]["kinds"], layers),
            "chain": sum(step["chain"].values()),
        }
        for step in ours["steps"]
    ]
    result = {
        "network": ours["network"],
        "stock_step": stock_step,
        "lengths": lengths,
        "marginal_seconds": slope([(x["positions"], x["seconds"]) for x in lengths]),
        "stock_messages_per_block": _stock_block_messages(stock_layers_1),
        "linear": linear_offline(stock_layers_1, ours["steps"][0]["offline_linear"], layers),
        "prefill": {"stock": stock["prefill"], "ours": ours["prefill"]},
        "peak_memory": {"stock": stock["peak_memory"], "ours": ours["peak_memory"]},
        "learned": {"stock": stock["learned"], "ours": ours["learned"]},
    }
    failures = [] if stock["as_in_plaintext"] else ["the stock path's tokens are not plaintext's"]
    return result | {"failures": failures, "criteria": criteria(result)}


def _block_messages(kinds: dict[str, Any], layers: int) -> float:
    """Return the messages of one block; the last norm, which is like the others, stands after all
    blocks.
    """
    by_kind = {kind: kinds[kind]["messages"] for kind in BLOCK_KINDS if kind in kinds}
    norm = by_kind.pop("norm", 0.0) * 2 / (2 * layers + 1)
    return norm + sum(by_kind.values()) / layers


def _stock_block_messages(layers: dict[str, Any]) -> int:
    times = {kind: 2 if kind == "norm" else 1 for kind in BLOCK_KINDS}
    return sum(times[kind] * layers[kind]["messages"] for kind in BLOCK_KINDS)


def linear_offline(
    stock: dict[str, dict[str, Any]], ours: dict[str, Any], layers: int
) -> dict[str, Any]:
    """Compare products with weights at one position, embedding and head included: the stock path's
    encrypted ones, which it makes online, against our correlated randomness for them, made ahead.
    """
    times = {"linear": layers, "embedding": 1, "head": 1}
    seconds = sum(n * stock[kind]["seconds"] for kind, n in times.items())
    count = sum(n * report.both_ways(stock[kind]) for kind, n in times.items())
    own = report.both_ways(ours)
    return {
        "stock_seconds": seconds,
        "stock_bytes": count,
        "ours_seconds": ours["seconds"],
        "ours_bytes": own,
        "times_fewer_seconds": seconds / ours["seconds"] if ours["seconds"] else None,
        "times_fewer_bytes": count / own if own else None,
    }


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the straight line through the points: seconds per further position."""
    xs, ys = np.array(points, np.float64).T
    return float(np.polyfit(xs, ys, 1)[0]) if len(points) > 1 else 0.0


# What the project asks for; per emitted token: `experiments.completions.report`.
WANTED_MESSAGES = 400  # per block
WANTED_OF_STOCK = {8: 0.5, 16: 0.65}  # on lan: a step against the stock path's step of one position
WANTED_LINEAR = 10.0
WANTED_MEMORY = 2 << 30


def criteria(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each criterion with its value, its bound, and whether it holds."""
    checks: list[dict[str, Any]] = []

    def check(name: str, value: float, bound: float, *, least: bool) -> None:
        holds = value >= bound if least else value <= bound
        checks.append(
            {"name": name, "value": value, "bound": bound, "least": least, "holds": bool(holds)}
        )

    for step in result["lengths"]:
        n = step["positions"]
        if n in (1, 8):
            check(
                f"messages per block at {n}",
                step["messages_per_block"],
                WANTED_MESSAGES,
                least=False,
            )
        if result["network"] == "lan" and n in WANTED_OF_STOCK:
            check(
                f"step of {n} against stock's of 1",
                step["of_stock"],
                WANTED_OF_STOCK[n],
                least=False,
            )
    for unit in ("seconds", "bytes"):
        times = result["linear"][f"times_fewer_{unit}"]
        if times is not None:
            check(f"offline {unit} of linear layers, times fewer", times, WANTED_LINEAR, least=True)
    for role, size in result["peak_memory"]["ours"].items():
        check(f"peak memory, {role}", size, WANTED_MEMORY, least=False)
    return checks


# ---- the table and the plot


MOST = 8  # kinds of correlated randomness that are listed


def table(result: dict[str, Any]) -> str:
    """Return one network's figures as Markdown."""
    machine, linear = result["machine"], result["linear"]
    # What the stock path has no figure of is left empty.
    stock = {name: result["stock_step"][name] for name in FIGURES} | {
        "positions": "1 (stock)",
        "messages_per_block": result["stock_messages_per_block"],
        "segments": 1,
    }
    lines = [
        f"network {result['network']}, both parties on {machine['cores']} cores; greedy, per step. "
        "Ahead: what a step takes of its batches; without the cache's tiles and the set-up.",
        "",
        *rows_table(_STEP, [stock, *result["lengths"]]),
        "",
        f"a further position: {result['marginal_seconds']:.3f} s",
        "linear layers, embedding and head at one position: stock "
        f"{seconds_text(linear['stock_seconds'])} s, {count_text(linear['stock_bytes'])} bytes, on "
        "the way; ours "
        f"{seconds_text(linear['ours_seconds'])} s, {count_text(linear['ours_bytes'])} bytes, "
        "made ahead",
        *(
            f"peak memory, {name}: client {mib_text(sizes['client'])} MiB, provider "
            f"{mib_text(sizes['provider'])} MiB"
            for name, sizes in result["peak_memory"].items()
        ),
        *(
            f"prefill, {name}: {cost['seconds']:.1f} s, {cost['messages']} messages"
            for name, cost in result["prefill"].items()
        ),
        "",
        *_made_ahead(result),
        "",
        *(_criterion(one) for one in result["criteria"]),
        "outcomes: " + ("; ".join(result["failures"]) or "as in plaintext"),
    ]
    return "\n".join(lines)


def _ahead(step: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> str:
    return text(step["offline"]) if "offline" in step else ""


_STEP: Sequence[Column[dict[str, Any]]] = (
    Column("positions", lambda step: str(step["positions"])),
    Column("seconds", lambda step: seconds_text(step["seconds"])),
    Column(
        "of stock's step", lambda step: f"{step['of_stock']:.3f}" if "of_stock" in step else "1"
    ),
    Column("messages", lambda step: count_text(step["messages"])),
    Column("per block", lambda step: count_text(step["messages_per_block"])),
    Column("one after the other", lambda step: str(step.get("chain", ""))),
    Column("SPU segments", lambda step: str(step["segments"])),
    Column("bytes C→P", lambda step: count_text(step["client_to_provider"])),
    Column("bytes P→C", lambda step: count_text(step["provider_to_client"])),
    Column("ahead: seconds", lambda step: _ahead(step, lambda cost: seconds_text(cost["seconds"]))),
    Column("bytes", lambda step: _ahead(step, lambda cost: count_text(report.both_ways(cost)))),
)


def _made_ahead(result: dict[str, Any]) -> list[str]:
    """List what the making ahead for the longest step goes into, the longest parts first."""
    step = result["lengths"][-1]
    made = sorted(step["material"].items(), key=lambda item: -item[1]["seconds"])
    lines = [f"made ahead for a step of {step['positions']} positions, by kind:"]
    for name, cost in made[:MOST]:
        lines.append(
            f"- {name}: {count_text(cost['units'])} units, {seconds_text(cost['seconds'])} s, "
            f"{count_text(report.both_ways(cost))} bytes"
        )
    return lines


def _criterion(one: dict[str, Any]) -> str:
    relation = "at least" if one["least"] else "at most"
    if "memory" in one["name"]:
        value, bound = f"{mib_text(one['value'])} MiB", f"{mib_text(one['bound'])} MiB"
    else:
        value, bound = f"{one['value']:.3g}", f"{one['bound']:g}"
    return report.criterion(one["name"], f"{relation} {bound}", value, holds=one["holds"])


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw seconds per step against its positions; InputError without matplotlib."""
    figure = report.figure(6, 4)
    draw_lengths(figure.subplots(), results)
    report.save(figure, path, dpi=120)


def draw_lengths(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    """Draw a step of ours against its positions, in steps of the stock path of one position."""
    for result in results:
        steps = result["lengths"]
        xs, ys = [s["positions"] for s in steps], [s["of_stock"] for s in steps]
        axes.plot(xs, ys, "o-", label=result["network"])
    axes.axhline(1.0, color="0.6", linestyle="--", label="stock, one position")
    axes.set(
        xticks=[s["positions"] for s in results[0]["lengths"]],
        ylim=(0, None),
        xlabel="positions in one step of ours",
        ylabel="seconds, in stock's of one position",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_network(parser, "local,lan,wan")
    commands.add_number(parser, "--steps", 2, "measured steps of each kind", "K")
    commands.add_number(parser, "--draft-length", 7, "a step of that and one more position", "G")
    commands.add_prompt(parser)
    commands.add_draft_model(parser)
    commands.add_plot(parser, "draw seconds per step")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    pair = commands.pair(options)
    request = Request(commands.prompt(options), options.draft_length, options.steps)
    request.check(*pair)
    commands.each_network(options, lambda network: measure(*pair, request, network), table, plot)
