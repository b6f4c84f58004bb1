"""Simulation of time: pairs of single-core producers, one core at each party, that make batches of
correlated randomness over one link into one pool.

A pair takes the next item of the list that is dealt, opens a session for it, and makes its batches
one after the other. A batch takes, in this order:

1. its seconds of computing, one core at each party;
2. half its messages times the network's delay, since parties take turns;
3. its bytes on the link: each direction serves one pair at a time, in the order of arrival;
4. its bytes on the disk of the pool, which serves one pair at a time, too.

What is shared, link and disk, bounds how throughput grows; so does a list that is too short.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from spu_llm.net.shaping import NetworkShape


@dataclass(frozen=True)
class Batch:
    """The cost of a batch. client_to_provider, provider_to_client, stored: bytes; stored: of each
    party.
    """

    seconds: float
    messages: float
    client_to_provider: float
    provider_to_client: float
    stored: float


@dataclass(frozen=True)
class Dealt:
    """Work and settings that all pairs share. items: of the list, each with `batches`; setup_s: of
    a session, one for each item; disk: bytes per second of each party's.
    """

    items: int
    batches: int
    setup_s: float
    disk: float


@dataclass(frozen=True)
class Throughput:
    """Throughput of some pairs. link, disk: the shares of time that the busier direction and a disk
    were in use.
    """

    pairs: int
    batches_per_s: float
    link: float
    disk: float


class _Served:
    """A resource that serves one after the other."""

    def __init__(self) -> None:
        self.free, self.busy = 0.0, 0.0

    def until(self, now: float, seconds: float) -> float:
        """Return when what is asked for now, for so many seconds, is done."""
        self.free = max(self.free, now) + seconds
        self.busy += seconds
        return self.free


def simulate(batch: Batch, dealt: Dealt, network: NetworkShape, pairs: int) -> Throughput:
    """Play `pairs` pairs until the list is done."""
    there, back, disk = _Served(), _Served(), _Served()
    by_byte = 8.0 / network.bits_per_s if network.bits_per_s else 0.0
    left = dealt.items

    def course() -> Iterator[tuple[_Served | None, float]]:
        """Yield what a pair waits for: a resource or nothing, and for how many seconds."""
        nonlocal left
        while left:
            left -= 1
            yield None, dealt.setup_s
            for _ in range(dealt.batches):
                yield None, batch.seconds + batch.messages / 2 * network.delay_s
                yield there, batch.client_to_provider * by_byte
                yield back, batch.provider_to_client * by_byte
                yield disk, batch.stored / dealt.disk

    courses = [course() for _ in range(pairs)]
    events = [(0.0, number) for number in range(pairs)]
    now = 0.0
    while events:
        now, number = heapq.heappop(events)
        for resource, seconds in courses[number]:
            due = now + seconds if resource is None else resource.until(now, seconds)
            heapq.heappush(events, (due, number))
            break
    done = dealt.items * dealt.batches
    return Throughput(pairs, done / now, max(there.busy, back.busy) / now, disk.busy / now)
