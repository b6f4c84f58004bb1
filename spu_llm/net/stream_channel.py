"""Messages of our own protocols between the two workers: a TCP connection for each channel.

Both ends first say the channel's number, from 0 on; then a message is its length and its bytes
(numbers and lengths: 8 bytes, little-endian). What a peer sends is taken for hostile: lengths are
bounded, and a channel's user seals what is in it (`SealedChannel`).

All channels share the relays' one connection. Where a worker leaves more than `relay.HELD_BYTES`
unread of one of them, its relay reads no more of any: a party that does not read a channel until it
has heard something on another one must know that so much never comes before.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque

from spu_llm.core.errors import PeerError, WireError, WorkerError
from spu_llm.core.values import PROVIDER
from spu_llm.net import loopback

MAX_MESSAGE = 1 << 30  # bytes
MAX_WAITING = 1 << 30  # bytes of a channel that are sent, but not on their way

NUMBER_BYTES = 8
_READ_AHEAD = 64 << 10
_HELLO_S = 10.0  # for a connection to say which channel it is
_RETRY_S = 0.1
_FLUSH_S = 5.0


class StreamChannel:
    """A `Channel` over a connected socket, which it owns. One thread sends and one receives.

    Both parties may send much before either receives: what the connection does not take at once is
    kept, and a thread writes it. `send` waits only while `MAX_WAITING` bytes are kept.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """Take the socket. `timeout_s`: for the next bytes of the peer's, and for room to send."""
        sock.settimeout(None)
        # By the kernel: Python's own timeout costs a call of the system more for every message.
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock, self._timeout_s = sock, timeout_s
        self._incoming = sock.makefile("rb", _READ_AHEAD)
        self._changed = threading.Condition()
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._writer: threading.Thread | None = None
        self._broken: OSError | None = None

    def send(self, data: bytes) -> None:
        """Send a message; PeerError when the connection is lost, or takes nothing for too long."""
        size = len(data).to_bytes(NUMBER_BYTES, "little")
        with self._changed:
            if self._waiting_bytes and not self._changed.wait_for(self._has_room, self._timeout_s):
                raise PeerError("the other party takes no messages")
            if self._broken is not None:
                raise _lost(self._broken)
            sent = 0
            if not self._waiting_bytes:
                try:
                    sent = self._sock.sendmsg((size, data), (), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise _lost(error) from error
            if sent < len(size) + len(data):
                self._keep(size[sent:], memoryview(data)[max(0, sent - len(size)) :])

    def recv(self) -> bytes:
        """Return the next message; PeerError when none comes in time or the connection ends,
        WireError when it is too long.
        """
        size = int.from_bytes(self._exactly(NUMBER_BYTES), "little")
        if size > MAX_MESSAGE:
            raise WireError(f"the other party announces a message of {size} bytes")
        return self._exactly(size)

    def close(self, flush_s: float = _FLUSH_S) -> None:
        """Send what still waits, if the peer takes it within `flush_s`, and close the
        connection.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._broken or not self._waiting_bytes, flush_s)
            self._broken = self._broken or OSError("the channel is closed")
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._writer is not None:
            self._writer.join()
        self._incoming.close()
        self._sock.close()

    def _exactly(self, count: int) -> bytes:
        try:
            data = self._incoming.read(count)
        except (OSError, ValueError) as error:  # lost, or closed by this side
            raise PeerError("no message from the other party") from error
        if data is None or len(data) < count:
            raise PeerError("no message from the other party")
        return data

    def _has_room(self) -> bool:
        return self._broken is not None or self._waiting_bytes < MAX_WAITING

    def _keep(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            if part:
                self._waiting.append(memoryview(part))
                self._waiting_bytes += len(part)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="channel", daemon=True)
            self._writer.start()
        self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._broken or self._waiting)
                if self._broken is not None:
                    return
                part = self._waiting.popleft()
            error = None
            try:
                self._sock.sendall(part)
            except OSError as exc:
                error = exc
            with self._changed:
                self._waiting_bytes -= len(part)
                self._broken = self._broken or error
                self._changed.notify_all()


def _lost(error: OSError) -> PeerError:
    return PeerError(f"the connection to the other party was lost: {error.strerror or error}")


class Channels:
    """A worker's channels to the peer's worker, opened one after the other, on any threads, in the
    same order at both parties: the client's worker calls, the provider's answers.
    """

    def __init__(self, rank: int, port: int, timeout_s: float) -> None:
        """Take `port`, on loopback; the provider's worker listens there, the client's calls it.
        `timeout_s`: for the peer to open a channel, too, and then for each message. WorkerError
        when the port is taken.
        """
        self._port, self._timeout_s = port, timeout_s
        self._opening = threading.Lock()
        self._opened: list[StreamChannel] = []
        self._listener: socket.socket | None = None
        if rank == PROVIDER:
            try:
                self._listener = socket.create_server((loopback.HOST, port))
            except OSError as error:
                raise WorkerError(f"cannot listen on port {port}: {error.strerror}") from error

    def open(self) -> StreamChannel:
        """Open the next channel; PeerError when the peer does not come, WireError when it opens
        another.
        """
        with self._opening:
            deadline = time.monotonic() + self._timeout_s
            hello = len(self._opened).to_bytes(NUMBER_BYTES, "little")
            while (sock := self._met(hello, deadline)) is None:
                if time.monotonic() > deadline:
                    raise PeerError("the other party's worker did not come")
                time.sleep(_RETRY_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._opened.append(StreamChannel(sock, self._timeout_s))
            return self._opened[-1]

    def close(self, flush_s: float = _FLUSH_S) -> None:
        """Close all channels. `flush_s`: for what was sent to leave this process."""
        if self._listener is not None:
            self._listener.close()
        for channel in self._opened:
            channel.close(flush_s)

    def __enter__(self) -> Channels:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(_FLUSH_S if error is None else 0.0)

    def _met(self, hello: bytes, deadline: float) -> socket.socket | None:
        """Return a connection over which both said `hello`; None when there is none yet."""
        try:
            sock = self._call() if self._listener is None else self._answer(self._listener)
        except OSError:
            return None
        try:
            if self._listener is None:
                sock.sendall(hello)
                sock.settimeout(max(0.0, deadline - time.monotonic()))
            else:
                sock.settimeout(_HELLO_S)
            heard = _read(sock)
            if self._listener is not None and heard == hello:
                sock.sendall(hello)
        except OSError:
            # The relay gives a worker ten seconds to listen; a busy machine takes longer.
            sock.close()
            return None
        if heard != hello:
            sock.close()
            raise WireError("the other party's worker opens another channel")
        return sock

    def _call(self) -> socket.socket:
        return loopback.connect(self._port)

    def _answer(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(_HELLO_S)
        sock, address = listener.accept()
        if loopback.owner_of(address[1], self._port) != os.getuid():
            sock.close()
            raise ConnectionRefusedError("another user of this machine")
        return sock


def _read(sock: socket.socket) -> bytes:
    """Read what the other end calls a channel; OSError when it does not."""
    said = b""
    while len(said) < NUMBER_BYTES:
        part = sock.recv(NUMBER_BYTES - len(said))
        if not part:
            raise ConnectionAbortedError("the connection has ended")
        said += part
    return said
