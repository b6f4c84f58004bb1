"""The pool: every unit once, matching at both parties, in memory and on disk."""

from __future__ import annotations

import errno
import json
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spu_llm import stock
from spu_llm.channel import MemoryChannel
from spu_llm.correlation import Correlation, Material, evaluate
from spu_llm.errors import PoolError, WireError
from spu_llm.pool import INVENTORY_BYTES, MAX_BATCHES, Pool
from spu_llm.prg import Prg
from spu_llm.secure import PartySession
from spu_llm.settings import SpuConfig
from spu_llm.spu_runtime import create_memory_link
from spu_llm.values import CLIENT, PROVIDER
from tests.core.dealing import (
    CORRELATIONS,
    GATE,
    PRODUCT,
    TRIPLE,
    WEIGHTS,
    Made,
    dealer,
    fixed_at,
)

RANKS = (CLIENT, PROVIDER)


@pytest.fixture(autouse=True, scope="module")
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

    def __init__(self, threads: ThreadPoolExecutor, root: Path | None = None) -> None:
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
                rank, Prg.from_os(), dealer(rank, ends[rank], self.made),
                session=b"session %d" % self.sessions, directory=self.directories[rank],
            )
            for rank in RANKS
        ]  # fmt: skip
        inventories = [pool.inventory() for pool in self.pools]
        for rank in RANKS:
            self.pools[rank].resume(inventories[1 - rank])

    def both(self, work: Callable[[int, Pool], Any]) -> list[Any]:
        waiting = [self.threads.submit(work, rank, self.pools[rank]) for rank in RANKS]
        wait(waiting)
        return [future.result() for future in waiting]

    def prepare(self, correlation: Correlation, units: int) -> None:
        self.both(lambda r, pool: pool.prepare(correlation, units, fixed_at(r, correlation)))

    def take(self, correlation: Correlation, units: int) -> list[Material]:
        found = self.both(lambda r, pool: pool.take(correlation, units, fixed_at(r, correlation)))
        taken = [self.made.units_of(rank, found[rank]) for rank in RANKS]
        assert taken[CLIENT] == taken[PROVIDER] and len(taken[CLIENT]) == units
        self.record(taken[CLIENT])
        return found

    def take_alone(self, rank: int, correlation: Correlation, units: int) -> None:
        """One party goes ahead as far as it can; what it took is gone for both."""
        units = min(units, self.pools[rank].available(correlation))
        found = self.pools[rank].take(correlation, units, fixed_at(rank, correlation))
        self.record(self.made.units_of(rank, found))

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
        """Each pool is closed, or left as a killed process leaves it."""
        for pool, tidy in zip(self.pools, clean or (True, True), strict=True):
            pool.close() if tidy else _die(pool)


def _die(pool: Pool) -> None:
    assert pool._stock is not None
    pool._stock.close()  # the lock goes with the process; nothing else does


@pytest.fixture
def parties(threads: ThreadPoolExecutor, tmp_path: Path) -> Parties:
    found = Parties(threads, tmp_path)
    found.open()
    return found


def batch_folder(parties: Parties, rank: int, correlation: Correlation = TRIPLE) -> Path:
    """The only batch of a correlation."""
    directory = parties.directories[rank]
    assert directory is not None
    name = correlation.name.split()[0]
    (found,) = (b for f in directory.iterdir() if f.name.startswith(name) for b in f.iterdir())
    return found


# ---- units


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from(CORRELATIONS), st.integers(0, 40)),
        st.tuples(st.just("prepare"), st.sampled_from(CORRELATIONS), st.integers(0, 40)),
        st.tuples(st.just("reopen"), st.booleans(), st.booleans()),
        st.tuples(
            st.just("alone"), st.sampled_from(RANKS), st.sampled_from(CORRELATIONS),
            st.integers(0, 12), st.booleans(), st.booleans(),
        ),
    ),
    max_size=12,
)  # fmt: skip


@settings(max_examples=80)
@given(ACTIONS)
def test_units_match_and_come_once(threads: ThreadPoolExecutor, actions: list[Any]) -> None:
    """Whatever the parties prepare and take, and however their sessions end."""
    with tempfile.TemporaryDirectory() as root:
        parties = Parties(threads, Path(root))
        parties.open()
        for kind, *rest in actions:
            before = {c.name: parties.available(c) for c in CORRELATIONS}
            if kind == "take":
                correlation, units = rest
                parties.take(correlation, units)
                missing = max(0, units - before[correlation.name])
                made = -(-missing // correlation.chunk) * correlation.chunk
                assert parties.available(correlation) == before[correlation.name] + made - units
            elif kind == "prepare":
                parties.prepare(*rest)
                assert parties.available(rest[0]) >= rest[1]
            elif kind == "reopen":
                parties.end(*rest)
                parties.open()
                for c in CORRELATIONS:
                    lost = before[c.name] - parties.available(c)
                    assert lost == 0 if all(rest) else 0 <= lost < stock.slice_units(c.chunk)
            else:
                rank, correlation, units, *clean = rest
                parties.take_alone(rank, correlation, units)
                parties.end(*clean)
                parties.open()
        parties.end()


def test_in_memory(threads: ThreadPoolExecutor) -> None:
    parties = Parties(threads)
    parties.open()
    for correlation in CORRELATIONS:
        assert parties.available(correlation) == 0
        for units in (0, 1, 5, 40, 2):
            client, provider = parties.take(correlation, units)
            masks = [a + b for a, b in zip(client.masks, provider.masks, strict=True)]
            if correlation is not GATE:
                (expected,) = evaluate(
                    correlation, masks, WEIGHTS if correlation.fixed is not None else None
                )
                np.testing.assert_array_equal(client.results[0] + provider.results[0], expected)
            assert client.masks[0].shape == (units, *correlation.masks[0].shape)
        assert parties.pools[CLIENT].stored_bytes(correlation) == 0.0
    assert parties.pools[CLIENT].inventory() == b"{}"
    parties.end()
    with pytest.raises(PoolError, match="closed"):
        parties.pools[CLIENT].take(TRIPLE, 0)


def test_no_refill_without_a_maker(parties: Parties) -> None:
    """What is there serves; what is not there is refused, and nothing is lost by asking."""
    parties.prepare(TRIPLE, 16)
    for pool in parties.pools:
        pool._make = None
    with pytest.raises(PoolError, match="16 of 17 units of triple of words / 16"):
        parties.take(TRIPLE, 17)
    assert parties.available(TRIPLE) == 16
    parties.take(TRIPLE, 16)
    with pytest.raises(PoolError, match="may not make more"):
        parties.pools[CLIENT].prepare(GATE, 1)
    parties.end()


def test_nothing_serves_before_the_inventories_are_compared(parties: Parties) -> None:
    parties.prepare(TRIPLE, 16)
    parties.end()
    pool = Pool(CLIENT, Prg.from_os(), None, session=b"s", directory=parties.directories[CLIENT])
    assert pool.available(TRIPLE) == 0 and len(json.loads(pool.inventory())) == 1
    with pytest.raises(PoolError):
        pool.take(TRIPLE, 1)
    pool.close()
    parties.open()
    assert parties.available(TRIPLE) == 16
    parties.end()


def test_what_only_one_party_has_is_dropped(parties: Parties) -> None:
    """Also from disk: it must not come back when the peer's directory does."""
    parties.prepare(TRIPLE, 16)
    parties.prepare(GATE, 11)
    parties.end()
    shutil.rmtree(batch_folder(parties, PROVIDER))
    kept = batch_folder(parties, CLIENT)
    parties.open()
    assert parties.available(TRIPLE) == 0 and parties.available(GATE) == 11
    assert not kept.exists()
    parties.end()


@pytest.mark.parametrize("rolled_back", RANKS)
def test_an_old_copy_of_one_side_is_burnt(
    parties: Parties, rolled_back: int, tmp_path: Path
) -> None:
    parties.prepare(TRIPLE, 32)
    parties.take(TRIPLE, 1)
    parties.end()
    directory = parties.directories[rolled_back]
    assert directory is not None
    shutil.copytree(directory, tmp_path / "copy")
    parties.open()
    parties.take(TRIPLE, 20)
    parties.end()
    shutil.rmtree(directory)
    shutil.copytree(tmp_path / "copy", directory)
    directory.chmod(0o700)
    parties.open()
    assert parties.available(TRIPLE) == 11
    parties.take(TRIPLE, 11)
    parties.end()


def test_a_peer_that_went_back_cannot_bring_units_back(parties: Parties) -> None:
    parties.take(TRIPLE, 5)
    parties.end()
    pool = Pool(CLIENT, Prg.from_os(), None, session=b"s", directory=parties.directories[CLIENT])
    pool.resume(json.dumps(dict.fromkeys(json.loads(pool.inventory()), 0)).encode())
    assert pool.available(TRIPLE) == 11
    units = parties.made.units_of(CLIENT, pool.take(TRIPLE, 11))
    assert not set(units) & set(parties.gone)
    pool.close()


def test_weights(parties: Parties) -> None:
    """Material belongs to the weights it was made for: in the session and after it."""
    other = WEIGHTS + np.uint64(1)
    parties.take(PRODUCT, 1)

    def refused(remedy: str) -> None:
        provider = parties.pools[PROVIDER]
        for ask in (provider.take, provider.prepare):
            with pytest.raises(PoolError, match=f"made for other weights; {remedy}"):
                ask(PRODUCT, 1, other)
        assert provider.available(PRODUCT) == 2

    refused(f"remove {parties.directories[PROVIDER]}, or use another directory")
    parties.take(PRODUCT, 0)
    parties.end()
    parties.open()
    refused(f"remove {parties.directories[PROVIDER]}, or use another directory")
    with pytest.raises(PoolError, match="other weights"):
        parties.pools[PROVIDER].take(PRODUCT, 1)
    parties.end()
    parties.open()
    parties.take(PRODUCT, 2)
    parties.end()


def test_equal_weights_are_read_once(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("spu_llm.pool.digest", lambda array: calls.append(1) or "d")
    for _ in range(5):
        parties.take(PRODUCT, 1)
    assert len(calls) == 1
    parties.end()


# ---- files


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def _words_on_disk(root: Path) -> set[int]:
    """All that could be a word of a file: eight bytes from anywhere."""
    found: set[int] = set()
    for path in _files(root):
        data = path.read_bytes()
        for offset in range(8):
            part = data[offset : offset + (len(data) - offset) // 8 * 8]
            found.update(np.frombuffer(part, "<u8").tolist())
    return found


def _words_by_keys(root: Path) -> set[int]:
    """Mask words that the keys on disk give (of TRIPLE, slice by slice)."""
    from spu_llm.pool import _masks_of, _next_key

    found: set[int] = set()
    for path in root.rglob("state.json"):
        key = bytes.fromhex(json.loads(path.read_bytes())["key"])
        for _ in range(stock.SLICES):
            for words in TRIPLE.draw(CLIENT, _masks_of(key), stock.slice_units(TRIPLE.chunk)):
                found.update(words.reshape(-1).tolist())
            key = _next_key(key)
    return found


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("units", [2, 5, 21])
def test_used_units_leave_no_trace(parties: Parties, clean: bool, units: int) -> None:
    """A thief of the directory finds neither masks nor results of what was handed out."""
    parties.prepare(TRIPLE, 32)
    root = parties.directories[CLIENT]
    assert root is not None
    stored = _words_on_disk(root)
    (client, _) = parties.take(TRIPLE, units)
    masks = {int(x) for words in client.masks for x in words.reshape(-1)}
    results = {int(x) for words in client.results for x in words.reshape(-1)}
    assert results <= stored and not masks & stored
    for _ in range(2):
        parties.end(clean, clean)
        assert not (masks | results) & (_words_on_disk(root) | _words_by_keys(root))
        parties.open()
    parties.end()


def test_a_thief_finds_results_wiped_after_a_crash_at_the_next_start(parties: Parties) -> None:
    parties.prepare(TRIPLE, 16)
    for pool in parties.pools:
        for batch in pool._batches[TRIPLE.name]:
            assert isinstance(batch.store, stock.Files)
            batch.store._wipe = lambda first, last: None  # type: ignore[method-assign]
    (client, _) = parties.take(TRIPLE, 2)
    results = {int(x) for x in client.results[0].reshape(-1)}
    root = parties.directories[CLIENT]
    assert root is not None and results <= _words_on_disk(root)
    parties.end(False, False)
    parties.open()
    assert not results & _words_on_disk(root)
    parties.end()


def test_modes_and_layout(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        parties = Parties(threads, tmp_path / "deep")
        parties.open()
        parties.prepare(TRIPLE, 16)
        parties.take(TRIPLE, 1)
        parties.end()
    finally:
        os.umask(umask)
    for root in parties.directories:
        assert root is not None
        for path in (root, *root.rglob("*")):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    folder = batch_folder(parties, CLIENT)
    assert {path.name for path in folder.iterdir()} == {
        "meta.json", "state.json", "results.npy", "rest.npy",
    }  # fmt: skip
    results = np.load(folder / "results.npy", allow_pickle=False)
    assert results.shape == (16, TRIPLE.words) and results.dtype == np.uint64
    meta = json.loads((folder / "meta.json").read_bytes())
    assert (meta["name"], meta["units"], meta["fixed"]) == (TRIPLE.name, 16, None)


def test_stored_bytes(parties: Parties) -> None:
    parties.prepare(TRIPLE, 32)
    root = parties.directories[CLIENT]
    assert root is not None
    size = sum(path.stat().st_size for path in _files(root))
    assert parties.pools[CLIENT].stored_bytes(TRIPLE) == size / 32
    assert parties.pools[CLIENT].stored_bytes(GATE) == 0.0
    big = Correlation("big", TRIPLE.masks, TRIPLE.results, TRIPLE.secure, chunk=8192)
    parties.prepare(big, 1)
    assert 16 < parties.pools[CLIENT].stored_bytes(big) < 16.3
    parties.end()


def test_one_session_at_a_time(parties: Parties) -> None:
    directory = parties.directories[CLIENT]
    with pytest.raises(PoolError, match=f"{directory} is in use by another session"):
        Pool(CLIENT, Prg.from_os(), None, session=b"s", directory=directory)
    parties.end()
    parties.open()
    parties.end()
    parties.end()  # twice does no harm


def reopen(parties: Parties, rank: int = CLIENT) -> None:
    pool = Pool(rank, Prg.from_os(), None, session=b"s", directory=parties.directories[rank])
    pool.close()


@pytest.fixture
def stored(parties: Parties) -> Parties:
    """One batch with units put back, closed."""
    parties.prepare(TRIPLE, 16)
    parties.take(TRIPLE, 3)
    parties.end()
    reopen(parties)
    return parties


def _sealed_with(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_bytes())
    del fields["seal"]
    owner = path.parent.name if path.name == "state.json" else ""
    path.write_bytes(stock._sealed({**fields, **changes}, owner))


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "truncated array": ("results.npy", lambda p: os.truncate(p, p.stat().st_size - 1)),
    "longer array": ("results.npy", lambda p: os.truncate(p, p.stat().st_size + 8)),
    "empty array": ("results.npy", lambda p: p.write_bytes(b"")),
    "bad header": ("results.npy", lambda p: p.write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'a': (1,")),
    "wrong shape": ("results.npy", lambda p: np.save(p, np.zeros((15, 2), np.uint64))),
    "flat": ("results.npy", lambda p: np.save(p, np.zeros(32, np.uint64))),
    "signed words": ("results.npy", lambda p: np.save(p, np.zeros((16, 2), np.int64))),
    "by columns": ("results.npy", lambda p: np.save(p, np.zeros((2, 16), np.uint64).T)),
    "pickle": ("results.npy", lambda p: np.save(p, np.array([{}]), allow_pickle=True)),
    "no array": ("results.npy", lambda p: p.unlink()),
    "no JSON": ("meta.json", lambda p: p.write_bytes(b"{")),
    "not text": ("meta.json", lambda p: p.write_bytes(b"\xff\xfe{}")),
    "a list": ("meta.json", lambda p: p.write_bytes(b"[]")),
    "empty table": ("state.json", lambda p: p.write_bytes(b"{}")),
    "deep JSON": ("state.json", lambda p: p.write_bytes(b"[" * 60000)),
    "long JSON": ("meta.json", lambda p: p.write_bytes(b"[" + b"1," * 60000 + b"1]")),
    "foreign version": ("meta.json", lambda p: _sealed_with(p, format=2)),
    "unknown field": ("meta.json", lambda p: _sealed_with(p, colour=1)),
    "wrong type": ("meta.json", lambda p: _sealed_with(p, units="16")),
    "fraction": ("state.json", lambda p: _sealed_with(p, used=[3])),
    "used too far": ("state.json", lambda p: _sealed_with(p, used=17)),
    "negative": ("state.json", lambda p: _sealed_with(p, used=-1)),
    "short key": ("state.json", lambda p: _sealed_with(p, key="00")),
    "no state": ("state.json", lambda p: p.unlink()),
    "state of another batch": (
        "state.json", lambda p: p.write_bytes(p.read_bytes().replace(b'used": 3', b'used": 2')),
    ),
    "folder for a file": ("meta.json", lambda p: (p.unlink(), p.mkdir(0o700))),
    "pipe for a file": ("meta.json", lambda p: (p.unlink(), os.mkfifo(p, 0o600))),
    "link for a file": ("meta.json", lambda p: (p.rename(p.parents[3] / "m"),
                                                p.symlink_to(p.parents[3] / "m"))),
    "file open to others": ("results.npy", lambda p: p.chmod(0o640)),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(stored: Parties, damage: str) -> None:
    name, spoil = DAMAGE[damage]
    path = batch_folder(stored, CLIENT) / name
    spoil(path)
    with pytest.raises(PoolError, match=str(path.parent)) as refusal:
        reopen(stored)
    assert "\n" not in str(refusal.value)
    assert str(path) in str(refusal.value)
    with pytest.raises(PoolError, match=str(path)):
        reopen(stored)  # it is the damage again, not a lock left behind


def test_no_flipped_bit_passes(stored: Parties) -> None:
    """Neither in what describes a batch nor in its words."""
    folder = batch_folder(stored, CLIENT)
    provider_folder = batch_folder(stored, PROVIDER)
    assert provider_folder.name == folder.name
    for name in ("meta.json", "state.json"):
        data = (folder / name).read_bytes()
        for i in range(len(data)):
            (folder / name).write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
            with pytest.raises(PoolError, match=str(folder)):
                reopen(stored)
        (folder / name).write_bytes(data)
    theirs = stored_inventory(stored, PROVIDER)
    for name in ("results.npy", "rest.npy"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        pool = Pool(
            CLIENT, Prg.from_os(), None, session=b"s", directory=stored.directories[CLIENT]
        )
        pool.resume(theirs)
        with pytest.raises(PoolError, match=f"{folder / name} is damaged"):
            pool.take(TRIPLE, 13)
        pool.close()
        (folder / name).write_bytes(data)
    stored.open()
    stored.take(TRIPLE, 13)
    stored.end()


def stored_inventory(parties: Parties, rank: int) -> bytes:
    pool = Pool(rank, Prg.from_os(), None, session=b"s", directory=parties.directories[rank])
    pool.close()
    return json.dumps({batch_folder(parties, rank).name: 3}).encode()


PLACES: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "link for the directory": (
        "symbolic link", lambda r, b: (r.rename(r.parent / "m"), r.symlink_to(r.parent / "m"))
    ),
    "link to nowhere": (
        "symbolic link", lambda r, b: (shutil.rmtree(r), r.symlink_to(r.parent / "none"))
    ),
    "link for a correlation": (
        "symbolic link",
        lambda r, b: (b.parent.rename(r.parent / "m"), b.parent.symlink_to(r.parent / "m")),
    ),
    "link for a batch": (
        "symbolic link", lambda r, b: (b.rename(r.parent / "m"), b.symlink_to(r.parent / "m"))
    ),
    "link for the lock": (
        "symbolic link", lambda r, b: ((r / "lock").unlink(), (r / "lock").symlink_to(r / "x"))
    ),
    "file for the directory": (
        "not a directory", lambda r, b: (shutil.rmtree(r), r.write_bytes(b""))
    ),
    "directory others may read": ("mode 750", lambda r, b: r.chmod(0o750)),
    "correlation others may read": ("mode 701", lambda r, b: b.parent.chmod(0o701)),
    "batch others may read": ("mode 704", lambda r, b: b.chmod(0o704)),
    "lock others may take": ("mode 666", lambda r, b: (r / "lock").chmod(0o666)),
    "a stranger's file": ("not a directory", lambda r, b: (r / "notes").touch(0o600)),
    "a stranger's file inside": ("not part of a pool", lambda r, b: (b.parent / "notes").touch()),
    "a batch from elsewhere": ("moved here", lambda r, b: b.rename(b.with_name("0" * 32))),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_odd_places_are_refused(stored: Parties, place: str) -> None:
    line, spoil = PLACES[place]
    root = stored.directories[CLIENT]
    assert root is not None
    spoil(root, batch_folder(stored, CLIENT))
    for _ in range(2):
        with pytest.raises(PoolError, match=line):
            reopen(stored)


def test_the_other_partys_directory_is_refused(stored: Parties) -> None:
    stored.directories.reverse()
    with pytest.raises(PoolError, match="the other party's material"):
        reopen(stored, CLIENT)


def test_what_a_crash_left_is_swept(stored: Parties) -> None:
    folder = batch_folder(stored, CLIENT)
    shutil.copytree(folder, folder.with_name(f".{'1' * 32}.made"))
    shutil.copytree(folder, folder.with_name(f".{'2' * 32}.gone"))
    (folder / ".state.json").touch(0o600)
    reopen(stored)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert not (folder / ".state.json").exists()


def test_another_correlation_under_the_same_name(stored: Parties) -> None:
    other = Correlation(TRIPLE.name, TRIPLE.masks, GATE.results, TRIPLE.secure, chunk=16)
    stored.open()
    with pytest.raises(PoolError, match="has 2 words a unit, not 4; remove"):
        stored.pools[CLIENT].take(other, 1)
    stored.end()


def test_a_full_disk_hands_out_nothing(stored: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.open()

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for units in (5, 40):
            with pytest.raises(PoolError, match="No space left"):
                stored.take(TRIPLE, units)
    stored.end()
    stored.open()
    assert stored.available(TRIPLE) == 13
    stored.take(TRIPLE, 13)
    stored.end()


# ---- inventories


ID = "0123456789abcdef" * 2
BAD_INVENTORIES = {
    "empty": b"",
    "not text": b"\xff\xff",
    "list": b"[]",
    "null": b"null",
    "number": b"1",
    "cut": b'{"' + ID.encode(),
    "deep": b"[" * 200_000,
    "deep tables": b'{"a":' * 100_000,
    "too long": b" " * INVENTORY_BYTES + b"{}",
    "unknown name": b'{"a": 1}',
    "upper case": json.dumps({ID.upper(): 1}).encode(),
    "surrogate": b'{"\\ud800": 1}',
    "path": b'{"../../x": 1}',
    "twice": f'{{"{ID}": 1, "{ID}": 1}}'.encode(),
    "negative": json.dumps({ID: -1}).encode(),
    "fraction": json.dumps({ID: 1.0}).encode(),
    "not a number": f'{{"{ID}": NaN}}'.encode(),
    "truth": json.dumps({ID: True}).encode(),
    "text": json.dumps({ID: "1"}).encode(),
    "null index": json.dumps({ID: None}).encode(),
    "table": json.dumps({ID: {}}).encode(),
    "huge number": f'{{"{ID}": {"9" * 100_000}}}'.encode(),
    "huge exponent": f'{{"{ID}": 1e999999}}'.encode(),
}


@pytest.mark.parametrize("kind", BAD_INVENTORIES)
def test_bad_inventories_are_refused(stored: Parties, kind: str) -> None:
    _check_refused(stored, BAD_INVENTORIES[kind])


@pytest.mark.parametrize("used", [17, 10**17])
def test_more_used_than_there_is(stored: Parties, used: int) -> None:
    data = json.dumps({ID: 3, batch_folder(stored, CLIENT).name: used}).encode()
    _check_refused(stored, data)


def _check_refused(parties: Parties, data: bytes) -> None:
    root = parties.directories[CLIENT]
    assert root is not None
    before = {path: path.read_bytes() for path in _files(root)}
    pool = Pool(CLIENT, Prg.from_os(), None, session=b"s", directory=root)
    with pytest.raises(WireError) as refusal:
        pool.resume(data)
    pool.close()
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 200
    assert {path: path.read_bytes() for path in _files(root)} == before


ANY_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=200),
        ANY_JSON.map(lambda value: json.dumps(value).encode()),
        st.dictionaries(
            st.one_of(st.just("ours"), st.from_regex(r"[0-9a-f]{32}", fullmatch=True)),
            st.one_of(st.integers(-2, 20), ANY_JSON),
        ),
    )
)
@example({"ours": 16})
@example({"ours": 15})
@example({"ours": 0})
def test_any_inventory_is_taken_or_refused(stored: Parties, sent: Any) -> None:
    """WireError is all that the peer can cause, and a refused inventory changes no file."""
    root = stored.directories[CLIENT]
    assert root is not None
    name = batch_folder(stored, CLIENT).name
    if isinstance(sent, dict):
        sent = json.dumps({name if k == "ours" else k: v for k, v in sent.items()}).encode()
    backup = root.parent / "backup"
    if not backup.exists():
        shutil.copytree(root, backup)
    pool = Pool(CLIENT, Prg.from_os(), None, session=b"s", directory=root)
    try:
        pool.resume(sent)
    except WireError:
        pool.close()
        assert {p.relative_to(root): p.read_bytes() for p in _files(root)} == {
            p.relative_to(backup): p.read_bytes() for p in _files(backup)
        }
        return
    used = max(3, json.loads(sent).get(name, 16))
    assert pool.available(TRIPLE) == 16 - used
    pool.take(TRIPLE, 16 - used)
    pool.close()
    shutil.rmtree(root)
    shutil.copytree(backup, root)


def test_an_inventory_that_would_be_refused_is_not_sent(
    stored: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spu_llm.pool.INVENTORY_BYTES", 10)
    stored_pool = Pool(
        CLIENT, Prg.from_os(), None, session=b"s", directory=stored.directories[CLIENT]
    )
    with pytest.raises(PoolError, match="1 batches, more than can be compared"):
        stored_pool.inventory()
    stored_pool.close()


def test_no_more_is_stored_than_can_be_compared(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {f"{i:032x}": 10**6 for i in range(MAX_BATCHES)}
    assert len(json.dumps(ids)) < INVENTORY_BYTES
    monkeypatch.setattr("spu_llm.pool.MAX_BATCHES", 2)
    parties.take(TRIPLE, TRIPLE.chunk)  # used up: it does not count
    parties.prepare(TRIPLE, 2 * TRIPLE.chunk)
    for pool in parties.pools:
        with pytest.raises(PoolError, match="prepare fewer steps"):
            pool.prepare(TRIPLE, 3 * TRIPLE.chunk)
        assert pool.available(TRIPLE) == 2 * TRIPLE.chunk


@pytest.mark.parametrize("call", ["mkdir", "open", "replace", "fsync"])
def test_a_full_disk_costs_nothing_that_is_there(
    parties: Parties, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    parties.prepare(TRIPLE, 3)
    there, client = parties.available(TRIPLE), parties.pools[CLIENT]

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    client._make = lambda kind, masks, fixed: kind.split(
        np.zeros((len(masks[0]), kind.words), np.uint64)
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(PoolError, match="No space left"):
            client.prepare(TRIPLE, there + 1)
    assert client.available(TRIPLE) == there
    parties.end()
    parties.open()
    assert parties.available(TRIPLE) == there
    parties.take(TRIPLE, there)


# ---- sessions


def test_sessions_resume(tmp_path: Path) -> None:
    """Two party sessions over one link after the other; then one without a directory."""
    made = Made()

    def run(name: str, directories: list[Path | None]) -> list[int]:
        ends = MemoryChannel.pair()
        found: queue.Queue[tuple[int, int]] = queue.Queue()

        def party(rank: int) -> None:
            link = create_memory_link(rank, name)
            session = PartySession(
                link, SpuConfig(), profile=False, pool_dir=directories[rank]
            )
            session.pool._make = dealer(rank, ends[rank], made)
            found.put((rank, session.pool.available(TRIPLE)))
            session.party.take(TRIPLE, 3)
            session.close()

        running = [threading.Thread(target=party, args=(rank,)) for rank in RANKS]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
        return [count for _, count in sorted(found.get(timeout=1) for _ in RANKS)]

    both: list[Path | None] = [tmp_path / "client", tmp_path / "provider"]
    assert run("pool 1", both) == [0, 0]
    assert run("pool 2", both) == [13, 13]
    # A peer without a directory, or another one, leaves what belongs to this pair as it is.
    assert run("pool 3", [both[0], None]) == [0, 0]
    assert run("pool 4", [both[0], tmp_path / "other"]) == [0, 0]
    assert run("pool 5", both) == [10, 10]
