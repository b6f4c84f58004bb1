"""Benchmark of the connection: what relay, TLS and the control plane add to a completion.

One greedy completion runs between two processes in each mode, in turn:

    direct     messages and SPU's link go from worker to worker on this machine's loopback
               interface: no supervisors, no relay, no certificates
    insecure   like `serve` and `generate` with --insecure: supervisors, gRPC, relays
    tls        like insecure, with certificates

The seconds of a decode step are compared, for each mode the median of its runs. Also measured is
the start of a session: from the client's call to the beginning of prefill, after one session that
has stored what outlives it (the hint), and the part until there is a connection for data, which
gRPC, a second handshake and the start of a worker's process take.

On `lan` all three modes go through the same cable (`experiments.common.cable`), which has the
network's delay; relays emulate nothing.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments.common import commands, report
from experiments.common.cable import cable
from models.files import files_of
from models.hf import load_config
from models.tokenizer import Tokenizer
from spu_llm.app.printing import tell
from spu_llm.core.errors import SpuLlmError
from spu_llm.core.machine import machine
from spu_llm.core.values import PROVIDER, ROLES
from spu_llm.net import identity
from spu_llm.net.identity import CERTIFICATE
from spu_llm.net.loopback import HOST
from spu_llm.net.manifest import agree, with_nonce
from spu_llm.net.stream import ByteStream
from spu_llm.offline.silent.cache import peer_folder
from spu_llm.offline.silent.store import default_directory
from spu_llm.service import agreeing
from spu_llm.service.client import run_as_client
from spu_llm.service.launching import local_provider
from spu_llm.service.supervisor import python_command
from spu_llm.service.task import Task
from spu_llm.service.worker import Events, run_task
from spu_llm.systems.decoding.records import COMPLETION, ClientInputs
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.program import ProviderInputs

MODES = ("direct", "insecure", "tls")
MOST = 1.05  # of a step without a connection of ours
START_S = 3.0  # of a session
_RUN_S = 600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_common(parser)
    commands.add_number(parser, "--repeat", 5, "runs of each, in turn")
    commands.add_number(parser, "--tokens", 17, "of each completion, one a step")
    commands.add_network(parser, "local")


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--repeat", options.repeat, 1)
    commands.check_range("--tokens", options.tokens, 2)
    model = commands.private_model(options)
    results = {
        network: measure(model, network, options.repeat, options.tokens)
        for network in options.network
    }
    result = {
        "networks": results,
        "failed": [f"{name}: {f}" for name, r in results.items() for f in r["failed"]],
        "machine": asdict(machine()),
        "config": {"model": str(model), "tokens": options.tokens},
    }
    commands.conclude(options, result, table(result))


def measure(model: Path, network: str, repeat: int, tokens: int) -> dict[str, Any]:
    """Measure one network: run every mode in turn, once to warm up and then `repeat` times. Return
    the records and medians of the latter. SpuLlmError when the runs' texts differ.
    """
    tokenizer, prompt = Tokenizer.load(model), "def f(x):"
    ids = tokenizer.encode(prompt)
    request = Request(len(ids), tokens, 0, 0.0)
    # No drafts are made.
    inputs = ClientInputs(ids, str(model))
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "direct": lambda: _direct(model, network, request, inputs, tokenizer),
            "insecure": lambda: _served(model, network, request, inputs, tokenizer, None),
            "tls": lambda: _served(model, network, request, inputs, tokenizer, Path(folder)),
        }
        _make_identities(Path(folder))
        for i in range(repeat + 1):
            for mode in MODES:
                run = {"mode": mode, **ways[mode]()}
                tell(f"{network}, {i} of {repeat}: {json.dumps(run)}")
                runs += [run] if i else []
    if len({tuple(run.pop("token_ids")) for run in runs}) != 1:
        raise SpuLlmError("the runs differ in their text; a near-tie has flipped")
    steps = {m: statistics.median(r["step_s"] for r in runs if r["mode"] == m) for m in MODES}
    starts = {m: statistics.median(r["start_s"] for r in runs if r["mode"] == m) for m in MODES[1:]}
    added = {m: steps[m] / steps["direct"] for m in MODES[1:]}
    failed = [f"{m} adds too much to a step" for m, ratio in added.items() if ratio > MOST]
    failed += [f"{m}: a session starts too late" for m, s in starts.items() if s > START_S]
    return {"step_s": steps, "added": added, "start_s": starts, "runs": runs, "failed": failed}


def table(result: dict[str, Any]) -> str:
    rows = [
        [network, *row] for network, steps in result["networks"].items() for row in _rows(steps)
    ]
    heads = (
        "network",
        "connection",
        "decode step",
        "ratio",
        "start of a session (s)",
        "until connected",
    )
    return "\n".join(report.table(heads, rows))


def _rows(steps: dict[str, Any]) -> list[list[str]]:
    rows = []
    for mode in MODES:
        runs = [run for run in steps["runs"] if run["mode"] == mode]
        spread = f"{min(r['step_s'] for r in runs):.3f} to {max(r['step_s'] for r in runs):.3f}"
        beside = (
            [
                report.three(steps["added"][mode]),
                report.three(steps["start_s"][mode]),
                f"{1e3 * statistics.median(r['open_s'] for r in runs):.0f} ms",
            ]
            if mode in steps["added"]
            else ["1", "-", "-"]
        )
        rows.append([mode, f"{steps['step_s'][mode]:.3f} s ({spread})", *beside])
    return rows


def _record(result: dict[str, Any]) -> dict[str, Any]:
    if not (steps := result["report"]["steps"]):
        raise SpuLlmError("the text ended with its first token; there is no decode step to time")
    return {"step_s": result["seconds"]["decode"] / steps, "token_ids": result["token_ids"]}


# ---- through a connection of ours


def _make_identities(folder: Path) -> None:
    for role in ROLES:
        identity.make(folder / role, f"{role}.example", 1)


def _served(
    model: Path,
    network: str,
    request: Request,
    inputs: ClientInputs,
    tokenizer: Tokenizer,
    folder: Path | None,
) -> dict[str, Any]:
    began: list[float] = []
    opened: list[float] = []

    def connected(stream: ByteStream) -> ByteStream:
        opened.append(time.monotonic())
        return stream

    def on_event(event: dict[str, Any], relay: object) -> None:
        if event["event"] == "stage" and event["name"].startswith("prefilling") and not began:
            began.append(time.monotonic())

    credentials = None
    if folder is not None:
        credentials = folder / "provider", folder / "client" / CERTIFICATE
    with (
        local_provider(model, "local", credentials=credentials) as server,
        cable(network, [server.port]) as (port,),
    ):
        server = replace(server, port=port)
        if folder is not None:
            known = identity.load(folder / "client", folder / "provider" / CERTIFICATE)
            server = replace(server, identity=known)
        started = time.monotonic()
        outcome, _ = run_as_client(
            server,
            COMPLETION,
            request,
            inputs,
            on_event,
            tokenizer=tokenizer,
            reads=files_of(model),
            wrap=connected,
        )
    return {**_record(outcome.result), "start_s": began[0] - started, "open_s": opened[0] - started}


# ---- without


def _direct(
    model: Path, network: str, request: Request, inputs: ClientInputs, tokenizer: Tokenizer
) -> dict[str, Any]:
    agreed = agree(
        with_nonce(agreeing.of_client(COMPLETION, request, tokenizer, "local", 1)),
        with_nonce(agreeing.of_provider(load_config(model), tokenizer, "local", 1)),
    )
    # Of each party's SPU, and of its channels, which the client's worker alone calls.
    own = _free_ports(4)
    with cable(network, own) as far:
        tasks = []
        for rank, held in enumerate((inputs, ProviderInputs(str(model)))):
            # Each party listens at its own ports, and reaches the other through the cable.
            ports = [own[i] if i % 2 == rank else far[i] for i in range(4)]
            kept = peer_folder(default_directory(ROLES[rank]), "direct")
            task = agreeing.task_of(ROLES[rank], agreed, held, None, kept)
            link = tuple(f"{HOST}:{port}" for port in ports[:2])
            tasks.append(replace(task, link=link, messages=ports[2 + PROVIDER]))
        return _record(_result(tasks))


def _result(tasks: Sequence[Task]) -> dict[str, Any]:
    """Run both parties of a direct run, without supervisors; return the client's result."""
    parties = [
        subprocess.Popen(
            python_command(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for _ in tasks
    ]
    try:
        for party, task in zip(parties, tasks, strict=True):
            assert party.stdin is not None
            party.stdin.write(task.line())
            party.stdin.flush()
        said = [party.communicate(timeout=_RUN_S)[0] for party in parties]
    finally:
        for party in parties:
            party.kill()
            party.wait()
    events = [json.loads(line) for line in said[0].splitlines()]
    if not events or events[-1]["event"] != "result":
        raise SpuLlmError(f"the direct run failed: {events[-1:]}")
    result: dict[str, Any] = events[-1]
    return result


def _free_ports(count: int) -> Sequence[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


def main() -> None:
    """Run one party of a direct run; its task comes on standard input."""
    events = Events()
    events.answer = lambda: True  # there is no supervisor, and nobody else receives hints
    task = Task.of_line(sys.stdin.readline())
    events.send("result", **run_task(COMPLETION, task, events, lambda seconds: None))
