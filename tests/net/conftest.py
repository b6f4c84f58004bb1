"""Both ends of a relay in one process, over real loopback sockets."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from spu_llm.core.errors import PeerError
from spu_llm.net import tls
from spu_llm.net.control import Control
from spu_llm.net.frames import StreamType
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import NETWORKS, NetworkShape
from spu_llm.net.stream import TcpStream, accept, connect, listen
from spu_llm.net.worker_side import Loopback
from tests.kit.patience import SOON_S, eventually


def read_all(sock: socket.socket, nbytes: int | None = None) -> bytes:
    """Read `nbytes`, or until the end."""
    parts: list[bytes] = []
    while nbytes is None or nbytes > 0:
        data = sock.recv(min(nbytes or 1 << 20, 1 << 20))
        if not data:
            break
        parts.append(data)
        if nbytes is not None:
            nbytes -= len(data)
    return b"".join(parts)


def as_server(tcp: TcpStream, context: ssl.SSLContext, timeout_s: float = 5.0) -> tls.TlsStream:
    """Meet one client as an entrance does; PeerError, with the connection closed, unless it is one
    of those trusted.
    """
    meeting, deadline = tls.Meeting(tcp, context), time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(tcp, select.POLLIN)
    try:
        while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            if (stream := meeting.step()) is not None:
                return stream
        raise PeerError("the peer did not answer in time")
    except BaseException:
        tcp.close_after(0.3)
        raise


def opened(relay: Relay, worker_port: int, door: StreamType = StreamType.MESSAGES) -> int:
    """Open a relay's side of a worker that listens there; the port where it finds its peer's
    door.
    """
    side = Loopback(dict.fromkeys(StreamType, worker_port))
    relay.open_worker_side(side)
    return side.ports[door][1]


def echo(sock: socket.socket) -> None:
    while data := sock.recv(1 << 16):
        sock.sendall(data)


class Worker:
    """A server on loopback that handles each connection on a thread."""

    def __init__(self, handle: Callable[[socket.socket], object], port: int = 0) -> None:
        self._handle = handle
        self._server = socket.create_server(("127.0.0.1", port))
        self.port: int = self._server.getsockname()[1]
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socks.append(sock)
            thread = threading.Thread(target=self._one, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _one(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            self._handle(sock)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SOON_S)


@dataclass
class Bench:
    """Makes connections and cleans up after them."""

    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def streams(self) -> tuple[TcpStream, TcpStream]:
        with listen("127.0.0.1", 0) as listener:
            client = connect("127.0.0.1", listener.getsockname()[1], 5)
            return client, accept(listener, 5)

    def controls(
        self, shape: NetworkShape = NETWORKS["local"], silence_s: float = 9.0
    ) -> tuple[Control, Control]:
        client, provider = self.streams()
        pair = (
            Control(Relay(client, shape, "client"), silence_s),
            Control(Relay(provider, shape, "provider"), silence_s),
        )
        for control in pair:
            self.cleanup.callback(control.close)
        return pair

    def raw_peer(self, silence_s: float = 9.0) -> tuple[socket.socket, Control]:
        """Return a provider's control, and the socket of a client that the test plays by hand."""
        with listen("127.0.0.1", 0) as listener:
            raw, stream = self.dial(listener.getsockname()[1]), accept(listener, 5)
        control = Control(Relay(stream, NETWORKS["local"], "provider"), silence_s)
        self.cleanup.callback(control.close)
        return raw, control

    def worker(self, handle: Callable[[socket.socket], object], port: int = 0) -> Worker:
        worker = Worker(handle, port)
        self.cleanup.callback(worker.close)
        return worker

    def dial(self, port: int) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port), 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.cleanup.callback(sock.close)
        return sock


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture()
def bench() -> Iterator[Bench]:
    """Yield a bench; afterwards no thread and no descriptor may be left."""
    threads, files = set(threading.enumerate()), _open_files()
    made = Bench()
    with made.cleanup:
        yield made

    def left() -> set[threading.Thread]:
        return set(threading.enumerate()) - threads

    assert eventually(lambda: not left()), left()
    assert eventually(lambda: _open_files() <= files)
