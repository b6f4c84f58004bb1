"""A proxy on the connections between two parties: records every byte, and can spoil them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from spu_llm.net.frames import CALLS_BYTE, PREAMBLE, FrameParser, Kind, encode

Spoil = Callable[[bytes], bytes]


class Tap:
    """Listens on `port` for one client after another and connects each to the provider.

    `wire` has all bytes of sessions so far by the side that sent them, `calls` those of the control
    plane, which are passed on as they are. With `mute`, frames of workers are not passed on.
    """

    def __init__(self, provider_port: int) -> None:
        self.wire = {"client": bytearray(), "provider": bytearray()}
        self.calls = {"client": bytearray(), "provider": bytearray()}
        self.mute = False
        self._spoil: dict[str, Spoil] = {}
        self._provider_port = provider_port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def spoil(self, side: str, change: Spoil) -> None:
        """Pass on what `change` makes of the next bytes that `side` sends, and end there."""
        self._spoil[side] = change

    def streams(self, side: str) -> list[bytes]:
        """Return all that `side` sent, out of the relay's frames: a stream of its worker at a time,
        and what its supervisor said.
        """
        collected: dict[int, bytearray] = {}
        for frame in FrameParser().feed(bytes(self.wire[side])):
            collected.setdefault(frame.stream, bytearray()).extend(frame.payload)
        return [bytes(data) for data in collected.values()]

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *exc: object) -> None:
        for sock in (self._server, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)

    def _run(self, body: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=body, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._server.accept()[0]
                self._socks.append(client)
                self._run(self._meet, client)

    def _meet(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            calls = client.recv(1, socket.MSG_PEEK) == CALLS_BYTE
            provider = socket.create_connection(("127.0.0.1", self._provider_port))
            self._socks.append(provider)
            carry = self._call if calls else self._carry
            self._run(carry, "client", client, provider)
            self._run(carry, "provider", provider, client)

    def _call(self, side: str, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.calls[side] += data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _carry(self, side: str, source: socket.socket, sink: socket.socket) -> None:
        parser, greeted = FrameParser(), False
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.wire[side] += data
                if side in self._spoil:
                    sink.sendall(self._spoil[side](data))
                    break
                if self.mute:
                    frames = [f for f in parser.feed(data) if f.kind == Kind.CONTROL]
                    data = b"".join(map(encode, frames))
                    data, greeted = data if greeted else PREAMBLE + data, True
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
