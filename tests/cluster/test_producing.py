"""Producers on a cluster: what is dealt out comes, whatever becomes of a pair."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.api.events import Event, Making
from spu_llm.cluster.connection import joined
from spu_llm.cluster.producer import ProviderAddress, WorkEnded
from spu_llm.cluster.producing import ClusterProducers, dealt
from spu_llm.core.errors import PeerError, PoolError, WantedError
from spu_llm.offline import inbox
from spu_llm.offline.durable import open_folder
from spu_llm.offline.inbox import Parcel
from spu_llm.systems.decoding.records import MAX_BESIDE, Ahead
from tests.cluster.machines import Machines, machines
from tests.cluster.stub_producers import REQUEST, Stub, arrived, make


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(1, 40))
def test_all_is_dealt_out_evenly(lacking: list[int], items: int) -> None:
    shares = dealt(lacking, items)
    assert [sum(share[kind] for share in shares) for kind in range(len(lacking))] == (
        lacking if shares else [0] * len(lacking)
    )
    assert len(shares) <= max(items, -(-sum(lacking) // MAX_BESIDE))
    sizes = [sum(share) for share in shares]
    assert all(0 < size <= MAX_BESIDE for size in sizes)
    if sizes:
        assert max(sizes) - min(sizes) <= 1
        for kind in range(len(lacking)):
            assert max(s[kind] for s in shares) - min(s[kind] for s in shares) <= 1


@pytest.fixture(scope="module")
def nodes() -> Iterator[Machines]:
    with machines(2) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def time_for_all_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spu_llm.cluster.producing.OTHERS_S", 30.0)


@pytest.fixture
def cluster(nodes: Machines) -> Iterator[tuple[Any, str]]:
    with joined(nodes.address) as ray:
        yield ray, nodes.address


class Dying(Stub):
    """One of the pairs dies at its second batch: the one that is first to leave its mark."""

    def before(self, number: int) -> None:
        if number == 1:
            try:
                Path(self._way.host).touch(exist_ok=False)
            except FileExistsError:
                return
            os._exit(1)


class Busy(Stub):
    """The provider has a place for one pair."""

    def made(self, request: Ahead, digest: str | None) -> Iterator[Parcel | WorkEnded]:
        try:
            Path(self._way.host).touch(exist_ok=False)
        except FileExistsError:
            if Path(self._way.host).read_text() != str(os.getpid()):
                yield WorkEnded(error="the provider is busy", busy=True)
                return
        Path(self._way.host).write_text(str(os.getpid()))
        yield from super().made(request, digest)


class Failing(Stub):
    """No pair makes anything."""

    def made(self, request: Ahead, digest: str | None) -> Iterator[Parcel | WorkEnded]:
        yield WorkEnded(error="nothing comes")


class OneWay(Stub):
    """The provider is reached on the first way alone."""

    def made(self, request: Ahead, digest: str | None) -> Iterator[Parcel | WorkEnded]:
        if self._way.port == 1:
            yield from super().made(request, digest)
        else:
            yield WorkEnded(error=f"nobody at {self._way.port}")


class Slow(Stub):
    """A batch takes a while."""

    def before(self, number: int) -> None:
        time.sleep(0.3)


def test_all_that_lacks_comes(cluster: tuple[Any, str], tmp_path: Path) -> None:
    made, heard = make(cluster, Stub, tmp_path / "peer", (3, 0, 4))
    assert made.batches == arrived(tmp_path / "peer") == 7
    assert sum(result["batches"] for result in made.results) == 7
    assert [event.made for event in heard if isinstance(event, Making)] == list(range(1, 8))


def test_a_pair_that_dies_costs_its_batch(cluster: tuple[Any, str], tmp_path: Path) -> None:
    made, heard = make(cluster, Dying, tmp_path / "peer", (18,), tmp_path / "mark")
    assert made.batches == arrived(tmp_path / "peer")
    # Two items of nine; the one that died at its second batch had given one, or was giving it.
    assert made.batches in (9, 10)
    assert "a pair of producers failed" in str(heard)


@pytest.mark.slow
def test_whom_the_provider_has_no_place_for_rests(cluster: tuple[Any, str], tmp_path: Path) -> None:
    made, heard = make(cluster, Busy, tmp_path / "peer", (12,), tmp_path / "mark")
    assert made.batches == arrived(tmp_path / "peer") == 12
    assert "failed" not in str(heard)


def test_a_way_that_comes_to_nothing_is_left_out(cluster: tuple[Any, str], tmp_path: Path) -> None:
    open_folder(tmp_path / "peer")
    ways = [ProviderAddress("", port, "local", None, None, "", b"0" * 32) for port in (1, 2)]
    producers = ClusterProducers(*cluster, ways, 2, OneWay)
    came, failed = [], []
    for lacking in (12, 6):
        heard: list[Event] = []
        made = producers.make(
            REQUEST, None, (lacking,), tmp_path / "peer", heard.append, lambda: None
        )
        came.append(made.batches)
        failed.append(str(heard).count("nobody at 2"))
    assert came[0] < 12 and came[1] == 6
    assert failed == [1, 0]


def test_where_nothing_comes_the_reason_is_told(cluster: tuple[Any, str], tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="nothing comes"):
        make(cluster, Failing, tmp_path / "peer", (4,))


def test_where_there_is_no_room_that_is_told(
    cluster: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spu_llm.cluster.producing.START_S", 3.0)
    monkeypatch.setattr("spu_llm.cluster.producing.MEMORY_BYTES", 1 << 45)
    with pytest.raises(PeerError, match="no machine of the cluster had room"):
        make(cluster, Stub, tmp_path / "peer", (4,))


@pytest.mark.slow
def test_fewer_pairs_than_wanted_do(cluster: tuple[Any, str], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spu_llm.cluster.producing.OTHERS_S", 3.0)
        made, _ = make(cluster, Stub, tmp_path / "peer", (20,), pairs=5)
    assert made.batches == 20


def test_whoever_waits_can_end_it(cluster: tuple[Any, str], tmp_path: Path) -> None:
    begun = time.monotonic()

    def look() -> None:
        if time.monotonic() > begun + 3:
            raise WantedError("a completion wants it")

    with pytest.raises(WantedError):
        make(cluster, Slow, tmp_path / "peer", (1000,), look=look)
    assert time.monotonic() < begun + 20
    count = arrived(tmp_path / "peer")
    time.sleep(1)
    assert arrived(tmp_path / "peer") == count


def test_a_full_disk_ends_it(
    cluster: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = inbox.store_files

    def full(directory: Path, *batch: Any) -> Path:
        if arrived(tmp_path / "peer") == 2:
            raise PoolError(f"{directory}: no space is left")
        return stored(directory, *batch)

    monkeypatch.setattr(inbox, "store_files", full)
    with pytest.raises(PoolError, match="no space is left"):
        make(cluster, Stub, tmp_path / "peer", (12,))
    assert arrived(tmp_path / "peer") == 2


@pytest.mark.slow
def test_a_head_that_is_lost_is_noticed(tmp_path: Path) -> None:
    with machines(1) as nodes, joined(nodes.address) as ray:
        begun: list[float] = []

        def look() -> None:
            if not begun and arrived(tmp_path / "peer"):
                nodes.lose_head()
                begun.append(time.monotonic())

        with pytest.raises(PeerError, match="does not answer any more"):
            make((ray, nodes.address), Slow, tmp_path / "peer", (1000,), look=look, pairs=1)
        assert time.monotonic() < begun[0] + 30
