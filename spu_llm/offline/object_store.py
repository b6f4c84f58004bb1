"""Object storage for the results of batches: any place that fsspec knows.

    <directory>/store-url           the place: in a party's pool directory, or in the one that has
                                    parties' directories in it
    <URL>/spu-llm-batches           empty; where it is missing, the place is not there, as a disk
                                    that is not mounted, and nothing counts as lost
    <URL>/<peer's folder>/<name>    an object: the results of one batch, sealed

A pool keeps there what takes room, the results, and on its disk what makes them good for
anything: how far a batch is used, and the key that opens its object. A key serves one object and
goes when the batch comes back to the disk, which is before its first unit is used
(`offline.files`). So single use rests on the disk alone.

An operator of the storage learns sizes of batches, which tell the kinds of correlated randomness,
and when each is stored and fetched.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from spu_llm.core.errors import InputError, PoolError
from spu_llm.core.values import ROLES
from spu_llm.offline.access import check, failures
from spu_llm.offline.durable import drawn_once
from spu_llm.offline.files import STORE_FILE
from spu_llm.offline.peer_directories import CERTIFIED
from spu_llm.offline.sealed_objects import AT_ONCE, MAX_OBJECT_BYTES, OBJECT_NAME, seal

ANSWER_S = (
    60.0  # for the storage to answer; below what a stalled session is given (`service.watch`)
)
_URL_BYTES = 4096
_MARK = "spu-llm-batches"

T = TypeVar("T")


class FsspecStore:
    """An `ObjectStore` at a URL that fsspec knows: `s3://bucket/folder`, `file:///mnt/shared` and
    the like. Credentials come from the environment, as the package for that storage has them.
    """

    def __init__(self, url: str, folder: str = "") -> None:
        """Take a place, and a folder in it. InputError when no package for such a URL is installed,
        or it is none.
        """
        import fsspec

        self.url = url
        scheme, _, rest = url.partition("://")
        if not rest or "@" in rest.partition("/")[0]:
            raise InputError(
                f"{_without_login(url)!r} is no place for objects; give a URL like "
                "s3://bucket/folder or file:///mnt/folder, and credentials by the environment"
            )
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as exc:
            raise InputError(f"objects in {scheme}: {exc}") from None
        self._top = str(root).rstrip("/")
        if scheme in ("file", "local"):  # the same place from another working directory
            self.url = str(self._fs.unstrip_protocol(self._top))
        self._root = f"{self._top}/{folder}".rstrip("/")
        self.folder = folder

    def put(self, name: str, data: bytes) -> None:
        """See `ObjectStore.put`."""

        def write() -> None:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(self._path(name), data)

        self._within(write)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """See `ObjectStore.get`."""

        def read(name: str) -> bytes | None:
            try:
                return bytes(self._fs.cat_file(self._path(name), end=MAX_OBJECT_BYTES + 1))
            except FileNotFoundError:
                return None

        assert len(names) <= AT_ONCE
        objects = self._within(*(lambda name=name: read(name) for name in names))
        if None in objects and not self._is_there():
            raise PoolError(f"object storage at {self.url} is not there; nothing of it is given up")
        return objects

    def remove(self, name: str) -> None:
        """See `ObjectStore.remove`."""

        def remove() -> None:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                pass

        self._within(remove)

    def begin(self) -> None:
        """Make the place, which may be there. PoolError when that fails."""

        def mark() -> None:
            self._fs.makedirs(self._top, exist_ok=True)
            self._fs.pipe_file(f"{self._top}/{_MARK}", b"")

        self._within(mark)

    def check(self) -> None:
        """Store, fetch and remove an object. InputError when that fails."""
        opener, data = seal(b"")
        try:
            self.put(opener.name, data)
            if self.get([opener.name]) != [data]:
                raise PoolError(f"{self.url} does not give what was stored there")
            self.remove(opener.name)
            if not self._is_there():
                raise PoolError(f"object storage at {self.url} is not there")
        except PoolError as exc:
            raise InputError(str(exc)) from None

    def _is_there(self) -> bool:
        return self._within(lambda: bool(self._fs.exists(f"{self._top}/{_MARK}")))[0]

    def _path(self, name: str) -> str:
        assert OBJECT_NAME.fullmatch(name)
        return f"{self._root}/{name}"

    def _within(self, *calls: Callable[[], T]) -> list[T]:
        """Return what calls give, which run beside one another. Threads that the storage keeps
        waiting keep nobody else.
        """
        outcomes: list[Any] = [None] * len(calls)

        def run(index: int) -> None:
            try:
                outcomes[index] = (calls[index](),)
            except Exception as exc:  # packages for storages raise what they like
                outcomes[index] = exc

        threads = [
            threading.Thread(target=run, args=(index,), name="object-store", daemon=True)
            for index in range(len(calls))
        ]
        until = time.monotonic() + ANSWER_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        results = []
        for outcome in outcomes:
            if not isinstance(outcome, tuple):
                what = f"no answer within {ANSWER_S:g} s" if outcome is None else _words(outcome)
                raise PoolError(f"object storage at {self.url}: {what}")
            results.append(outcome[0])
        return results


def keep_in(directory: Path, url: str) -> None:
    """Have a pool directory, which is there, keep results of batches at a URL from now on.
    InputError when it cannot, or keeps them at another one.
    """
    store = FsspecStore(url)
    try:
        store.begin()
    except PoolError as exc:
        raise InputError(str(exc)) from None
    store.check()
    kept = drawn_once(directory / STORE_FILE, store.url.encode()).decode()
    if kept != store.url:
        raise InputError(
            f"{directory} keeps batches at {kept}; use another directory, or use these up and "
            f"remove {directory / STORE_FILE}"
        )


def url_of(directory: Path) -> str | None:
    """Return where a party's pool directory keeps results of batches; None for its own disk."""
    places = [directory]
    if directory.name in ROLES or directory.name.startswith(CERTIFIED):
        places.append(directory.parent)
    for path in (place / STORE_FILE for place in places):
        with failures(path):
            if os.path.lexists(path):
                check(path, folder=False)
                return path.read_bytes()[:_URL_BYTES].decode()
    return None


def store_of(folder: Path) -> FsspecStore | None:
    """Return where results of batches with one peer are kept; None for the disk. `folder`: the
    peer's, in a party's pool directory. InputError when that place cannot be used.
    """
    url = url_of(folder.parent)
    return None if url is None else FsspecStore(url, folder.name)


def _words(exc: Exception) -> str:
    lines = str(exc).strip().splitlines() or [""]
    return f"{type(exc).__name__}: {lines[0][:200]}"


def _without_login(url: str) -> str:
    return re.sub(r"//[^/]*@", "//...@", url)
