"""The doors of a provider, one on each machine of its cluster but the front door's own. The front
door starts them, answers what clients ask there, and decides over their sessions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from spu_llm.cluster.actors import Actors
from spu_llm.cluster.bridge import Port
from spu_llm.cluster.delivering import delivery
from spu_llm.cluster.door import DoorPlan, Shown
from spu_llm.cluster.door_words import (
    ADMITTED,
    ALIVE,
    CALLS,
    ENDED,
    GO,
    LIFE,
    NOT_STORED,
    PARCEL,
    PLACED,
    RENEW,
    SESSION,
    SILENT_S,
    STOP,
    STORED,
    STRANGER,
    USAGE,
    certificate_of,
    error_of,
)
from spu_llm.cluster.framed import Framed
from spu_llm.cluster.holders import Holders
from spu_llm.cluster.hosting import decoded
from spu_llm.cluster.placing import Placing
from spu_llm.cluster.remote_worker import TIDY_S
from spu_llm.core.errors import (
    InputError,
    LimitError,
    PeerError,
    PoolError,
    SpuLlmError,
    WantedError,
    WorkerError,
)
from spu_llm.net.entrance import Met
from spu_llm.net.identity import Certificate, Identity, OneTime
from spu_llm.net.tls import TlsStream
from spu_llm.net.uplink import Counters
from spu_llm.offline.inbox import Parcel
from spu_llm.service import journal
from spu_llm.service.admission import Admitted
from spu_llm.service.journal import Log, Record, Session
from spu_llm.service.provider import ServeOptions
from spu_llm.service.supervisor import Look
from spu_llm.service.workers import Sessions

START_S = 60.0  # for a machine to open its door
AGAIN_S = 30.0  # until a machine that has lost its door, or opened none, is asked again
# For a door to tell a client how its session ended: then `provider.STOP_S` leaves time to log it.
LEFT_S = 6.0
ALIVE_S = 1.0  # between this end's signs of life to a door
_LOOK_S = 0.2
_MACHINES_S = 2.0  # between two looks at which machines there are
_EVERYWHERE = ("", "0.0.0.0", "::", "[::]")
# Errors whose words the client hears.
_TOLD = (LimitError, PeerError, WantedError)


@dataclass(eq=False)
class _Open:
    """A door that is open: its node, the address of its machine, its actor, where it reaches this
    process, and the address of the door. `life`: a connection that ends with the door; `shown`: the
    identity that it was last told, one at a time, under `telling`.
    """

    node: str
    machine: str
    actor: Any = None
    at: str = ""
    port: Port | None = None
    life: Framed | None = None
    shown: Shown | None = None
    telling: threading.Lock = field(default_factory=threading.Lock)


class Doors:
    """Keeps a door open on each machine that may run sessions, but on this process's own."""

    def __init__(
        self, actors: Actors, holders: Holders, options: ServeOptions, port: int, log: Log
    ) -> None:
        """Take the port of all doors; 0: each has one that is free."""
        self._actors, self._holders, self._log = actors, holders, log
        self._host, self._port, self._network = options.host, port, options.network
        self._identity = options.identity
        self._lock = threading.Lock()
        self._open: dict[str, _Open] = {}
        self._again: dict[str, float] = {}  # when a node is asked again

    def listen(self, sessions: Sessions) -> None:
        """Open the doors, and open more from here on where machines join. InputError where a
        machine that is there cannot open one.
        """
        self._sessions = sessions
        self._own_node, self._own_host = self._actors.own_place()
        errors = self._open_all()
        if errors:
            raise errors[0]
        threading.Thread(target=self._keep, name="doors", daemon=True).start()

    def renew(self, identity: Identity | None) -> None:
        """Have all doors meet clients as `identity` from here on; those that cannot are closed."""
        with self._lock:
            self._identity = identity
            doors = list(self._open.values())
        for door in doors:
            self._renew(door, again=True)

    def _renew(self, door: _Open, again: bool) -> None:
        """Tell a door whom it is to be by now; unless `again`, where it was told another one."""
        with door.telling:
            with self._lock:
                life, shown = door.life, Shown.of(self._identity)
            if life is not None and shown is not None and (again or shown != door.shown):
                door.shown = shown
                with suppress(PeerError):
                    life.say(RENEW, *map(str, astuple(shown)))

    def _keep(self) -> None:
        """Follow which machines there are, for as long as this process lives."""
        while True:
            time.sleep(_MACHINES_S)
            with suppress(Exception):  # of Ray's, too: the head may have gone
                for error in self._open_all():
                    self._tell(str(error))

    def _open_all(self) -> list[SpuLlmError]:
        """Open doors on machines that have none, all at a time, and forget those of machines that
        are gone; return why some could not be opened.
        """
        machines, now = self._actors.machines(), time.monotonic()
        with self._lock:
            gone = [door for node, door in self._open.items() if node not in machines]
            missing = [
                (node, machine)
                for node, machine in machines.items()
                if node not in self._open
                and node != self._own_node
                and self._again.get(node, 0.0) < now
            ]
        for door in gone:
            self._forget(door, "its machine was lost")
        errors: list[SpuLlmError] = []
        threads = [
            threading.Thread(target=self._try, args=(*one, errors), daemon=True) for one in missing
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self._lock:
            places = sorted(door.at for door in self._open.values())
        if len(missing) > len(errors):
            self._tell(f"producers' sessions come also to {', '.join(places)}")
        return errors

    def _try(self, node: str, machine: str, errors: list[SpuLlmError]) -> None:
        door = _Open(node, machine)
        try:
            door.actor = self._actors.door(node)
            self._opened(door)
        except Exception as exc:
            if door.actor is not None:
                self._actors.kill(door.actor)
            if door.port is not None:
                door.port.close()
            with self._lock:
                self._open.pop(node, None)
                self._again[node] = time.monotonic() + AGAIN_S
            why = f"no answer in {START_S:g} s" if isinstance(exc, TimeoutError) else str(exc)
            errors.append(InputError(f"machine {machine} of the cluster opens no port: {why}"))

    def _opened(self, door: _Open) -> None:
        actor, own = door.actor, OneTime.made()
        theirs = self._actors.answer(actor.certificate.remote(), START_S)

        def serve(framed: Framed, purpose: list[Any]) -> None:
            self._serve(door, framed, purpose)

        door.port = Port(self._own_host, own, theirs, serve)
        with self._lock:
            self._open[door.node] = door
            door.shown = Shown.of(self._identity)
        host = "0.0.0.0" if self._host in _EVERYWHERE else door.machine
        plan = DoorPlan(door.port.endpoint, host, self._port, self._network, door.shown)
        port = self._actors.answer(actor.open.remote(plan), START_S)
        door.at = f"{door.machine}:{port}"

    def _serve(self, door: _Open, framed: Framed, purpose: list[Any]) -> None:
        """Serve a connection of a door."""
        match purpose:
            case [kind] if kind == LIFE:
                self._live(door, framed)
            case [kind, peer, own, str(origin)] if kind == CALLS:
                framed.say(GO)
                stream = framed.stream()
                assert isinstance(stream, TlsStream)
                seen, shown = certificate_of(peer), certificate_of(own)
                self._sessions.start(Met(stream, stream, seen, shown, origin, door.machine))
            case [kind, str(ticket), peer, str(certificate), int(sent), int(received)] if (
                kind == SESSION
            ):
                client, moved = certificate_of(peer), Counters(sent, received)
                one = _AtDoor(self, door, framed, client, bytes.fromhex(ticket), certificate, moved)
                self._sessions.run_elsewhere(one)
            case _:
                raise PeerError("a connection for no purpose")

    def _live(self, door: _Open, framed: Framed) -> None:
        """Hear of a door's life to its end."""
        why = "it was lost"
        with self._lock:
            door.life = framed
        self._renew(door, again=False)  # it may be another one since the door was opened
        try:
            while True:
                match framed.hear():
                    case [kind, str(words)] if kind == STRANGER:
                        self._sessions.note_stranger(f"{words} (at {door.machine})")
                    case [kind, str(words)] if kind == ENDED:
                        why = words
                    case _:
                        raise PeerError("words that mean nothing")
        finally:
            self._forget(door, why)

    def _forget(self, door: _Open, why: str) -> None:
        """End a door, unless that was done already."""
        with self._lock:
            if self._open.get(door.node) is not door:
                return
            del self._open[door.node]
            self._again[door.node] = time.monotonic() + AGAIN_S
        self._tell(f"producers' sessions come no more to {door.at or door.machine}: {why}")
        if door.life is not None:
            door.life.close()
        if door.port is not None:
            door.port.close()
        self._actors.kill(door.actor)

    def _tell(self, words: str) -> None:
        with suppress(WantedError):  # an audit file that is full: nothing depends on this record
            self._log(Record(journal.MACHINES, words))

    def place(self, task: Any, supervisor: str, node: str, look: Look) -> Any:
        """Return where a session runs on a node (`Placing`)."""
        self._actors.check_closed()
        return Placing(self._actors, self._holders, task, supervisor, node).result(look)

    def release(self, host: Any) -> None:
        """End a session's actor, after a while in which its machine removes what it has of it."""
        ending = threading.Timer(TIDY_S, self._actors.kill, args=(host,))
        ending.daemon = True
        ending.start()

    def log(self, record: Record) -> None:
        """Log a record; WantedError where that cannot be done."""
        self._log(record)


class _AtDoor:
    """A session whose connection a door has (`workers.Elsewhere`)."""

    def __init__(
        self,
        doors: Doors,
        door: _Open,
        framed: Framed,
        client: Certificate | None,
        shown: bytes,
        supervisor: str,
        moved: Counters,
    ) -> None:
        """Take the connection to the door. supervisor: the certificate, in PEM form, that the door
        shows to the worker's machine; moved: bytes of the client's connection so far.
        """
        self.client, self.shown = client, shown
        self._supervisor, self._moved = supervisor, moved
        self._doors, self._door, self._framed = doors, door, framed
        self._memory = 0
        self._deliver: Callable[[Parcel], None] | None = None
        self._over = threading.Event()
        self._error: SpuLlmError | None = None
        self._heard_at, self._said_at, self._storing = time.monotonic(), 0.0, False
        threading.Thread(target=self._read, name="at-door", daemon=True).start()

    def snapshot(self) -> Counters:
        """See `Elsewhere.snapshot`."""
        return self._moved

    def memory_bytes(self) -> int:
        """See `Elsewhere.memory_bytes`."""
        return self._memory

    def run(
        self, session: Session, admitted: Admitted, look: Look, begin: Callable[[], None]
    ) -> None:
        """See `Elsewhere.run`."""

        def looks() -> None:
            look()
            self._say_alive()
            if self._over.is_set():
                raise self._error or WorkerError("the door ended a session that had not begun")
            if not self._storing and time.monotonic() > self._heard_at + SILENT_S:
                raise WorkerError(f"nothing is heard of machine {self._door.machine}")

        self._deliver = delivery(admitted.task)
        self._framed.say(ADMITTED, admitted.task.program)
        self._doors.log(journal.waiting(session))
        place = self._doors.place(admitted.task, self._supervisor, self._door.node, looks)
        try:
            self._doors.log(journal.placed(session, place.machine))
            begin()
            where, key = astuple(place.endpoint), place.hints.key.hex()
            self._framed.say(PLACED, asdict(admitted.task), place.machine, where, key)
            while not self._over.wait(_LOOK_S):
                looks()
            if self._error is not None:
                raise self._error
            self._framed.close()
        finally:
            self._memory = 0
            self._doors.release(place.host)

    def _say_alive(self) -> None:
        now = time.monotonic()
        if now > self._said_at + ALIVE_S:
            self._said_at = now
            with suppress(PeerError):  # which the reader sees, too
                self._framed.say(ALIVE)

    def refuse(self, error: SpuLlmError) -> None:
        """See `Elsewhere.refuse`; returns when the client has been told, or after a while."""
        told = isinstance(error, _TOLD)
        kind = type(error).__name__ if told else WorkerError.__name__
        with suppress(PeerError):
            self._framed.say(STOP, kind, str(error) if told else "the provider's worker failed")
            self._over.wait(LEFT_S)
        self._framed.close()

    def _read(self) -> None:
        try:
            while True:
                self._hear(self._framed.hear())
        except _Ended as ended:
            self._error = ended.error
        except Exception as exc:
            ours = isinstance(exc, PeerError)
            lost = "was lost" if ours else f"says what means nothing: {exc!r:.200}"
            self._error = WorkerError(f"the machine of this session {lost}: {self._door.machine}")
        self._over.set()

    def _hear(self, words: list[Any]) -> None:
        self._heard_at = time.monotonic()
        match words:
            case [kind, int(sent), int(received), int(memory)] if kind == USAGE:
                self._moved, self._memory = Counters(sent, received), memory
            case [kind, str(name), str(id_), files] if kind == PARCEL and self._deliver is not None:
                self._storing = True  # which may take a while
                try:
                    self._deliver(Parcel(name, id_, decoded(files)))
                except (PoolError, OSError) as exc:
                    self._framed.say(NOT_STORED, str(exc))
                else:
                    self._framed.say(STORED)
                finally:
                    self._heard_at, self._storing = time.monotonic(), False
            case [kind, str(error), str(why)] if kind == ENDED:
                raise _Ended(error_of(error, why) if error else None)
            case _:
                raise PeerError("words that mean nothing")


class _Ended(Exception):
    """The door says how the session ended; None: well."""

    def __init__(self, error: SpuLlmError | None) -> None:
        super().__init__()
        self.error = error
