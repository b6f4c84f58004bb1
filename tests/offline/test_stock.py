"""A look at a pool directory: what is there, with nothing changed and nobody turned away."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

import pytest

from spu_llm.core.errors import PoolError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline import access, files, stock
from spu_llm.offline.peer_directories import open_directory, party_directories
from tests.kit.dealing import GATE, MIXED, TRIPLE
from tests.offline.parties import Parties, batch_folder, files_of

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def folder_of(parties: Parties, rank: int = CLIENT) -> Path:
    folder = parties.directories[rank]
    assert folder is not None
    return folder


def counts(folder: Path) -> dict[str, tuple[int, int]]:
    """Batches and units that are left, by kind."""
    return {kind.name: (kind.batches, kind.units) for kind in stock.kinds_in(folder)}


def test_what_is_left_is_listed_by_kind(parties: Parties) -> None:
    parties.prepare(TRIPLE, 20)
    parties.prepare(GATE, 1)
    parties.prepare(MIXED, 3)
    parties.take(TRIPLE, 5)
    parties.take(MIXED, 3)
    parties.end()
    for rank in (CLIENT, PROVIDER):
        folder = folder_of(parties, rank)
        assert counts(folder) == {GATE.name: (1, 11), TRIPLE.name: (2, 27)}
        total = sum(kind.disk_bytes for kind in stock.kinds_in(folder))
        assert total == sum(path.stat().st_size for path in files_of(folder))


def test_all_files_count_whatever_they_are(parties: Parties, tmp_path: Path) -> None:
    parties.prepare(TRIPLE, 20)
    (folder_of(parties) / "lock").write_bytes(bytes(5))
    (folder_of(parties) / "other").mkdir()
    (folder_of(parties) / "other" / "damaged").write_bytes(bytes(7))
    (kind,) = stock.kinds_in(folder_of(parties, PROVIDER))
    assert stock.file_bytes(folder_of(parties)) == kind.disk_bytes + 5 + 7
    assert stock.file_bytes(tmp_path / "nowhere") == 0


def everything(root: Path) -> dict[Path, tuple[int, int, bytes]]:
    """Return all below a directory: mode, time of the last change, contents."""
    collected = {}
    for path in (root, *root.rglob("*")):
        status = path.stat()
        data = path.read_bytes() if path.is_file() else b""
        collected[path] = (status.st_mode, status.st_mtime_ns, data)
    return collected


def test_a_look_changes_nothing(stored: Parties) -> None:
    """What a session that died has left stays for the next session, too."""
    folder, batch = folder_of(stored), batch_folder(stored, CLIENT)
    for name in (f".{'1' * 32}.made", f".{'2' * 32}.gone"):
        shutil.copytree(batch, batch.with_name(name))
    (batch / ".state.json").touch(0o600)
    (folder / "lock").unlink()
    before = everything(folder)
    assert counts(folder) == {TRIPLE.name: (1, 13)}
    assert not stock.in_use(folder) and stock.stocks(folder) == []  # a peer's alone is no pool
    assert everything(folder) == before


def test_a_session_is_seen_and_goes_on(parties: Parties) -> None:
    parties.prepare(TRIPLE, 32)
    folder = folder_of(parties)
    before = everything(folder)
    assert access.is_locked(folder / "lock")
    assert counts(folder) == {TRIPLE.name: (2, 32)}
    assert everything(folder) == before
    parties.take(TRIPLE, 1)
    assert counts(folder) == {TRIPLE.name: (2, 30)}  # a slice is used up on disk at once
    parties.end()
    assert not access.is_locked(folder / "lock")
    assert counts(folder) == {TRIPLE.name: (2, 31)}


def test_a_session_that_begins_during_a_look_gets_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    held = access.take_lock(path)
    assert held is not None
    os.close(held)
    look = os.open(path, os.O_RDONLY)
    fcntl.flock(look, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda seconds: os.close(look))
    held = access.take_lock(path)
    assert held is not None and access.is_locked(path)
    os.close(held)
    assert not access.is_locked(path)


def test_a_batch_that_vanishes_meanwhile_is_left_out(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    parties.prepare(TRIPLE, 16)
    parties.prepare(GATE, 11)
    parties.end()
    gone = batch_folder(parties, CLIENT)

    def load(path: Path) -> tuple[files.Label, files.State]:
        if path == gone and path.exists():
            shutil.rmtree(path)
        return files.load(path)

    monkeypatch.setattr(stock, "load", load)
    assert counts(folder_of(parties)) == {GATE.name: (1, 11)}


def test_damage_is_named(stored: Parties) -> None:
    batch = batch_folder(stored, CLIENT)
    (batch / "meta.json").write_bytes(b"{")
    with pytest.raises(PoolError, match=f"{batch / 'meta.json'} is damaged; remove"):
        stock.kinds_in(folder_of(stored))
    folder_of(stored).chmod(0o755)
    with pytest.raises(PoolError, match="open to other users"):
        stock.kinds_in(folder_of(stored))


def test_one_party_s_pool_and_that_of_both(parties: Parties, tmp_path: Path) -> None:
    parties.prepare(TRIPLE, 16)
    parties.end()
    pool, peers = tmp_path / "pool", ("a" * 32, "b" * 32)
    for role, rank, peer in (("client", CLIENT, peers[1]), ("provider", PROVIDER, peers[0])):
        open_directory(pool / role)
        folder_of(parties, rank).rename(pool / role / peer)
    listed = stock.stocks(pool)
    assert [actual.folder for actual in listed] == [
        pool / "client" / peers[1],
        pool / "provider" / peers[0],
    ]
    assert listed[:1] == stock.stocks(pool / "client")
    (kind,) = listed[0].kinds
    assert (kind.name, kind.batches, kind.units) == (TRIPLE.name, 1, 16)
    assert (listed[0].batches, listed[0].disk_bytes) == (1, kind.disk_bytes)
    assert stock.stored_bytes(pool) == 2 * kind.disk_bytes > 2 * 16 * 16
    assert not stock.in_use(pool)
    held = access.take_lock(pool / "provider" / peers[0] / "lock")
    assert held is not None and stock.in_use(pool) and not stock.in_use(pool / "client")
    os.close(held)


def test_other_paths_are_no_pools(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir(0o700)
    (tmp_path / "folder" / "id").write_text("me")
    for path in (tmp_path, tmp_path / "file", tmp_path / "folder", tmp_path / "none"):
        assert party_directories(path) == [] == stock.stocks(path)
    assert stock.kinds_in(tmp_path / "none") == ()
