"""A door: a port of the provider on another machine than the front door's, for producers' sessions.

A client's producer connects to it as to the front door, and meets the same identity, which the door
reads from its machine's disk. The front door decides all: the door passes a client's calls on to
it as they are, asks it for a session when a ticket is shown, and supervises that session, whose
worker runs on the door's machine. The session's bytes do not pass the front door; its batches do,
as parcels for the front door's pool. The door keeps nothing, and ends with the front door.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from spu_llm.cluster.bridge import Dialer, Endpoint
from spu_llm.cluster.door_words import (
    ADMITTED,
    ALIVE,
    CALLS,
    ENDED,
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
    error_of,
    words_of,
)
from spu_llm.cluster.framed import Framed
from spu_llm.cluster.hosting import encoded
from spu_llm.cluster.remote_worker import RemoteWorker
from spu_llm.core.errors import (
    BusyError,
    InputError,
    PeerError,
    PoolError,
    SpuLlmError,
    WantedError,
)
from spu_llm.core.freed import give_back
from spu_llm.net.control import Control
from spu_llm.net.entrance import Entrance, Met
from spu_llm.net.identity import Identity, OneTime, load
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import shape_of
from spu_llm.net.stream import ByteStream, Metered, listen
from spu_llm.offline.inbox import Parcel
from spu_llm.service import listening, programs
from spu_llm.service.listening import UNADMITTED_BYTES, Callers, Strangers
from spu_llm.service.supervisor import HANDSHAKE_S, run_session
from spu_llm.service.task import Task

USAGE_S = 0.5  # between reports of what a session uses, which are signs of life
STORED_S = 60.0  # for the front door to store a batch
LEFT_S = 5.0  # for it to hear how a session ended
GO_S = 5.0  # for it to take a connection for calls
CALLS_S = 15.0  # of a connection for calls, whatever either end does or does not
NO_ANSWER = "the provider's front door does not answer"
CLOSED_S = 1.0  # for the port to be closed
_LOOK_S = 0.2
_CHUNK = 64 << 10
_T = TypeVar("_T")


@dataclass(frozen=True)
class Shown:
    """Identity of the front door, which a door must have, too: where it is on each machine's disk,
    the fingerprint of its certificate, and whom it trusts, in PEM form.
    """

    directory: Path
    trust: Path
    fingerprint: str
    anchors: str

    @staticmethod
    def of(identity: Identity | None) -> Shown | None:
        """Return what a door is told of an identity; None in the clear."""
        if identity is None:
            return None
        at, trust = identity.directory.absolute(), identity.trust.absolute()
        return Shown(at, trust, identity.own.fingerprint, identity.anchors)

    def here(self) -> Identity:
        """Return the identity as this machine has it. InputError where it has another one, trusts
        others, or has none.
        """
        own = load(self.directory, self.trust)
        if own.own.fingerprint != self.fingerprint:
            raise InputError(f"{own.chain} is another certificate than the front door's")
        if own.anchors != self.anchors:
            raise InputError(f"{self.trust} holds other certificates than at the front door")
        return own


@dataclass(frozen=True)
class DoorPlan:
    """Plan of a door: where it reaches the front door, where it listens (port 0: any that is
    free), the network that is emulated, and who it is; None: clients come in the clear.
    """

    front_door: Endpoint
    host: str
    port: int
    network: str
    shown: Shown | None


class Door:
    """A door, in a process of its own. All methods return soon."""

    def __init__(self) -> None:
        self._own = OneTime.made()

    def certificate(self) -> str:
        """Return the certificate by which the front door knows this door, in PEM form."""
        return self._own.certificate

    def open(self, plan: DoorPlan) -> int:
        """Let clients in, and return the port. InputError where this machine has another identity
        than the front door, or the port is taken; PeerError where it cannot reach the front door.
        """
        identity = None if plan.shown is None else plan.shown.here()
        try:
            listener = listen(plan.host, plan.port)
        except InputError as exc:
            raise InputError(str(exc).replace("--listen", "--node-port")) from None
        self._network = plan.network
        self._dialer = Dialer(self._own, plan.front_door)
        self._life = self._dialer.dial(LIFE)
        self._callers = Callers(self._run)
        self._refused = Strangers(self._say).refused
        self._entrance = Entrance(listener, identity, self._refused)
        port = int(listener.getsockname()[1])
        self._over = threading.Event()
        self._listening = threading.Thread(target=self._listen, name="door", daemon=True)
        self._listening.start()
        threading.Thread(target=self._live, name="life", daemon=True).start()
        return port

    def _say(self, words: str) -> None:
        with suppress(PeerError):
            self._life.say(STRANGER, words)

    def _listen(self) -> None:
        try:
            with closing(self._entrance) as entrance:
                listening.listen(
                    entrance, self._callers.start, exit_with_parent=False, over=self._over.is_set
                )
        except BaseException:
            os._exit(1)

    def _live(self) -> None:
        """Meet clients as the front door does; end this process with it, or where that cannot be
        done, so that nobody is let in whom it does not trust any more.
        """
        why = "the front door has gone"
        try:
            while True:
                match self._life.hear():
                    case [kind, str(directory), str(trust), str(print_), str(anchors)]:
                        assert kind == RENEW
                        shown = Shown(Path(directory), Path(trust), print_, anchors)
                        self._entrance.renew(shown.here())
                    case other:
                        raise PeerError(f"words that mean nothing: {other!r:.80}")
        except SpuLlmError as exc:
            why = str(exc)
        finally:
            # First the port, which another door may take as soon as the front door knows.
            self._over.set()
            self._listening.join(CLOSED_S)
            with suppress(PeerError):
                self._life.say(ENDED, why)
                time.sleep(_LOOK_S)
            os._exit(1)

    def _run(self, met: Met) -> None:
        with suppress(SpuLlmError):  # the front door has said so
            if met.for_calls:
                self._pass_on(met)
            else:
                self._serve(met)

    def _pass_on(self, met: Met) -> None:
        """Pass a client's calls on to the front door, which says whose they are."""
        with closing(met.stream):
            own, peer = words_of(met.own), words_of(met.peer)
            with closing(self._dialed(CALLS, peer, own, met.origin)) as framed:
                with _ends_after(GO_S, framed):
                    framed.hear()  # it may begin
                with _ends_after(CALLS_S, framed):
                    splice(met.stream, framed.stream())

    def _dialed(self, *purpose: Any) -> Framed:
        """Return a connection to the front door; PeerError, which its log gets, where there is
        none.
        """
        try:
            return self._dialer.dial(*purpose)
        except PeerError as exc:
            self._refused(PeerError(f"a door does not reach the front door: {exc}"))
            raise

    def _serve(self, met: Met) -> None:
        """Serve a connection for a session's data to its end."""
        metered = Metered(met.stream, UNADMITTED_BYTES)
        relay = Relay(metered, shape_of(self._network), "provider")
        relay.hold_streams()
        with closing(Control(relay)) as control:
            shown = b""  # no ticket, which is refused, and what was moved counts
            with suppress(PeerError):
                shown = control.take_ticket(HANDSHAKE_S)
            own = OneTime.made()
            asked = [shown.hex(), words_of(met.peer), own.certificate, *_moved(relay)]
            try:
                framed = self._dialed(SESSION, *asked)
            except PeerError:
                control.bye(NO_ANSWER, ok=False)
                raise
            with closing(_AtFrontDoor(framed, relay)) as session:
                try:
                    program = session.admitted(control.check)
                    self._callers.settled(met)
                    metered.most = None  # from here on, the client's account counts
                    # Before there is a place: the client's worker opens its link when it is ready,
                    # and what is held would keep this end from hearing the client's heartbeats.
                    relay.allow_streams(programs.doors(programs.find(program)))
                    placed = session.placed(control.check)
                except SpuLlmError as exc:
                    control.bye(str(exc), ok=False, busy=isinstance(exc, BusyError))
                    session.ended(exc)
                    raise
                session.supervise(control, placed, own)


@dataclass(frozen=True)
class _Placed:
    """Session that the front door has placed on this machine: its task, the machine's name, where
    the worker is reached, and the key of the model's hints.
    """

    task: Task
    machine: str
    endpoint: Endpoint
    hints_key: bytes


class _AtFrontDoor:
    """A session, as the door has it from the front door."""

    def __init__(self, framed: Framed, relay: Relay) -> None:
        self._framed, self._relay = framed, relay
        self._worker: RemoteWorker | None = None
        self._programs: queue.Queue[str] = queue.Queue()
        self._places: queue.Queue[_Placed] = queue.Queue()
        self._stored: queue.Queue[PoolError | None] = queue.Queue()
        self._stop: SpuLlmError | None = None
        self._over = threading.Event()
        self._reported, self._heard_at = 0.0, time.monotonic()
        threading.Thread(target=self._read, name="session", daemon=True).start()

    def admitted(self, look: Callable[[], None]) -> str:
        """Return the session's program, before it has a place; raise why there is no session, or
        what `look` raises.
        """
        return self._next(self._programs, look)

    def placed(self, look: Callable[[], None]) -> _Placed:
        """Return where the session runs; raise why it does not, or what `look` raises."""
        return self._next(self._places, look)

    def _next(self, said: queue.Queue[_T], look: Callable[[], None]) -> _T:
        while True:
            look()
            self._look()
            with suppress(queue.Empty):
                return said.get(timeout=_LOOK_S)

    def supervise(self, control: Control, placed: _Placed, own: OneTime) -> None:
        """Run the session to its end, which the front door hears of; raise what ended it before.
        own: what this door shows to the worker's machine.
        """
        try:
            try:
                self._worker = RemoteWorker(
                    placed.machine,
                    Dialer(own, placed.endpoint),
                    placed.hints_key,
                    release=lambda: None,  # the front door does so
                    deliver=self._deliver,
                )
            except SpuLlmError:
                control.bye("the provider's worker failed", ok=False)
                raise
            try:
                run_session(control, self._worker, placed.task, lambda event: None, self._look)
            finally:
                self._worker.stop()
                give_back()  # what passed between peer and worker
        except Exception as exc:
            self.ended(exc)
            raise
        self.ended(None)

    def ended(self, error: Exception | None) -> None:
        """Tell the front door how the session ended, and wait until it has heard."""
        self._reported = 0.0
        kind, words = ("", "") if error is None else (type(error).__name__, str(error))
        with suppress(PeerError):
            self._report()
            self._framed.say(ENDED, kind, words)
            self._over.wait(LEFT_S)

    def close(self) -> None:
        """Close the connection to the front door."""
        self._framed.close()

    def _look(self) -> None:
        self._report()
        if self._stop is not None:
            raise self._stop
        if time.monotonic() > self._heard_at + SILENT_S:
            raise WantedError(NO_ANSWER)

    def _report(self) -> None:
        now = time.monotonic()
        if now > self._reported + USAGE_S:
            self._reported = now
            memory = 0 if self._worker is None else self._worker.memory_bytes()
            with suppress(PeerError):  # which the reader sees, too
                self._framed.say(USAGE, *_moved(self._relay), memory)

    def _deliver(self, parcel: Parcel) -> None:
        """Have the front door store a batch; PoolError where it does not."""
        try:
            self._framed.say(PARCEL, parcel.kind, parcel.id, encoded(parcel.files))
            error = self._stored.get(timeout=STORED_S)
        except (PeerError, queue.Empty):
            raise PoolError("the front door does not take batches any more") from None
        if error is not None:
            raise error

    def _read(self) -> None:
        try:
            while True:
                self._hear(self._framed.hear())
        except Exception:
            self._stop = self._stop or WantedError("the provider is shutting down")
        self._over.set()
        self._stored.put(PoolError("the front door has gone"))

    def _hear(self, words: list[Any]) -> None:
        self._heard_at = time.monotonic()
        match words:
            case [kind, str(program)] if kind == ADMITTED:
                self._programs.put(program)
            case [kind, task, machine, [str(host), int(port), str(certificate)], str(key)] if (
                kind == PLACED
            ):
                endpoint = Endpoint(host, port, certificate)
                self._places.put(_Placed(Task(**task), machine, endpoint, bytes.fromhex(key)))
            case [kind] if kind == ALIVE:
                pass
            case [kind] if kind == STORED:
                self._stored.put(None)
            case [kind, str(why)] if kind == NOT_STORED:
                self._stored.put(PoolError(why))
            case [kind, str(error), str(why)] if kind == STOP:
                self._stop = error_of(error, why)
            case _:
                raise PeerError("words that mean nothing")


def _moved(relay: Relay) -> tuple[int, int]:
    seen = relay.snapshot()
    return seen.wire_bytes_sent, seen.wire_bytes_received


@contextmanager
def _ends_after(seconds: float, framed: Framed) -> Iterator[None]:
    """Close a connection where the block takes longer than so many seconds."""
    late = threading.Timer(seconds, framed.close)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def splice(one: ByteStream, other: ByteStream) -> None:
    """Carry bytes both ways until either end closes; then both are closed."""

    def forward(source: ByteStream, sink: ByteStream) -> None:
        with suppress(PeerError):
            while data := source.recv_some(_CHUNK):
                sink.send_all(data)
        sink.close()
        source.close()

    back = threading.Thread(target=forward, args=(other, one), name="splice", daemon=True)
    back.start()
    forward(one, other)
    back.join()
