"""Keys as they are mounted, and users without a home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spu_llm.core.errors import InputError
from spu_llm.net import identity
from spu_llm.offline.silent import store
from spu_llm.systems.watermark.keys import Key, Scheme, read_key, write_key


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """Return two keys behind links, as in a mounted secret."""
    held = tmp_path / "..2026"
    identity.make(held, "provider.example", 30)
    write_key(held / "mark", Key.from_os(), Scheme())
    (tmp_path / "..data").symlink_to(held.name)
    for name in (identity.CERTIFICATE, identity.KEY, "mark"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    return tmp_path


def read(folder: Path, mode: int) -> None:
    for name in (identity.KEY, "mark"):
        (folder / name).chmod(mode)
    identity.load(folder, folder / identity.CERTIFICATE)
    read_key(folder / "mark")


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_a_group_of_ours_may_read_a_key(mounted: Path, mode: int) -> None:
    read(mounted, mode)


@pytest.mark.parametrize("mode", [0o660, 0o644, 0o444, 0o650, 0o601])
def test_nobody_else_may(mounted: Path, mode: int) -> None:
    with pytest.raises(InputError, match="open to others"):
        read(mounted, mode)


def test_nor_another_group(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = (mounted / "mark").stat().st_gid
    monkeypatch.setattr(os, "getegid", lambda: group + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [group + 2])
    for name in (identity.KEY, "mark"):
        (mounted / name).chmod(0o440)
    with pytest.raises(InputError, match="open to others"):
        identity.load(mounted, mounted / identity.CERTIFICATE)
    with pytest.raises(InputError, match="open to others"):
        read_key(mounted / "mark")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless(path: Path) -> Path:
        if path.parts[0] == "~":
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.default_directory("client").is_relative_to(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(InputError, match="set XDG_CACHE_HOME or HOME"):
        store.default_directory("client")
