"""The operator's guard before a vault: bounds how much of what the vault says leaves the machine.

A vault reads all weights at a prefill, and its user's end is encrypted, so that nobody here reads
what it says (Gim, Li, Zhong, section 4.1: the vendor limits the outbound traffic to what tokens
take). The guard passes everything to the vault, and of what comes back, over all connections
together, `burst` bytes at once, `rate` bytes a second, and `most` bytes in all while it runs.

What that is worth. By a time t after the start no more than burst + rate t bytes have left, nor
more than `most`: of W bytes of weights the last leaves after (W - burst) / rate seconds, or not.

What it is not worth. It bounds bytes, not what they mean: weights may be packed, and worth taking
in part. Text is chosen by the vault, log2 of the vocabulary bits a token, and when bytes come, or
when a connection ends, says something too, as much as a user can tell apart. A guard that is
started again begins anew. The operator has to leave the vault no other way out: its machine may
reach the engine and this guard alone. Who may call is the vault's to say, after its own first
bytes, which strangers spend too: only users' addresses may reach the guard.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from spu_llm.net.crowd import Crowd, origin_of
from spu_llm.net.stream import listen

CHUNK_BYTES = 1024
_CONNECT_S = 20.0
_READ_S = 60.0  # for a user to read what may leave
_LAST_S = 30.0  # for what a vault has said, whose user's words it takes no more
_CONNECTIONS = 64  # at a time; a newcomer gets the place of the address that holds most
_SAY_S = 60.0  # between two lines


class Spent(Exception):
    """No more bytes may leave."""


@dataclass
class Allowance:
    """The bytes that may leave: a bucket of `burst` bytes that fills by `rate` bytes a second."""

    rate: float
    burst: int
    most: int | None = None
    sent: int = field(default=0, init=False)
    _left: float = field(default=0.0, init=False)
    _at: float | None = field(default=None, init=False)

    @property
    def is_spent(self) -> bool:
        """Tell whether a piece of CHUNK_BYTES may never leave."""
        return self.most is not None and self.sent + CHUNK_BYTES > self.most

    def take(self, size: int, now: float) -> float:
        """Take `size` bytes of it, and return after how many seconds they may leave. Spent where
        they may not; nothing is taken then.
        """
        if self.most is not None and self.sent + size > self.most:
            raise Spent
        if self._at is None:
            self._left, self._at = float(self.burst), now
        self._left = min(self.burst, self._left + self.rate * (now - self._at))
        self._at = now
        self._left -= size
        self.sent += size
        return max(0.0, -self._left / self.rate)


@dataclass(frozen=True)
class GuardOptions:
    vault: tuple[str, int]
    listen: tuple[str, int]
    rate: int
    burst: int
    most: int | None


async def guard(
    options: GuardOptions, say: Callable[[str], None], on_port: Callable[[int], None]
) -> None:
    """Pass connections to the vault, and its answers within the allowance, until cancelled.
    InputError where the port cannot be had.
    """
    passing = _Passing(options, say)
    with closing(listen(*options.listen)) as listener:
        on_port(listener.getsockname()[1])
        server = await asyncio.start_server(passing.met, sock=listener, limit=CHUNK_BYTES)
        async with server:
            await server.serve_forever()


class _Passing:
    """All connections of one guard."""

    def __init__(self, options: GuardOptions, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        self._allowance = Allowance(options.rate, options.burst, options.most)
        self._crowd = Crowd["asyncio.Task[None]"](_CONNECTIONS)
        self._said_at = -_SAY_S
        self._said_spent = False

    async def met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection until either end closes it."""
        own = asyncio.current_task()
        assert own is not None
        origin = origin_of((writer.get_extra_info("peername") or ("",))[0])
        if (gone := self._crowd.enter(own, origin)) is not None:
            gone.cancel()
        try:
            if not self._allowance.is_spent:
                await self._passed(reader, writer)
        except asyncio.CancelledError:
            pass  # for a newcomer's place, or as the guard ends
        finally:
            self._crowd.leave(own)
            writer.close()
        words = f"{self._allowance.sent} bytes have gone out in all"
        if not self._allowance.is_spent:
            self._note(words)
        elif not self._said_spent:
            self._said_spent = True
            self._say(f"{words}; no more may")

    async def _passed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._options.vault
        try:
            opening = asyncio.open_connection(host, port, limit=CHUNK_BYTES)
            from_vault, to_vault = await asyncio.wait_for(opening, _CONNECT_S)
        except (OSError, UnicodeError, asyncio.TimeoutError):
            return self._note(f"the vault at {host}:{port} does not answer")
        for end in (writer, to_vault):
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        there = asyncio.ensure_future(_pump(reader, to_vault, None))
        back = asyncio.ensure_future(_pump(from_vault, writer, self._allowance))
        try:
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
            if there.done() and not there.result():  # the vault takes no more: it may say why
                await asyncio.wait([back], timeout=_LAST_S)
        finally:
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
            to_vault.close()

    def _note(self, words: str) -> None:
        """Say something, unless a line a short time ago did: whoever calls could fill a disk."""
        if time.monotonic() - self._said_at >= _SAY_S:
            self._said_at = time.monotonic()
            self._say(words)


async def _pump(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, allowance: Allowance | None
) -> bool:
    """Pass on what comes, at the pace that is allowed, until there is no more. Return whether the
    source has ended, not the sink.
    """
    while True:
        try:
            data = await source.read(CHUNK_BYTES)
        except OSError:
            return True
        if not data:
            return True
        if allowance is not None:
            try:
                wait_s = allowance.take(len(data), time.monotonic())
            except Spent:
                return True
            await asyncio.sleep(wait_s)
        try:
            sink.write(data)
            await asyncio.wait_for(sink.drain(), _READ_S)
        except (OSError, asyncio.TimeoutError):
            return False
