"""Carries a connection of ours to and from a local socket, for code that wants one of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable

from spu_llm.core.errors import PeerError
from spu_llm.net.stream import ByteStream

_CHUNK_BYTES = 64 << 10


class PrivateFolder:
    """A directory of this user alone, for Unix sockets; its sockets go with it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="spu-llm-", ignore_cleanup_errors=True)
        self._lock, self._closed = threading.Lock(), False
        self._descriptor = os.open(self._folder.name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def path(self, name: str) -> str:
        """Return the path of a socket, as this process reaches it. However long the directory's own
        name is, a socket's may have 107 bytes.
        """
        return f"/proc/self/fd/{self._descriptor}/{name}"

    def remove(self, name: str) -> None:
        """Remove a socket's name, which whoever has connected needs no more."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._descriptor)

    def close(self) -> None:
        """Remove the directory and its sockets; safe to call again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._descriptor)
        self._folder.cleanup()


def carry(
    stream: ByteStream, sock: socket.socket, look: Callable[[bytes], None] = lambda first: None
) -> None:
    """Carry bytes both ways until either end closes; then both are closed. Raises what broke the
    stream, or what `look` raises at the first bytes that came from it.
    """
    broken: list[PeerError] = []

    def receive() -> None:
        first = True
        try:
            while data := stream.recv_some(_CHUNK_BYTES):
                if first:
                    look(data)
                    first = False
                sock.sendall(data)
        except PeerError as error:
            broken.append(error)
        except OSError:
            pass  # the local end wants no more
        finally:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=receive, name="carry", daemon=True)
    with sock:
        thread.start()
        with contextlib.suppress(OSError, PeerError):  # the other direction says why
            while data := sock.recv(_CHUNK_BYTES):
                stream.send_all(data)
        why = broken[:1]  # what comes later, closing it has caused
        stream.close()
        thread.join()
    if why:
        raise why[0]
