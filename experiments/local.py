"""Runs a study on this machine: both parties as they are in `spu-llm demo`, progress on stderr."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.tokenizer import Tokenizer
from spu_llm.app.parties import local_provider, run_as_client
from spu_llm.app.progress import Progress
from spu_llm.app.supervisor import Outcome
from spu_llm.net.manifest import Manifest, Scalar
from spu_llm.net.relay import Relay
from spu_llm.net.stream import ByteStream


def run_study(
    program: str,
    model: Path,
    request: Mapping[str, Scalar],
    job: dict[str, Any],
    *,
    tokenizer: Path,
    network: str = "local",
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    wrap: Callable[[ByteStream], ByteStream] = lambda stream: stream,
) -> tuple[Outcome, Manifest]:
    """One session of `program` with a provider process that holds `model`.

    `tokenizer` is the directory of the client's copy. Events named "stage" and "update" are shown,
    all others go to `on_event`.
    """
    relays: list[Relay] = []

    def wire_bytes() -> int:
        counters = [relay.snapshot() for relay in relays]
        return sum(c.wire_bytes_sent + c.wire_bytes_received for c in counters)

    def show(event: dict[str, Any], relay: Relay) -> None:
        relays[:] = [relay]
        if event["event"] == "stage":
            progress.stage(event["name"])
        elif event["event"] == "update":
            progress.update(event["name"])
        else:
            on_event(event)

    progress = Progress(wire_bytes)
    progress.stage("starting both parties")
    try:
        with local_provider(model, network, studies=True) as server:
            own = Tokenizer.load(tokenizer)
            return run_as_client(server, own, program, request, job, show, wrap)
    finally:
        progress.close()


@dataclass(frozen=True)
class Machine:
    """What a measurement ran on: the cores both parties share, and their kind."""

    cores: int
    processor: str


def machine() -> Machine:
    """The cores that this process may use."""
    name = "unknown processor"
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return Machine(len(os.sched_getaffinity(0)), name)
