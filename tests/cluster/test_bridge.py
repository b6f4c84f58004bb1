"""The way between the front door and a worker on another machine."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.cluster.bridge import CONNECT, FETCH, WORDS, BridgedSide, Dialer, Landing, Port
from spu_llm.cluster.framed import MAX_FRAME, Framed, carry
from spu_llm.core.errors import PeerError
from spu_llm.net.frames import StreamType
from spu_llm.net.identity import OneTime
from spu_llm.net.stream import TcpStream, connect
from tests.kit.patience import SOON_S, eventually

HOST = "127.0.0.1"
LINK = StreamType.LINK


class EchoSide:
    """A worker that sends back what it gets, and opens what `opened` has."""

    ports = {door: (9001, 9002) for door in StreamType}

    def __init__(self) -> None:
        self.listens = True
        self.closed = threading.Event()
        self.ends: list[socket.socket] = []
        self.opened: queue.Queue[socket.socket] = queue.Queue()

    def accept(self, door: StreamType) -> socket.socket | None:
        if self.closed.is_set():
            raise OSError
        with contextlib.suppress(queue.Empty):
            if door is LINK:
                return self.opened.get(timeout=0.1)
            self.closed.wait(0.1)
        return None

    def connect(self, door: StreamType) -> socket.socket:
        if not self.listens:
            raise ConnectionRefusedError
        ours, theirs = socket.socketpair()
        self.ends.append(theirs)
        threading.Thread(target=_echo, args=(theirs,), daemon=True).start()
        return ours

    def close(self) -> None:
        self.closed.set()


def _echo(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := sock.recv(1 << 16):
            sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)


class Bridge:
    def __init__(self) -> None:
        self.own = OneTime.made()
        self.worker = EchoSide()
        self.landing = Landing(HOST, OneTime.made(), self.own.certificate)
        self.dialer = Dialer(self.own, self.landing.endpoint)
        self.side = BridgedSide(self.worker.ports, self.dialer)
        self.landing.open(self.worker, self.side.announce)


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    made = Bridge()
    yield made
    made.side.drop()
    made.landing.close()

    def left() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("bridge")]

    assert eventually(lambda: not left(), SOON_S), left()


def whole(sock: socket.socket) -> bytes:
    sock.settimeout(SOON_S)
    parts = []
    while data := sock.recv(1 << 16):
        parts.append(data)
    return b"".join(parts)


def exchanged(sock: socket.socket, sent: bytes) -> bytes:
    """Return what comes back of `sent` after its end."""

    def send() -> None:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)

    sending = threading.Thread(target=send)
    sending.start()
    with sock:
        came = whole(sock)
        sending.join()
    return came


def test_bytes_pass_both_ways_and_so_do_ends(bridge: Bridge) -> None:
    sent = os.urandom(5_000_000)
    assert exchanged(bridge.side.connect(LINK), sent) == sent


def test_many_connections_pass_side_by_side(bridge: Bridge) -> None:
    socks = [bridge.side.connect(LINK) for _ in range(40)]
    texts = [os.urandom(10_000 + n) for n in range(len(socks))]
    for sock, text in zip(socks, texts, strict=True):
        sock.sendall(text)
        sock.shutdown(socket.SHUT_WR)
    assert [whole(sock) for sock in socks] == texts
    for sock in socks:
        sock.close()


def test_what_the_worker_opens_is_fetched(bridge: Bridge) -> None:
    ours, theirs = socket.socketpair()
    bridge.worker.opened.put(theirs)
    came: list[socket.socket] = []
    assert eventually(lambda: bool(came) or not _accepted(bridge, came), SOON_S)
    with ours, came[0]:
        ours.sendall(b"from the worker")
        came[0].sendall(b"to it")
        assert came[0].recv(100) == b"from the worker" and ours.recv(100) == b"to it"


def _accepted(bridge: Bridge, came: list[socket.socket]) -> bool:
    if (sock := bridge.side.accept(LINK)) is not None:
        came.append(sock)
    return not came


def test_a_worker_that_does_not_listen_refuses(bridge: Bridge) -> None:
    bridge.worker.listens = False
    with pytest.raises(ConnectionRefusedError):
        bridge.side.connect(LINK)


def test_either_end_breaks_a_connection(bridge: Bridge) -> None:
    sock = bridge.side.connect(LINK)
    sock.sendall(b"a")
    assert sock.recv(1) == b"a"
    bridge.worker.ends[0].shutdown(socket.SHUT_RDWR)
    assert whole(sock) == b""
    sock.close()
    sock = bridge.side.connect(LINK)
    sock.close()
    bridge.worker.ends[1].settimeout(SOON_S)
    with contextlib.suppress(OSError):
        while bridge.worker.ends[1].recv(1):
            pass


def test_dropping_breaks_all_of_it(bridge: Bridge) -> None:
    socks = [bridge.side.connect(LINK) for _ in range(3)]
    bridge.side.drop()
    for sock in socks:
        assert whole(sock) == b""
        sock.close()
    with pytest.raises(OSError):
        while True:
            bridge.side.accept(LINK)


def test_a_front_door_with_another_certificate_is_refused(bridge: Bridge) -> None:
    stranger = Dialer(OneTime.made(), bridge.landing.endpoint)
    with pytest.raises(PeerError):
        framed = stranger.dial(CONNECT, int(LINK))
        framed.receive()
    assert not bridge.worker.ends
    # The front door itself is served as before.
    assert exchanged(bridge.side.connect(LINK), b"still") == b"still"


def test_another_machine_in_its_place_is_refused(bridge: Bridge) -> None:
    false = replace(bridge.landing.endpoint, certificate=OneTime.made().certificate)
    with pytest.raises(PeerError, match="certificate"):
        Dialer(bridge.own, false).dial(WORDS)
    assert bridge.landing.words.empty()


@pytest.mark.parametrize(("purpose", "limit_ms"), [(WORDS, 15_000), (CONNECT, 0), (FETCH, 0)])
def test_a_machine_that_is_lost_is_noticed(
    monkeypatch: pytest.MonkeyPatch, purpose: str, limit_ms: int
) -> None:
    """At both ends, by probes; what is carried waits for its reader, without an end."""
    sockets: list[socket.socket] = []
    made = TcpStream.__init__

    def kept(self: TcpStream, sock: socket.socket) -> None:
        made(self, sock)
        sockets.append(sock)

    monkeypatch.setattr(TcpStream, "__init__", kept)
    own, theirs = OneTime.made(), OneTime.made()
    met: queue.Queue[Framed] = queue.Queue()
    port = Port(HOST, own, theirs.certificate, lambda framed, said: met.put(framed))
    framed = Dialer(theirs, port.endpoint).dial(purpose, 1)
    other = met.get(timeout=SOON_S)
    for sock in sockets:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, between, count, untaken_ms = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
        assert 10 <= idle + between * count <= 20 and untaken_ms == limit_ms
    assert len(sockets) == 2
    framed.close()
    other.close()
    port.close()


def test_who_shows_nothing_is_dropped(bridge: Bridge) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100):
        tcp = connect(HOST, bridge.landing.endpoint.port, 5.0)
        tcp.send_all(said)
        with contextlib.suppress(PeerError):
            while tcp.recv_within(1 << 16, SOON_S):
                pass
        tcp.close()
    assert not bridge.worker.ends and bridge.landing.words.empty()


@pytest.mark.parametrize(
    "purpose", [(), ("other",), (CONNECT, 99), (CONNECT, "x"), ("fetch", 0), ({},)]
)
def test_a_connection_for_no_purpose_is_dropped(bridge: Bridge, purpose: tuple[object]) -> None:
    framed = bridge.dialer.dial(*purpose)
    with pytest.raises(PeerError):
        framed.receive()


def test_a_port_listens_again_after_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of descriptors, and of threads."""
    ours, theirs = OneTime.made(), OneTime.made()
    port = Port(HOST, theirs, ours.certificate, lambda framed, purpose: framed.say("met"))
    short = iter([OSError(errno.EMFILE, "too many"), ConnectionAbortedError()])
    accept = socket.socket.accept

    def sometimes(self: socket.socket) -> tuple[socket.socket, object]:
        if (error := next(short, None)) is not None:
            raise error
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", sometimes)
    dialer = Dialer(ours, port.endpoint)
    for _ in range(3):
        assert dialer.dial(WORDS).hear() == ["met"]
    port.close()


def test_a_port_that_nobody_has_is_a_clear_error() -> None:
    own = OneTime.made()
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    landing = Landing(HOST, own, own.certificate)
    landing.close()
    gone = Dialer(own, replace(landing.endpoint, port=port))
    with pytest.raises(PeerError, match=f"cannot reach the machine at {HOST}:{port}"):
        gone.dial(WORDS)


def pairs() -> tuple[socket.socket, Framed, Framed, socket.socket]:
    """Return a socket, and the connection that is to carry it, from end to end."""
    listener = socket.create_server((HOST, 0))
    near = TcpStream(socket.create_connection(listener.getsockname()))
    far = TcpStream(listener.accept()[0])
    listener.close()
    ours, theirs = socket.socketpair()
    other, last = socket.socketpair()
    threads = [(theirs, Framed(near)), (other, Framed(far))]
    for sock, framed in threads:
        threading.Thread(target=carry, args=(sock, framed), name="bridge", daemon=True).start()
    return ours, threads[0][1], threads[1][1], last


@given(st.lists(st.binary(max_size=3000), max_size=8), st.lists(st.binary(max_size=3000)))
def test_any_parts_arrive_whole(there: list[bytes], back: list[bytes]) -> None:
    ours, _, _, last = pairs()
    with ours, last:
        for mine, yours in ((there, ours), (back, last)):
            for part in mine:
                yours.sendall(part)
            yours.shutdown(socket.SHUT_WR)
        assert whole(last) == b"".join(there) and whole(ours) == b"".join(back)


def test_a_frame_that_is_too_long_is_not_read() -> None:
    class Bytes:
        def recv_some(self, max_bytes: int) -> bytes:
            return (MAX_FRAME + 1).to_bytes(4, "big")

        def send_all(self, data: bytes | memoryview) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(PeerError, match="at most"):
        Framed(Bytes()).receive()
