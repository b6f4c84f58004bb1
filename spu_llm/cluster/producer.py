"""The client's half of a pair of producers: a Ray actor that makes correlated randomness.

Its other half is a session's worker at the provider. Each item of work is a session of its own, on
an authenticated connection of its own, whose batches leave this machine as soon as they are whole;
nothing is kept here.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spu_llm.api.events import Event
from spu_llm.api.preparation import make_beside
from spu_llm.api.provider import Provider
from spu_llm.core.errors import BusyError, SpuLlmError, WantedError
from spu_llm.net.identity import load
from spu_llm.offline import inbox
from spu_llm.offline.durable import create, open_folder
from spu_llm.offline.files import STORE_FILE
from spu_llm.offline.inbox import Parcel
from spu_llm.offline.peer_directories import peer_folders
from spu_llm.service.client import Server
from spu_llm.service.first_contact import text_format
from spu_llm.systems.decoding.records import Ahead


@dataclass(frozen=True)
class ProviderAddress:
    """Address of the provider for a producer: as `Server`, but the identity is read on the
    producer's machine, from the same paths. `secret`: the client's, of its pool directory, by which
    both parties know whose batches they are; `store`: the pool's object storage, as a URL, if there
    is any.
    """

    host: str
    port: int
    network: str
    identity: Path | None
    trust: Path | None
    served_model: str
    secret: bytes = field(repr=False)
    store: str | None = None

    @staticmethod
    def to(server: Server, secret: bytes, store: str | None) -> ProviderAddress:
        own = server.identity
        return ProviderAddress(
            server.host,
            server.port,
            server.network,
            None if own is None else own.directory.absolute(),
            None if own is None else own.trust.absolute(),
            server.served_model,
            secret,
            store,
        )

    def server(self) -> Server:
        """Return the provider, reached with this machine's copy of the identity."""
        own = None
        if self.identity is not None and self.trust is not None:
            own = load(self.identity, self.trust)
        return Server(self.host, self.port, self.network, own, served_model=self.served_model)


@dataclass(frozen=True)
class WorkEnded:
    """End of an item of work: with its session's result, or with an error in words; `busy`: the
    provider has no place for one more session.
    """

    result: dict[str, Any] | None = None
    error: str = ""
    busy: bool = False


class Producer:
    """A producer at the client; an actor of Ray's, whose methods may run beside each other."""

    def __init__(self, way: ProviderAddress) -> None:
        self._way = way
        self._stop = threading.Event()

    def end(self) -> None:
        """End the session under way, and leave nothing of it on this machine's disk."""
        self._stop.set()

    def ready(self) -> str:
        """Return the name of the machine, once there is a process for this producer."""
        return os.uname().nodename

    def made(self, request: Ahead, digest: str | None) -> Iterator[Parcel | WorkEnded]:
        """Yield each batch of a session that makes what the request asks for, then how it ended.
        `digest`: of the format of the provider's text, as the request's tokens were counted.
        """
        events: queue.SimpleQueue[WorkEnded | None] = queue.SimpleQueue()
        with tempfile.TemporaryDirectory(prefix="spu-llm-") as name:
            pool = Path(name, "pool")
            session = threading.Thread(
                target=lambda: events.put(self._session(request, digest, pool, events)), daemon=True
            )
            session.start()
            ended: WorkEnded | None = None
            while ended is None:
                ended = events.get()
                yield from _parcels(pool)
            session.join()
        yield ended

    def _session(
        self,
        request: Ahead,
        digest: str | None,
        pool: Path,
        events: queue.SimpleQueue[WorkEnded | None],
    ) -> WorkEnded:
        def heard(event: Event) -> None:
            events.put(None)

        def look() -> None:
            if self._stop.is_set():
                raise WantedError("no more is wanted of this producer")

        try:
            open_folder(pool)
            create(pool / "id", self._way.secret)
            if self._way.store is not None:
                create(pool / STORE_FILE, self._way.store.encode())
            server = self._way.server()
            text = text_format(server).text
            provider = Provider(server.network, server, Path(), pool, 1)
            return WorkEnded(
                make_beside(request, text.tokenizer, provider, heard, look, text_format=digest)
            )
        except SpuLlmError as exc:
            return WorkEnded(error=str(exc), busy=isinstance(exc, BusyError))
        except Exception as exc:
            return WorkEnded(error=f"{type(exc).__name__}: {exc}")


def _parcels(pool: Path) -> Iterator[Parcel]:
    """Yield what the session in a pool directory has made so far, which is forgotten here."""
    if pool.is_dir():
        for folder in peer_folders(pool):
            yield from inbox.hand_over(folder)
