"""A forwarder between gateway and provider, whose connections can be cut, or fall silent."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

_CHUNK_BYTES = 256 << 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


class Forwarder:
    """Forwards connections from a port of this machine to another one."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._ends: set[socket.socket] = set()
        self._cut, self._flows = False, threading.Event()
        self._flows.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset all connections, and those that come."""
        self._cut = True
        self._reset()

    def stall(self) -> None:
        """Forward nothing any more, and leave all connections as they are."""
        self._flows.clear()

    def mend(self) -> None:
        """Forward new connections; earlier ones are reset."""
        self._reset()
        self._cut = False
        self._flows.set()

    def close(self) -> None:
        """Reset all connections, and take no more."""
        self.cut()
        self._listener.close()
        self._flows.set()

    def _reset(self) -> None:
        for end in list(self._ends):
            self._ends.discard(end)
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            try:
                if self._cut:
                    raise ConnectionError
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                near.close()
                continue
            self._ends |= {near, far}
            for source, sink in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                self._flows.wait()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
