"""Producers that make words of one party, without a provider."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spu_llm.api.events import Event
from spu_llm.cluster.producer import Producer, ProviderAddress, WorkEnded
from spu_llm.cluster.producing import ClusterProducers
from spu_llm.core.correlation import Correlation
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.offline import inbox
from spu_llm.offline.durable import open_folder
from spu_llm.offline.files import INBOX
from spu_llm.offline.inbox import Parcel
from spu_llm.offline.pool import Pool
from spu_llm.systems.decoding.records import Ahead, PrepareRequest
from tests.kit.dealing import TRIPLE

REQUEST = PrepareRequest(5, 7, 2, 0.5, steps=3)


class Stub(Producer):
    """Makes as many batches as it is asked for, of one party's words that nobody else has."""

    batch = TRIPLE

    def made(self, request: Ahead, digest: str | None) -> Iterator[Parcel | WorkEnded]:
        for number in range(sum(request.batches)):
            self.before(number)
            yield _parcel(Path(os.environ.get("TMPDIR", "/tmp")), self.batch)
        yield WorkEnded({"traffic": {}, "batches": sum(request.batches)})

    def before(self, number: int) -> None:
        """Do what comes before a batch."""


def _parcel(at: Path, correlation: Correlation) -> Parcel:
    """Return a batch of words that say nothing."""
    folder = at / f"stub-{os.urandom(8).hex()}"
    open_folder(folder)
    pool = Pool(CLIENT, Prg.from_os(), _results, session=os.urandom(16))
    made = pool.make(correlation)
    inbox.put(folder, made.label, made.key, made.results)
    (parcel,) = inbox.hand_over(folder)
    return parcel


def _results(correlation: Any, masks: Sequence[Any]) -> list[Any]:
    shapes = [part.shape for part in correlation.results]
    return [np.zeros((correlation.chunk, *shape), np.uint64) for shape in shapes]


def make(
    cluster: tuple[Any, str],
    kind: type[Producer],
    folder: Path,
    lacking: Sequence[int],
    mark: Path | None = None,
    look: Any = lambda: None,
    pairs: int = 2,
) -> tuple[Any, list[Event]]:
    open_folder(folder)
    way = ProviderAddress(str(mark), 1, "local", None, None, "", b"0" * 32)
    heard: list[Event] = []
    producers = ClusterProducers(*cluster, [way], pairs, kind)
    return producers.make(REQUEST, None, lacking, folder, heard.append, look), heard


def arrived(folder: Path) -> int:
    return len(list((folder / INBOX).glob("*/*")))
