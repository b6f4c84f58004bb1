"""Results of a pool's batches in object storage: what it may lose, keep, swap or refuse."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core.errors import InputError, PoolError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline import files, inbox, object_store, stock
from spu_llm.offline.files import STORE_FILE, Files
from spu_llm.offline.object_store import FsspecStore, keep_in, store_of, url_of
from spu_llm.offline.opener_files import RESULTS, STORED
from spu_llm.offline.sealed_objects import (
    AT_ONCE,
    MAX_OBJECT_BYTES,
    Opener,
    in_groups,
    seal,
    unseal,
)
from tests.kit.dealing import MIXED, TRIPLE
from tests.kit.shelf import Shelf
from tests.offline.inboxes import folder, put
from tests.offline.parties import RANKS, Parties, batch_folder, files_of

UNITS = TRIPLE.chunk
NAME = "0123456789abcdef" * 2


@pytest.fixture
def shelves() -> list[Shelf]:
    return [Shelf(), Shelf()]


@pytest.fixture
def outside(threads: ThreadPoolExecutor, tmp_path: Path, shelves: list[Shelf]) -> Parties:
    actual = Parties(threads, tmp_path, shelves)
    actual.open()
    return actual


def again(parties: Parties) -> None:
    parties.end()
    parties.open()


def keys(parties: Parties, rank: int) -> list[Path]:
    """Return the files that say how an object is opened."""
    return [path for path in files_of(folder(parties, rank)) if STORED.fullmatch(path.name)]


def lose_one(shelf: Shelf, content: bytes | None) -> None:
    """Put other content in the place of an object; None: nothing."""
    name = min(shelf.objects)
    del shelf.objects[name]
    if content is not None:
        shelf.objects[name] = content


# ---- a pool


def test_results_are_outside_until_a_unit_is_used(outside: Parties, shelves: list[Shelf]) -> None:
    outside.prepare(TRIPLE, UNITS + 1)
    for rank in RANKS:
        assert not [p for p in files_of(folder(outside, rank)) if p.name == RESULTS]
        assert len(keys(outside, rank)) == len(shelves[rank].objects) == 2
    again(outside)
    assert outside.available(TRIPLE) == 2 * UNITS
    outside.take(TRIPLE, 1)
    for rank in RANKS:
        assert len(keys(outside, rank)) == len(shelves[rank].objects) == 1
    again(outside)
    outside.take(TRIPLE, 2 * UNITS - 1)
    for rank in RANKS:
        assert not keys(outside, rank) and not shelves[rank].objects
    outside.end()


def test_one_party_alone_may_have_object_storage(
    threads: ThreadPoolExecutor, tmp_path: Path, shelves: list[Shelf]
) -> None:
    parties = Parties(threads, tmp_path, [shelves[CLIENT], None])
    parties.open()
    parties.prepare(TRIPLE, UNITS)
    again(parties)
    parties.take(TRIPLE, UNITS)
    assert shelves[CLIENT].copies and not shelves[PROVIDER].copies
    parties.end()


def test_what_a_call_takes_comes_together(outside: Parties, shelves: list[Shelf]) -> None:
    outside.prepare(TRIPLE, 3 * UNITS)
    outside.prepare(MIXED, MIXED.chunk)
    wanted = [(TRIPLE, 3 * UNITS), (MIXED, 1)]
    outside.both(lambda rank, pool: pool.lease_all(wanted))
    assert [shelf.gets for shelf in shelves] == [[4], [4]]
    for shelf in shelves:
        shelf.down = True  # nothing is missing
    outside.take(TRIPLE, 3 * UNITS)
    outside.take(MIXED, 1)


def test_sizes_count_what_is_outside(outside: Parties, shelves: list[Shelf]) -> None:
    outside.prepare(TRIPLE, UNITS)
    for rank in RANKS:
        (kind,) = stock.kinds_in(folder(outside, rank))
        (size,) = map(len, shelves[rank].objects.values())
        assert kind.store_bytes == size
        assert outside.pools[rank].stored_bytes(TRIPLE) == size + kind.disk_bytes
        assert stock.file_bytes(folder(outside, rank)) == size + kind.disk_bytes
    outside.end()


@pytest.mark.parametrize("content", [None, b"", b"0" * 40, b"other"])
@pytest.mark.parametrize("rank", RANKS)
def test_a_lost_object_costs_its_batch_alone(
    outside: Parties, shelves: list[Shelf], rank: int, content: bytes | None
) -> None:
    outside.prepare(TRIPLE, 2 * UNITS)
    again(outside)
    if content == b"other":
        content = max(shelves[rank].objects.items())[1]
    lose_one(shelves[rank], content)
    with pytest.raises(PoolError, match="has lost the results of .*: 1 of 2; they are removed"):
        outside.take_alone(rank, TRIPLE, 2 * UNITS)
    outside.end(*(False, False))
    outside.open()
    assert outside.available(TRIPLE) == UNITS
    outside.take(TRIPLE, UNITS)
    outside.end()


def test_storage_that_is_down_costs_nothing(outside: Parties, shelves: list[Shelf]) -> None:
    outside.prepare(TRIPLE, UNITS)
    again(outside)
    shelves[CLIENT].down = True
    with pytest.raises(PoolError, match="is down"):
        outside.take_alone(CLIENT, TRIPLE, 1)
    shelves[CLIENT].down = False
    again(outside)
    outside.take(TRIPLE, UNITS)
    outside.end()


def test_a_batch_that_cannot_be_stored_is_none(outside: Parties, shelves: list[Shelf]) -> None:
    shelves[CLIENT].down = True
    made = outside.both(lambda rank, pool: pool.make(TRIPLE))
    with pytest.raises(PoolError, match="is down"):
        outside.pools[CLIENT].add(made[CLIENT])
    outside.pools[PROVIDER].add(made[PROVIDER])
    outside.end()
    shelves[CLIENT].down = False
    outside.open()
    assert outside.available(TRIPLE) == 0
    assert not files_of(folder(outside, PROVIDER))[1:] and not shelves[PROVIDER].objects
    outside.end()


def opened_by_what_is_left(parties: Parties, rank: int, shelf: Shelf) -> list[str]:
    """Return the copies of objects that some 32 bytes on this party's disk open."""
    disk = b"".join(path.read_bytes() for path in files_of(folder(parties, rank)))
    words = {bytes.fromhex(w) for w in _hex_words(disk)}
    return [
        name
        for name, data in shelf.copies.items()
        if any(unseal(Opener(name, len(data), key), data) is not None for key in words)
    ]


def _hex_words(data: bytes) -> list[str]:
    text = data.decode("latin-1")
    words = text.split('"')
    return [word for word in words if len(word) == 64 and not set(word) - set("0123456789abcdef")]


def test_copies_of_used_objects_open_to_nobody(outside: Parties, shelves: list[Shelf]) -> None:
    outside.prepare(TRIPLE, 2 * UNITS)
    for rank in RANKS:
        assert len(opened_by_what_is_left(outside, rank, shelves[rank])) == 2
    outside.take(TRIPLE, 1)
    for rank in RANKS:
        assert len(opened_by_what_is_left(outside, rank, shelves[rank])) == 1
    outside.take(TRIPLE, 2 * UNITS - 1)
    for rank in RANKS:
        assert not opened_by_what_is_left(outside, rank, shelves[rank])
    outside.end()


def test_a_key_that_stays_is_noticed(
    outside: Parties, shelves: list[Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken twin of the test before: the key is kept when the results are back."""
    monkeypatch.setattr(Files, "_forget", lambda self: None)
    outside.prepare(TRIPLE, UNITS)
    outside.take(TRIPLE, 1)
    assert opened_by_what_is_left(outside, CLIENT, shelves[CLIENT])


def test_a_copy_put_back_serves_nobody(outside: Parties, shelves: list[Shelf]) -> None:
    outside.prepare(TRIPLE, UNITS)
    outside.take(TRIPLE, 3)
    for shelf in shelves:
        shelf.objects = dict(shelf.copies)
    again(outside)
    assert outside.available(TRIPLE) == UNITS - 3
    outside.take(TRIPLE, UNITS - 3)
    outside.end()


def test_results_that_are_back_count_after_a_crash(outside: Parties, shelves: list[Shelf]) -> None:
    """The key was not yet forgotten when the process died."""
    outside.prepare(TRIPLE, UNITS)
    (key,) = keys(outside, CLIENT)
    content = key.read_bytes()
    outside.take(TRIPLE, 1)
    outside.end(False, False)
    shelves[CLIENT].objects = dict(shelves[CLIENT].copies)
    key.write_bytes(content)
    key.chmod(0o600)
    outside.open()
    assert not key.exists() and not shelves[CLIENT].objects
    outside.take(TRIPLE, outside.available(TRIPLE))
    outside.end()


def test_what_the_peer_has_used_is_wiped(outside: Parties) -> None:
    outside.prepare(TRIPLE, UNITS)
    outside.take_alone(CLIENT, TRIPLE, 3)
    outside.end(False, False)
    outside.open()
    path = batch_folder(outside, PROVIDER)
    used = json.loads((path / "state.json").read_text())["used"]
    assert used >= 3 and (path / RESULTS).exists() and not keys(outside, PROVIDER)
    outside.take(TRIPLE, UNITS - used)
    outside.end()


def test_no_word_of_where_the_objects_are(outside: Parties, tmp_path: Path) -> None:
    outside.prepare(TRIPLE, UNITS)
    outside.end()
    outside.objects = (None, None)
    outside.open()
    with pytest.raises(PoolError, match="are in object storage, and no file 'store-url'"):
        outside.take_alone(CLIENT, TRIPLE, 1)
    outside.end()


# ---- its inbox


def test_parcels_have_keys_and_no_results(outside: Parties, shelves: list[Shelf]) -> None:
    outside.end()
    put(outside, *RANKS)
    outside.open()
    assert outside.available(TRIPLE) == UNITS  # on the disk: no storage was named
    outside.end()
    put(outside, *RANKS, objects=shelves, session=b"another")
    parcels = [list(inbox.hand_over(folder(outside, rank))) for rank in RANKS]
    for rank in RANKS:
        (parcel,) = parcels[rank]
        assert RESULTS not in parcel.files and len(shelves[rank].objects) == 1
        inbox.deliver(folder(outside, rank), parcel)
    outside.open()
    outside.take(TRIPLE, 2 * UNITS)
    outside.end()


def test_a_half_that_waited_too_long_leaves_nothing(
    outside: Parties, shelves: list[Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    outside.end()
    put(outside, CLIENT, objects=shelves)
    monkeypatch.setattr(inbox, "PATIENCE_S", -1.0)
    outside.open()
    outside.end()
    assert not shelves[CLIENT].objects and not keys(outside, CLIENT)


# ---- objects


@given(st.binary(max_size=200), st.data())
def test_a_changed_object_does_not_open(content: bytes, data: st.DataObject) -> None:
    opener, sealed = seal(content)
    assert unseal(opener, sealed) == content
    assert content not in sealed or len(content) < 4
    at = data.draw(st.integers(0, len(sealed) - 1))
    changed = bytearray(sealed)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert unseal(opener, bytes(changed)) is None
    assert unseal(opener, sealed[:at]) is None
    other, _ = seal(content)
    assert unseal(Opener(other.name, opener.nbytes, opener.key), sealed) is None
    assert unseal(Opener(opener.name, opener.nbytes, other.key), sealed) is None


# ---- places that fsspec knows


def test_objects_in_a_folder(tmp_path: Path) -> None:
    store = FsspecStore(f"file://{tmp_path}/objects", "peer")
    store.begin()
    store.put(NAME, b"data")
    assert (tmp_path / "objects" / "peer" / NAME).read_bytes() == b"data"
    assert store.get([(NAME, 4), (NAME[::-1], 4)]) == [b"data", None]
    assert store.get([(NAME, 2)]) == [b"dat"]  # larger than was told: another one
    store.remove([NAME, NAME[::-1]])
    store.remove([NAME])
    assert store.get([(NAME, 4)]) == [None]


def test_a_place_that_is_not_mounted(tmp_path: Path) -> None:
    store = FsspecStore(f"file://{tmp_path}/objects", "peer")
    store.begin()
    store.put(NAME, b"data")
    (tmp_path / "objects").rename(tmp_path / "elsewhere")
    (tmp_path / "objects").mkdir()
    with pytest.raises(PoolError, match="is not there; nothing of it is given up"):
        store.get([(NAME, 4)])
    with pytest.raises(PoolError, match="is not there"):
        FsspecStore(store.url, "peer").put(NAME[::-1], b"data")
    with pytest.raises(InputError, match="is not there"):
        FsspecStore(store.url, "peer").check()
    assert not list((tmp_path / "objects").iterdir())


class Odd(MemoryFileSystem):
    """A place that fails as it is told."""

    protocol = "odd"
    error: Exception | None = None
    waits_s = 0.0
    removed = 0  # how often it was asked to remove something

    def rm_file(self, path: str) -> None:
        Odd.removed += 1
        time.sleep(self.waits_s)
        super()._rm(path)

    def pipe_file(self, path: str, value: bytes, **kwargs: object) -> None:
        time.sleep(self.waits_s)
        if self.error is not None:
            raise self.error
        super().pipe_file(path, value, **kwargs)


fsspec.register_implementation("odd", Odd, clobber=True)


def test_errors_of_a_place_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore("odd://bucket/folder")
    store.begin()
    monkeypatch.setattr(Odd, "error", RuntimeError("AccessDenied\nmore"))
    with pytest.raises(PoolError, match="odd://bucket/folder: RuntimeError: AccessDenied$"):
        store.put(NAME, b"data")
    with pytest.raises(InputError, match="AccessDenied"):
        store.check()


def test_a_place_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore("odd://bucket/folder")
    store.begin()
    monkeypatch.setattr(Odd, "waits_s", 2.0)
    monkeypatch.setattr(object_store, "ANSWER_S", 0.2)
    monkeypatch.setattr(object_store, "REMOVE_S", 0.2)
    monkeypatch.setattr(Odd, "removed", 0)
    with pytest.raises(PoolError, match=r"no answer within 0\.2 s"):
        store.put(NAME, b"data")
    with pytest.raises(PoolError, match=r"no answer within 0\.2 s"):
        store.remove([NAME])
    for _ in range(20):
        store.remove([NAME])  # it is not asked again
    assert Odd.removed <= 1  # none where the machine is busy


def test_calls_that_hang_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore("odd://bucket/folder")
    store.begin()
    monkeypatch.setattr(Odd, "waits_s", 1.0)
    monkeypatch.setattr(object_store, "ANSWER_S", 0.05)
    monkeypatch.setattr(object_store, "_hanging", threading.BoundedSemaphore(2))
    before = threading.active_count()
    for _ in range(5):
        with pytest.raises(PoolError, match="no answer within"):
            store.put(NAME, b"data")
    assert threading.active_count() <= before + 2


@pytest.mark.parametrize(
    "url",
    [
        "",
        "here",
        "file://",
        "file:///",
        "s3://key:secret@bucket/x",
        "nothing://b",
        "memory://b",
        "simplecache::file:///tmp/x",
        "zip:///none/at/all.zip",
        f"file:///{'x' * 3000}",
    ],
)
def test_what_is_no_place(url: str) -> None:
    with pytest.raises(InputError) as told:
        FsspecStore(url)
    assert "secret" not in str(told.value)


def test_a_place_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert FsspecStore("file://objects").url == f"file://{tmp_path}/objects"


def test_a_pool_keeps_to_one_place(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    pool.mkdir(mode=0o700)
    here, there = (f"file://{tmp_path}/{name}" for name in ("here", "there"))
    assert url_of(pool) is None and store_of(pool / NAME) is None
    keep_in(pool, here)
    keep_in(pool, here)
    with pytest.raises(InputError, match="keeps batches at .*here; use another directory"):
        keep_in(pool, there)
    store = store_of(pool / NAME)
    assert store is not None and (store.url, store.folder) == (here, NAME)
    for inner in ("client", "provider", f"certificate-{NAME}", f"provider/certificate-{NAME}"):
        assert url_of(pool / inner) == here
    assert url_of(pool / NAME) is None  # a peer's folder is no party's
    assert (pool / STORE_FILE).stat().st_mode & 0o777 == 0o600
    assert len(list((tmp_path / "here").iterdir())) == 1


def test_a_place_that_is_away_is_not_begun_again(tmp_path: Path) -> None:
    pool, place = tmp_path / "pool", tmp_path / "objects"
    keep_in(pool, f"file://{place}")
    place.rename(tmp_path / "elsewhere")
    place.mkdir()
    with pytest.raises(InputError, match="is not there"):
        keep_in(pool, f"file://{place}")
    assert not list(place.iterdir())


@pytest.mark.parametrize("content", [b"", b"\xff", b"x" * 5000])
def test_a_file_that_names_no_place(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STORE_FILE).write_bytes(content)
    (tmp_path / STORE_FILE).chmod(0o600)
    with pytest.raises(PoolError, match="store-url names no place"):
        url_of(tmp_path)


def test_a_batch_that_is_too_large_stays_on_disk(
    outside: Parties, shelves: list[Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_OBJECT_BYTES", 100)
    outside.prepare(TRIPLE, UNITS)
    assert not shelves[CLIENT].copies
    again(outside)
    outside.take(TRIPLE, UNITS)
    outside.end()


def test_a_disk_that_fills_up_leaves_no_object(
    outside: Parties, shelves: list[Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    made = outside.both(lambda rank, pool: pool.make(TRIPLE))
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PoolError, match="make room on that disk"):
        outside.pools[CLIENT].add(made[CLIENT])
    assert shelves[CLIENT].copies and not shelves[CLIENT].objects


@given(st.lists(st.integers(1, 40), max_size=60))
def test_groups_are_small_and_whole(sizes: list[int]) -> None:
    openers = [Opener(f"{at:032x}", size << 20, b"") for at, size in enumerate(sizes)]
    groups = list(in_groups(openers))
    assert [one for group in groups for one in group] == openers
    for group in groups:
        assert 1 <= len(group) <= AT_ONCE
        assert len(group) == 1 or sum(one.nbytes for one in group) <= MAX_OBJECT_BYTES
