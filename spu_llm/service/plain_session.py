"""One party of two without SPU: messages to the peer's worker, and the ledger of what is opened."""

from __future__ import annotations

import hashlib

from spu_llm.core.channel import Channel, CountingChannel, SealedChannel, agree_on_key, say_goodbye
from spu_llm.core.errors import WireError
from spu_llm.core.ledger import Ledger


class PlainSession:
    """A session for a program without SPU; `close` it in the end."""

    def __init__(self, rank: int, wire: Channel, session: str) -> None:
        """Agree on a key over `wire`, which leads to the peer. `session`: its id, which both
        supervisors told their workers. WireError when whoever is at the other end does not know it:
        nothing of the program's has been sent then.
        """
        self.rank = rank
        key = hashlib.sha256(agree_on_key(wire) + session.encode()).digest()
        sealed = SealedChannel(wire, key, rank)
        sealed.send(b"")
        try:
            sealed.recv()
        except WireError:
            raise WireError("a stranger is at the other end of the worker's connection") from None
        self.channel = CountingChannel(sealed)
        self.ledger = Ledger()

    @property
    def finished(self) -> int:
        """Return how many messages are done: the number stands still when this party does."""
        return self.channel.traffic.messages

    def close(self) -> None:
        """Wait until the peer has come to the end, too, and so has received all that was sent."""
        say_goodbye(self.channel)
