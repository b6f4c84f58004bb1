"""Benchmark of producers on a cluster: how fast correlated randomness is made, by pairs of them.

Each run begins with empty pools and makes what a completion takes: by one session (0 pairs), or by
pairs of producers, whose client's halves are processes of the Ray cluster at `--ray` and whose
provider's halves are sessions of a provider process here. The numbers of pairs take turns.

Both halves of a pair share a core of this machine (as if it were half of one each), so that N pairs
run on N cores: that is what their throughput is compared at. A session alone has as many cores as
the most pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.common import commands, report
from experiments.common.report import Column, rows_table, spread
from spu_llm.api.client import Client, CompletionOptions
from spu_llm.api.events import Event, Making, Note
from spu_llm.api.provider import Provider
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.service.client import Server
from spu_llm.service.launching import network_options, own_provider
from spu_llm.service.supervisor import python_command

_CORES = os.sched_getaffinity(0)  # before any is left out


@dataclass(frozen=True)
class Plan:
    """Runs of a benchmark: `repeat` of each number of pairs on each network, for a completion of so
    many steps.
    """

    pairs: tuple[int, ...]
    networks: tuple[str, ...]
    repeat: int
    prompt_tokens: int
    steps: int


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_common(parser)
    parser.add_argument(
        "--ray", required=True, metavar="HOST:PORT", help="the head of a Ray cluster"
    )
    parser.add_argument(
        "--pairs",
        type=commands.numbers,
        default=[0, 1, 2],
        metavar="N,...",
        help="of producers, one after another; 0: a session without (default: 0,1,2)",
    )
    commands.add_number(parser, "--repeat", 2, "runs of each, in turn")
    commands.add_number(parser, "--prompt-tokens", 16, "of the completion")
    commands.add_number(parser, "--steps", 16, "of the completion")
    commands.add_network(parser, "local")


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    for name, least in (("repeat", 1), ("prompt_tokens", 1), ("steps", 1)):
        commands.check_range(f"--{name.replace('_', '-')}", getattr(options, name), least)
    if min(options.pairs) < 0:
        raise InputError("--pairs are numbers from 0 on")
    plan = Plan(
        tuple(options.pairs),
        tuple(options.network),
        options.repeat,
        options.prompt_tokens,
        options.steps,
    )
    model = commands.private_model(options)
    result = commands.with_progress("runs", lambda say: measure(model, options.ray, plan, say))
    commands.conclude(options, result, table(result))


def measure(
    model: Path, address: str, plan: Plan, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Measure all runs of a plan with the cluster at `address`."""
    before = asdict(machine())
    rows: list[dict[str, Any]] = []
    for network in plan.networks:
        for turn in range(plan.repeat):
            for pairs in plan.pairs:
                say(f"{network}, run {turn + 1} of {plan.repeat}, {pairs} pairs")
                took = run(model, address, plan, network, pairs)
                rows.append({"network": network, "pairs": pairs, **took})
    return {
        "plan": asdict(plan),
        "rows": rows,
        "before": before,
        "machine": asdict(machine()),
        "config": {"model": str(model)},
    }


def run(model: Path, address: str, plan: Plan, network: str, pairs: int) -> dict[str, Any]:
    """Return what one run took: `seconds` in all, `making_s` from the begin of what makes batches
    (a session's first batch, the producers' start of sessions) to the last one, the number of
    `batches`, and the payload's `bytes`.
    """
    told: list[tuple[float, int]] = []

    def heard(event: Event) -> None:
        if isinstance(event, Making) or (isinstance(event, Note) and "producers" in event.text):
            told.append((time.monotonic(), event.made if isinstance(event, Making) else 0))

    cores = pairs or max(plan.pairs)
    _stay_on(cores)

    with (
        tempfile.TemporaryDirectory() as folder,
        _provider(model, network, Path(folder, "provider"), pairs) as server,
    ):
        pool = Path(folder, "client")
        client = Client(Provider(network, server, Path(), pool, 1))
        options = CompletionOptions(max_new_tokens=8 * plan.steps + 1)
        with _producers(address, server, pool, pairs) as producers:
            started = time.monotonic()
            made = client.prepare(
                plan.prompt_tokens, options, heard, steps=plan.steps, producers=producers
            )
            seconds = time.monotonic() - started
    (first, none), (last, all_) = told[0], told[-1]
    return {
        "cores": cores,
        "seconds": seconds,
        "making_s": last - first,
        "batches": all_ - none,
        "bytes": sum(asdict(made.bytes["offline"]).values()),
        "units": sum(row["made_units"] for row in made.correlations),
    }


def _stay_on(cores: int) -> None:
    """Keep this process, what it starts from now on, and the cluster's nodes here, to so many
    cores. InputError where there are fewer.
    """
    own = sorted(_CORES)
    if cores > len(own):
        raise InputError(f"--pairs: {cores} pairs take as many cores, and there are {len(own)}")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name = (process / "comm").read_text().strip()
            if process.name == str(os.getpid()) or name == "raylet":
                for thread in (process / "task").iterdir():
                    os.sched_setaffinity(int(thread.name), own[:cores])


def _provider(model: Path, network: str, pool: Path, pairs: int) -> AbstractContextManager[Server]:
    command = [*python_command("spu_llm.app.cli"), "serve", "--model", str(model), "--insecure"]
    command += ["--listen", "127.0.0.1:0", *network_options(network), "--exit-with-parent"]
    command += [f"--pool={pool}", f"--sessions={pairs + 2}", "--jobs=1"]
    return own_provider(command, network)


def _producers(address: str, server: Server, pool: Path, pairs: int) -> AbstractContextManager[Any]:
    if not pairs:
        return nullcontext()
    from spu_llm.cluster.producing import on_cluster

    return on_cluster(address, server, pool, pairs)


def table(result: dict[str, Any]) -> str:
    """Return runs by network and number of pairs: medians, with least and most."""
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        rows.setdefault((row["network"], row["pairs"]), []).append(row)

    def rate(some: Sequence[dict[str, Any]]) -> float:
        return statistics.median(row["batches"] / row["making_s"] for row in some)

    def of_one(key: tuple[str, int]) -> str:
        network, pairs = key
        if pairs < 1 or (network, 1) not in rows:
            return ""
        return f"{rate(rows[key]) / (pairs * rate(rows[network, 1])):.2f}"

    def seconds(name: str) -> Callable[[tuple[str, int]], str]:
        return lambda key: spread([row[name] for row in rows[key]], report.duration_text)

    columns = [
        Column[tuple[str, int]]("network", lambda key: key[0]),
        Column("pairs", lambda key: str(key[1]) if key[1] else "none: one session"),
        Column("cores", lambda key: str(rows[key][0]["cores"])),
        Column("seconds in all", seconds("seconds")),
        Column("of making", seconds("making_s")),
        Column("batches a second", lambda key: report.three(rate(rows[key]))),
        Column("of linear", of_one),
        Column("bytes", lambda key: spread([r["bytes"] for r in rows[key]], report.bytes_text)),
    ]
    return "\n".join(rows_table(columns, rows))
