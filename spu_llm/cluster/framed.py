"""Frames over a connection between two machines of one party, and a socket carried by them.

A frame is its length, 4 bytes big-endian, and its content. Where a socket is carried, an empty
frame is the end of one direction; a connection that ends without it was broken.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

from spu_llm.core.errors import PeerError
from spu_llm.net.stream import ByteStream

MAX_FRAME = 64 << 20
_CHUNK = 256 << 10
_LENGTH = 4


class Framed:
    """Frames over a byte stream, which it owns: one thread may receive while others send."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._came = bytearray()

    def send(self, frame: bytes | memoryview) -> None:
        """Send a frame; PeerError when the connection is broken."""
        self._stream.send_all(len(frame).to_bytes(_LENGTH, "big") + frame)

    def receive(self) -> bytes:
        """Return the next frame; PeerError when there is none, or one that is too long."""
        length = int.from_bytes(self._next(_LENGTH), "big")
        if length > MAX_FRAME:
            raise PeerError(f"a frame of {length} bytes; at most {MAX_FRAME}")
        return self._next(length)

    def say(self, *words: Any) -> None:
        """Send words as JSON; PeerError when the connection is broken."""
        self.send(json.dumps(words).encode())

    def hear(self) -> list[Any]:
        """Return the next words; PeerError when there are none."""
        try:
            words = json.loads(self.receive())
        except ValueError as exc:
            raise PeerError(f"words that are no JSON: {exc}") from None
        if not isinstance(words, list) or not words:
            raise PeerError("words that are no list")
        return words

    def stream(self) -> ByteStream:
        """Return what the frames went over, for bytes without frames from here on; PeerError where
        the other end has sent some already.
        """
        if self._came:
            raise PeerError("bytes that came too early")
        return self._stream

    def close(self) -> None:
        """Close both directions, from any thread, and wake blocked calls."""
        self._stream.close()

    def _next(self, count: int) -> bytes:
        while len(self._came) < count:
            data = self._stream.recv_some(_CHUNK)
            if not data:
                raise PeerError("the connection between two machines of this party ended")
            self._came += data
        frame = bytes(self._came[:count])
        del self._came[:count]
        return frame


def carry(sock: socket.socket, framed: Framed) -> None:
    """Carry a socket's bytes both ways until both ends have ended, or either broke; close both."""
    down = threading.Thread(target=_down, args=(framed, sock), name="bridge-down", daemon=True)
    down.start()
    try:
        _up(sock, framed)
    finally:
        down.join()
        sock.close()
        framed.close()


def _up(sock: socket.socket, framed: Framed) -> None:
    room = memoryview(bytearray(_CHUNK))
    try:
        while count := sock.recv_into(room):
            framed.send(room[:count])
        framed.send(b"")
    except OSError:
        framed.close()
    except PeerError:
        _break(sock)


def _down(framed: Framed, sock: socket.socket) -> None:
    try:
        while frame := framed.receive():
            sock.sendall(frame)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        framed.close()
    except PeerError:
        _break(sock)


def _break(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
