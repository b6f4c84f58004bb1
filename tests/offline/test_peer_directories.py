"""Pool directories: who a party is to its peers, and whose correlated randomness lies where."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from spu_llm.core.errors import PoolError, WireError
from spu_llm.offline import peer_directories


class Hears:
    """A channel on which a message waits; what is sent is kept."""

    def __init__(self, message: bytes) -> None:
        self.message = message
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def recv(self) -> bytes:
        return self.message

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


PEER = b"0123456789abcdef" * 2
OTHER = PEER[::-1]


def agreed(directory: Path, pair: str = "", peer: bytes = PEER) -> tuple[bytes, Path]:
    """Return the id that a party tells a peer, and the folder that it has for it."""
    channel = Hears(peer)
    folder = peer_directories.agree(channel, directory, pair)
    (told,) = channel.sent
    assert folder is not None and len(told) == 32
    return told, folder


def test_a_secret_is_drawn_once_and_is_its_owner_s(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "pool"
    own = peer_directories.open_directory(directory)
    assert peer_directories.open_directory(directory) == own
    assert peer_directories.open_directory(tmp_path / "other") != own
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "id").stat().st_mode) == 0o600
    assert [path.name for path in directory.iterdir()] == ["id"]


def test_every_peer_has_a_folder(tmp_path: Path) -> None:
    first, again, other = (agreed(tmp_path / "pool", peer=peer) for peer in (PEER, PEER, OTHER))
    assert first == again != other
    assert first[0] == other[0]  # this party's id
    for _, folder in (first, other):
        assert folder.parent == tmp_path / "pool"
        assert peer_directories._is_peers(folder) and PEER.decode() not in str(folder)


def test_an_id_is_of_two_certificates(tmp_path: Path) -> None:
    """Neither this party under two of its own, nor two of a peer's, are known by it as one."""
    pairs = ["", *(f"{own} {peer}" for own in ("C1", "C2") for peer in ("P1", "P2"))]
    collected = [agreed(tmp_path, pair) for pair in pairs]
    secret = peer_directories.open_directory(tmp_path)
    assert len({own_id for own_id, _ in collected} | {secret}) == len(pairs) + 1
    assert collected == [agreed(tmp_path, pair) for pair in pairs]
    other = agreed(tmp_path / "other", pairs[1])
    assert other[0] != collected[1][0]


def test_one_id_under_two_certificates_has_two_folders(tmp_path: Path) -> None:
    """What lies in a folder is told to the peer, and would link its own or this party's two."""
    folders = {agreed(tmp_path, pair)[1] for pair in ("", "C1 P", "C2 P", "C1 Q")}
    assert len(folders) == 4


@pytest.mark.parametrize(("directory", "peer"), [(True, b""), (False, PEER), (False, b"")])
def test_one_directory_is_none(tmp_path: Path, directory: bool, peer: bytes) -> None:
    channel = Hears(peer)
    assert peer_directories.agree(channel, tmp_path / "pool" if directory else None) is None
    assert len(channel.sent) == 1 and bool(channel.sent[0]) == directory


@pytest.mark.parametrize(
    "name", [b"../" + PEER[3:], PEER + b"0", PEER.upper(), b"id", PEER + b"\n"]
)
def test_a_peer_cannot_name_another_path(tmp_path: Path, name: bytes) -> None:
    with pytest.raises(WireError, match="no id"):
        peer_directories.agree(Hears(name), tmp_path / "pool")


def test_a_copy_of_one_directory_is_no_pair(tmp_path: Path) -> None:
    own, _ = agreed(tmp_path, "C P")
    with pytest.raises(PoolError, match="give each its own"):
        agreed(tmp_path, "C P", own)


def test_strangers_do_not_fill_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_directories, "MAX_PEERS", 2)
    folders = [peer_directories.agree(Hears(b"%032x" % i), tmp_path) for i in range(2)]
    for folder in folders:
        assert folder is not None
        folder.mkdir(0o700)
        (folder / "lock").touch()
    # An id costs a stranger nothing, so a folder without correlated randomness counts for nothing.
    assert peer_directories.agree(Hears(PEER), tmp_path) is not None
    for folder in folders:
        (folder / "some correlated randomness").mkdir()  # type: ignore[operator]
    with pytest.raises(PoolError, match="for 2 parties already"):
        peer_directories.agree(Hears(PEER), tmp_path)
    assert peer_directories.agree(Hears(b"%032x" % 1), tmp_path) == folders[1]


def _a_file(path: Path) -> None:
    path.write_text("")


def _open_to_others(path: Path) -> None:
    path.mkdir(0o755)


def _a_link(path: Path) -> None:
    path.symlink_to(path.parent)


def _cut(path: Path) -> None:
    peer_directories.open_directory(path)
    (path / "id").write_bytes(PEER[:9])


def _without_rights(path: Path) -> None:
    path.mkdir(0o500)
    if os.geteuid() == 0:
        pytest.skip("everything is open to root")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_a_file, "not a directory"),
        (_open_to_others, "make it 700"),
        (_a_link, "symbolic link"),
        (_cut, "damaged"),
        (_without_rights, "cannot be written"),
    ],
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    path = tmp_path / "pool"
    spoil(path)
    with pytest.raises(PoolError, match=said):
        peer_directories.open_directory(path)
