"""Connections between machines of one party; the way from a session's supervisor to its worker on
another machine.

The worker's machine listens on one TCP port; the front door connects, once for words (`Words`), and
once for each socket of the worker that its relay carries. Every connection is TLS 1.3 in which both
ends show certificates made for this session alone, and each takes no other one: Ray carries the
certificates, no key and no token. What the worker opens is announced among the words, and the front
door connects to fetch it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spu_llm.cluster.framed import Framed, carry
from spu_llm.core.errors import PeerError
from spu_llm.net import stream, tls
from spu_llm.net.frames import StreamType
from spu_llm.net.identity import Identity, OneTime
from spu_llm.net.stream import TcpStream
from spu_llm.net.worker_side import WorkerSide

WORDS, CONNECT, FETCH = "words", "connect", "fetch"  # what a connection is for
_CARRIED = (CONNECT, FETCH)  # these carry a socket, whose reader may take its time
_CONNECTED, _REFUSED = b"c", b"r"
CONNECT_S = 5.0
# After which a machine that does not take words that are sent to it, or is not there, counts as
# lost.
UNHEARD_S = 15.0
_LOOK_S = 0.5
_AGAIN_S = 0.1  # until it listens again
_STRANGERS = 64  # connections that have not shown their certificate


@dataclass(frozen=True)
class Endpoint:
    """Address at which the worker's machine listens, and the certificate that it shows there, in
    PEM form.
    """

    host: str
    port: int
    certificate: str


class Dialer:
    """Connects to one port of another machine of this party."""

    def __init__(self, own: OneTime, endpoint: Endpoint) -> None:
        self._identity = own.pinning(endpoint.certificate)
        self._endpoint = endpoint

    def dial(self, *purpose: Any) -> Framed:
        """Return a connection for a purpose; PeerError when there is none."""
        at = self._endpoint
        tcp = stream.connect(at.host, at.port, CONNECT_S, "the machine")
        tcp.notice_loss(UNHEARD_S, untaken=_of_words(purpose))
        framed = Framed(tls.as_client(tcp, self._identity, at.host))
        framed.say(*purpose)
        return framed


def _of_words(purpose: Sequence[Any]) -> bool:
    """Return whether a connection is for words alone, which its ends read as they come."""
    return not (purpose and purpose[0] in _CARRIED)


class BridgedSide:
    """A `WorkerSide` whose worker is on another machine."""

    def __init__(self, ports: Mapping[StreamType, tuple[int, int]], dialer: Dialer) -> None:
        self.ports = ports
        self._dialer = dialer
        self._announced: dict[StreamType, queue.Queue[int | None]] = {
            door: queue.Queue() for door in StreamType
        }
        self._carried = Carried()

    def announce(self, door: StreamType, number: int) -> None:
        """Let `accept` fetch the worker's connection of this number."""
        self._announced[door].put(number)

    def accept(self, door: StreamType) -> socket.socket | None:
        """See `WorkerSide.accept`."""
        try:
            number = self._announced[door].get(timeout=_LOOK_S)
        except queue.Empty:
            return None
        if number is None:
            self._announced[door].put(None)
            raise OSError(errno.EPIPE, "the worker has gone")
        try:
            return self._carried.through(self._dialer.dial(FETCH, number))
        except PeerError as exc:
            raise OSError(errno.EPIPE, str(exc)) from exc

    def connect(self, door: StreamType) -> socket.socket:
        """See `WorkerSide.connect`."""
        try:
            framed = self._dialer.dial(CONNECT, int(door))
            if framed.receive() != _CONNECTED:
                framed.close()
                raise ConnectionRefusedError("the worker does not listen")
            return self._carried.through(framed)
        except PeerError as exc:
            raise OSError(errno.EPIPE, str(exc)) from exc

    def close(self) -> None:
        """See `WorkerSide.close`: what is carried goes on until `drop`."""
        for announced in self._announced.values():
            announced.put(None)

    def drop(self) -> None:
        """Break all that is carried."""
        self.close()
        self._carried.drop()


class Port:
    """Port of this machine for one other machine of this party, until it is closed."""

    def __init__(
        self, host: str, own: OneTime, other: str, serve: Callable[[Framed, list[Any]], None]
    ) -> None:
        """Listen at `host`, on a free port. other: the other machine's certificate, in PEM form.
        serve: gets each connection and what it is for, on a thread of its own; the connection is
        closed where it raises.
        """
        self._identity: Identity = own.pinning(other)
        self._serve = serve
        self._listener = socket.create_server((host, 0), backlog=_STRANGERS)
        port = int(self._listener.getsockname()[1])
        self.endpoint = Endpoint(host, port, own.certificate)
        self._places = threading.BoundedSemaphore(_STRANGERS)
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="bridge", daemon=True).start()

    def close(self) -> None:
        """Stop listening; what is connected stays."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except ConnectionError:  # one that has gone already
                continue
            except OSError:  # closed, or without descriptors for a moment
                if self._listener.fileno() < 0 or self._closed.wait(_AGAIN_S):
                    return
                continue
            if not self._places.acquire(blocking=False):
                sock.close()
                continue
            try:
                threading.Thread(
                    target=self._meet, args=(sock,), name="bridge", daemon=True
                ).start()
            except RuntimeError:  # no more threads
                self._places.release()
                sock.close()

    def _meet(self, sock: socket.socket) -> None:
        """Serve one connection; drop it unless it is the other machine's."""
        framed: Framed | None = None
        try:
            try:
                tcp = TcpStream(sock)
                tcp.notice_loss(UNHEARD_S, untaken=True)
                framed = Framed(tls.as_server(tcp, self._identity))
            finally:
                self._places.release()
            purpose = framed.hear()
            tcp.notice_loss(UNHEARD_S, untaken=_of_words(purpose))
            self._serve(framed, purpose)
        except (OSError, PeerError, ValueError, KeyError, RuntimeError):  # the last: no threads
            if framed is not None:
                framed.close()


class Landing:
    """The worker's machine's end: listens for one front door until it is closed."""

    def __init__(self, host: str, own: OneTime, front_door: str) -> None:
        """Listen at `host`, on a free port. front_door: its certificate, in PEM form."""
        self.words: queue.Queue[Framed] = queue.Queue()
        self._side: WorkerSide | None = None
        self._numbers = itertools.count()
        self._held: dict[int, socket.socket] = {}
        self._carried = Carried()
        self._port = Port(host, own, front_door, self._serve)
        self.endpoint = self._port.endpoint

    def open(self, side: WorkerSide, announce: Callable[[StreamType, int], None]) -> None:
        """Carry what goes to and from the worker. announce: tells the front door of a connection
        that the worker has opened.
        """
        self._side = side
        for door in StreamType:
            threading.Thread(
                target=self._accept, args=(side, door, announce), name="bridge", daemon=True
            ).start()

    def close(self) -> None:
        """Stop listening, and break all that is carried."""
        self._port.close()
        if self._side is not None:
            self._side.close()
        self._carried.drop()
        for number in list(self._held):
            if (sock := self._held.pop(number, None)) is not None:
                sock.close()

    def _accept(
        self, side: WorkerSide, door: StreamType, announce: Callable[[StreamType, int], None]
    ) -> None:
        with contextlib.suppress(OSError, PeerError):
            while True:
                if (sock := side.accept(door)) is not None:
                    number = next(self._numbers)
                    self._held[number] = sock
                    announce(door, number)

    def _serve(self, framed: Framed, purpose: list[Any]) -> None:
        match purpose:
            case [str(kind)] if kind == WORDS:
                self.words.put(framed)
            case [str(kind), int(door)] if kind == CONNECT:
                self._connect(framed, StreamType(door))
            case [str(kind), int(number)] if kind == FETCH and number in self._held:
                self._carried.here(self._held.pop(number), framed)
            case _:
                raise PeerError("a connection for no purpose")

    def _connect(self, framed: Framed, door: StreamType) -> None:
        try:
            if self._side is None:
                raise ConnectionRefusedError
            sock = self._side.connect(door)
        except OSError:
            framed.send(_REFUSED)
            framed.close()
            return
        framed.send(_CONNECTED)
        self._carried.here(sock, framed)


class Carried:
    """Sockets that one end carries at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: set[Framed] = set()
        self._dropped = False

    def through(self, framed: Framed) -> socket.socket:
        """Return a socket that leads to the other end of a connection."""
        ours, theirs = socket.socketpair()
        threading.Thread(
            target=self.here, args=(theirs, framed), name="bridge-up", daemon=True
        ).start()
        return ours

    def here(self, sock: socket.socket, framed: Framed) -> None:
        """Carry a socket over a connection, on this thread, until both have ended."""
        with self._lock:
            self._all.add(framed)
            dropped = self._dropped
        if dropped:
            framed.close()
        try:
            carry(sock, framed)
        finally:
            with self._lock:
                self._all.discard(framed)

    def drop(self) -> None:
        """Break them, and whatever comes."""
        with self._lock:
            self._dropped = True
            carried = list(self._all)
        for framed in carried:
            framed.close()
