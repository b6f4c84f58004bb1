"""A pool on disk: nothing used can be read, nothing damaged or out of place is taken."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import PoolError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline import contents
from spu_llm.offline import files as pool_files
from spu_llm.offline.pool import Pool
from tests.kit.dealing import GATE, TRIPLE, refuses, zeros
from tests.offline.parties import Parties, batch_folder, files_of, reopen, stored_inventory

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def _words_on_disk(root: Path) -> set[int]:
    """Return all that could be a word of a file: eight bytes from anywhere."""
    collected: set[int] = set()
    for path in files_of(root):
        data = path.read_bytes()
        for offset in range(8):
            part = data[offset : offset + (len(data) - offset) // 8 * 8]
            collected.update(np.frombuffer(part, "<u8").tolist())
    return collected


def _words_by_keys(root: Path) -> set[int]:
    """Mask words that the keys on disk give (of TRIPLE, slice by slice)."""
    from spu_llm.offline.batch import masks_of, next_key

    collected: set[int] = set()
    for path in root.rglob("state.json"):
        key = bytes.fromhex(json.loads(path.read_bytes())["key"])
        for _ in range(pool_files.SLICES):
            for words in TRIPLE.draw(CLIENT, masks_of(key), pool_files.slice_units(TRIPLE.chunk)):
                collected.update(words.reshape(-1).tolist())
            key = next_key(key)
    return collected


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


def test_results_are_wiped_after_a_crash_at_the_next_start(parties: Parties) -> None:
    parties.prepare(TRIPLE, 16)
    for pool in parties.pools:
        for batch in pool._batches[TRIPLE.name]:
            assert isinstance(batch.store, pool_files.Files)
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
        "meta.json",
        "state.json",
        "results.npy",
        "rest.npy",
    }
    results = np.load(folder / "results.npy", allow_pickle=False)
    assert results.shape == (16, TRIPLE.stored_words(CLIENT)) and results.dtype == np.uint64
    meta = json.loads((folder / "meta.json").read_bytes())
    assert (meta["name"], meta["units"]) == (TRIPLE.name, 16)


def test_stored_bytes(parties: Parties) -> None:
    parties.prepare(TRIPLE, 32)
    root = parties.directories[CLIENT]
    assert root is not None
    size = sum(path.stat().st_size for path in files_of(root))
    assert parties.pools[CLIENT].stored_bytes(TRIPLE) == size
    assert parties.pools[CLIENT].stored_bytes(GATE) == 0
    big = Correlation("big", TRIPLE.masks, TRIPLE.results, TRIPLE.secure, chunk=8192)
    parties.prepare(big, 1)
    assert 16 < parties.pools[CLIENT].stored_bytes(big) / 8192 < 16.3
    parties.end()


def test_growth_is_told_before(parties: Parties) -> None:
    client = parties.pools[CLIENT]
    for units, batches in ((16, 1), (16, 0), (17, 1), (60, 2)):
        told, before = client.growth_bytes(TRIPLE, units), client.stored_bytes(TRIPLE)
        parties.prepare(TRIPLE, units)
        grown = client.stored_bytes(TRIPLE) - before
        assert grown <= told <= grown + batches * 2048
    parties.end()


def test_one_session_at_a_time(parties: Parties) -> None:
    directory = parties.directories[CLIENT]
    with pytest.raises(PoolError, match=f"{directory} is in use by another session"):
        Pool(CLIENT, Prg.from_os(), refuses, session=b"s", directory=directory)
    parties.end()
    parties.open()
    parties.end()
    parties.end()  # twice does no harm


def _sealed_with(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_bytes())
    del fields["seal"]
    owner = path.parent.name if path.name == "state.json" else ""
    path.write_bytes(contents.sealed({**fields, **changes}, owner))


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
    "foreign version": ("meta.json", lambda p: _sealed_with(p, format=99)),
    "unknown field": ("meta.json", lambda p: _sealed_with(p, colour=1)),
    "wrong type": ("meta.json", lambda p: _sealed_with(p, units="16")),
    "fraction": ("state.json", lambda p: _sealed_with(p, used=[3])),
    "used too far": ("state.json", lambda p: _sealed_with(p, used=17)),
    "negative": ("state.json", lambda p: _sealed_with(p, used=-1)),
    "short key": ("state.json", lambda p: _sealed_with(p, key="00")),
    "no state": ("state.json", lambda p: p.unlink()),
    "state of another batch": (
        "state.json",
        lambda p: p.write_bytes(p.read_bytes().replace(b'used": 3', b'used": 2')),
    ),
    "folder for a file": ("meta.json", lambda p: (p.unlink(), p.mkdir(0o700))),
    "pipe for a file": ("meta.json", lambda p: (p.unlink(), os.mkfifo(p, 0o600))),
    "link for a file": (
        "meta.json",
        lambda p: (p.rename(p.parents[3] / "m"), p.symlink_to(p.parents[3] / "m")),
    ),
    "file open to others": ("results.npy", lambda p: p.chmod(0o640)),
}


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
            CLIENT, Prg.from_os(), refuses, session=b"s", directory=stored.directories[CLIENT]
        )
        pool.resume(theirs)
        with pytest.raises(PoolError, match=f"{folder / name} is damaged"):
            pool.take(TRIPLE, 13)
        pool.close()
        (folder / name).write_bytes(data)
    stored.open()
    stored.take(TRIPLE, 13)
    stored.end()


PLACES: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "link for the directory": (
        "symbolic link",
        lambda r, b: (r.rename(r.parent / "m"), r.symlink_to(r.parent / "m")),
    ),
    "link to nowhere": (
        "symbolic link",
        lambda r, b: (shutil.rmtree(r), r.symlink_to(r.parent / "none")),
    ),
    "link for a correlation": (
        "symbolic link",
        lambda r, b: (b.parent.rename(r.parent / "m"), b.parent.symlink_to(r.parent / "m")),
    ),
    "link for a batch": (
        "symbolic link",
        lambda r, b: (b.rename(r.parent / "m"), b.symlink_to(r.parent / "m")),
    ),
    "link for the lock": (
        "symbolic link",
        lambda r, b: ((r / "lock").unlink(), (r / "lock").symlink_to(r / "x")),
    ),
    "file for the directory": (
        "not a directory",
        lambda r, b: (shutil.rmtree(r), r.write_bytes(b"")),
    ),
    "directory others may read": ("mode 750", lambda r, b: r.chmod(0o750)),
    "correlation others may read": ("mode 701", lambda r, b: b.parent.chmod(0o701)),
    "batch others may read": ("mode 704", lambda r, b: b.chmod(0o704)),
    "lock others may take": ("mode 666", lambda r, b: (r / "lock").chmod(0o666)),
    "a stranger's file": ("not a directory", lambda r, b: (r / "notes").touch(0o600)),
    "a stranger's file inside": ("not part of a pool", lambda r, b: (b.parent / "notes").touch()),
    "a batch from elsewhere": ("moved here", lambda r, b: b.rename(b.with_name("0" * 32))),
}


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
    with pytest.raises(PoolError, match="the other party's correlated randomness"):
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
            with pytest.raises(PoolError, match="No space left on device; make room on that disk"):
                stored.take(TRIPLE, units)
    stored.end()
    stored.open()
    assert stored.available(TRIPLE) == 13
    stored.take(TRIPLE, 13)
    stored.end()


@pytest.mark.parametrize("call", ["mkdir", "open", "replace", "fsync"])
def test_a_full_disk_costs_nothing_that_is_there(
    parties: Parties, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    parties.prepare(TRIPLE, 3)
    there, client = parties.available(TRIPLE), parties.pools[CLIENT]

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    client._make = zeros
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(PoolError, match="No space left on device; make room on that disk"):
            client.prepare(TRIPLE, there + 1)
    assert client.available(TRIPLE) == there
    parties.end()
    parties.open()
    assert parties.available(TRIPLE) == there
    parties.take(TRIPLE, there)
