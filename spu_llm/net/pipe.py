"""The worker's end of one stream: a loopback socket and the bytes waiting for it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque

from spu_llm.net.frames import StreamType
from spu_llm.net.link_frames import LinkFrames

_OVERHEAD_BYTES = 64


class ByteBudget:
    """A bound on bytes held for slow workers, shared by the pipes of one connection."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._closed = False
        self._changed = threading.Condition()
        self.waiting = False

    def take(self, nbytes: int) -> None:
        """Account for `nbytes`."""
        with self._changed:
            self._used += nbytes

    def give(self, nbytes: int) -> None:
        """Give `nbytes` back."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    def wait_below_limit(self) -> None:
        """Block while the limit is exceeded and the budget is not closed."""
        if self._used <= self._limit:
            return
        with self._changed:
            while self._used > self._limit and not self._closed:
                self.waiting = True
                self._changed.wait()
            self.waiting = False

    def close(self) -> None:
        """Let every waiter go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _held(payload: bytes) -> int:
    """Return the bytes counted for keeping `payload`: many small ones take more than their own."""
    return len(payload) + _OVERHEAD_BYTES


class WorkerPipe:
    """One stream's socket to the worker.

    The connection's reader calls `deliver` and `end`, which never block; one thread runs
    `write_loop`, another reads `sock` once attached. Each of those two calls `release` when
    done, and the last one frees the socket.
    """

    def __init__(self, stream: int, door: StreamType, budget: ByteBudget) -> None:
        self.stream, self.door = stream, door
        # Of what comes from the peer. Messages of our own are parsed by our own code.
        self.frames = LinkFrames() if door is StreamType.LINK else None
        self.sent_close = False  # the protocol's state, kept by the relay
        self.got_close = False
        self.aborted = False  # by `abort`
        self._budget = budget
        self._sock: socket.socket | None = None
        self._waiting: deque[bytes] = deque()
        self._ended = False
        self._users = 2
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def attach(self, sock: socket.socket) -> bool:
        """Take over a connected socket; False, with it closed, when the stream is gone."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            if self.aborted:
                sock.close()
                return False
            self._sock = sock
            self._changed.notify_all()
            return True

    def recv_into(self, buffer: memoryview) -> int:
        """Read what the worker sent; 0 at its end. `OSError` from the socket."""
        assert self._sock is not None
        return self._sock.recv_into(buffer)

    def deliver(self, payload: bytes) -> None:
        """Hand `payload` to the worker, or keep it for `write_loop`. `OSError` from the socket."""
        with self._lock:
            if self.aborted:
                return
            sent = 0
            if self._sock is not None and not self._waiting:
                try:
                    sent = self._sock.send(payload, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
            if sent < len(payload):
                rest = payload[sent:] if sent else payload
                self._waiting.append(rest)
                self._budget.take(_held(rest))
                self._changed.notify_all()

    def end(self) -> None:
        """Close the worker's incoming half when all is written: the peer will send no more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Drop what waits and break the worker's connection."""
        with self._changed:
            self.aborted = True
            self._budget.give(sum(map(_held, self._waiting)))
            self._waiting.clear()
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def write_loop(self) -> None:
        """Write what waits until the peer's end or `abort`. `OSError` from the socket."""
        while True:
            with self._changed:
                while not self.aborted and not self._writable():
                    self._changed.wait()
                sock = self._sock
                if self.aborted or sock is None:
                    return
                if not self._waiting:
                    with contextlib.suppress(OSError):  # the worker may be gone already
                        sock.shutdown(socket.SHUT_WR)
                    return
                payload = self._waiting[0]
            sock.sendall(payload)
            with self._changed:
                if not self.aborted:
                    self._waiting.popleft()
                    self._budget.give(_held(payload))

    def release(self) -> None:
        """Say that one of the two threads is done with the socket."""
        with self._changed:
            self._users -= 1
            if self._users == 0 and self._sock is not None:
                self.aborted = True  # nothing can be delivered any more
                self._sock.close()

    def _writable(self) -> bool:
        return self._sock is not None and (bool(self._waiting) or self._ended)
