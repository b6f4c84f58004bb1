"""How a relay and its own worker reach each other.

The worker believes that its peer is a port on this machine: behind that port stands the relay, and
the relay reaches the worker at a port of its own. There are two such ports for each door.

Apart     The worker lives in a network namespace that has nothing but a loopback interface: no
          other user of the machine can reach its ports, and it reaches nothing itself. It makes
          both kinds of connections inside, in a thread (`hand_over`), and hands them out as open
          sockets.
Loopback  Where a namespace is not allowed: this machine's own loopback interface. Whoever connects
          in the peer's place must be of the same user.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from spu_llm.net.frames import StreamType
from spu_llm.net.loopback import HOST, connect, owner_of

# Of the worker, and in the peer's place; nobody else is there.
_APART: Mapping[StreamType, tuple[int, int]] = {
    StreamType.LINK: (9001, 9002),
    StreamType.MESSAGES: (9003, 9004),
}
_LOOK_S = 0.5
_ANSWER_S = 5.0
_BACKLOG = 64

# Messages between the two ends of `Apart`: one of these and the door, a byte each, with an open
# socket or without.
_CONNECT, _CONNECTED, _FAILED, _ACCEPTED = b"c", b"C", b"F", b"A"


class WorkerSide(Protocol):
    """`ports`: by door, the worker's and that in the peer's place, as the worker knows them."""

    ports: Mapping[StreamType, tuple[int, int]]

    def accept(self, door: StreamType) -> socket.socket | None:
        """Return the next connection of the worker to its peer; None after a while. OSError when
        there will be none.
        """

    def connect(self, door: StreamType) -> socket.socket:
        """Connect to the worker; OSError when it does not listen."""

    def close(self) -> None:
        """End `accept`; from any thread, more than once."""


class Loopback:
    """On this machine's loopback interface."""

    def __init__(self, given: Mapping[StreamType, int] | None = None) -> None:
        """Listen in the peer's place. `given`: ports of the worker; free ones for other doors."""
        given = given or {}
        self._own = [_free_port() for door in StreamType if door not in given]
        worker = dict(
            zip((door for door in StreamType if door not in given), self._own, strict=True)
        )
        worker |= given
        self._listeners = {
            door: socket.create_server((HOST, 0), backlog=_BACKLOG) for door in StreamType
        }
        for listener in self._listeners.values():
            listener.settimeout(_LOOK_S)  # a bound on close where shutdown does not wake accept
        self.ports: Mapping[StreamType, tuple[int, int]] = {
            door: (worker[door], listener.getsockname()[1])
            for door, listener in self._listeners.items()
        }

    def accept(self, door: StreamType) -> socket.socket | None:
        try:
            sock, address = self._listeners[door].accept()
        except TimeoutError:
            return None
        if owner_of(address[1], self.ports[door][1]) != os.getuid():
            sock.close()
            return None
        sock.settimeout(None)
        return sock

    def connect(self, door: StreamType) -> socket.socket:
        return connect(self.ports[door][0])

    def close(self) -> None:
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        _drawn.difference_update(self._own)


class Apart:
    """The listeners of a worker that is in a network namespace of its own; `channel` leads to its
    `hand_over`.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.ports: Mapping[StreamType, tuple[int, int]] = _APART
        self._channel = channel
        self._asking = threading.Lock()
        self._accepted: dict[StreamType, queue.Queue[socket.socket | None]] = {
            door: queue.Queue() for door in StreamType
        }
        self._answers: queue.Queue[tuple[StreamType | None, socket.socket | None]] = queue.Queue()
        threading.Thread(target=self._read, name="worker-side", daemon=True).start()

    def accept(self, door: StreamType) -> socket.socket | None:
        try:
            sock = self._accepted[door].get(timeout=_LOOK_S)
        except queue.Empty:
            return None
        if sock is None:
            self._accepted[door].put(None)
            raise OSError(errno.EPIPE, "the worker has gone")
        return sock

    def connect(self, door: StreamType) -> socket.socket:
        with self._asking:
            self._channel.send(_CONNECT + bytes([door]))
            try:
                answered, sock = self._answers.get(timeout=_ANSWER_S)
                while answered not in (door, None):  # came too late for whoever asked
                    if sock is not None:
                        sock.close()
                    answered, sock = self._answers.get(timeout=_ANSWER_S)
            except queue.Empty:
                raise TimeoutError("the worker does not answer") from None
        if sock is None:
            raise ConnectionRefusedError("the worker does not listen")
        return sock

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with self._channel, contextlib.suppress(OSError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(self._channel, 2, 1)
                sock = socket.socket(fileno=descriptors[0]) if descriptors else None
                if len(data) < 2 or data[1] >= len(StreamType):
                    break
                door = StreamType(data[1])
                # Sockets that nobody takes use up descriptors of this process, which has other
                # workers: one that hands out more than can be is no longer listened to.
                if max(self._accepted[door].qsize(), self._answers.qsize()) >= _BACKLOG:
                    if sock is not None:
                        sock.close()
                    break
                if data[:1] == _ACCEPTED and sock is not None:
                    self._accepted[door].put(sock)
                elif data[:1] in (_CONNECTED, _FAILED):
                    self._answers.put((door, sock))
                else:
                    break
        for accepted in self._accepted.values():
            accepted.put(None)
        self._answers.put((None, None))


# ---- in the worker's process


def leave_network() -> bool:
    """Move this process, which has one thread, to a network namespace of its own with a loopback
    interface alone; False, with nothing changed, where that is not allowed: a child has tried.
    """
    trial = os.fork()
    if trial == 0:
        left = False
        try:
            left = _left()
        finally:
            os._exit(0 if left else 1)
    return os.waitpid(trial, 0)[1] == 0 and _left()


def _left() -> bool:
    new_user, new_network = 0x10000000, 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(new_network) != 0:
        if libc.unshare(new_user | new_network) != 0:
            return False
        # Files and processes stay this user's.
        own = Path("/proc/self")
        (own / "setgroups").write_text("deny")
        (own / "uid_map").write_text(f"{user} {user} 1")
        (own / "gid_map").write_text(f"{group} {group} 1")
    set_flags, up = 0x8914, 0x1
    with socket.socket() as sock:
        fcntl.ioctl(sock, set_flags, struct.pack("16sH14x", b"lo", up))
    return True


def hand_over(channel: socket.socket) -> None:
    """Serve `Apart` from inside, in a thread, for as long as the other end is there."""
    listeners = {
        socket.create_server((HOST, peer), backlog=_BACKLOG): door
        for door, (_, peer) in _APART.items()
    }
    threading.Thread(
        target=_hand_over, args=(channel, listeners), name="worker-side", daemon=True
    ).start()


def _hand_over(channel: socket.socket, listeners: Mapping[socket.socket, StreamType]) -> None:
    with contextlib.ExitStack() as owned, contextlib.suppress(OSError):
        for sock in (channel, *listeners):
            owned.enter_context(sock)
        while True:
            ready = select.select([channel, *listeners], [], [])[0]
            for listener, door in listeners.items():
                if listener in ready:
                    with listener.accept()[0] as sock:
                        socket.send_fds(channel, [_ACCEPTED + bytes([door])], [sock.fileno()])
            if channel in ready:
                asked = channel.recv(2)
                if len(asked) < 2:
                    return
                door = StreamType(asked[1])
                try:
                    sock = connect(_APART[door][0])
                except OSError:
                    channel.send(_FAILED + asked[1:])
                else:
                    with sock:
                        socket.send_fds(channel, [_CONNECTED + asked[1:]], [sock.fileno()])


# ---- ports

_drawn: set[int] = set()  # for workers of this process that may not listen yet
_drawing = threading.Lock()


def _free_port() -> int:
    with _drawing:
        while True:
            with socket.socket() as probe:
                probe.bind((HOST, 0))
                port = int(probe.getsockname()[1])
            if port not in _drawn:
                _drawn.add(port)
                return port
