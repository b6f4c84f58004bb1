"""Messages between the two parties, seen by hand-written protocols as three methods."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Any, Protocol

from spu_llm.errors import PeerError


class Channel(Protocol):
    """An ordered, reliable pipe of whole messages to the other party."""

    def send(self, data: bytes) -> None: ...

    def recv(self) -> bytes: ...

    def close(self) -> None: ...


class LinkChannel:
    """A sub-channel of an SPU link (`link.spawn()`), in memory or over the relay."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self._peer = 1 - link.rank

    def send(self, data: bytes) -> None:
        self._link.send(self._peer, data)

    def recv(self) -> bytes:
        try:
            return bytes(self._link.recv(self._peer))
        except RuntimeError as exc:
            raise PeerError("no message from the other party") from exc

    def close(self) -> None:
        """The link is owned and stopped by the SPU runtime."""


class MemoryChannel:
    """One end of a pair of queues in one process."""

    def __init__(self, inbox: queue.Queue[bytes], outbox: queue.Queue[bytes]) -> None:
        self._inbox, self._outbox = inbox, outbox

    @staticmethod
    def pair() -> tuple[MemoryChannel, MemoryChannel]:
        a: queue.Queue[bytes] = queue.Queue()
        b: queue.Queue[bytes] = queue.Queue()
        return MemoryChannel(a, b), MemoryChannel(b, a)

    def send(self, data: bytes) -> None:
        self._outbox.put(data)

    def recv(self) -> bytes:
        try:
            return self._inbox.get(timeout=30)
        except queue.Empty:
            raise PeerError("no message from the other party for 30 s") from None

    def close(self) -> None:
        """Nothing to release."""


@dataclass
class Traffic:
    """Payload bytes and sends, as one party sees them."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.sent_messages + other.sent_messages,
            self.received_messages + other.received_messages,
        )

    @property
    def bytes(self) -> int:
        """Payload bytes of both parties."""
        return self.sent_bytes + self.received_bytes

    @property
    def messages(self) -> int:
        """Sends of both parties."""
        return self.sent_messages + self.received_messages


class CountingChannel:
    """Counts what passes through `inner` into `traffic`."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner
        self.traffic = Traffic()

    def send(self, data: bytes) -> None:
        self.traffic.sent_bytes += len(data)
        self.traffic.sent_messages += 1
        self.inner.send(data)

    def recv(self) -> bytes:
        data = self.inner.recv()
        self.traffic.received_bytes += len(data)
        self.traffic.received_messages += 1
        return data

    def close(self) -> None:
        self.inner.close()
