"""Messages between the two parties, seen by hand-written protocols as two methods."""

from __future__ import annotations

import hashlib
import hmac
import queue
import time
from dataclasses import dataclass
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from spu_llm.core.errors import PeerError, WireError


class Channel(Protocol):
    """An ordered, reliable pipe of whole messages to the other party."""

    def send(self, data: bytes) -> None: ...

    def recv(self) -> bytes: ...


class LinkChannel:
    """A sub-channel of an SPU link (`link.spawn()`), in memory."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self._peer = 1 - link.rank

    def send(self, data: bytes) -> None:
        # Not awaited: an acknowledgement would cost every message a round trip.
        self._link.send_async(self._peer, data)

    def recv(self) -> bytes:
        try:
            return bytes(self._link.recv(self._peer))
        except RuntimeError as exc:
            raise PeerError("no message from the other party") from exc


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


SEAL_BYTES = 24  # per message: its number and its tag


class SealedChannel:
    """Numbers every message and tags it under a key of the session.

    A message that is replayed, cut, reordered or changed on the way is a WireError, before any of
    it is used. The key comes from an unauthenticated exchange (`agree_on_key`): whoever sits in the
    middle from the start is kept out by the connection's TLS, not by this.
    """

    def __init__(self, inner: Channel, key: bytes, rank: int) -> None:
        self._inner = inner
        # A key per direction: a party's own messages sent back to it do not pass.
        self._keys = [hashlib.sha256(key + bytes([r])).digest() for r in (rank, 1 - rank)]
        self._sent = self._received = 0

    def send(self, data: bytes) -> None:
        number = self._sent.to_bytes(8, "little")
        self._sent += 1
        self._inner.send(number + self._tag(0, number, data) + data)

    def recv(self) -> bytes:
        message = self._inner.recv()
        number, tag, data = message[:8], message[8:SEAL_BYTES], message[SEAL_BYTES:]
        expected, self._received = self._received, self._received + 1
        if len(message) < SEAL_BYTES or not hmac.compare_digest(tag, self._tag(1, number, data)):
            raise WireError(f"message {expected} was changed on the way; the session ends")
        if int.from_bytes(number, "little") != expected:
            raise WireError(
                f"message {int.from_bytes(number, 'little')} came in place of message {expected}; "
                "the session ends"
            )
        return data

    def _tag(self, direction: int, number: bytes, data: bytes) -> bytes:
        state = hashlib.blake2b(number, key=self._keys[direction], digest_size=16)
        state.update(data)
        return state.digest()


def agree_on_key(channel: Channel) -> bytes:
    """Agree on a fresh key (32 bytes) that both parties get and listeners do not: X25519, one
    message each.

    Raise WireError when the peer's message is no public key.
    """
    private = X25519PrivateKey.generate()
    own = private.public_key().public_bytes_raw()
    channel.send(own)
    peer = channel.recv()
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError as exc:
        raise WireError("the peer's first message is not a public key") from exc
    return hashlib.sha256(b"".join([shared, *sorted((own, peer))])).digest()


@dataclass(frozen=True)
class Traffic:
    """Payload bytes and sends, as one party sees them."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    received_messages: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{k: n + getattr(other, k) for k, n in vars(self).items()})

    def since(self, before: Traffic) -> Traffic:
        """Return the traffic that came on top of `before`."""
        return Traffic(**{k: n - getattr(before, k) for k, n in vars(self).items()})

    @property
    def bytes(self) -> int:
        """Return the payload bytes that both parties sent."""
        return self.sent_bytes + self.received_bytes

    @property
    def messages(self) -> int:
        """Return the number of sends of both parties."""
        return self.sent_messages + self.received_messages


def round_trip_s(channel: Channel, *, asks: bool, times: int = 5) -> float | None:
    """Measure how long a message to the peer and its answer take, in seconds: the shortest of
    `times` tries, at the party that `asks`, while its peer answers and gets None.
    """
    best = None
    for _ in range(times):
        started = time.perf_counter()
        if asks:
            channel.send(_PING)
        if channel.recv() != _PING:
            raise WireError("the other party does not answer as it should")
        if not asks:
            channel.send(_PING)
        else:
            took = time.perf_counter() - started
            best = took if best is None else min(best, took)
    return best


class CountingChannel:
    """Counts what passes through `inner` into `traffic`."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner
        self.traffic = Traffic()

    def send(self, data: bytes) -> None:
        self.traffic += Traffic(sent_bytes=len(data), sent_messages=1)
        self.inner.send(data)

    def recv(self) -> bytes:
        data = self.inner.recv()
        self.traffic += Traffic(received_bytes=len(data), received_messages=1)
        return data


def recv_exactly(channel: Channel, size: int) -> bytes:
    """Receive the peer's next message; WireError when its size is not `size` bytes."""
    data = channel.recv()
    if len(data) != size:
        raise WireError(f"a message has {len(data)} bytes, expected {size}")
    return data


_GOODBYE = b"end"
_PING = b"ping"


def say_goodbye(channel: Channel) -> None:
    """End a session with the peer, who has then got all that was sent. WireError when it is not at
    its end.
    """
    channel.send(_GOODBYE)
    if channel.recv() != _GOODBYE:
        raise WireError("the other party goes on where this one is at its end")
