"""What lies in a pool directory, for whoever is no session: nothing is changed, no lock is kept.

A session may be at work meanwhile. Batches appear and vanish whole, and how far one is used is
replaced whole, so that what is read was true at some moment; a batch that vanishes while it is
looked at is left out. What a session has in memory counts as used, until it puts the rest back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spu_llm.core.errors import PoolError
from spu_llm.offline.access import check, failures, is_locked
from spu_llm.offline.files import HALF, INBOX, batch_folders, load
from spu_llm.offline.opener_files import object_bytes
from spu_llm.offline.peer_directories import party_directories, peer_folders


@dataclass(frozen=True)
class Kind:
    """All batches of a correlation: units that are left in them, and bytes on disk and in object
    storage.
    """

    name: str
    batches: int = 0
    units: int = 0
    disk_bytes: int = 0
    store_bytes: int = 0


@dataclass(frozen=True)
class PeerStock:
    """A party's correlated randomness with one peer, by kind; `in_use`: a session has it."""

    folder: Path
    in_use: bool
    kinds: tuple[Kind, ...]

    @property
    def batches(self) -> int:
        return sum(kind.batches for kind in self.kinds)

    @property
    def disk_bytes(self) -> int:
        return sum(kind.disk_bytes for kind in self.kinds)

    @property
    def store_bytes(self) -> int:
        return sum(kind.store_bytes for kind in self.kinds)


def stocks(directory: Path) -> list[PeerStock]:
    """Return the correlated randomness with all peers of the party, or of both parties, that have
    `directory`; none unless it is a pool's. PoolError where no session could read it either.
    """
    return [
        PeerStock(folder, _is_used(folder), kinds_in(folder))
        for party in party_directories(directory)
        for folder in peer_folders(party)
    ]


def stored_bytes(directory: Path) -> int:
    """Return the bytes of all correlated randomness of a pool directory, wherever it lies."""
    return sum(stock.disk_bytes + stock.store_bytes for stock in stocks(directory))


def file_bytes(directory: Path) -> int:
    """Return the bytes of all files below a directory, and of the objects that they open, whatever
    is in them, and whatever vanishes meanwhile.
    """
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size + object_bytes(name)
    return total


@dataclass(frozen=True)
class Budget:
    """Bytes that files below a directory may take in all."""

    directory: Path
    limit: int


def room_in(budgets: Sequence[Budget]) -> int | None:
    """Return by how many bytes files that lie in the directories of all `budgets` may grow now;
    None without budgets.
    """
    return min((max(0, one.limit - file_bytes(one.directory)) for one in budgets), default=None)


def in_use(directory: Path) -> bool:
    """Return whether some session has correlated randomness of a pool directory."""
    parties = party_directories(directory)
    return any(_is_used(folder) for party in parties for folder in peer_folders(party))


def kinds_in(folder: Path) -> tuple[Kind, ...]:
    """Return what a peer's folder holds, by name; nothing when there is no such folder."""
    kinds: dict[str, Kind] = {}
    with failures(folder):
        if not os.path.lexists(folder):
            return ()
        check(folder, folder=True)
        for path in (*batch_folders(folder), *_in_inbox(folder)):
            if HALF.fullmatch(path.name):
                continue
            try:
                label, state = load(path)
                size, outside = _sizes(path)
            except (PoolError, FileNotFoundError):
                if os.path.lexists(path):
                    raise
                continue  # used up by a session meanwhile
            kind = kinds.get(label.name, Kind(label.name))
            kinds[label.name] = Kind(
                label.name,
                kind.batches + 1,
                kind.units + label.units - state.used,
                kind.disk_bytes + size,
                kind.store_bytes + outside,
            )
    return tuple(kinds[name] for name in sorted(kinds))


def _in_inbox(folder: Path) -> Iterator[Path]:
    """Yield the batches that no session has taken in yet."""
    if os.path.lexists(folder / INBOX):
        check(folder / INBOX, folder=True)
        yield from batch_folders(folder / INBOX)


def _is_used(folder: Path) -> bool:
    with failures(folder):
        return is_locked(folder / "lock")


def _sizes(path: Path) -> tuple[int, int]:
    """Return the bytes of a batch's files, and of its object; a file may just be replaced."""
    total = outside = 0
    for entry in os.scandir(path):
        with suppress(FileNotFoundError):
            total += entry.stat().st_size
            outside += object_bytes(entry.name)
    return total, outside
