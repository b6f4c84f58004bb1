"""How many tokens an hour two parties make that have several machines each: predicted, by the cost
model (`experiments.cost_model.estimate`), never measured.

A pair is one core at each party. Of a completion of N tokens, a producer's pair makes the
correlated randomness, and a session's pair computes online:

    producing = (A + M d / 2 + s B / W) / e
    online    = s + O + R d + 8 (c + p) / b
    by cores  = 3600 N pairs / (producing + online)             tokens an hour
    by link   = 3600 N b / (8 max(c + c', p + p'))
    by disk   = 3600 N D machines / (3 S)
    capacity  = min(by cores, by link, by disk)

A, M, B: seconds, messages and batches of its correlated randomness; e: what producers reach of
linear growth; s: seconds of opening a session, one for W batches and one for each completion; O, R:
seconds of computing and rounds online; c, p: bytes online from client and from provider, c', p'
those ahead; d, b: the network's delay and bits per second in each direction, which all pairs share;
S: bytes of its correlated randomness that a party stores, each of which is written, read and
overwritten; D: bytes per second of a machine's disk: clients' pools are spread over all machines.

Every token is a step of its own (no drafts). A session has its cores also while it waits for the
network. The hint of the weights, once for a client, is not in it. Seconds are those of the machine
that the prices are of, whatever a core of another one does.

Beside it, a simulation of time (`experiments.cost_model.pairs`) says how producers' throughput
grows with their number.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.common import commands, report
from experiments.common.measured import summed
from experiments.common.report import Column, rows_table
from experiments.cost_model import workload
from experiments.cost_model.pairs import Batch, Dealt, simulate
from experiments.cost_model.prices import Prices
from models.hf import load_config
from spu_llm.api.defaults import shipped
from spu_llm.app.printing import show_table
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.core.values import CLIENT
from spu_llm.net.shaping import NetworkShape, shape_of
from spu_llm.systems.decoding.request import Request

NODES, NETWORKS = (1, 2, 4, 10, 30, 100), ("local", "lan", "wan")
PAIRS = (1, 2, 3, 4, 8, 16, 32, 64)
EFFICIENCY = 0.8  # of linear, that producers reach
SETUP_S = 6.0
ITEM_BATCHES = 300
DISK_MB_S = 200
DISK_TIMES = 3  # that a stored byte is written, read, and overwritten when it is used up
_ITEMS = 256  # that are dealt in the simulation


@dataclass(frozen=True)
class CapacityPlan:
    """The study's settings. cores: of each machine; setup_s: of a session; item_batches: that a
    producer makes in one; disk_mb_s: of a party's pool.
    """

    nodes: Sequence[int] = NODES
    cores: int = 16
    networks: Sequence[str] = NETWORKS
    prompt_tokens: int = 64
    new_tokens: int = 32
    setup_s: float = SETUP_S
    item_batches: int = ITEM_BATCHES
    disk_mb_s: float = DISK_MB_S
    efficiency: float = EFFICIENCY


@dataclass(frozen=True)
class Completion:
    """Cost of a completion, without a network: seconds of one core at each party, bytes by
    direction. stored: bytes of correlated randomness, of each party.
    """

    tokens: int
    online_s: float
    rounds: float
    online: dict[str, float]
    ahead_s: float
    ahead_messages: float
    ahead: dict[str, float]
    batches: float
    stored: float

    @property
    def batch(self) -> Batch:
        """Return the mean batch of its correlated randomness."""
        return Batch(
            self.ahead_s / self.batches,
            self.ahead_messages / self.batches,
            self.ahead["client_to_provider"] / self.batches,
            self.ahead["provider_to_client"] / self.batches,
            self.stored / self.batches,
        )


_WAYS = ("client_to_provider", "provider_to_client")


def completion_of(model: Path, plan: CapacityPlan, prices: Prices) -> Completion:
    """Return what a completion costs by a model's shape; weights are not read. Tokens that the
    model's ranges do not hold for stand in the clear before the prompt.
    """
    config = load_config(model)
    public = (0,) * config.public_rows
    request = Request(plan.prompt_tokens, plan.new_tokens, 0, 0.0, public_prefix=public)
    request.check(config)
    # The prefill gives the first token.
    work = workload.together(workload.of_steps(config, request, [], [0] * (plan.new_tokens - 1)))
    making = summed(prices.of_material(work).values())
    kinds = [(work.correlations[name], units) for name, units in work.units.items()]
    return Completion(
        plan.new_tokens,
        prices.computing(work),
        work.counts["rounds"],
        {way: work.counts[way] for way in _WAYS},
        making["seconds"],
        making["messages"],
        {way: making[way] for way in _WAYS},
        sum(units / kind.chunk for kind, units in kinds),
        sum(8.0 * kind.stored_words(CLIENT) * units for kind, units in kinds if kind.fixed is None),
    )


def capacity(
    of: Completion, plan: CapacityPlan, network: NetworkShape, nodes: int
) -> dict[str, Any]:
    """Return tokens an hour with so many machines at each party, and what bounds them."""
    pairs, rate = nodes * plan.cores, network.bits_per_s
    sessions = of.batches / plan.item_batches
    producing = of.ahead_s + of.ahead_messages / 2 * network.delay_s + plan.setup_s * sessions
    online = plan.setup_s + of.online_s + of.rounds * network.delay_s
    if rate:
        online += 8 * sum(of.online.values()) / rate
    hourly = {"cores": 3600 * of.tokens * pairs / (producing / plan.efficiency + online)}
    disks = nodes * plan.disk_mb_s * 1e6
    hourly["disk"] = 3600 * of.tokens * disks / (DISK_TIMES * of.stored)
    if rate:
        busier = max(of.online[way] + of.ahead[way] for way in _WAYS)
        hourly["link"] = 3600 * of.tokens * rate / (8 * busier)
    bound = min(hourly, key=lambda name: hourly[name])
    return {
        "network": network.name,
        "nodes": nodes,
        "tokens_per_hour": hourly[bound],
        "bound": bound,
        "by": hourly,
    }


def growth(of: Completion, plan: CapacityPlan, network: NetworkShape) -> list[dict[str, Any]]:
    """Simulate producers; return their throughput by their number, beside linear growth."""
    dealt = Dealt(_ITEMS, plan.item_batches, plan.setup_s, plan.disk_mb_s * 1e6)
    played = [simulate(of.batch, dealt, network, pairs) for pairs in PAIRS]
    alone = played[0].batches_per_s
    return [
        {"network": network.name, **asdict(one), "of_linear": one.batches_per_s / alone / one.pairs}
        for one in played
    ]


def measure(models: Sequence[Path], plan: CapacityPlan) -> dict[str, Any]:
    """Predict for each model's shape."""
    prices, rows = Prices.load(), []
    networks = [shape_of(name) for name in plan.networks]
    for model in models:
        of = completion_of(model, plan, prices)
        rows.append(
            {
                "model": model.resolve().name,
                "shape": load_config(model).asdict(),
                "completion": asdict(of),
                "capacity": [capacity(of, plan, on, n) for on in networks for n in plan.nodes],
                "growth": [row for on in networks for row in growth(of, plan, on)],
            }
        )
    return {
        "plan": asdict(plan),
        "models": rows,
        "prices_of": prices.machine,
        "machine": asdict(machine()),
    }


# ---- as text


def circumstances(result: dict[str, Any]) -> str:
    """Say what is predicted, and of what."""
    plan, of = result["plan"], result["prices_of"]
    return (
        f"Predicted, not measured: tokens an hour of completions of {plan['new_tokens']} tokens "
        f"after {plan['prompt_tokens']}, without drafts, by two parties with as many machines "
        f"each, of {plan['cores']} cores. In parentheses what bounds it: cores, the link between "
        f"the parties, which all share, or the machines' disks, {plan['disk_mb_s']:g} "
        f"MB/s each, over which clients' pools are spread. Producers reach "
        f"{plan['efficiency']:.0%} of linear growth; a session takes {plan['setup_s']:g} s to "
        f"open, one for {plan['item_batches']} batches and one for each completion. Prices of an "
        f"{of['processor']}, commit {of['commit']}."
    )


def capacity_rows(result: dict[str, Any], model: dict[str, Any]) -> list[str]:
    """Return a table of one model's tokens an hour: machines down, networks across."""
    cells = {(row["network"], row["nodes"]): row for row in model["capacity"]}

    def on(network: str) -> Column[int]:
        def text(nodes: int) -> str:
            row = cells[network, nodes]
            return f"{float(report.three(row['tokens_per_hour'])):,.0f} ({row['bound']})"

        return Column(f"{network} ᵖ", text)

    columns: list[Column[int]] = [
        Column(f"{model['model']}: machines of each party", str),
        Column("cores of each", lambda nodes: f"{nodes * result['plan']['cores']:,}"),
        *map(on, result["plan"]["networks"]),
    ]
    return rows_table(columns, result["plan"]["nodes"])


def growth_rows(result: dict[str, Any], model: dict[str, Any]) -> list[str]:
    """Return a table of what producers reach of linear growth, and how busy link and disk are."""
    cells = {(row["network"], row["pairs"]): row for row in model["growth"]}

    def on(network: str) -> Column[int]:
        def text(pairs: int) -> str:
            row = cells[network, pairs]
            busy = f"link {row['link']:.0%}, disk {row['disk']:.0%}"
            return f"{row['of_linear']:.2f} ({busy})"

        return Column(f"{network}: of linear ᵖ", text)

    columns: list[Column[int]] = [
        Column(f"{model['model']}: pairs", str),
        *map(on, result["plan"]["networks"]),
    ]
    return rows_table(columns, dict.fromkeys(row["pairs"] for row in model["growth"]))


def table(result: dict[str, Any]) -> str:
    """Return the whole result as Markdown."""
    lines = [circumstances(result)]
    for model in result["models"]:
        lines += ["", *capacity_rows(result, model), "", *growth_rows(result, model)]
    return "\n".join(lines)


def in_page(result: dict[str, Any], origin: str) -> list[str]:
    """Return the paragraphs of its page: capacity of all models, then growth of the first."""
    paragraphs = [circumstances(result)]
    for model in result["models"]:
        paragraphs += ["\n".join(capacity_rows(result, model)), origin]
    plan = result["plan"]
    return [
        *paragraphs,
        "Producers in a simulation of time: throughput by the number of pairs (one core at each "
        "party) that share the link and one disk at each party of "
        f"{plan['disk_mb_s']:g} MB/s, as a part of so many times that of one pair. In parentheses "
        "how busy both are.",
        "\n".join(growth_rows(result, result["models"][0])),
        origin,
    ]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Computed by the cost model: nothing is measured, no weights are read."
    parser.add_argument(
        "--models",
        type=commands.names,
        metavar="DIR,...",
        help="whose config.json is read (default: the shipped private model)",
    )
    parser.add_argument(
        "--nodes",
        type=commands.numbers,
        metavar="N,...",
        default=list(NODES),
        help=f"machines of each party (default: {','.join(map(str, NODES))})",
    )
    commands.add_number(parser, "--cores", CapacityPlan.cores, "of each machine", "C")
    commands.add_network(parser, ",".join(NETWORKS))
    commands.add_number(parser, "--prompt-tokens", CapacityPlan.prompt_tokens, "prefilled")
    commands.add_number(parser, "--new-tokens", CapacityPlan.new_tokens, "of a completion")
    parser.add_argument(
        "--setup-seconds",
        type=float,
        metavar="S",
        default=SETUP_S,
        help="of opening a session (default: %(default)g)",
    )
    commands.add_number(
        parser, "--item-batches", ITEM_BATCHES, "that a producer makes in a session"
    )
    commands.add_number(parser, "--disk", DISK_MB_S, "of a party's pool", "MB/S")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    commands.add_debug(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    for nodes in options.nodes:
        commands.check_range("--nodes", nodes, 1)
    for name, least in (("cores", 1), ("new_tokens", 2), ("item_batches", 1), ("disk", 1)):
        commands.check_range(f"--{name.replace('_', '-')}", getattr(options, name), least)
    if not 0 <= options.setup_seconds <= 3600:
        raise InputError(f"--setup-seconds must be 0 to 3600, found {options.setup_seconds:g}")
    plan = CapacityPlan(
        options.nodes,
        options.cores,
        options.network,
        options.prompt_tokens,
        options.new_tokens,
        options.setup_seconds,
        options.item_batches,
        options.disk,
    )
    models = [Path(name) for name in options.models or [shipped("private")]]
    result = measure(models, plan)
    show_table(table(result))
    commands.write(options, result)
