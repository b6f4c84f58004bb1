"""The operator's guard before a vault: bounds how much of what the vault says leaves the machine.

A vault reads all weights at a prefill, and its user's end is encrypted, so that nobody here reads
what it says (Gim, Li, Zhong, section 4.1: the vendor limits the outbound traffic to what tokens
take). The guard passes everything to the vault, and of what comes back, over all connections
together, `burst` bytes at once, `rate` bytes a second, and `most` bytes in all.

What that is worth. By a time t after the start no more than burst + rate t bytes have left, nor
more than `most`: of W bytes of weights the last leaves after (W - burst) / rate seconds, or never.

What it is not worth. It bounds bytes, not what they mean: text is chosen by the vault, log2 of the
vocabulary bits a token, and when bytes come says something too, as much as a user can tell apart.
Weights may be worth taking in part, and rounded. The operator has to leave the vault no other way
out: its machine may reach the engine and this guard alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field

from spu_llm.net.stream import listen

CHUNK_BYTES = 1024
_CONNECT_S = 20.0
_CONNECTIONS = 64  # at a time


class Spent(Exception):
    """No more bytes may leave."""


@dataclass
class Allowance:
    """What may leave, as a bucket of `burst` bytes that fills by `rate` bytes a second."""

    rate: float
    burst: int
    most: int | None = None
    sent: int = field(default=0, init=False)
    _left: float = field(default=0.0, init=False)
    _at: float | None = field(default=None, init=False)

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
    allowance = Allowance(options.rate, options.burst, options.most)
    places = asyncio.Semaphore(_CONNECTIONS)

    async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with places:
            await _passed(options, allowance, say, reader, writer)

    with closing(listen(*options.listen)) as listener:
        on_port(listener.getsockname()[1])
        server = await asyncio.start_server(met, sock=listener, limit=CHUNK_BYTES)
        async with server:
            await server.serve_forever()


async def _passed(
    options: GuardOptions,
    allowance: Allowance,
    say: Callable[[str], None],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Pass one connection until either end closes it, and say how much came back."""
    started, before = time.monotonic(), allowance.sent
    try:
        opening = asyncio.open_connection(*options.vault, limit=CHUNK_BYTES)
        from_vault, to_vault = await asyncio.wait_for(opening, _CONNECT_S)
    except (OSError, asyncio.TimeoutError):
        say(f"the vault at {options.vault[0]}:{options.vault[1]} does not answer")
        writer.close()
        return
    why = ""
    pumps = [
        asyncio.ensure_future(_pump(reader, to_vault, None)),
        asyncio.ensure_future(_pump(from_vault, writer, allowance)),
    ]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        if pumps[1].done() and isinstance(pumps[1].exception(), Spent):
            why = f"; {allowance.most} bytes have left in all, and no more may"
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        writer.close()
        to_vault.close()
    took = time.monotonic() - started
    say(f"a connection ended after {took:.0f} s; {allowance.sent - before} bytes left since{why}")


async def _pump(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, allowance: Allowance | None
) -> None:
    """Pass on what comes, at the pace that is allowed, until there is no more."""
    with suppress(OSError):
        while data := await source.read(CHUNK_BYTES):
            if allowance is not None:
                await asyncio.sleep(allowance.take(len(data), time.monotonic()))
            sink.write(data)
            await sink.drain()
