"""The worker process: SPU and the program of one party and one session.

Started by a supervisor as `python -m spu_llm.service.worker START`, a `Start` in JSON. Reads one
task (a JSON line) from standard input, and what its user says meanwhile, and writes events (JSON
lines) to standard output; over a
descriptor it hands over its connections (`spu_llm.net.worker_side`). It dies with its supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from spu_llm.core.errors import PeerError, PoolError, RangeError, SpuLlmError
from spu_llm.core.jax_settings import settle
from spu_llm.core.values import ROLES
from spu_llm.net.manifest import JOBS, SESSION
from spu_llm.net.stream_channel import Channels
from spu_llm.net.worker_side import hand_over, leave_network
from spu_llm.service.calls import confine_calls
from spu_llm.service.confine import confine_files, die_with_parent, drop_rights
from spu_llm.service.store_door import StoreBehindDoor
from spu_llm.service.task import Start, Task
from spu_llm.systems.program import Hear, Job, Program

if TYPE_CHECKING:
    from spu_llm.offline.silent.products import Receiving
    from spu_llm.runtime.party_session import PartySession

HINTS_WANTED, HINTS_RECEIVED = "hints wanted", "hints received"  # events for `service.hint_room`
ANSWER = "answer"  # what the supervisor says to what was asked, among what it says
ALIVE_S = 2.0  # between signs of life


class Events:
    """JSON lines to the supervisor; anything else printed in this process goes to stderr."""

    def __init__(self) -> None:
        self._out: IO[str] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        os.dup2(2, 1)
        self.finished: Callable[[], int] = lambda: 0  # messages and work of the thread that works
        self.answer: Callable[[], Any]  # to what was asked

    def send(self, event: str, **fields: Any) -> None:
        with self._lock:
            self._out.write(json.dumps({"event": event, **fields}) + "\n")
            self._out.flush()

    def ask(self, event: str, **fields: Any) -> Any:
        """Send an event that the supervisor answers; return the answer."""
        self.send(event, **fields)
        return self.answer()

    def show_life(self) -> None:
        """Tell the supervisor every ALIVE_S that this process is not frozen, and how far it is."""

        def beat() -> None:
            while True:
                time.sleep(ALIVE_S)
                self.send("alive", finished=self.finished())

        threading.Thread(target=beat, daemon=True).start()


class Said:
    """The JSON lines that the supervisor writes after the task; when its end closes, this process
    ends, since SPU cannot be interrupted otherwise.
    """

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """Return what is said next, or None when nothing is within that time."""
        try:
            return self._said.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def answer(self) -> Any:
        """Wait for the answer to what this process has asked, and return it."""
        return self._answers.get()

    def _read(self) -> None:
        for line in sys.stdin:
            said = json.loads(line)
            if ANSWER in said:
                self._answers.put(said[ANSWER])
            else:
                self._said.put(said)
        os._exit(1)


def main() -> None:
    """Run one task; exit code 0 also after a reported error (the event says which)."""
    apart = leave_network()  # before there is another thread
    die_with_parent()
    drop_rights()
    settle()
    start = Start.of(sys.argv[1])
    if start.confined:
        writes = *start.writes, tempfile.gettempdir()
        confine_files(*(map(Path, paths) for paths in (start.reads, writes, start.lists)))
    events = Events()
    program = preload(start.program)
    with socket.socket(fileno=start.channel) as channel:
        if apart:
            hand_over(channel.dup())
    if start.confined:
        confine_calls()
    events.send("ready", apart=apart)
    line = sys.stdin.readline()
    if not line:
        return
    said = Said()
    events.answer = said.answer
    events.show_life()
    try:
        task = Task.of_line(line)
        events.send("result", **run_task(program, task, events, said.next, start.objects))
    except SpuLlmError as exc:
        of_link = isinstance(exc, PeerError)  # perhaps only a symptom of how the peer ended
        events.send(
            "error",
            message=str(exc),
            exit_code=exc.exit_code,
            of_link=of_link,
            of_ranges=isinstance(exc, RangeError),
        )
    except RuntimeError as exc:  # SPU's own errors: the link broke or a program cannot run
        message = f"SPU failed: {_first_line(exc)}"
        events.send("error", message=message, exit_code=1, of_link=True, of_ranges=False)
    except Exception:  # one of this program's own: its last line is what the supervisor says
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    finally:
        sys.stdout.flush()
    # SPU's link threads may outlive the peer; everything of worth has been sent.
    os._exit(0)


def preload(place: str) -> Program:
    """Return the program's record; imports what is slow, while the supervisors shake hands."""
    import scipy.fft  # noqa: F401

    from spu_llm.service import agreeing, programs  # noqa: F401

    program = programs.load(place)
    program.load()
    return program


def run_task(
    program: Program, task: Task, events: Events, hear: Hear, objects: int | None = None
) -> dict[str, Any]:
    """Link up with the peer's worker and run the agreed program; return its result. `objects`: the
    descriptor of the door to object storage, if there is one.
    """
    from spu_llm.service.agreeing import job_of

    assert task.program == program.name
    job = job_of(program, task)
    events.send("stage", name="connecting")
    run = _run_plain if program.spu is None else partial(_run_on_spu, objects=objects)
    rank, timeout_s = ROLES.index(task.role), task.timeout_ms / 1000
    with Channels(rank, task.messages, timeout_s) as channels:
        return run(program, job, task, events, channels, hear)


def _run_plain(
    program: Program, job: Job[Any, Any], task: Task, events: Events, channels: Channels, hear: Hear
) -> dict[str, Any]:
    from spu_llm.service.plain_session import PlainSession

    session = PlainSession(ROLES.index(task.role), channels.open(), task.agreed[SESSION])
    events.finished = lambda: session.finished
    result = _run(program, session, job, events, hear)
    session.close()
    return result


def _run(
    program: Program, session: Any, job: Job[Any, Any], events: Events, hear: Hear
) -> dict[str, Any]:
    heard = [hear] if program.hears else []
    return program.load()(session, job, events.send, *heard)


def _run_on_spu(
    program: Program,
    job: Job[Any, Any],
    task: Task,
    events: Events,
    channels: Channels,
    hear: Hear,
    objects: int | None,
) -> dict[str, Any]:
    session = _spu_session(program, job, task, events, channels, objects)
    try:
        events.send("stage", name="preparing")
        with session.meter.in_phase("offline"):
            session.warm_up()
        result = _run(program, session, job, events, hear)
    except SpuLlmError:
        # What nobody has used yet serves the next session.
        with contextlib.suppress(PoolError):
            session.preprocessing.pool.close()
        raise
    session.close()
    return result


def _spu_session(
    program: Program,
    job: Job[Any, Any],
    task: Task,
    events: Events,
    channels: Channels,
    objects: int | None = None,
) -> PartySession:
    from spu_llm.offline.stock import Budget
    from spu_llm.runtime.party_session import PartySession, SessionOptions
    from spu_llm.runtime.spu_runtime import create_link
    from spu_llm.service.agreeing import pool_ids

    assert program.spu is not None
    link = create_link(ROLES.index(task.role), task.link, timeout_ms=task.timeout_ms)
    kept_in = None if task.pool_dir is None else Path(task.pool_dir)
    beside = program.beside(job.request)
    pool_dir, inbox_dir = (None, kept_in) if beside else (kept_in, None)
    hints_dir = _hints_directory(task, events) if program.keeps_hints else None
    held = {} if job.of_provider is None else job.of_provider.disk_bytes
    budgets = [Budget(Path(directory), limit) for directory, limit in held.items()]
    met = pool_ids(task.role, task.agreed)
    options = SessionOptions(
        pool_dir=pool_dir,
        inbox_dir=inbox_dir,
        budgets=budgets,
        objects=None if objects is None else StoreBehindDoor(objects),
        outside=program.needs_pool,
        hints_dir=hints_dir,
        receiving=_receiving(events, task.hints_dir is not None and program.keeps_hints),
        jobs=task.agreed[JOBS],
        session=task.agreed[SESSION],
        met=met,
        on_batch=lambda made, total: events.send("making", made=made, total=total),
        on_hint=lambda done, total: events.send("hint", done=done, total=total),
    )
    config = program.spu.computing(job.backend)
    session = PartySession(link, config, options, open_channel=channels.open)
    events.finished = lambda: session.finished
    if met[0] and kept_in is None:
        events.send(
            "note", text="the other party keeps no correlated randomness: --pool has no effect"
        )
    return session


def _hints_directory(task: Task, events: Events) -> Path | None:
    """Return where hints are kept, or None where that cannot be."""
    from spu_llm.offline.durable import open_folder

    if task.hints_dir is None:
        return None
    directory = Path(task.hints_dir)
    try:
        open_folder(directory.parent)
        open_folder(directory)
    except PoolError as exc:
        events.send("note", text=f"hints of the model are not kept for the next session: {exc}")
        return None
    return directory


def _receiving(events: Events, asks: bool) -> Receiving:
    """Return what makes room for hints (`silent.products`): the supervisor, which alone sees what
    hints of other providers take (`service.hint_room`). `asks`: it keeps hints; else they are in
    memory.
    """

    @contextlib.contextmanager
    def receiving(wanted: Sequence[tuple[str, int]]) -> Iterator[bool]:
        keep = asks and bool(events.ask(HINTS_WANTED, hints=wanted))
        try:
            yield keep
        finally:
            if asks:
                events.send(HINTS_RECEIVED)

    return receiving


def _first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines()]
    said = [line for line in lines if line and line != "what:"]
    return said[0][:300] if said else type(exc).__name__


if __name__ == "__main__":
    main()
