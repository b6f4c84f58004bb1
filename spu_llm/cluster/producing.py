"""Correlated randomness made on the machines of a cluster, for a pool on this one.

Producers go in pairs, one process at each party, each pair with sessions of its own
(`cluster.producer`). What lacks is dealt out in items of work, some for each pair, which the pairs
take as they get done. A pair that fails, or whose machine is lost, costs the batches that it was
making; what lacks in the end is counted and dealt out again (`api.preparation`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from spu_llm.api.events import Making, Note, OnEvent
from spu_llm.api.preparation import Produced
from spu_llm.cluster.connection import Head, joined, kill, line_of
from spu_llm.cluster.producer import Producer, ProviderAddress, WorkEnded
from spu_llm.core.errors import InputError, PeerError
from spu_llm.offline import inbox
from spu_llm.offline.inbox import Parcel
from spu_llm.offline.object_store import url_of
from spu_llm.offline.peer_directories import open_directory
from spu_llm.service.client import Server
from spu_llm.service.supervisor import Look
from spu_llm.systems.decoding.records import MAX_BESIDE, Ahead

MEMORY_BYTES = 1 << 30  # of a producer and its worker, as Ray is told
START_S = 60.0  # for the first machine to have room for a producer
OTHERS_S = 5.0  # for others, from then on
FETCH_S = 60.0  # for a batch that is there to come from its machine
END_S = 5.0  # for producers to end their sessions
_CALLS = 4  # of a producer at a time: its work, and that it is to end
_LOOK_S = 0.2
# An item for each pair, and more where there is much to do, so that a pair that is faster, or has
# lost another one's work, gets on: a session's start takes as long as a hundred batches.
_ITEMS_A_PAIR = 3
_LEAST_BATCHES = 400  # of an item, where a pair has several
_AHEAD = 2  # batches that wait to be fetched, of each pair


@dataclass
class _Pair:
    """The client's half of a pair and the item of work that it has, as a stream of results."""

    actor: Any
    way: ProviderAddress  # where it meets its other half
    item: tuple[int, ...] = ()
    made: int = 0  # batches
    results: Any = None


class ClusterProducers:
    """Pairs whose client's halves are processes of a cluster (`api.preparation.Producers`)."""

    def __init__(
        self,
        ray: Any,
        address: str,
        ways: Sequence[ProviderAddress],
        pairs: int | None,
        producer: type[Producer] = Producer,
    ) -> None:
        """Take Ray, connected to the cluster at `address`. `ways`: to the provider, over which the
        pairs are dealt evenly; `pairs`: how many; one a core of the cluster by default. `producer`:
        of the client's halves.
        """
        self._ray, self._ways, self._producer = ray, list(ways), producer
        self._lost: set[int] = set()  # ways, by their places, that came to nothing
        self._address = address
        self._count = int(ray.cluster_resources().get("CPU", 0)) if pairs is None else pairs

    def make(
        self,
        request: Ahead,
        text_format: str | None,
        lacking: Sequence[int],
        folder: Path,
        on_event: OnEvent,
        look: Look,
    ) -> Produced:
        """Make what lacks, as `Producers.make` says; PeerError when no machine of the cluster has
        room for a producer, each pair failed, or the cluster's head is lost.
        """
        head = Head(self._address)

        def looks() -> None:
            head.look()
            look()

        most = max(self._count, sum(lacking) // _LEAST_BATCHES)
        items = deque(dealt(lacking, min(most, _ITEMS_A_PAIR * self._count)))
        pairs = self._started(min(self._count, len(items)), looks)
        batches, total = 0, sum(lacking)
        results: list[dict[str, Any]] = []
        failed: list[_Pair] = []
        errors: list[str] = []
        try:
            on_event(Note(f"{len(pairs)} pairs of producers"))
            while True:
                self._deal(items, pairs, request, text_format)
                working = [pair for pair in pairs if pair.results is not None]
                if not working:
                    break
                looks()
                for pair in self._with_news(working):
                    match self._next(pair):
                        case Parcel() as parcel:
                            inbox.deliver(folder, parcel)
                            batches += 1
                            pair.made += 1
                            on_event(Making(batches, total))
                        case WorkEnded(result=None) as ended:
                            errors.append(ended.error)
                            pairs.remove(pair)
                            kill(self._ray, pair.actor)
                            if ended.busy:
                                items.append(pair.item)
                            else:
                                failed.append(pair)
                                on_event(Note(f"a pair of producers failed: {ended.error}"))
                        case WorkEnded(result=dict() as result):
                            results.append(result)
                            pair.results = None
        finally:
            self._end(pairs)
        self._leave_out(failed)
        if not batches and errors:
            raise PeerError(f"no pair of producers made anything: {errors[-1]}")
        return Produced(batches, tuple(results))

    def _leave_out(self, failed: Sequence[_Pair]) -> None:
        """Leave out, from here on, a way whose pairs failed before they made anything; where that
        is said of all ways, they are tried again.
        """
        of = [self._ways.index(pair.way) for pair in failed if not pair.made]
        self._lost |= set(of)
        if len(self._lost) == len(self._ways):
            self._lost.clear()

    def _end(self, pairs: list[_Pair]) -> None:
        """End producers, which leave nothing on their machines' disks if they get on in time."""
        ray, working = self._ray, [pair for pair in pairs if pair.results is not None]
        with suppress(ray.exceptions.RayError):
            for pair in working:
                pair.actor.end.remote()
            until = time.monotonic() + END_S
            while working and time.monotonic() < until:
                for pair in self._with_news(working):
                    if isinstance(self._next(pair), WorkEnded):
                        working.remove(pair)
        for pair in pairs:
            kill(ray, pair.actor)

    def _started(self, count: int, look: Look) -> list[_Pair]:
        """Return up to `count` pairs, as many as there is room for."""
        kind = self._ray.remote(
            num_cpus=1, memory=MEMORY_BYTES, max_restarts=0, max_concurrency=_CALLS
        )(self._producer)
        ways = [way for number, way in enumerate(self._ways) if number not in self._lost]
        made = [_Pair(kind.remote(way), way) for way in islice(cycle(ways), count)]
        starting = {pair.actor.ready.remote(): pair for pair in made}
        pairs: list[_Pair] = []
        until = time.monotonic() + START_S
        while starting and time.monotonic() < until:
            look()
            done, _ = self._ray.wait(list(starting), timeout=_LOOK_S)
            for ready in done:
                pair = starting.pop(ready)
                with suppress(self._ray.exceptions.RayError):
                    self._ray.get(ready)
                    pairs.append(pair)
                    until = min(until, time.monotonic() + OTHERS_S)
        for pair in starting.values():
            kill(self._ray, pair.actor)
        if not pairs:
            raise PeerError(
                f"no machine of the cluster had room for a producer within {START_S:g} s: each "
                f"takes a core and {MEMORY_BYTES >> 20} MB"
            )
        return pairs

    def _deal(
        self, items: deque[tuple[int, ...]], pairs: list[_Pair], request: Ahead, digest: str | None
    ) -> None:
        for pair in pairs:
            if pair.results is None and items:
                pair.item = items.popleft()
                asked = replace(request, batches=pair.item, room_bytes=None)
                pair.results = pair.actor.made.options(
                    num_returns="streaming", _generator_backpressure_num_objects=_AHEAD
                ).remote(asked, digest)

    def _with_news(self, working: list[_Pair]) -> list[_Pair]:
        """Return the pairs that have something to give, after a short while at most."""
        by_stream = {pair.results: pair for pair in working}
        ready, _ = self._ray.wait(list(by_stream), num_returns=1, timeout=_LOOK_S)
        return [by_stream[stream] for stream in ready]

    def _next(self, pair: _Pair) -> Parcel | WorkEnded:
        """Return what a pair has to give; how it ended, where it or its machine was lost."""
        try:
            given: Parcel | WorkEnded = self._ray.get(next(pair.results), timeout=FETCH_S)
        except StopIteration:
            return WorkEnded(error="its process was lost: no more comes")
        except self._ray.exceptions.RayTaskError as exc:
            return WorkEnded(error=f"its machine failed: {line_of(exc.cause)}")
        except self._ray.exceptions.RayError as exc:
            return WorkEnded(error=f"its process was lost: {line_of(exc)}")
        return given


@contextmanager
def on_cluster(
    address: str,
    server: Server | None,
    pool: Path | None,
    pairs: int | None,
    doors: Sequence[tuple[str, int]] = (),
) -> Iterator[ClusterProducers]:
    """Yield producers on the cluster at `address` for a client's pool. `doors`: host and port of
    more ways to the provider than its own port. InputError where there are none: both parties are
    on this machine, or no cluster answers.
    """
    if server is None or pool is None:
        raise InputError("--ray takes a provider elsewhere; give --server HOST:PORT")
    first = ProviderAddress.to(server, open_directory(pool), url_of(pool))
    ways = [first, *(replace(first, host=host, port=port) for host, port in doors)]
    with joined(address) as ray:
        yield ClusterProducers(ray, address, ways, pairs)


def dealt(lacking: Sequence[int], items: int) -> list[tuple[int, ...]]:
    """Deal batches of each kind out into that many items of work or fewer, none of them empty or
    more than a session makes: each has about the same part of each kind.
    """
    total = sum(lacking)
    count = max(1, min(items, total), -(-total // MAX_BESIDE))
    # Kind after kind around the table, so that no item gets all the remainders.
    shares, start = [[0] * len(lacking) for _ in range(count)], 0
    for kind, batches in enumerate(lacking):
        for number in range(batches):
            shares[(start + number) % count][kind] += 1
        start = (start + batches) % count
    return [tuple(share) for share in shares if any(share)]
