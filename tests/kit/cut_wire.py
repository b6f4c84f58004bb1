"""A wire to a port of this machine that can be cut, or go dead, in the midst."""

from __future__ import annotations

import contextlib
import socket
import threading


class CutWire:
    """Listens on `port` and carries each connection to `at`, a port of 127.0.0.1. `moved`: bytes
    that it has carried, both ways.
    """

    def __init__(self, at: int) -> None:
        self.moved = 0
        self._at, self._lock = at, threading.Lock()
        self._socks: list[socket.socket] = []
        self._dead: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> CutWire:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """End all connections that there are; later ones are carried."""
        with self._lock:
            socks, self._socks = self._socks, []
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        """Let nothing pass any more on the connections that there are; none is closed."""
        with self._lock:
            self._dead |= set(self._socks)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._server.accept()[0]
                provider = socket.create_connection(("127.0.0.1", self._at))
                with self._lock:
                    self._socks += [client, provider]
                for source, sink in ((client, provider), (provider, client)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source not in self._dead:
                    sink.sendall(data)
                    self.moved += len(data)
        if source not in self._dead:
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
