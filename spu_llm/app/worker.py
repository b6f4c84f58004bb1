"""The worker process: SPU, the model and the decode loop of one party and one session.

Started by a supervisor as `python -m spu_llm.app.worker`. Reads one job (a JSON line) from standard
input and writes events (JSON lines) to standard output. It dies with its supervisor.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from spu_llm.channel import Traffic
from spu_llm.errors import SpuLlmError
from spu_llm.values import CLIENT, ROLES

PHASES = ("offline", "prefill", "decode")


class Events:
    """JSON lines to the supervisor; anything else printed in this process goes to stderr."""

    def __init__(self) -> None:
        self._out: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, event: str, **fields: Any) -> None:
        self._out.write(json.dumps({"event": event, **fields}) + "\n")
        self._out.flush()


def main() -> None:
    """Run one job; exit code 0 also after a reported error (the event says which)."""
    _die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no secrets in core files
    os.environ["JAX_PLATFORMS"] = "cpu"
    events = Events()
    import models.generate  # noqa: F401 - the slow imports, while the supervisors shake hands

    events.send("ready")
    line = sys.stdin.readline()
    if not line:
        return
    _leave_when_stdin_closes()
    try:
        events.send("result", **run_job(json.loads(line), events))
    except SpuLlmError as exc:
        events.send("error", message=str(exc), exit_code=exc.exit_code)
    except RuntimeError as exc:  # SPU's own errors: the link broke or a program cannot run
        events.send("error", message=f"SPU failed: {_first_line(exc)}", exit_code=1)
    finally:
        sys.stdout.flush()
    # SPU's link threads may outlive the peer; everything of worth has been sent.
    os._exit(0)


def run_job(job: dict[str, Any], events: Events) -> dict[str, Any]:
    """One completion, this party's side; returns the result's fields."""
    from models.generate import ClientSide, Programs, Report, generate, share_weights
    from models.gpt2 import GPT2Config
    from models.hf import load_model
    from models.request import Request
    from spu_llm.secure import PartySession
    from spu_llm.settings import SpuConfig
    from spu_llm.spu_runtime import create_link

    rank = ROLES.index(job["role"])
    config = GPT2Config(**job["model"])
    request = Request(**job["request"])
    spu_config = SpuConfig(**job["spu"])

    events.send("stage", name="connecting")
    link = create_link(rank, job["addresses"], timeout_ms=job["timeout_ms"])
    session = PartySession(link, spu_config)
    with session.meter.in_phase("offline"):
        events.send("stage", name="preparing")
        session.warm_up()
        programs = Programs.build(config, request)
        params = load_model(Path(job["model_dir"]))[1] if rank != CLIENT else None
        weights = share_weights(session, config, params)
        programs.prepare(session, weights)
    client: ClientSide | None = None
    if rank == CLIENT:
        client = _client_side(job, request, programs.limit, events)

    events.send("stage", name=f"prefilling {request.prompt_tokens} tokens")

    def on_step(report: Report) -> None:
        events.send(
            "step", steps=report.steps, accepted=report.accepted, drafted=report.drafted
        )

    report = generate(session, programs, weights, client, on_step)
    result: dict[str, Any] = {
        "report": asdict(report),
        "seconds": session.meter.seconds,
        "traffic": {phase: asdict(session.meter.traffic(phase)) for phase in PHASES},
        "steps": _per_step(session.meter.entries),
        "learned": session.ledger.learned(),
    }
    if client is not None:
        result |= {"text": client.text, "token_ids": client.tokens}
    return result


def _client_side(job: dict[str, Any], request: Any, limit: int, events: Events) -> Any:
    from models.draft import Drafter
    from models.generate import ClientSide
    from models.hf import load_model
    from models.tokenizer import Tokenizer
    from spu_llm.prg import Prg

    drafter = None
    if request.draft_length:
        draft_config, draft_params = load_model(Path(job["draft_dir"]))
        capacity = request.prompt_tokens + limit + request.draft_length + 1
        drafter = Drafter(draft_config, draft_params, capacity)

    def stream(label: str, seed: int | None) -> Prg:
        return Prg.from_os() if seed is None else Prg.from_seed(seed, label)

    return ClientSide(
        prompt=job["prompt"],
        tokenizer=Tokenizer.load(Path(job["draft_dir"])),
        drafter=drafter,
        drafting=stream("drafts", job["draft_seed"]),
        sampling=stream("sampling", job["sampling_seed"]),
        stop=job["stop"],
        on_text=lambda text: events.send("text", text=text),
    )


def _per_step(entries: list[Any]) -> list[dict[str, Any]]:
    """Cost of each decode step: a step ends when the client has announced how it went."""
    steps: list[dict[str, Any]] = []
    seconds, traffic = 0.0, Traffic()
    for entry in entries:
        if entry.phase != "decode":
            continue
        seconds, traffic = seconds + entry.seconds, traffic + entry.traffic
        if entry.function == "announce":
            steps.append({"seconds": seconds, "bytes": traffic.bytes, "messages": traffic.messages})
            seconds, traffic = 0.0, Traffic()
    return steps


def _first_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return lines[0][:300] if lines else type(exc).__name__


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its supervisor dies, however it dies."""
    pr_set_pdeathsig = 1
    parent = os.getppid()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _leave_when_stdin_closes() -> None:
    """The supervisor closes our input to stop us; SPU cannot be interrupted otherwise."""

    def watch() -> None:
        while sys.stdin.read(1):
            time.sleep(0.1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
