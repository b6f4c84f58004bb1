"""Faults on the wire: a proxy between two parties that does one thing to one message.

A message is what the parties' own layer takes whole or not at all: a TLS record, or in the clear a
frame of the relay (on a connection for calls, whatever comes at once).

    drop-before   both connections end in its place
    drop-after    both end behind it
    truncate      both end in its middle
    half-close    its direction ends in its place; the other one goes on
    black-hole    nothing passes any more, and nothing is closed
    corrupt       one bit of it is another one
    duplicate     it comes twice
    reorder       the next one comes first
    delay         it comes DELAY_S late, and all behind it
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from spu_llm.net.frames import CALLS_BYTE, HEADER_BYTES, PREAMBLE

FATAL = (
    "drop-before",
    "drop-after",
    "truncate",
    "half-close",
    "black-hole",
    "corrupt",
    "duplicate",
    "reorder",
)
DEEDS = (*FATAL, "delay")
SIDES = ("client", "provider")
DELAY_S = 2.5


@dataclass(frozen=True)
class Fault:
    """What happens to the `at`-th message, from 0 on, that `side` sends on the `connection`-th
    connection.
    """

    deed: str
    side: str
    at: int
    connection: int = 1  # of a session without text: the first is for calls, the second for data


class FaultyWire:
    """Listens on `port` and connects each caller to the provider. `hit`: when the fault was done,
    by the monotonic clock. Messages are counted from when `counting` is set (`at_once`: from the
    first one on).
    """

    def __init__(
        self, provider_port: int, fault: Fault | None = None, *, at_once: bool = True
    ) -> None:
        self.hit: float | None = None
        self.counting = threading.Event()
        if at_once:
            self.counting.set()
        self._fault, self._provider_port = fault, provider_port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._run(self._accept)

    def __enter__(self) -> FaultyWire:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        self._end(self._server, *self._socks)
        for thread in self._threads:
            thread.join(5)
        for sock in (self._server, *self._socks):
            sock.close()

    def _run(self, body: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=body, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                client = self._server.accept()[0]
                provider = socket.create_connection(("127.0.0.1", self._provider_port))
                self._socks += [client, provider]
                fault = self._fault
                mine = fault if fault is not None and fault.connection == number else None
                hole = threading.Event()
                self._run(self._carry, mine, "client", client, provider, hole)
                self._run(self._carry, mine, "provider", provider, client, hole)
                number += 1

    def _carry(
        self,
        fault: Fault | None,
        side: str,
        source: socket.socket,
        sink: socket.socket,
        hole: threading.Event,
    ) -> None:
        messages, count, late = _Messages(), 0, b""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if hole.is_set():
                    continue
                for message in messages.feed(data):
                    counts = self.counting.is_set()
                    if counts and fault is not None and (fault.side, fault.at) == (side, count):
                        self.hit = time.monotonic()
                        if fault.deed == "black-hole":
                            hole.set()
                            break
                        if fault.deed == "half-close":
                            sink.shutdown(socket.SHUT_WR)
                            self._closed.wait()
                            return
                        if fault.deed == "reorder":
                            late, message = message, b""
                        elif self._ends(fault.deed, message, source, sink):
                            return
                        message = _spoilt(fault.deed, message)
                    elif late and message:
                        message, late = message + late, b""
                    sink.sendall(message)
                    count += counts
        if not hole.is_set():
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

    def _ends(self, deed: str, message: bytes, source: socket.socket, sink: socket.socket) -> bool:
        """Return whether both connections end here; that is done then."""
        passed = {"drop-before": 0, "truncate": len(message) // 2, "drop-after": len(message)}
        if deed not in passed:
            return False
        sink.sendall(message[: passed[deed]])
        self._end(sink, source)
        return True

    def _end(self, *socks: socket.socket) -> None:
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _spoilt(deed: str, message: bytes) -> bytes:
    if deed == "corrupt":
        return message[:-1] + bytes([message[-1] ^ 1])
    if deed == "duplicate":
        return message * 2
    if deed == "delay":
        time.sleep(DELAY_S)
    return message


class _Messages:
    """Cuts one direction's bytes into messages."""

    def __init__(self) -> None:
        self._rest = b""
        self._size: Callable[[bytes], int] | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are whole by now."""
        self._rest += data
        if self._size is None:
            self._size = _of_plain if self._rest.startswith(PREAMBLE[:1]) else _of_tls
            if self._rest[:1] in (CALLS_BYTE, b"\0"):
                self._size = len
        collected = []
        while self._rest and len(self._rest) >= (size := self._size(self._rest)):
            collected.append(self._rest[:size])
            self._rest = self._rest[size:]
        return collected


def _of_tls(data: bytes) -> int:
    return 5 + int.from_bytes(data[3:5], "big") if len(data) >= 5 else 5


def _of_plain(data: bytes) -> int:
    if data.startswith(PREAMBLE):
        return len(PREAMBLE)
    if len(data) < HEADER_BYTES:
        return HEADER_BYTES
    return HEADER_BYTES + int.from_bytes(data[5:HEADER_BYTES], "big")
