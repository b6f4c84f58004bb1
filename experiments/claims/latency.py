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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.benchmarks import step_sweep
from experiments.common import commands
from experiments.common.kinds import KINDS
from experiments.common.two_parties import machine
from experiments.spu_baseline import layers as spu_layers
from models.training.evaluate import expected_tokens
from spu_llm.core.errors import InputError
from spu_llm.net.shaping import NETWORKS, NetworkShape

POSITIONS = (1, 2, 4, 8, 16)
PARTS = ("delay", "transmission", "compute")


def check(
    model: Path, draft_model: Path, prompt: str, positions: Sequence[int], repeat: int
) -> None:
    """InputError for what cannot be measured."""
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
    """One network's sessions, as JSON fields. `local`: the result on the local network, which
    comes first; `stock`: the stock path's layers, too, which take minutes.
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
    ours: dict[str, Any],
    stock: dict[str, Any] | None,
    local: dict[str, Any] | None,
) -> dict[str, Any]:
    """The figures of one network."""
    shape = NETWORKS[ours["network"]]
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
            compute = local[i]["kinds"][kind]["seconds"] if local else cost["seconds"]
            busier = max(cost["client_to_provider"], cost["provider_to_client"])
            chain = step["chain"].get(kind, 0)
            kinds[kind] = _costs(cost) | {
                "chain": chain,
                "delay": chain * shape.delay_s,
                "transmission": _sending(busier, shape),
                "compute": compute,
            }
        steps.append({
            "positions": step["positions"], "seconds": step["median"]["seconds"],
            "segments": step["segments"], "kinds": kinds,
        })  # fmt: skip
    return steps


def _stock(
    measured: dict[str, Any], shape: NetworkShape, local: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    steps = []
    for i, step in enumerate(measured["steps"]):
        kinds = {}
        for layer in step["layers"]:
            cost, kind = spu_layers.scaled(layer), layer["kind"]
            compute = local[i]["kinds"][kind]["seconds"] if local else cost["seconds"]
            both = cost["client_to_provider"] + cost["provider_to_client"]
            transmission = _sending(both, shape)
            kinds[kind] = _costs(cost) | {
                "delay": max(0.0, cost["seconds"] - compute - transmission) if local else 0.0,
                "transmission": transmission,
                "compute": compute,
            }
        steps.append({
            "positions": step["positions"], "kinds": kinds,
            "seconds": sum(cell["seconds"] for cell in kinds.values()),
        })  # fmt: skip
    return steps


def _costs(cost: dict[str, Any]) -> dict[str, Any]:
    return {
        "seconds": cost["seconds"],
        "bytes": cost["client_to_provider"] + cost["provider_to_client"],
        "messages": cost["messages"],
    }


def _sending(count: float, shape: NetworkShape) -> float:
    return 8 * count / shape.bits_per_s if shape.bits_per_s else 0.0


def parts_of(step: dict[str, Any]) -> dict[str, float]:
    """Delay, transmission and compute of a whole step, in seconds."""
    return {part: sum(cell[part] for cell in step["kinds"].values()) for part in PARTS}


def kinds_of(path: Sequence[dict[str, Any]]) -> list[str]:
    """The kinds that occur, in the order of a forward."""
    return [kind for kind in KINDS if any(kind in step["kinds"] for step in path)]


def growth(path: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds of each step in those of the first, which has one position."""
    return [step["seconds"] / path[0]["seconds"] for step in path]


def speedup(path: Sequence[dict[str, Any]], alpha: float, draft_length: int) -> float:
    """Of drafted over standard decoding on this path, when every draft is accepted with chance
    `alpha` on its own (the paper's Figure 5; the client's drafting is not counted there).
    """
    seconds = {step["positions"]: step["seconds"] for step in path}
    tokens = float(draft_length + 1) if alpha == 1 else expected_tokens(alpha, draft_length)
    return tokens * seconds[1] / seconds[draft_length + 1]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_network(parser, "lan,wan", "lan, wan, after local (default: %(default)s)")
    parser.add_argument("--no-stock", dest="stock", action="store_false",
                        help="leave the stock path's layers out, which take minutes")  # fmt: skip
    step_sweep.add_sweep(parser, "draw all figures into a file")


def command(options: argparse.Namespace) -> None:
    from experiments.claims import latency_report

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
    commands.each_network(options, once, latency_report.table, latency_report.plot)
