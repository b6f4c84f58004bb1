"""What a worker runs in place of SPU and a model: two processes that exchange bytes over the relay.

The client goes through the phases of a completion, one byte and its echo after another. A
preparation then makes worthless units of one kind in the parties' pools, NEEDED for any request.
`SPU_LLM_STUB` is `WHO:PHASE:DEED`, or empty for a run that ends at once: in that phase, WHO (client
or provider)

    holds       goes on exchanging bytes for ever (the client)
    floods      the same, half a megabyte at a time
    deadlocks   waits for a lock that it holds, while its other threads live
    computes    COMPUTE_S seconds without a message, then goes on
    sends FILE  sends the file as it is, in clear; the other one keeps it, and both go on
    tries FILE  says whether it can read the file; the provider ends with that
    tries to write FILE  says whether it can; several, as FILE and to write FILE, in turn
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

PHASES = ("preparing", "prefilling", "decoding")
TOKENS = 3  # of a run that ends
COMPUTE_S = 9.0
NEEDED = 40  # units
HELD: list[bytes] = []  # what was received in clear


def install() -> None:
    """Make the worker of this process a stub."""
    from spu_llm.service import worker

    # Slow, and not needed.
    worker.preload = lambda place: None  # type: ignore[assignment, return-value]
    worker.run_task = run_task  # type: ignore[assignment]
    if "tries" not in os.environ["SPU_LLM_STUB"]:  # else its deeds are on any files
        worker.confine_files = lambda *paths: False


class Peer:
    """The connection to the other worker; counts the messages of the thread that works."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.messages = 0

    def send(self, data: bytes) -> None:
        self._channel.send(data)
        self.messages += 1

    def close(self) -> None:
        """Do nothing: the peer ends with the process."""

    def recv(self) -> bytes:
        data: bytes = self._channel.recv()
        self.messages += 1
        return data


def run_task(
    program: None, task: Any, events: Any, hear: Any, objects: int | None = None
) -> dict[str, Any]:
    """Stand in for `worker.run_task`."""
    events.send("stage", name="connecting")
    role = task.role
    peer = Peer(_channel(role, task))
    events.finished = lambda: peer.messages
    who, phase, deed = (os.environ["SPU_LLM_STUB"] or "nobody::").split(":", 2)
    mine = deed if who == role else ""
    if role == "provider":
        while (message := peer.recv()) != b"end":
            if message == phase.encode() and mine:
                _do(mine, peer)
                mine = ""
            HELD.append(message)
            peer.send(b"echo")
        return _prepared(task, peer) if task.program == "preparation" else {}
    for name in PHASES:
        events.send("stage", name=name)
        for _ in range(TOKENS):
            if name == "decoding":
                events.send("text", text="x")
            peer.send(name.encode())
            HELD.append(peer.recv())
        if name == phase and mine.startswith("tries "):
            events.send("note", text=_tried(mine.removeprefix("tries ")))
        elif name == phase and mine:
            _do(mine, peer)
        while name == phase and (mine in ("holds", "floods") or deed.startswith("sends ")):
            peer.send(bytes(500_000) if mine == "floods" else name.encode())
            peer.recv()
            time.sleep(0.05)
    peer.send(b"end")
    return _result() | (_prepared(task, peer) if task.program == "preparation" else {})


def _prepared(task: Any, peer: Peer) -> dict[str, Any]:
    """Make correlated randomness in the party's directory; what a result says of it."""

    from spu_llm.core.prg import Prg
    from spu_llm.core.values import ROLES
    from spu_llm.offline import peer_directories
    from spu_llm.offline.pool import Pool
    from spu_llm.service.agreeing import pool_ids
    from tests.kit.dealing import TRIPLE, zeros

    peer_directories.check_met(peer, *pool_ids(task.role, task.agreed))
    folder = Path(task.pool_dir)
    session = str(task.agreed["session"]).encode()
    pool = Pool(ROLES.index(task.role), Prg.from_os(), zeros, session=session, directory=folder)
    peer.send(pool.inventory())
    pool.resume(peer.recv())
    before = pool.available(TRIPLE)
    pool.prepare(TRIPLE, NEEDED)
    row = {
        "kind": TRIPLE.name,
        "needed_units": NEEDED,
        "batch_units": TRIPLE.chunk,
        "available_units": pool.available(TRIPLE),
        "made_units": pool.available(TRIPLE) - before,
        "seconds": 0.1,
        "bytes": 0,
        "stored_bytes": pool.stored_bytes(TRIPLE),
    }
    pool.close()
    return {
        "peer": folder.name,
        "steps": task.agreed["request.steps"],
        "lacking_bytes": 0,
        "room_bytes": {"client": None, "provider": None},
        "step_lacks_bytes": 0,
        "lacking_batches": [0],
        "correlations": [row],
    }


def _channel(role: str, task: Any) -> Any:
    from spu_llm.core.values import ROLES
    from spu_llm.net.stream_channel import Channels

    return Channels(ROLES.index(role), task.messages, task.timeout_ms / 1000).open()


def _tried(all_: str) -> str:
    return "; ".join(map(_tried_one, all_.split(" and ")))


def _tried_one(what: str) -> str:
    path = Path(what.removeprefix("to write "))
    try:
        if what.startswith("to write "):
            return f"wrote {path.write_bytes(b'x')} byte"
        return f"read {len(path.read_bytes())} bytes"
    except OSError as exc:
        return f"cannot read: {exc.strerror}"


def _do(deed: str, peer: Peer) -> None:
    if deed == "deadlocks":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif deed == "computes":
        until = time.monotonic() + COMPUTE_S
        while time.monotonic() < until:
            sum(range(10_000))
    elif deed.startswith("tries "):
        from spu_llm.core.errors import WorkerError

        raise WorkerError(_tried(deed.removeprefix("tries ")))
    elif deed.startswith("sends "):
        with open(deed.removeprefix("sends "), "rb") as file:
            peer.send(file.read())
        peer.recv()


def _result() -> dict[str, Any]:
    numbers = ("sent_bytes", "received_bytes", "sent_messages", "received_messages")
    phases = ("offline", "prefill", "decode")
    return {
        "text": "x" * TOKENS,
        "token_ids": [1] * TOKENS,
        "report": {"finish_reason": "length", "steps": 2, "drafted": 0, "accepted": 0},
        "traffic": {phase: dict.fromkeys(numbers, 0) for phase in phases},
        "seconds": dict.fromkeys(phases, 1.0),
        "beside": {"batches": 0, "seconds": 0.0},
        "steps": [],
        "learned": {"client": [], "provider": []},
    }
