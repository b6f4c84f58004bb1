"""Run of a study on this machine: both parties as in `spu-llm demo`, with progress on stderr."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.tokenizer import Tokenizer
from spu_llm.app.progress import Progress
from spu_llm.core.errors import SpuLlmError
from spu_llm.core.machine import machine
from spu_llm.core.settings import OWN, SpuConfig
from spu_llm.net.manifest import Manifest
from spu_llm.net.relay import Relay
from spu_llm.net.stream import ByteStream
from spu_llm.service.client import run_as_client
from spu_llm.service.launching import local_provider
from spu_llm.service.supervisor import SessionOutcome, python_command
from spu_llm.systems.program import Nothing, Program

# SPU's own way to a result transfers while it runs: its stock is then extended in few messages.
FEW_MESSAGES = SpuConfig(ot_kind="EMP_Ferret")


def run_study(
    program: Program,
    model: Path,
    request: Any,
    inputs: Any = Nothing(),
    *,
    tokenizer: Path | None = None,
    network: str = "local",
    sampling_seed: int | None = None,
    backend: str = OWN,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    wrap: Callable[[ByteStream], ByteStream] = lambda stream: stream,
) -> tuple[SessionOutcome, Manifest]:
    """Run one session of `program` with a provider process that holds `model`; `inputs` are the
    client's. Return the outcome and the manifest that the parties agreed on.

    `tokenizer` is the directory of the client's tokenizer, by default `model`; `sampling_seed`
    fixes the provider's joint randomness; `backend` computes forwards. Events named "stage",
    "update" and "making" are shown, all others go to `on_event`.
    """
    relays: list[Relay] = []

    def wire_bytes() -> int:
        counters = [relay.snapshot() for relay in relays]
        return sum(c.wire_bytes_sent + c.wire_bytes_received for c in counters)

    doing = "starting both parties"

    def show(event: dict[str, Any], relay: Relay) -> None:
        nonlocal doing
        relays[:] = [relay]
        if event["event"] == "stage":
            doing = event["name"]
            progress.stage(doing)
        elif event["event"] == "update":
            progress.update(event["name"])
        elif event["event"] == "making":
            made, total = event["made"], event["total"]
            if made < total:
                progress.update(f"making correlated randomness, {made} of {total} batches")
            else:
                progress.stage(doing)
        else:
            on_event(event)

    progress = Progress(wire_bytes)
    progress.stage(doing)
    try:
        with local_provider(
            model, network, studies=True, sampling_seed=sampling_seed, backend=backend
        ) as server:
            own = Tokenizer.load(tokenizer or model)
            return run_as_client(server, program, request, inputs, show, tokenizer=own, wrap=wrap)
    finally:
        progress.close()


def session_record(outcome: SessionOutcome, agreed: Manifest, **more: str) -> dict[str, Any]:
    """Return the last fields of the result of every study of one session: bytes on the wire, what
    each party learned, the machine, and the session's settings, with `more` from the study.
    """
    return {
        "wire_bytes": {
            "client_to_provider": outcome.wire_sent,
            "provider_to_client": outcome.wire_received,
        },
        "learned": outcome.result["learned"],
        "machine": asdict(machine()),
        "config": {**more, **agreed},
    }


def run_command(arguments: Sequence[str], json_file: Path) -> dict[str, Any]:
    """Run a command of `spu-llm` in a separate process; return the JSON that it writes. SpuLlmError
    when it fails.
    """
    finish_command([*arguments, f"--json={json_file}"])
    result: dict[str, Any] = json.loads(json_file.read_text(encoding="utf-8"))
    return result


def finish_command(arguments: Sequence[str]) -> None:
    """Run a command of `spu-llm` in a separate process to its end. SpuLlmError when it fails."""
    command = [*python_command("spu_llm.app.cli"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rsplit("\n", 1)[-1]
        raise SpuLlmError(f"{' '.join(arguments[:2])} ended with {done.returncode}: {last}")
