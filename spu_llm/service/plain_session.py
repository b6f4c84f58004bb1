"""One party of two without SPU: messages to the peer's worker, and the ledger of what is opened."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from spu_llm.core.channel import CountingChannel, SealedChannel, agree_on_key, say_goodbye
from spu_llm.core.errors import PeerError, WireError
from spu_llm.core.ledger import Ledger
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.net.stream import ByteStream, accept, connect, listen

_SIZE_BYTES = 8  # little-endian, before each message
_AT_ONCE = 1 << 20
_LARGEST = 1 << 30  # bytes of a message
_RETRY_S = 0.1


class StreamChannel:
    """Whole messages over a byte stream."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    def send(self, data: bytes) -> None:
        self._stream.send_all(len(data).to_bytes(_SIZE_BYTES, "little") + data)

    def recv(self) -> bytes:
        size = int.from_bytes(self._exactly(_SIZE_BYTES), "little")
        if size > _LARGEST:
            raise WireError(f"the other party announces a message of {size} bytes")
        return self._exactly(size)

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._stream.recv_some(min(count - len(data), _AT_ONCE))
            if not part:
                raise PeerError("no message from the other party")
            data += part
        return bytes(data)


class PlainSession:
    """What a program without SPU runs with; `close` it in the end."""

    def __init__(self, rank: int, stream: ByteStream, session: str) -> None:
        """`session`: its id, which both supervisors told their workers. WireError when whoever is
        at the other end does not know it: nothing of the program's has been sent then.
        """
        self.rank = rank
        wire = StreamChannel(stream)
        key = hashlib.sha256(agree_on_key(wire) + session.encode()).digest()
        sealed = SealedChannel(wire, key, rank)
        sealed.send(b"")
        try:
            sealed.recv()
        except WireError:
            raise WireError("a stranger is at the other end of the worker's connection") from None
        self.channel = CountingChannel(sealed)
        self.ledger = Ledger()
        self._stream = stream

    @staticmethod
    def meet(rank: int, addresses: Sequence[str], timeout_ms: int, session: str) -> PlainSession:
        """With the peer's worker: the client calls the provider's address. PeerError when it does
        not come.
        """
        host, _, port = addresses[PROVIDER].rpartition(":")
        timeout_s = timeout_ms / 1000
        deadline = time.monotonic() + timeout_s
        while rank == CLIENT:
            try:
                return PlainSession(rank, connect(host, int(port), timeout_s), session)
            except WireError:
                raise
            except PeerError:
                # The relay gives a worker ten seconds to listen; a busy machine takes longer.
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
        with listen(host, int(port)) as listener:
            try:
                return PlainSession(rank, accept(listener, timeout_s), session)
            except TimeoutError:
                raise PeerError("the other party's worker did not come") from None

    @property
    def finished(self) -> int:
        """How many messages are done: it stands still when this party does."""
        return self.channel.traffic.messages

    def close(self) -> None:
        """Wait until the peer has come to the end, too: it has then got all that was sent."""
        say_goodbye(self.channel)
        self._stream.close()
