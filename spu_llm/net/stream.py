"""An ordered byte stream to the peer, and its plain TCP form."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from spu_llm.core.errors import InputError, PeerError
from spu_llm.net import loopback

BACKLOG = 1024  # connections that wait to be accepted, if the system allows as many
_IDLE_S, _PROBE_S = 5, 3  # until an idle connection is probed, and between two probes


class ByteStream(Protocol):
    """The operations that the relay needs of a connection.

    One thread may receive while another sends. Every call raises `PeerError` when the connection
    is broken. `close` may come from any thread, more than once, and wakes blocked calls.
    """

    def recv_some(self, max_bytes: int) -> bytes:
        """Return 1 to `max_bytes` bytes, or b"" once the peer has closed its side."""
        ...

    def send_all(self, data: bytes | memoryview) -> None:
        """Block until all of `data` is handed to the connection."""
        ...

    def close(self) -> None:
        """Close both directions."""
        ...


class Metered:
    """A `ByteStream` over another one that counts its bytes, both ways: `on_bytes` hears of each
    part. PeerError, and the connection closed, beyond `most` bytes; None: as many as come.
    """

    def __init__(
        self,
        stream: ByteStream,
        most: int | None,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.most = most
        self._stream, self._on_bytes = stream, on_bytes
        self._lock = threading.Lock()
        self._moved = 0

    def recv_some(self, max_bytes: int) -> bytes:
        """See `ByteStream.recv_some`."""
        data = self._stream.recv_some(max_bytes)
        self._count(len(data))
        return data

    def send_all(self, data: bytes | memoryview) -> None:
        """See `ByteStream.send_all`."""
        self._count(len(data))
        self._stream.send_all(data)

    def close(self) -> None:
        """See `ByteStream.close`."""
        self._stream.close()

    def _count(self, count: int) -> None:
        self._on_bytes(count)
        with self._lock:
            self._moved += count
            most = self.most
            if most is None or self._moved <= most:
                return
        self.close()
        raise PeerError(f"the connection moved more than the {most:,} bytes that it may")


class TcpStream:
    """A `ByteStream` over a connected TCP socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._shared = sock, _Shared(sock)
        self._room = memoryview(b"")  # what is received goes here first

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for it; -1 once it is closed."""
        return self._sock.fileno()

    @property
    def host(self) -> str:
        """Return the peer's address; "" when the connection has gone."""
        try:
            return str(self._sock.getpeername()[0])
        except OSError:
            return ""

    def of_own_user(self) -> bool:
        """Return whether the connection comes from this user, on this machine's loopback interface;
        else close it.
        """
        try:
            peer, own = self._sock.getpeername(), self._sock.getsockname()
        except OSError:
            peer, own = ("", 0), ("", 0)
        if loopback.owner_of(peer[1], own[1]) == os.getuid():
            return True
        self.close()
        return False

    def notice_loss(self, seconds: float, untaken: bool) -> None:
        """Break the connection when the peer's machine has answered nothing for so many seconds, a
        few more or less: while nothing is sent, it is probed. untaken: also when the peer takes
        none of what is sent for so long, or the machine is lost meanwhile; else that may take as
        long as it likes.
        """
        probes = max(1, round((seconds - _IDLE_S) / _PROBE_S))
        with self._shared as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
            unheard_ms = round(1e3 * seconds) if untaken else 0
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unheard_ms)

    def recv_some(self, max_bytes: int) -> bytes:
        """See `ByteStream.recv_some`."""
        # In place: to get room for the most that may come costs more than most messages.
        if len(self._room) < max_bytes:
            self._room = memoryview(bytearray(max_bytes))
        with self._shared as sock:
            count = sock.recv_into(self._room, max_bytes)
        return bytes(self._room[:count])

    def recv_within(self, max_bytes: int, timeout_s: float) -> bytes:
        """Receive as `recv_some` does; PeerError when nothing comes within `timeout_s`."""
        with self._shared as sock:
            # Nobody is listened to after that, however much it has to say.
            if timeout_s <= 0 or not _ready(sock, select.POLLIN, timeout_s):
                raise PeerError("the peer did not answer in time")
            return sock.recv(max_bytes)

    def recv_now(self, max_bytes: int) -> bytes | None:
        """Return what has come by now, as `recv_some` does; None when nothing has."""
        return self._now(max_bytes, 0)

    def look(self) -> bytes | None:
        """Return the first byte that has come, which stays to be read: as `recv_now` does."""
        return self._now(1, socket.MSG_PEEK)

    def _now(self, max_bytes: int, flags: int) -> bytes | None:
        with self._shared as sock:
            try:
                return sock.recv(max_bytes, flags | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None

    def send_all(self, data: bytes | memoryview) -> None:
        """See `ByteStream.send_all`."""
        with self._shared as sock:
            sock.sendall(data)

    def send_within(self, data: bytes | memoryview, timeout_s: float) -> None:
        """Send as `send_all` does; PeerError when the peer does not take it all within
        `timeout_s`, after which the connection is of no more use.
        """
        left, deadline = memoryview(data), time.monotonic() + timeout_s
        with self._shared as sock:
            while left:
                try:
                    left = left[sock.send(left, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    wait_s = deadline - time.monotonic()
                    if wait_s <= 0 or not _ready(sock, select.POLLOUT, wait_s):
                        raise PeerError("the peer does not take what is sent") from None

    def send_last(self, data: bytes) -> None:
        """Send `data`, which is lost if the peer does not read; never blocks."""
        with contextlib.suppress(PeerError), self._shared as sock:
            sock.send(data, socket.MSG_DONTWAIT)

    def end_sending(self) -> None:
        """Close this end's direction alone."""
        with contextlib.suppress(PeerError), self._shared as sock:
            sock.shutdown(socket.SHUT_WR)

    def close_after(self, seconds: float) -> None:
        """Close the connection, but let what was sent arrive: what is unread here would make the
        other end forget it. Waits for the other end, `seconds` at most.
        """
        deadline = time.monotonic() + seconds
        self.end_sending()
        with contextlib.suppress(PeerError):
            while self.recv_within(1 << 16, deadline - time.monotonic()):
                pass
        self.close()

    def close(self) -> None:
        """See `ByteStream.close`."""
        self._shared.close()


class _Shared:
    """A socket that several threads use, each within `with`; PeerError in place of OSError there.

    Its descriptor is freed only when no call uses it: its number could otherwise be handed to
    another socket while a thread is still about to read from it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False

    def __enter__(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise PeerError("the connection to the peer is closed")
            self._calls += 1
        return self._sock

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._closed and self._calls == 0:
                self._sock.close()
        if isinstance(error, OSError):
            raise PeerError(f"connection to the peer was lost: {_reason(error)}") from error

    def close(self) -> None:
        """Close the socket, once no call uses it, and wake the calls."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            if self._calls == 0:
                self._sock.close()


def connect(host: str, port: int, timeout_s: float, peer: str = "provider") -> TcpStream:
    """Connect to `peer`; `PeerError` when that takes longer than `timeout_s` or fails."""
    try:
        return TcpStream(socket.create_connection((host, port), timeout_s))
    except TimeoutError as error:
        raise PeerError(
            f"cannot reach {peer} at {host}:{port}: no answer within {timeout_s:g} s"
        ) from error
    except OSError as error:
        raise PeerError(f"cannot reach {peer} at {host}:{port}: {_reason(error)}") from error


def listen(host: str, port: int) -> socket.socket:
    """Listen on `host`:`port` (0: any free port); `InputError` when that cannot be done."""
    sock: socket.socket | None = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use; choose another with --listen"
        else:
            message = f"cannot listen on {host}:{port}: {_reason(error)}"
        raise InputError(message) from error
    return sock


def accept(listener: socket.socket, timeout_s: float) -> TcpStream:
    """Wait for one connection; `TimeoutError` after `timeout_s`."""
    listener.settimeout(timeout_s)
    return TcpStream(listener.accept()[0])


def _ready(sock: socket.socket, event: int, timeout_s: float) -> bool:
    """Return whether a socket can be read, or written, within `timeout_s`, by poll, which takes
    descriptors of any number. event: POLLIN or POLLOUT.
    """
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(1000 * timeout_s))


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
