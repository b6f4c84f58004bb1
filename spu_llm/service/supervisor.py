"""One party's side of a session: handshake, worker process, relay, and who tells whom what failed.

The supervisor does not run SPU. It owns the connection to the peer and the worker; whatever
ends first, it stops the rest within seconds and says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from spu_llm.core import blas
from spu_llm.core.errors import (
    InputError,
    LimitError,
    PeerError,
    PoolError,
    RangeError,
    SpuLlmError,
    StalledError,
    WantedError,
    WorkerError,
)
from spu_llm.core.values import CLIENT, PROVIDER, ROLES
from spu_llm.net.control import Control
from spu_llm.net.frames import StreamType
from spu_llm.net.loopback import HOST
from spu_llm.net.worker_side import Apart, Loopback, WorkerSide
from spu_llm.offline.durable import open_folder
from spu_llm.offline.sealed_objects import ObjectStore
from spu_llm.service.store_door import StoreDoor
from spu_llm.service.task import Start, Task
from spu_llm.service.watch import Watch

HANDSHAKE_S = 10.0
WORKER_START_S = 120.0
AFTER_PEER_S = 30.0  # for our half, once the peer has finished its own
# For the peer to say how it ended, where its end may be the cause of what is seen here. Who lost a
# worker speaks first: the other one's link has failed because of it.
DEATH_WORD_S = 2.0
_LEFT_RANGES = "activations left their ranges"  # what both know, as a goodbye
LINK_WORD_S = 5.0
STDERR_KEPT = 4000

# What a worker gets of the environment: where programs, packages and files of this user are, how
# text and times are written, how much the libraries take, and what tests say to their stub.
_KEPT = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "LANGUAGE",
        "TZ",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONUTF8",
        "PYTHONIOENCODING",
        "PYTHONDONTWRITEBYTECODE",
        "XDG_CACHE_HOME",
        "MALLOC_ARENA_MAX",
        "GLIBC_TUNABLES",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "SPU_LLM_STUB",
        "SPU_LLM_TEST_COMMAND",
    }
)

MAX_EVENT_BYTES = 1 << 28  # of one event: a study's result may hold many logits
MAX_EVENTS = 10_000  # that the supervisor has not looked at

OnEvent = Callable[[dict[str, Any]], None]
Look = Callable[[], None]  # several times a second; what it raises ends the session


def python_command(module: str) -> list[str]:
    """Return the command that runs `module.main()` with this process's import path.

    `python -m` would search the working directory first, where any `models` folder shadows ours.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main()"
    return [sys.executable, "-c", code]


def kept_folders(hints: Path, correlations: Path | None) -> list[Path]:
    """Make the folders in which a worker keeps what outlives a session, and return them: hints, and
    correlated randomness with its peer. PoolError when there can be no such correlated randomness.
    """
    with contextlib.suppress(PoolError):  # the worker says so
        open_folder(hints.parent)
        open_folder(hints)
    if correlations is None:
        return [hints]
    open_folder(correlations)
    return [hints, correlations]


class SessionWorker(Protocol):
    """The worker of a session, as its supervisor sees it: `Worker`, or one on another machine
    (`spu_llm.cluster`). `apart`: in a network namespace of its own. `killed`: it ended by what no
    broken link does.
    """

    apart: bool

    @property
    def killed(self) -> bool: ...
    def side(self) -> WorkerSide: ...
    def submit(self, task: Task) -> None: ...
    def next_event(self, timeout_s: float) -> dict[str, Any] | None: ...
    def cpu_s(self) -> float: ...
    def memory_bytes(self) -> int: ...
    def stop(self) -> None: ...
    def wait(self, timeout_s: float) -> None: ...


class Worker:
    """The worker process for a program, and its events."""

    def __init__(
        self,
        program: str,
        inherits: Sequence[int] = (),
        *,
        reads: Sequence[Path] = (),
        writes: Sequence[Path] = (),
        lists: Sequence[Path] = (),
        confined: bool = True,
        objects: ObjectStore | None = None,
    ) -> None:
        """Start the worker. `program`: the place of its record (`programs.place_of`). `inherits`:
        descriptors that it gets, under the same numbers. `reads`, `writes`, `lists`: files and
        directories that it needs (`confine`), beside the system's and Python's; unless it is
        `confined` it has all that this user has. `objects`: where results of its peer's batches
        are kept beside the disk. WorkerError when there is no place for its temporary files, or
        when this process can have no more processes, threads or descriptors.
        """
        try:
            self._folder = tempfile.mkdtemp(prefix="spu-llm-")
        except OSError as exc:
            why = exc.strerror or exc
            raise WorkerError(
                f"no folder for the worker's temporary files: {why}; free some space, or set TMPDIR"
            ) from exc
        self.apart = False  # in a network namespace of its own, as it says when it is ready
        self._asked = False  # for its side, which then owns the channel
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._stderr = b""
        try:
            with ExitStack() as undone:
                undone.callback(shutil.rmtree, self._folder, ignore_errors=True)
                self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undone.callback(self._channel.close)
                with theirs:
                    self._door = None if objects is None else StoreDoor(objects)
                    if self._door is not None:
                        undone.callback(self._door.close)
                    passed = [] if self._door is None else [self._door.theirs.fileno()]
                    start = Start(
                        program,
                        theirs.fileno(),
                        _names(reads),
                        _names(writes),
                        _names(lists),
                        confined,
                        objects=passed[0] if passed else None,
                    )
                    self._process = subprocess.Popen(
                        [*python_command("spu_llm.service.worker"), start.argument()],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        pass_fds=[theirs.fileno(), *passed, *inherits],
                        env=_environment() | {"TMPDIR": self._folder},
                        # A Ctrl-C at the terminal is the supervisor's to handle.
                        start_new_session=True,
                    )
                undone.callback(self._process.kill)
                threading.Thread(target=self._read_events, daemon=True).start()
                self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
                self._stderr_reader.start()
                undone.pop_all()
        except (OSError, RuntimeError) as exc:
            raise WorkerError(f"the worker process could not be started: {exc}") from exc
        if self._door is not None:
            self._door.theirs.close()

    def side(self) -> WorkerSide:
        """Return how the worker is reached, once it is ready; called once."""
        if not self.apart:
            return Loopback()
        self._asked = True
        return Apart(self._channel)

    def submit(self, task: Task) -> None:
        self._write(task.line())

    def tell(self, **said: Any) -> None:
        """Send words to a program that listens; WorkerError when the worker has died."""
        self._write(json.dumps(said).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (OSError, ValueError) as exc:
            raise self.death() from exc

    def next_event(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next event, None after `timeout_s`; WorkerError when the worker has died."""
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if event is None:
            raise self.death()
        return event

    def cpu_s(self) -> float:
        """Return the CPU time that the worker has used so far, in seconds; 0 once it has gone."""
        try:
            with open(f"/proc/{self._process.pid}/stat") as file:
                user, system = file.read().rpartition(")")[2].split()[11:13]
        except OSError:
            return 0.0
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Return the memory that the worker has for itself, in bytes; 0 once it has gone."""
        try:
            with open(f"/proc/{self._process.pid}/statm") as file:
                _, resident, shared, *_ = map(int, file.read().split())
                return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0

    @property
    def killed(self) -> bool:
        """Return whether the worker was killed from outside, which no broken link does."""
        return self._process.poll() == -signal.SIGKILL

    def death(self) -> WorkerError:
        """Return how the worker ended, with its last words: for this party's eyes only."""
        code = self._process.wait()
        self._stderr_reader.join(1.0)
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        last = f": {lines[-1][:300]}" if lines else ""
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return WorkerError(f"the worker process ended early ({how}){last}")

    def stop(self) -> None:
        """Kill the worker if it still runs; safe to call again."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)  # which follows no link of the worker's
        if not self._asked:
            self._channel.close()
        if self._door is not None:
            self._door.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def wait(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()

    def _read_events(self) -> None:
        """Read events until the worker ends. One that sends more than its supervisor can have in
        memory is killed: it may be its peer's by now.
        """
        assert self._process.stdout is not None
        try:
            while line := self._process.stdout.readline(MAX_EVENT_BYTES):
                if len(line) == MAX_EVENT_BYTES or self._events.qsize() >= MAX_EVENTS:
                    self._process.kill()
                    break
                self._events.put(json.loads(line))
        except (ValueError, RecursionError):
            pass  # closed by `stop`, cut off in the middle of a line, or no event
        finally:
            self._events.put(None)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        try:
            while data := self._process.stderr.read1(4096):  # type: ignore[attr-defined]
                self._stderr = (self._stderr + data)[-STDERR_KEPT:]
        except ValueError:
            pass


def _environment() -> dict[str, str]:
    """Return what a worker may know of this process's environment, which may hold secrets."""
    return blas.settings() | {
        name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("LC_")
    }


def _names(paths: Sequence[Path]) -> tuple[str, ...]:
    return tuple(str(path.absolute()) for path in paths)


@dataclass(frozen=True)
class SessionOutcome:
    """A finished session: the worker's result and the relay's wire counters."""

    result: dict[str, Any]
    wire_sent: int
    wire_received: int


def run_session(
    control: Control,
    worker: SessionWorker,
    task: Task,
    on_event: OnEvent,
    look: Look = lambda: None,
    begin: Callable[[], None] = lambda: None,
) -> SessionOutcome:
    """Run `task` in `worker` over an agreed session; the caller closes both afterwards. begin: when
    both parties are ready, before the worker gets the task; what it raises ends the session.

    PeerError, WorkerError, StalledError or the worker's own error, whichever ended the session; the
    peer is told who failed unless it was itself, but not how: a worker's words may quote its
    secrets.
    """
    try:
        _wait_ready(control, worker, look)
        side = worker.side()
        try:
            control.relay.open_worker_side(side)
        except PeerError:
            control.check()  # the peer's goodbye says more than that it has ended
            raise
        order = 1 if task.role == ROLES[CLIENT] else -1
        link, messages = (
            side.ports[door][::order] for door in (StreamType.LINK, StreamType.MESSAGES)
        )
        task = replace(
            task, link=tuple(f"{HOST}:{port}" for port in link), messages=messages[PROVIDER]
        )
        begin()
        worker.submit(task)
        result = _follow(control, worker, on_event, look)
        worker.wait(5.0)
        counters = control.relay.snapshot()
        control.bye("finished", ok=True)
        return SessionOutcome(result, counters.wire_bytes_sent, counters.wire_bytes_received)
    except BaseException as exc:
        worker.stop()
        match exc:
            case PeerError():
                control.close()
            case StalledError() | WantedError() | LimitError():
                control.bye(str(exc), ok=False)
            case RangeError():
                # The peer's worker may still need this one's last message to say where.
                control.bye(_LEFT_RANGES, ok=False, data_first=True)
            case SpuLlmError():
                control.bye(f"the {task.role}'s worker failed", ok=False)
            case _:
                control.bye("interrupted", ok=False)
        raise


def _wait_ready(control: Control, worker: SessionWorker, look: Look) -> None:
    deadline = time.monotonic() + WORKER_START_S
    while (event := worker.next_event(0.2)) is None:
        control.check()
        look()
        if time.monotonic() > deadline:
            raise WorkerError(f"the worker process did not start within {WORKER_START_S:g} s")
    assert event["event"] == "ready"
    worker.apart = event["apart"]


def _check_peer(control: Control, worker: SessionWorker) -> None:
    """Raise what ended the session at the peer. Where activations left their ranges, both workers
    end by it, and this one's own words, which come soon, say more.
    """
    bye = control.peer_bye
    if bye is not None and not bye.ok and bye.reason == _LEFT_RANGES:
        deadline = time.monotonic() + DEATH_WORD_S
        with contextlib.suppress(WorkerError):  # it has died without a word
            while (left := deadline - time.monotonic()) > 0:
                event = worker.next_event(min(left, 0.2))
                if event is not None and event["event"] == "error" and event["of_ranges"]:
                    raise RangeError(event["message"])
    control.check()


def _follow(
    control: Control, worker: SessionWorker, on_event: OnEvent, look: Look
) -> dict[str, Any]:
    """Pass on the worker's events until its result; it must get on and not outlast the peer."""
    watch = Watch(control, worker.cpu_s)
    peer_finished: float | None = None
    while True:
        try:
            event = worker.next_event(0.2)
        except WorkerError:
            # SPU exits when its link breaks: then the peer's end is the cause, ours the symptom.
            control.ended.wait(0.0 if worker.killed else DEATH_WORD_S)
            control.check()
            raise
        now = time.monotonic()
        if control.ended.is_set():
            peer_finished = peer_finished or now
            if now - peer_finished > AFTER_PEER_S:
                raise PeerError("the peer finished, but this party's half did not")
        watch.look(event)
        if event is None or event["event"] == "alive":
            _check_peer(control, worker)  # which may come to its end first, its half done
        elif event["event"] == "result":
            return event
        elif event["event"] == "error":
            if event["of_ranges"]:
                raise RangeError(event["message"])
            control.ended.wait(LINK_WORD_S if event["of_link"] else 0.0)
            control.check()
            error = InputError if event["exit_code"] == 2 else WorkerError
            raise error(event["message"])
        else:
            on_event(event)
        look()
