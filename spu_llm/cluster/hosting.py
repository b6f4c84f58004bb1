"""A session's worker on a machine of the cluster: what runs there, in an actor of Ray's own.

The actor starts the confined worker that the front door would start (`supervisor.Worker`) and
passes on its events, and the words and connections to it, over `bridge`. Ray starts the actor and
ends it, and carries only where it listens; the session's task and events go over the bridge. The
actor's process ends with the session, and with the front door's connection for words.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spu_llm.cluster.bridge import Endpoint, Landing
from spu_llm.cluster.framed import Framed
from spu_llm.cluster.shared_hints import folder_here, keep_key
from spu_llm.cluster.weights import HeldWeights, opened
from spu_llm.core.errors import PeerError, PoolError, SpuLlmError, WorkerError
from spu_llm.net.frames import StreamType
from spu_llm.net.identity import OneTime
from spu_llm.offline import inbox
from spu_llm.offline.object_store import FsspecStore
from spu_llm.service.supervisor import Worker, kept_folders
from spu_llm.service.task import Task

FRONT_DOOR_S = 30.0  # for the front door to connect
KILLED_S = 10.0  # for Ray to end this process, as the front door asks it to
LAST_S = 30.0  # for it to take what a worker has sent that has ended
USAGE_S = 0.5  # between reports of what the worker uses, which are signs of life
EVENT, USAGE, OPENED, ENDED = "event", "usage", "opened", "ended"  # words to the front door
PARCEL = "parcel"  # another one: a batch of correlated randomness
TASK, TELL = "task", "tell"  # words from it


@dataclass(frozen=True)
class Hosted:
    """Description of a session for the machine that runs it. `program`: the place of its record;
    `held`: the weights; `hints`: the folder of their hints (`SharedHints`); `front_door`: the
    certificate that it shows; `makes`: batches of correlated randomness for the inbox of the front
    door's pool; `store`: the object storage of these, if the pool has any, as a URL and a folder.
    """

    program: str
    held: HeldWeights
    hints: str
    front_door: str
    makes: bool = False
    store: tuple[str, str] | None = None


class Host:
    """Hosts one session's worker. All methods return soon."""

    def start(self, hosted: Hosted, host: str) -> Endpoint:
        """Start the worker, and return where the front door reaches it: a port at `host`, an
        address of this machine. WorkerError when it does not start.
        """
        started: queue.Queue[Endpoint | Exception] = queue.Queue()
        # The worker dies with the thread that starts it, which must live as long as the session.
        threading.Thread(target=_host, args=(hosted, host, started), name="session").start()
        outcome = started.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def _host(hosted: Hosted, host: str, started: queue.Queue[Endpoint | Exception]) -> None:
    """Run a session's worker to its end, then end this process, which has no other purpose."""
    with contextlib.ExitStack() as held:
        try:
            staged = None
            if hosted.makes:  # of batches, each of which leaves at once
                staged = Path(tempfile.mkdtemp(prefix="spu-llm-"))
                held.callback(shutil.rmtree, staged, ignore_errors=True)
            weights = opened(hosted.held)
            hints = folder_here(hosted.hints)
            with _own_import_path():
                worker = Worker(
                    hosted.program,
                    [weights],
                    writes=kept_folders(hints, staged),
                    objects=None if hosted.store is None else FsspecStore(*hosted.store),
                )
            held.callback(worker.stop)
            landing = Landing(host, OneTime.made(), hosted.front_door)
            held.callback(landing.close)
        except Exception as exc:
            ours = isinstance(exc, SpuLlmError)
            started.put(exc if ours else WorkerError(f"the session's worker did not start: {exc}"))
            return
        started.put(landing.endpoint)
        with contextlib.suppress(queue.Empty, PeerError):
            framed = landing.words.get(timeout=FRONT_DOOR_S)
            held.callback(framed.close)
            _pass_words(framed, landing, worker, hints, weights, staged)
    time.sleep(KILLED_S)
    os._exit(0)


@contextmanager
def _own_import_path() -> Iterator[None]:
    """Have the import path that Python has on this machine. Ray puts the front door's working
    directory before it, and all that is on the path a worker may read.
    """
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"]
    try:
        said = subprocess.run(command, capture_output=True, check=True, timeout=FRONT_DOOR_S)
        path = [place for place in json.loads(said.stdout) if place]  # "" is where this one runs
    except (subprocess.SubprocessError, ValueError) as exc:
        raise WorkerError(f"Python does not tell its import path: {exc}") from exc
    with_rays, sys.path[:] = list(sys.path), path
    try:
        yield
    finally:
        sys.path[:] = with_rays


def _pass_words(
    framed: Framed, landing: Landing, worker: Worker, hints: Path, weights: int, staged: Path | None
) -> None:
    """Pass words both ways until the worker or the connection has ended."""

    def announce(door: StreamType, number: int) -> None:
        framed.say(OPENED, int(door), number)

    left = threading.Event()  # the front door

    def listen() -> None:
        try:
            while True:
                kind, said, *key = framed.hear()
                with contextlib.suppress(WorkerError):  # it has died, which `next_event` says
                    if kind == TASK:
                        with contextlib.suppress(PoolError):  # the worker says so
                            keep_key(hints, bytes.fromhex(key[0]))
                        worker.submit(_here(Task(**said), hints, weights, staged))
                    else:
                        worker.tell(**said)
        except PeerError:
            left.set()
            worker.stop()

    threading.Thread(target=listen, name="words", daemon=True).start()
    try:
        while True:
            event = worker.next_event(USAGE_S)
            for parcel in () if staged is None else inbox.hand_over(staged):
                framed.say(PARCEL, parcel.kind, parcel.id, encoded(parcel.files))
            if event is not None:
                _pass_event(event, framed, landing, worker, announce)
            framed.say(USAGE, worker.cpu_s(), worker.memory_bytes())
    except PoolError as exc:
        framed.say(ENDED, str(exc), False)
    except WorkerError as exc:
        framed.say(ENDED, str(exc), worker.killed)
    left.wait(LAST_S)  # what the worker has sent may still be on its way


def _pass_event(
    event: dict[str, Any],
    framed: Framed,
    landing: Landing,
    worker: Worker,
    announce: Callable[[StreamType, int], None],
) -> None:
    """Pass on an event; once the worker is ready, also how it is reached."""
    if event["event"] != "ready":
        framed.say(EVENT, event, {})
        return
    worker.apart = event["apart"]
    side = worker.side()
    framed.say(EVENT, event, {int(door): pair for door, pair in side.ports.items()})
    landing.open(side, announce)


def _here(task: Task, hints: Path, weights: int, staged: Path | None) -> Task:
    """Return a task as it is on this machine, which keeps no correlated randomness."""
    own = task.own | {"weights": weights, "disk_bytes": {}}
    pool_dir = None if staged is None else str(staged)
    return replace(task, own=own, hints_dir=str(hints), pool_dir=pool_dir)


def encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return contents of files as words have them."""
    return {name: base64.b64encode(data).decode() for name, data in files.items()}


def decoded(files: Mapping[str, str]) -> dict[str, bytes]:
    """Return contents of files out of words; PeerError where they are none."""
    try:
        return {name: base64.b64decode(data, validate=True) for name, data in files.items()}
    except (ValueError, AttributeError, TypeError):
        raise PeerError("words that are no files") from None
