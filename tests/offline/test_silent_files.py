"""Files of hints: whose they are, and sessions that share them."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spu_llm.core.errors import PoolError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline import durable
from spu_llm.offline.silent import store
from spu_llm.offline.silent.cache import INSECURE, HintCache
from spu_llm.offline.silent.ring import N
from tests.offline.silent_pair import Two, correlation_of, fixed, matrix

MATRIX, WEIGHTS = correlation_of(2, 5), matrix(1, 2, 5)
SIZE = 5 * 5 * N


def both_folders(root: Path) -> tuple[Path, Path]:
    return root / "deep" / "client" / INSECURE, root / "deep" / "provider" / "version"


def test_modes(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        Two(*both_folders(tmp_path)).set_up((MATRIX, WEIGHTS))
    finally:
        os.umask(umask)
    for folder, count in zip(both_folders(tmp_path), (1, 2), strict=True):
        assert folder.stat().st_mode & 0o777 == 0o700
        files = list(folder.iterdir())
        assert len(files) == count
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)


@pytest.mark.parametrize("rank", [CLIENT, PROVIDER])
def test_an_open_folder_is_refused(tmp_path: Path, rank: int) -> None:
    folders = both_folders(tmp_path)
    folders[rank].mkdir(parents=True)
    folders[rank].chmod(0o750)
    with pytest.raises(PoolError, match="open to other users"):
        Two(*folders)
    folders[rank].rmdir()
    folders[rank].symlink_to(tmp_path)
    with pytest.raises(PoolError, match="symbolic link"):
        Two(*folders)
    folders[rank].unlink()
    folders[rank].touch(0o600)
    with pytest.raises(PoolError, match="not a directory"):
        Two(*folders)


def _spoil(path: Path, how: str) -> str:
    if how == "open":
        path.touch()
        path.chmod(0o640)
        return "open to other users"
    if path.exists():
        path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    return "symbolic link"


@pytest.mark.parametrize("how", ["open", "link"])
@pytest.mark.parametrize("which", ["key", "own", "whole", "part", "lock"])
def test_an_open_file_is_refused(tmp_path: Path, which: str, how: str) -> None:
    client, provider = both_folders(tmp_path)
    Two(client, provider).set_up((MATRIX, WEIGHTS))
    (whole,), (own,) = client.glob("*.hint"), provider.glob("*.hint")
    part = whole.with_suffix(".part")
    if which == "part":
        whole.unlink()
    path = {
        "key": provider / "key",
        "own": own,
        "whole": whole,
        "part": part,
        "lock": client.parent / "lock",
    }[which]
    said = _spoil(path, how)
    if which == "lock" and how == "link":
        said = "lock"  # refused by the system
    if which == "key":
        with pytest.raises(PoolError, match=said):
            Two(client, provider)
        return
    outcomes = Two(client, provider).outcomes(
        lambda rank, p: p.set_up([(MATRIX, fixed(rank, WEIGHTS))])
    )
    assert any(isinstance(x, PoolError) and said in str(x) for x in outcomes)


def test_one_key_however_many_sessions_draw_it(tmp_path: Path) -> None:
    collected: list[bytes] = []
    start = threading.Barrier(8)

    def draw() -> None:
        start.wait()
        collected.append(store.provider_key(tmp_path))

    tmp_path.chmod(0o700)
    threads = [threading.Thread(target=draw) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(collected) == 8 and len(set(collected)) == 1 and len(collected[0]) == 32
    assert [p.name for p in tmp_path.iterdir()] == ["key"]
    assert store.provider_key(None) != store.provider_key(None)


def test_a_second_session_receives_beside_the_first(tmp_path: Path) -> None:
    """Only one writes a partial file; the other one holds the hint in memory."""
    client, provider = both_folders(tmp_path)
    two = Two(client, provider)
    elsewhere = client.with_name("1" * 32)  # of another provider
    with HintCache(elsewhere).receiving([("0" * 64, 1)]) as alone:
        assert alone
        with HintCache(client).receiving([("0" * 64, 1)]) as also:
            assert not also
        error = two.errors(MATRIX, 3, WEIGHTS)
        assert np.abs(error).max() < 2**36
        assert not list(client.iterdir())
    Two(client, provider).set_up((MATRIX, WEIGHTS))
    assert len(list(client.glob("*.hint"))) == 1
    with HintCache(elsewhere).receiving([("0" * 64, 1)]):  # what is whole serves all
        third = Two(client, provider)
        third.set_up((MATRIX, WEIGHTS))
    assert third.sent(PROVIDER) == [32]


def test_two_providers_make_the_same_hint(tmp_path: Path) -> None:
    """The first file stays, and serves."""
    tmp_path.chmod(0o700)
    made = np.arange(30, dtype=np.uint8).reshape(2, 3, 5)
    first, second = (store.save_own(tmp_path, "name", made) for _ in range(2))
    assert first.digest == second.digest and first.content.tobytes() == made.tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["name.hint"]
    assert store.load_own(tmp_path, "other", 30) is None


@pytest.mark.parametrize("rank", [CLIENT, PROVIDER])
def test_a_full_disk(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said with the path; the provider leaves no piece of a file behind."""
    folders = both_folders(tmp_path)
    two = Two(*folders)
    fdopen = os.fdopen

    class Full(io.BufferedWriter):
        def write(self, data: Any) -> int:
            super().write(bytes(data)[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(number: int, mode: str) -> Any:
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        here = mode == "wb" and path.parent == folders[rank]
        return Full(io.FileIO(number, "w")) if here else fdopen(number, mode)

    monkeypatch.setattr(os, "fdopen", opened)
    outcome = two.outcomes(lambda r, p: p.set_up([(MATRIX, fixed(r, WEIGHTS))]))[rank]
    assert isinstance(outcome, PoolError)
    assert str(folders[rank]) in str(outcome) and "make room on that disk" in str(outcome)
    monkeypatch.undo()
    if rank == PROVIDER:
        assert [p.name for p in folders[rank].iterdir()] == ["key"]
    two = Two(*folders)
    two.set_up((MATRIX, WEIGHTS))
    assert int.from_bytes(two.wires[CLIENT].sent[0], "little") == (10 if rank == CLIENT else 0)


def test_where_hints_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.default_directory("client") == tmp_path / "spu-llm" / "hints" / "client"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    actual = store.default_directory("provider")
    assert actual == tmp_path / "home" / ".cache" / "spu-llm" / "hints" / "provider"
    durable.open_folder(actual)
    assert actual.stat().st_mode & 0o777 == 0o700
