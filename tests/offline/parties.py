"""Two pools side by side, dealt to in place of SPU; fixtures for the tests of pools."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from spu_llm.core.channel import MemoryChannel
from spu_llm.core.correlation import Correlation, Correlations
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline.pool import Pool
from spu_llm.offline.sealed_objects import ObjectStore
from tests.kit.dealing import TRIPLE, Made, dealer, refuses

RANKS = (CLIENT, PROVIDER)


@pytest.fixture(scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Power cuts are tried elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: None)
        yield


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as running:
        yield running


class Parties:
    """Two pools and what they have handed out."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        root: Path | None = None,
        objects: Sequence[ObjectStore | None] = (None, None),
    ) -> None:
        self.objects = objects
        self.threads, self.made = threads, Made()
        self.directories = [root / str(r) if root is not None else None for r in RANKS]
        self.sessions = 0
        self.gone: dict[tuple[str, int], int] = {}  # unit -> number of the take
        self.takes = 0
        self.pools: list[Pool] = []

    def open(self) -> None:
        self.sessions += 1
        ends = MemoryChannel.pair()
        self.pools = [
            Pool(
                rank,
                Prg.from_os(),
                dealer(rank, ends[rank], self.made),
                session=b"session %d" % self.sessions,
                directory=self.directories[rank],
                objects=self.objects[rank],
                outside=True,
            )
            for rank in RANKS
        ]
        inventories = [pool.inventory() for pool in self.pools]
        for rank in RANKS:
            self.pools[rank].resume(inventories[1 - rank])

    def both(self, work: Callable[[int, Pool], Any]) -> list[Any]:
        waiting = [self.threads.submit(work, rank, self.pools[rank]) for rank in RANKS]
        wait(waiting)
        return [future.result() for future in waiting]

    def prepare(self, correlation: Correlation, units: int) -> None:
        self.both(lambda r, pool: pool.prepare(correlation, units))

    def take(self, correlation: Correlation, units: int) -> list[Correlations]:
        outcomes = self.both(lambda r, pool: pool.take(correlation, units))
        taken = [self.made.units_of(rank, outcomes[rank]) for rank in RANKS]
        assert taken[CLIENT] == taken[PROVIDER] and len(taken[CLIENT]) == units
        self.record(taken[CLIENT])
        return outcomes

    def take_alone(self, rank: int, correlation: Correlation, units: int) -> None:
        """Let one party go ahead as far as it can; what it took is gone for both."""
        units = min(units, self.pools[rank].available(correlation))
        actual = self.pools[rank].take(correlation, units)
        self.record(self.made.units_of(rank, actual))

    def record(self, units: list[tuple[str, int]]) -> None:
        self.takes += 1
        for unit in units:
            assert unit not in self.gone, f"{unit} was taken before, in take {self.gone[unit]}"
            self.gone[unit] = self.takes

    def available(self, correlation: Correlation) -> int:
        counts = {pool.available(correlation) for pool in self.pools}
        assert len(counts) == 1
        return counts.pop()

    def end(self, *clean: bool) -> None:
        """Close each pool, or leave it as a killed process leaves it."""
        for pool, tidy in zip(self.pools, clean or (True, True), strict=True):
            pool.close() if tidy else _die(pool)


def _die(pool: Pool) -> None:
    assert pool._directory is not None
    pool._directory.close()  # the lock goes with the process; nothing else does


@pytest.fixture
def parties(threads: ThreadPoolExecutor, tmp_path: Path) -> Parties:
    actual = Parties(threads, tmp_path)
    actual.open()
    return actual


def batch_folder(parties: Parties, rank: int, correlation: Correlation = TRIPLE) -> Path:
    """Return the only batch of a correlation."""
    directory = parties.directories[rank]
    assert directory is not None
    name = correlation.name.split()[0]
    (actual,) = (b for f in directory.iterdir() if f.name.startswith(name) for b in f.iterdir())
    return actual


def reopen(parties: Parties, rank: int = CLIENT) -> None:
    pool = Pool(rank, Prg.from_os(), refuses, session=b"s", directory=parties.directories[rank])
    pool.close()


@pytest.fixture
def stored(parties: Parties) -> Parties:
    """Return one batch with units put back, closed."""
    parties.prepare(TRIPLE, 16)
    parties.take(TRIPLE, 3)
    parties.end()
    reopen(parties)
    return parties


def stored_inventory(parties: Parties, rank: int) -> bytes:
    pool = Pool(rank, Prg.from_os(), refuses, session=b"s", directory=parties.directories[rank])
    pool.close()
    return json.dumps({batch_folder(parties, rank).name: 3}).encode()


def files_of(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]
