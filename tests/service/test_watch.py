"""What counts as progress of a session, and which deadline ends it."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spu_llm.core.errors import SpuLlmError, StalledError, WorkerError
from spu_llm.service import programs, supervisor
from spu_llm.service import watch as watch_module
from spu_llm.service.supervisor import Worker
from spu_llm.service.watch import COMPUTED_S, SILENT_S, STALL_S, WAIT_S, Watch
from tests.kit.patience import eventually

BEAT_S = 2.0
IDLE = 0.0013  # CPU seconds per second of a worker that only waits


@dataclass
class Session:
    """A watched session whose clock, worker and peer the test plays."""

    now: float = 1000.0
    cpu_s: float = 5.0
    sent: int = 0
    progress: int = 0  # of this side, as its supervisor tells the peer
    peer_progress: int = 3
    finished: int = 0
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.relay = SimpleNamespace(snapshot=lambda: SimpleNamespace(payload_bytes_sent=self.sent))
        self.watch = Watch(self, lambda: self.cpu_s)  # type: ignore[arg-type]

    def run(self, seconds: float, *, alive: bool = True, **per_second: float) -> float:
        """Beat by beat, with these attributes growing; seconds until an error ends it."""
        began = self.now
        while self.now - began < seconds:
            self.now += BEAT_S
            self.cpu_s += IDLE * BEAT_S
            for name, rate in per_second.items():
                setattr(self, name, getattr(self, name) + rate * BEAT_S)
            event = {"event": "alive", "finished": int(self.finished)}
            self.watch.look(event if alive else None)
        return self.now - began


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    made: list[Session] = []
    clock = SimpleNamespace(monotonic=lambda: made[0].now if made else 1000.0)
    monkeypatch.setattr(watch_module, "time", clock)
    made.append(Session())
    return made[0]


def ended(session: Session, error: type[SpuLlmError], **how: Any) -> float:
    began = session.now
    with pytest.raises(error):
        session.run(10 * WAIT_S, **how)
    return session.now - began


def test_signs_of_life_are_no_progress(session: Session) -> None:
    assert STALL_S < ended(session, StalledError) <= STALL_S + 2 * BEAT_S
    assert session.progress == 0


@pytest.mark.parametrize(
    "work", [{"finished": 0.01}, {"sent": 0.01}, {"cpu_s": 1.5 * COMPUTED_S / STALL_S}], ids=str
)
def test_a_slow_worker_goes_on(session: Session, work: dict[str, float]) -> None:
    session.run(10 * WAIT_S, **work)
    assert session.progress > 0


def test_a_peer_that_gets_on_is_waited_for_and_not_for_ever(session: Session) -> None:
    waited = ended(session, StalledError, peer_progress=1 / BEAT_S)
    assert WAIT_S < waited <= WAIT_S + 2 * BEAT_S
    assert session.progress == 0  # the peer's is not passed back to it as ours


def test_progress_starts_the_deadline_again(session: Session) -> None:
    for _ in range(3):
        session.run(STALL_S - 2 * BEAT_S)
        session.finished += 1
    assert STALL_S < ended(session, StalledError) <= STALL_S + 3 * BEAT_S


def test_a_frozen_process_is_told_apart(session: Session) -> None:
    waited = ended(session, WorkerError, alive=False, peer_progress=1.0)
    assert SILENT_S < waited <= SILENT_S + 2 * BEAT_S


def test_a_compiler_may_hold_up_the_signs_of_life(session: Session) -> None:
    session.run(10 * SILENT_S, alive=False, cpu_s=0.5)


def test_a_worker_s_cpu_time_is_read_from_outside() -> None:
    worker = Worker(programs.place_of("completion"))
    try:
        # It computes as it imports, and then waits for a job.
        assert eventually(lambda: worker.cpu_s() > 0.05, 20)
        while (event := worker.next_event(30)) is not None and event["event"] != "ready":
            pass
        before = worker.cpu_s()
        time.sleep(1)
        assert worker.cpu_s() - before < 0.5
    finally:
        worker.stop()
    assert worker.cpu_s() == 0.0
    assert isinstance(worker.death(), WorkerError) and worker.killed


def test_only_a_worker_killed_from_outside_counts_as_killed() -> None:
    worker = Worker(programs.place_of("completion"))
    assert worker._process.stdin is not None
    worker._process.stdin.close()  # it ends by itself
    try:
        worker._process.wait(30)
    except subprocess.TimeoutExpired:
        raise AssertionError("the worker did not end with its input") from None
    finally:
        assert not worker.killed
        worker.stop()


def test_a_worker_that_floods_its_supervisor_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one event that never ends, or by more events than anybody looks at."""
    for name, most in (("MAX_EVENT_BYTES", 8), ("MAX_EVENTS", 0)):
        with monkeypatch.context() as patched:
            patched.setattr(supervisor, name, most)
            worker = Worker(programs.place_of("completion"))
            try:
                with pytest.raises(WorkerError, match="signal 9"):
                    worker.next_event(30)
                assert worker.killed
            finally:
                worker.stop()


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("no thread")])
def test_a_worker_that_cannot_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []

    class Threadless(threading.Thread):
        def start(self) -> None:
            raise error

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *how: Any, **settings: Any) -> None:
            if isinstance(error, OSError):
                raise error
            super().__init__(*how, **settings)
            started.append(self)

    monkeypatch.setattr(supervisor.threading, "Thread", Threadless)
    monkeypatch.setattr(supervisor.subprocess, "Popen", Noted)
    with pytest.raises(WorkerError, match="could not be started: .*(open files|no thread)"):
        Worker(programs.place_of("completion"))
    assert not list(tmp_path.iterdir())
    assert [process.wait(10) for process in started] == [-9] * len(started)
    assert len(started) == isinstance(error, RuntimeError)


def test_a_worker_without_a_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, which has no room for another folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(WorkerError, match="temporary files: .*free some space"):
        Worker(programs.place_of("completion"))
