"""What a door and the front door say to each other of a session, without Ray."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from spu_llm.cluster import door, doors
from spu_llm.cluster.actors import NO_ROOM
from spu_llm.cluster.bridge import Dialer, Endpoint, Port
from spu_llm.cluster.door import _AtFrontDoor
from spu_llm.cluster.door_words import certificate_of, error_of, words_of
from spu_llm.cluster.doors import _AtDoor
from spu_llm.core.errors import (
    BusyError,
    InputError,
    LimitError,
    PeerError,
    PoolError,
    WantedError,
    WorkerError,
)
from spu_llm.net.identity import OneTime
from spu_llm.net.uplink import Counters
from spu_llm.offline.inbox import Parcel
from spu_llm.service.task import Task
from tests.kit.patience import SOON_S, eventually

TASK = Task("provider", "preparation", {}, {"weights": 3}, 1000)
PLACE = SimpleNamespace(
    machine="10.0.0.2",
    host="the actor",
    endpoint=Endpoint("10.0.0.2", 9001, "a certificate"),
    hints=SimpleNamespace(key=b"key"),
)


@dataclass
class FakeDoors:
    """Places sessions without a cluster."""

    place_it: Callable[[Callable[[], None]], Any] = lambda look: PLACE
    released: list[Any] = field(default_factory=list)

    def place(self, task: Task, supervisor: str, node: str, look: Callable[[], None]) -> Any:
        return self.place_it(look)

    def release(self, host: Any) -> None:
        self.released.append(host)

    def log(self, record: Any) -> None:
        """Log nothing."""


class Both:
    """Both ends of one session."""

    def __init__(self) -> None:
        own, theirs = OneTime.made(), OneTime.made()
        self.doors = FakeDoors()
        met: queue.Queue[Any] = queue.Queue()
        self.port = Port(
            "127.0.0.1", own, theirs.certificate, lambda framed, purpose: met.put(framed)
        )
        framed = Dialer(theirs, self.port.endpoint).dial("session")
        relay: Any = SimpleNamespace(snapshot=lambda: Counters(5, 7))
        self.door = _AtFrontDoor(framed, relay)
        at: Any = SimpleNamespace(machine="10.0.0.2", node="n")
        doors: Any = self.doors
        self.front = _AtDoor(doors, at, met.get(timeout=SOON_S), None, b"", "", Counters())
        self.ended: queue.Queue[BaseException | None] = queue.Queue()

    def run(self, look: Callable[[], None] = lambda: None) -> None:
        """Run the front door's end on a thread, as the provider does."""

        def body() -> None:
            session: Any = SimpleNamespace(fields={})
            try:
                self.front.run(session, SimpleNamespace(task=TASK), look, lambda: None)  # type: ignore[arg-type]
                self.ended.put(None)
            except Exception as exc:
                self.front.refuse(exc)  # type: ignore[arg-type]
                self.ended.put(exc)

        threading.Thread(target=body, daemon=True).start()


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    with closing(made.port), closing(made.door):
        yield made


def test_a_session_is_placed_and_ends(both: Both) -> None:
    both.run()
    placed = both.door.placed(lambda: None)
    assert replace(placed.task, link=()) == TASK and placed.hints_key == b"key"
    assert placed.endpoint == PLACE.endpoint and placed.machine == PLACE.machine
    both.door.ended(None)
    assert both.ended.get(timeout=SOON_S) is None
    assert both.front.snapshot() == Counters(5, 7)
    assert both.doors.released == ["the actor"]


def test_an_end_in_error_is_told(both: Both) -> None:
    both.run()
    both.door.placed(lambda: None)
    both.door.ended(PeerError("the client has gone"))
    error = both.ended.get(timeout=SOON_S)
    assert type(error) is PeerError and str(error) == "the client has gone"


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (BusyError(NO_ROOM), BusyError(NO_ROOM)),
        (PeerError("another port"), PeerError("another port")),
        (InputError("/a/path"), WorkerError("the provider's worker failed")),
        (WorkerError("a secret"), WorkerError("the provider's worker failed")),
    ],
)
def test_a_session_that_is_not_placed(both: Both, error: Exception, heard: Exception) -> None:
    def place(look: object) -> Any:
        raise error

    both.doors.place_it = place
    both.run()
    with pytest.raises(type(heard)) as told:
        both.door.placed(lambda: None)
    assert str(told.value) == str(heard)
    both.door.ended(told.value)
    assert both.ended.get(timeout=SOON_S) is error


def test_a_session_over_its_limit_hears_so(both: Both) -> None:
    over = threading.Event()

    def look() -> None:
        if over.is_set():
            raise LimitError("an hour's bytes are used")

    both.run(look)
    both.door.placed(lambda: None)
    over.set()

    def stopped() -> bool:
        try:
            both.door._look()
        except LimitError as exc:
            return str(exc) == "an hour's bytes are used"
        return False

    assert eventually(stopped)
    both.door.ended(LimitError("an hour's bytes are used"))
    assert isinstance(both.ended.get(timeout=SOON_S), LimitError)


@pytest.mark.parametrize("full", [False, True])
def test_a_batch_is_stored_before_the_session_goes_on(both: Both, full: bool) -> None:
    stored: list[Parcel] = []

    def store(parcel: Parcel) -> None:
        if full:
            raise PoolError("no space is left")
        stored.append(parcel)

    both.run()
    both.door.placed(lambda: None)
    both.front._deliver = store
    parcel = Parcel("kind", "id", {"results.npy": b"\0\1"})
    if full:
        with pytest.raises(PoolError, match="no space is left"):
            both.door._deliver(parcel)
    else:
        both.door._deliver(parcel)
    assert stored == ([] if full else [parcel])


def test_a_front_door_that_is_gone_ends_it(both: Both) -> None:
    both.run()
    both.door.placed(lambda: None)
    both.front._framed.close()
    assert both.door._over.wait(SOON_S)
    with pytest.raises(WantedError, match="shutting down"):
        both.door._look()
    with pytest.raises(PoolError, match="does not take batches|has gone"):
        both.door._deliver(Parcel("kind", "id", {}))


def test_a_front_door_that_says_nothing_ends_it(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "SILENT_S", 1.0)
    monkeypatch.setattr(doors, "ALIVE_S", 0.1)
    stalls, stalled = threading.Event(), threading.Event()

    def look() -> None:
        if stalls.is_set():
            stalled.set()
            time.sleep(SOON_S)

    both.run(look)
    both.door.placed(lambda: None)
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        time.sleep(0.02)
        both.door._look()
    stalls.set()
    assert stalled.wait(SOON_S)

    def ended() -> bool:
        try:
            both.door._look()
        except WantedError as exc:
            return str(exc) == door.NO_ANSWER
        return False

    assert eventually(ended, SOON_S / 2)


def test_a_door_that_is_gone_ends_it(both: Both) -> None:
    both.run()
    both.door.placed(lambda: None)
    both.door.close()
    error = both.ended.get(timeout=SOON_S)
    assert isinstance(error, WorkerError) and "10.0.0.2" in str(error)


def test_a_certificate_passes_as_words() -> None:
    own = OneTime.made()
    certificate = own.pinning(own.certificate).own
    assert certificate_of(words_of(certificate)) == certificate
    assert certificate_of(words_of(None)) is None
    with pytest.raises(PeerError):
        certificate_of(["one", 2])


def test_an_error_of_no_kind_is_the_worker_s() -> None:
    assert type(error_of("SystemExit", "words")) is WorkerError
    assert type(error_of("BusyError", "words")) is BusyError
