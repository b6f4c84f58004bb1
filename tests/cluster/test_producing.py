"""Producers on a cluster: what is dealt out comes, whatever becomes of a pair."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.api.events import Event, Making
from spu_llm.cluster.connection import joined
from spu_llm.cluster.producer import Producer, ProviderAddress, WorkEnded
from spu_llm.cluster.producing import ClusterProducers, dealt
from spu_llm.core.errors import PeerError, PoolError, WantedError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.offline import inbox
from spu_llm.offline.files import INBOX, open_folder
from spu_llm.offline.inbox import Parcel
from spu_llm.offline.pool import Pool
from spu_llm.systems.decoding.records import MAX_BESIDE, Ahead, PrepareRequest
from tests.cluster.machines import Machines, machines
from tests.kit.dealing import TRIPLE

REQUEST = PrepareRequest(5, 7, 2, 0.5, steps=3)
WAY = ProviderAddress("127.0.0.1", 1, "local", None, None, "", b"0" * 32)


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


class Stub(Producer):
    """Makes as many batches as it is asked for, of one party's words that nobody else has."""

    def made(self, request: Ahead, digest: str | None) -> Iterator[Parcel | WorkEnded]:
        for number in range(sum(request.batches)):
            self.before(number)
            yield _parcel(Path(os.environ["TMPDIR"]) if "TMPDIR" in os.environ else Path("/tmp"))
        yield WorkEnded({"traffic": {}, "batches": sum(request.batches)})

    def before(self, number: int) -> None:
        """Do what comes before a batch."""


def _parcel(at: Path) -> Parcel:
    """Return a batch of words that say nothing."""
    folder = at / f"stub-{os.urandom(8).hex()}"
    open_folder(folder)
    pool = Pool(CLIENT, Prg.from_os(), _results, session=os.urandom(16))
    made = pool.make(TRIPLE)
    inbox.put(folder, made.label, made.key, made.results)
    (parcel,) = inbox.hand_over(folder)
    return parcel


def _results(correlation: Any, masks: Sequence[Any]) -> list[Any]:
    import numpy as np

    shapes = [part.shape for part in correlation.results]
    return [np.zeros((correlation.chunk, *shape), np.uint64) for shape in shapes]


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


class Slow(Stub):
    """A batch takes a while."""

    def before(self, number: int) -> None:
        time.sleep(0.3)


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
    producers = ClusterProducers(*cluster, way, pairs, kind)
    return producers.make(REQUEST, None, lacking, folder, heard.append, look), heard


def arrived(folder: Path) -> int:
    return len(list((folder / INBOX).glob("*/*")))


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
