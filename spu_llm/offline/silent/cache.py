"""A client's hints of all providers on disk: where those of each lie, and what all may take.

    <root>/lock                  held by the one session, of all, that receives hints
    <root>/<32 hex digits>/      hints of the provider of one pair of certificates (`silent.store`)
    <root>/insecure/             those of all providers without certificates

A provider names hints by their SHA-256 and hears which of them the client has. In a folder for each
pair of certificates it hears that of its own hints alone: it cannot ask for those of another
provider, nor for those that the client fetched under another certificate. A renewed certificate, of
either party, begins with nothing.

The bound is of all folders, files that are half received included. Before anything is received,
what was used longest ago is removed until there is room. A session locks the hints that it uses;
those stay, and where they leave no room the session holds its hints in memory. Because one session
at a time receives, nothing grows while room is made for it.

What a provider can still tell: hints of its own that are gone, or were not kept, say that something
else took the room.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spu_llm.core.errors import InputError, PoolError
from spu_llm.offline.access import failures, take_lock
from spu_llm.offline.defaults import HINT_CACHE_BYTES
from spu_llm.offline.durable import open_folder
from spu_llm.offline.silent.store import remove_older

_MB = 10**6
INSECURE = "insecure"
_FOLDER = re.compile(rf"[0-9a-f]{{32}}|{INSECURE}")


def peer_folder(root: Path, pair: str) -> Path:
    """Return the folder of a provider's hints. `pair`: both parties' certificates
    (`agreeing.pair_of`); empty in the clear.
    """
    name = hashlib.sha256(pair.encode()).hexdigest()[:32] if pair else INSECURE
    return root / name


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    used: float  # when, in seconds since the epoch


class HintCache:
    """The cache, as a session with one provider uses it."""

    def __init__(self, folder: Path, most_bytes: int = HINT_CACHE_BYTES) -> None:
        """Take `folder`, of the provider's hints (`peer_folder`), and `most_bytes`, of all
        folders.
        """
        self.folder, self._root, self._most = folder, folder.parent, most_bytes
        self._asked = 0  # bytes of all hints of this session

    @contextmanager
    def receiving(self, wanted: Sequence[tuple[str, int]]) -> Iterator[bool]:
        """Make room for hints, SHA-256 in hex and bytes of each, and yield whether those that lack
        may be written to `folder` until the block ends; else they are for memory alone.

        InputError when this session's hints are more than the cache may hold. PoolError when its
        files cannot be used.
        """
        self._asked += sum(size for _, size in wanted)
        if self._asked > self._most:
            needed = -(-self._asked // _MB)
            raise InputError(
                f"the hints of the provider's model take {needed:,} MB, but all hints together may "
                f"take {self._most // _MB:,} MB here; give --hint-cache {needed} or more"
            )
        lock = None
        if self._is_usable():
            with failures(self._root):
                lock = take_lock(self._root / "lock")
        try:
            with failures(self._root):
                keep = lock is not None and self._make_room(wanted)
            yield keep
        finally:
            if lock is not None:
                os.close(lock)

    def _is_usable(self) -> bool:
        try:
            for folder in (self._root, self.folder):
                open_folder(folder)
        except PoolError:  # the worker says so
            return False
        return True

    def _make_room(self, wanted: Sequence[tuple[str, int]]) -> bool:
        """Make room for what lacks of the hints `wanted`: remove what nobody uses as far as need
        be, and return whether there is room then.
        """
        remove_older(self._root)
        names = {name for name, _ in wanted}
        lacking, taken, others = sum(size for _, size in wanted), 0, []
        for file in self._files():
            taken += file.size
            if file.path.parent == self.folder and file.path.stem in names:
                lacking -= file.size
                os.utime(file.path)
            else:
                others.append(file)
        over = taken + max(0, lacking) - self._most
        for file in sorted(others, key=lambda file: file.used):
            if over > 0 and _removed(file.path):
                over -= file.size
        return over <= 0

    def _files(self) -> Iterator[_File]:
        """Yield all files of all providers, whatever a worker calls them."""
        for folder in self._root.iterdir():
            if _FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
                for path in folder.iterdir():
                    with suppress(FileNotFoundError):  # a worker has just renamed it
                        status = path.lstat()
                        if stat.S_ISREG(status.st_mode):
                            yield _File(path, status.st_size, status.st_mtime)


def _removed(path: Path) -> bool:
    """Remove a file unless a session uses it (`store.Received`); return whether it is gone."""
    try:
        number = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except PermissionError:  # a worker can make such files, but no session can use them
        path.unlink()
        return True
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(number)
    return True
