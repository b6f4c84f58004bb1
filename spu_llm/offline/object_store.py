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
from spu_llm.offline.durable import drawn_once, open_folder, sync_folder
from spu_llm.offline.files import STORE_FILE
from spu_llm.offline.peer_directories import CERTIFIED
from spu_llm.offline.sealed_objects import AT_ONCE, MAX_OBJECT_BYTES, OBJECT_NAME, seal

ANSWER_S = 60.0  # for the storage to answer; a stalled session has twice as long
REMOVE_S = 10.0  # for it to remove what nobody can open any more
MOST_HANGING = 64  # calls of this process that the storage keeps waiting
_URL_BYTES = 2048
_MARK = "spu-llm-batches"

T = TypeVar("T")
_hanging = threading.BoundedSemaphore(MOST_HANGING + AT_ONCE)


class FsspecStore:
    """An `ObjectStore` at a URL that fsspec knows: `s3://bucket/folder`, `file:///mnt/shared` and
    the like. Credentials come from the environment, as the package for that storage has them.
    """

    def __init__(self, url: str, folder: str = "") -> None:
        """Take a place, and a folder in it. InputError when no package for such a URL is installed,
        or it is none.
        """
        self.url, self.folder = url, folder
        scheme, _, rest = url.partition("://")
        login = "@" in rest.partition("/")[0] or "?" in rest
        if not rest or login or "::" in url or scheme == "memory" or len(url) > _URL_BYTES:
            shown = re.sub("[?].*", "?...", re.sub("//[^/]*@", "//...@", url))[:200]
            raise InputError(
                f"{shown!r} is no place for objects; give a URL "
                "like s3://bucket/folder or file:///mnt/folder, and credentials by the environment"
            )
        try:
            (self._fs, root), *_ = self._within(_opened(url))
        except PoolError as exc:
            raise InputError(str(exc)) from None
        self._top = root.rstrip("/")
        if not self._top:
            raise InputError(f"{url} names no folder; give one that is for this alone")
        if scheme in ("file", "local"):  # the same place from another working directory
            self.url = str(self._fs.unstrip_protocol(self._top))
        self._root = f"{self._top}/{folder}".rstrip("/")
        self._ready = False  # to be written to
        self._keeps = False  # what it is asked to remove

    def begin(self) -> None:
        """Make the place, which may be there. PoolError when that fails."""

        def mark() -> None:
            self._fs.makedirs(self._top, exist_ok=True)
            self._fs.pipe_file(f"{self._top}/{_MARK}", b"")

        self._within(mark)

    def put(self, name: str, data: bytes) -> None:
        """See `ObjectStore.put`."""
        assert len(data) <= MAX_OBJECT_BYTES

        def write() -> bool:
            if not self._ready:
                if not self._is_there():
                    return False
                self._fs.makedirs(self._root, exist_ok=True)
                self._ready = True
            self._fs.pipe_file(self._path(name), data)
            return True

        if self._within(write) != [True]:
            raise self._not_there()

    def get(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """See `ObjectStore.get`."""

        def read(name: str, size: int) -> bytes | None:
            try:
                # A byte more, by which a larger one is another one.
                return bytes(self._fs.cat_file(self._path(name), end=size + 1))
            except FileNotFoundError:
                return None

        assert len(wanted) <= AT_ONCE
        reads = [lambda one=one: read(*one) for one in wanted]
        there, *objects = self._within(self._is_there, *reads)
        if None in objects and not there:
            raise self._not_there()
        return objects

    def remove(self, names: Sequence[str]) -> None:
        """See `ObjectStore.remove`. A storage that has failed to is not asked again."""

        def remove(name: str) -> None:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                pass

        assert len(names) <= AT_ONCE
        if self._keeps:
            return
        self._keeps = True
        self._within(*(lambda name=name: remove(name) for name in names), seconds=REMOVE_S)
        self._keeps = False

    def check(self) -> None:
        """Store, fetch and remove an object. InputError when that fails."""
        opener, data = seal(b"")
        try:
            self.put(opener.name, data)
            if self.get([(opener.name, len(data))]) != [data]:
                raise PoolError(f"{self.url} does not give what was stored there")
            self.remove([opener.name])
        except PoolError as exc:
            raise InputError(str(exc)) from None

    def _is_there(self) -> bool:
        return bool(self._fs.exists(f"{self._top}/{_MARK}"))

    def _not_there(self) -> PoolError:
        return PoolError(f"object storage at {self.url} is not there; nothing of it is given up")

    def _path(self, name: str) -> str:
        assert OBJECT_NAME.fullmatch(name)
        return f"{self._root}/{name}"

    def _within(self, *calls: Callable[[], Any], seconds: float | None = None) -> list[Any]:
        """Return what calls give, which run beside one another. Threads that the storage keeps
        waiting keep nobody else; where they are too many, no more are begun.
        """
        outcomes: list[Any] = [None] * len(calls)
        places = _hanging

        def run(index: int) -> None:
            try:
                outcomes[index] = (calls[index](),)
            except Exception as exc:  # packages for storages raise what they like
                outcomes[index] = exc
            finally:
                places.release()

        seconds = ANSWER_S if seconds is None else seconds
        until, threads = time.monotonic() + seconds, []
        for index in range(len(calls)):
            if not places.acquire(timeout=max(0.0, until - time.monotonic())):
                break
            thread = threading.Thread(target=run, args=(index,), name="object-store", daemon=True)
            threads.append(thread)
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        results = []
        for outcome in outcomes:
            if not isinstance(outcome, tuple):
                what = f"no answer within {seconds:g} s" if outcome is None else _words(outcome)
                raise PoolError(f"object storage at {self.url}: {what}")
            results.append(outcome[0])
        return results


def keep_in(directory: Path, url: str) -> None:
    """Have a pool directory, which is made if need be, keep results of batches at a URL from now
    on. InputError when it cannot, or keeps them at another one.
    """
    store = FsspecStore(url)
    open_folder(directory)
    file = directory / STORE_FILE
    kept = url_of(directory)
    if kept is None:
        try:
            store.begin()
        except PoolError as exc:
            raise InputError(str(exc)) from None
        store.check()
        kept = drawn_once(file, store.url.encode()).decode()
        sync_folder(directory)
    elif kept == store.url:
        store.check()
    if kept != store.url:
        raise InputError(
            f"{directory} keeps batches at {kept}; use another directory, or use these up and "
            f"remove {file}"
        )


def url_of(directory: Path) -> str | None:
    """Return where a party's pool directory keeps results of batches; None for its own disk.
    PoolError when the file that says so is none.
    """
    directory = directory.absolute()
    while (url := _url_in(directory / STORE_FILE)) is None:
        if directory.name not in ROLES and not directory.name.startswith(CERTIFIED):
            return None
        directory = directory.parent
    return url


def store_of(folder: Path) -> FsspecStore | None:
    """Return where results of batches with one peer are kept; None for the disk. `folder`: the
    peer's, in a party's pool directory. InputError when that place cannot be used.
    """
    url = url_of(folder.parent)
    return None if url is None else FsspecStore(url, folder.name)


def _url_in(file: Path) -> str | None:
    with failures(file):
        if not os.path.lexists(file):
            return None
        check(file, folder=False)
        data = file.read_bytes()
    try:
        url = data.decode().strip()
    except UnicodeDecodeError:
        url = ""
    if not url or len(data) > _URL_BYTES:
        raise PoolError(f"{file} names no place; see `spu-llm pool --help`")
    return url


def _opened(url: str) -> Callable[[], tuple[Any, str]]:
    """Return what opens a place: the filesystem and the path there."""

    def open_place() -> tuple[Any, str]:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(url)
        return filesystem, str(root)

    return open_place


def _words(exc: Exception) -> str:
    lines = str(exc).strip().splitlines() or [""]
    return f"{type(exc).__name__}: {lines[0][:200]}"
