"""How a relay and its own worker reach each other.

The worker believes that its peer is a port on this machine: behind that port stands the relay, and
the relay reaches the worker at a port of its own.

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
from pathlib import Path
from typing import Protocol

from spu_llm.net.loopback import owner_of

_LOOPBACK = "127.0.0.1"
_APART = (9001, 9002)  # of the worker, and in the peer's place; nobody else is there
_LOOK_S = 0.5
_ANSWER_S = 5.0
_BACKLOG = 64

# Messages between the two ends of `Apart`: one byte, with an open socket or without.
_CONNECT, _CONNECTED, _FAILED, _ACCEPTED = b"c", b"C", b"F", b"A"


class WorkerSide(Protocol):
    """`ports`: the worker's, and that in the peer's place, as the worker knows them."""

    ports: tuple[int, int]

    def accept(self) -> socket.socket | None:
        """The next connection of the worker to its peer; None after a while. OSError when there
        will be none.
        """

    def connect(self) -> socket.socket:
        """To the worker; OSError when it does not listen."""

    def close(self) -> None:
        """`accept` ends; from any thread, more than once."""


class Loopback:
    """On this machine's loopback interface."""

    def __init__(self, worker_port: int | None = None) -> None:
        """`worker_port`: a free one, unless it is given."""
        self._drawn = worker_port is None
        own = _free_port() if worker_port is None else worker_port
        self._listener = socket.create_server((_LOOPBACK, 0), backlog=_BACKLOG)
        self._listener.settimeout(_LOOK_S)  # a bound on close where shutdown does not wake accept
        self.ports = own, self._listener.getsockname()[1]

    def accept(self) -> socket.socket | None:
        try:
            sock, address = self._listener.accept()
        except TimeoutError:
            return None
        if owner_of(address[1], self.ports[1]) != os.getuid():
            sock.close()
            return None
        sock.settimeout(None)
        return sock

    def connect(self) -> socket.socket:
        return _connect(self.ports[0])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._drawn:
            _drawn.discard(self.ports[0])


class Apart:
    """In the worker's own namespace; `channel` leads to its `hand_over`."""

    def __init__(self, channel: socket.socket) -> None:
        self.ports = _APART
        self._channel = channel
        self._asking = threading.Lock()
        self._accepted: queue.Queue[socket.socket | None] = queue.Queue()
        self._answers: queue.Queue[socket.socket | None] = queue.Queue()
        threading.Thread(target=self._read, name="worker-side", daemon=True).start()

    def accept(self) -> socket.socket | None:
        try:
            sock = self._accepted.get(timeout=_LOOK_S)
        except queue.Empty:
            return None
        if sock is None:
            self._accepted.put(None)
            raise OSError(errno.EPIPE, "the worker has gone")
        return sock

    def connect(self) -> socket.socket:
        with self._asking:
            self._channel.send(_CONNECT)
            try:
                sock = self._answers.get(timeout=_ANSWER_S)
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
                data, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
                sock = socket.socket(fileno=descriptors[0]) if descriptors else None
                if data == _ACCEPTED and sock is not None:
                    self._accepted.put(sock)
                elif data in (_CONNECTED, _FAILED):
                    self._answers.put(sock)
                else:
                    break
        self._accepted.put(None)
        self._answers.put(None)


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
    listener = socket.create_server((_LOOPBACK, _APART[1]), backlog=_BACKLOG)
    threading.Thread(
        target=_hand_over, args=(channel, listener), name="worker-side", daemon=True
    ).start()


def _hand_over(channel: socket.socket, listener: socket.socket) -> None:
    with channel, listener, contextlib.suppress(OSError):
        while True:
            ready = select.select([channel, listener], [], [])[0]
            if listener in ready:
                with listener.accept()[0] as sock:
                    socket.send_fds(channel, [_ACCEPTED], [sock.fileno()])
            if channel in ready:
                if not channel.recv(1):
                    return
                try:
                    sock = _connect(_APART[0])
                except OSError:
                    channel.send(_FAILED)
                else:
                    with sock:
                        socket.send_fds(channel, [_CONNECTED], [sock.fileno()])


# ---- sockets


def _connect(port: int) -> socket.socket:
    """Connect to a port of this machine; `OSError` when nobody listens."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Bound first: a socket that the kernel gave the very port would connect to itself, and
        # keep the worker from ever binding it.
        sock.bind((_LOOPBACK, 0))
        if sock.getsockname()[1] == port:
            raise ConnectionError(f"port {port} was taken by this connection")
        sock.connect((_LOOPBACK, port))
    except OSError:
        sock.close()
        raise
    return sock


_drawn: set[int] = set()  # for workers of this process that may not listen yet
_drawing = threading.Lock()


def _free_port() -> int:
    with _drawing:
        while True:
            with socket.socket() as probe:
                probe.bind((_LOOPBACK, 0))
                port = int(probe.getsockname()[1])
            if port not in _drawn:
                _drawn.add(port)
                return port
