"""Files of the pool: batches of correlated randomness, each written whole or not at all.

    <directory>/lock                    held by the one session that uses the directory
    <directory>/<name>-<digest>/<id>/   a batch of the correlation of that name
    <directory>/inbox/                  batches that no session has taken in yet (`offline.inbox`),
                                        in folders as above
        meta.json      what it is; never changes
        results.npy    words [units, words]: results, and before them masks that no key gives again;
                       rows of units that are gone become zero
        stored-N.json  in place of results.npy: what opens the object of N bytes in which it is
                       (`offline.object_store`)
        state.json     how far it is used, and the key of other masks of what is left
        rest.npy       units that a clean end put back: words of their masks and results

Folders are 0700, files 0600. Whatever is not as this module writes it is refused: PoolError with
the path. Checksums find damage, not malice: who can write here can do anything.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from spu_llm.core.errors import PoolError
from spu_llm.core.prg import KEY_BYTES
from spu_llm.offline.access import check, failures, take_lock
from spu_llm.offline.contents import damaged, header, read_rows, sealed, unsealed
from spu_llm.offline.durable import creating, open_folder, opened, replacing, sync_folder
from spu_llm.offline.opener_files import (
    RESULTS,
    content_of,
    name_of,
    object_bytes,
    opener_in,
    stored_in,
)
from spu_llm.offline.sealed_objects import (
    MAX_OBJECT_BYTES,
    ObjectStore,
    Opener,
    in_groups,
    seal,
    unseal,
)

FORMAT = 3
IN_USE = "is in use by another session"  # what a second one is told of a directory
SLICES = 8  # of a batch: one is used up on disk before its first unit is handed out
BATCH_ID = re.compile(r"[0-9a-f]{32}")
KIND = re.compile(r"[A-Za-z0-9_-]{0,40}-[0-9a-f]{16}")  # folder of a correlation's batches
INBOX = "inbox"
STORE_FILE = "store-url"  # of a pool directory: where object storage is
HALF = re.compile(r"\.[0-9a-f]{32}\.(made|gone)")  # a batch on its way in or out
MAX_FILE_BYTES = 32 << 20  # of a batch that goes from one machine to another


@dataclass(frozen=True)
class Label:
    """Label of a batch; `sums` are checksums of the result words of each slice."""

    id: str
    name: str
    rank: int
    units: int
    words: int
    sums: tuple[str, ...]

    @property
    def step(self) -> int:
        """Return how many units a slice has; the last one may be shorter."""
        return slice_units(self.units)

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the first unit of a slice, and the first one after it."""
        return min(index * self.step, self.units), min((index + 1) * self.step, self.units)


@dataclass(frozen=True)
class State:
    """Use of a batch so far: the units before `used` are gone.

    `key` gives the masks of slice `index` and of all after it. Units between `used` and that slice,
    if any, are in rest.npy, whose checksum is `rest`.
    """

    used: int
    index: int
    key: bytes
    rest: str | None = None


def slice_units(units: int) -> int:
    return -(-units // SLICES)


def checksum(words: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(words).tobytes()).hexdigest()


class Files:
    """A batch in a folder of its own, its results there or in `objects`. PoolError when a file, or
    an object, cannot be used.
    """

    def __init__(self, folder: Path, label: Label, objects: ObjectStore | None = None) -> None:
        self.folder, self.label, self._objects = folder, label, objects

    def rows(self, index: int) -> np.ndarray:
        """Return the result words [units, words] of one slice, which are in this folder."""
        path = self.folder / RESULTS
        words = read_rows(path, (self.label.units, self.label.words), self.label.bounds(index))
        if checksum(words) != self.label.sums[index]:
            raise damaged(path)
        return words

    def rest(self, state: State) -> np.ndarray:
        """Return the words [units, mask words and result words] of what was put back."""
        path = self.folder / "rest.npy"
        words = read_rows(path)
        if checksum(words) != state.rest:
            raise damaged(path)
        return words

    def advance(self, old: State, new: State) -> None:
        """Durably record `new`; only then wipe what it says is gone."""
        with failures(self.folder):
            self._write_state(new)
            self._wipe(old.index, new.index)
            if old.rest is not None and new.rest is None:
                os.unlink(self.folder / "rest.npy")

    def put_back(self, rest: np.ndarray, state: State) -> None:
        """Durably store units that were not handed out after all, from `state.used` on."""
        with failures(self.folder):
            with replacing(self.folder / "rest.npy") as file:
                np.save(file, rest, allow_pickle=False)
            self._write_state(state)

    def moved(self, directory: Path) -> Files:
        """Move the batch below `directory`, at once; return it there."""
        return Files(move(self.folder, directory), self.label, self._objects)

    def remove(self) -> None:
        """Remove the batch, which is gone from one moment to the next."""
        opener = self.opener()
        discard(self.folder)
        if opener is not None:
            drop_objects(self._objects, [opener])

    def size(self) -> int:
        """Return the bytes of the batch's files, and of its object."""
        with failures(self.folder):
            entries = list(os.scandir(self.folder))
            return sum(one.stat().st_size + object_bytes(one.name) for one in entries)

    def opener(self) -> Opener | None:
        """Return what opens the object that has the results; None when they are in this folder."""
        return None if (path := stored_in(self.folder)) is None else opener_in(path)

    def take_back(self, opener: Opener, data: bytes | None, state: State) -> bool:
        """Put results out of their object `data` into this folder, and forget how it is opened,
        which leaves the object to be removed. Return whether that could be: an object that is gone,
        or another one, is a batch that is lost, and removed.
        """
        content = unseal(opener, data)
        if content is None:
            discard(self.folder)
            return False
        with failures(self.folder):
            with replacing(self.folder / RESULTS) as file:
                file.write(content)
            self._wipe(0, state.index)
            self._forget()
        return True

    def _forget(self) -> None:
        """Forget how the object is opened that had the results, which are in this folder now."""
        path = stored_in(self.folder, beside=True)
        if path is not None:
            path.unlink()
            sync_folder(self.folder)

    def clean(self, state: State) -> None:
        """Finish what a session that died had begun."""
        with failures(self.folder):
            halves = ".state.json", ".rest.npy", f".{RESULTS}"
            for name in (*halves, *(["rest.npy"] if not state.rest else [])):
                (self.folder / name).unlink(missing_ok=True)
            if (path := stored_in(self.folder, beside=True)) is not None:
                if not (self.folder / RESULTS).exists():
                    return
                opener = opener_in(path)
                self._forget()
                drop_objects(self._objects, [opener])
            self._wipe(0, state.index)

    def _write_state(self, state: State) -> None:
        with replacing(self.folder / "state.json") as file:
            file.write(_state_bytes(self.label, state))

    def _wipe(self, first: int, last: int) -> None:
        """Zero the results of the slices from `first` to before `last`."""
        start, stop = self.label.bounds(first)[0], self.label.bounds(last)[0]
        if start == stop:
            return
        path = self.folder / RESULTS
        with opened(path, write=True) as file:
            file.seek(header(file, path)[1] + 8 * self.label.words * start)
            file.write(bytes(8 * self.label.words * (stop - start)))


class PoolDirectory:
    """One party's directory of batches, locked until `close`; `found` is what it held at first.

    PoolError when another session has it, when others than its owner may read it, or when anything
    in it is not as it was written.
    """

    def __init__(self, directory: Path, rank: int, objects: ObjectStore | None = None) -> None:
        """Open a directory; `objects` has the results of batches that are not in it."""
        self.path, self._rank, self._objects = directory, rank, objects
        open_folder(directory)
        with failures(directory):
            lock = take_lock(directory / "lock")
        if lock is None:
            raise PoolError(f"{directory} {IN_USE}")
        self._lock = lock
        try:
            with failures(directory):
                self.found = list(self._scan())
        except BaseException:
            self.close()
            raise

    def folder(self, name: str) -> Path:
        """Return where the batches of a correlation lie."""
        return self.path / _folder_name(name)

    def add(self, label: Label, results: np.ndarray, state: State, outside: bool) -> Files:
        """Store a batch, with its results `outside` in object storage: after a crash it is there
        whole, or not at all.
        """
        made = store(self.path, label, results, state, self._objects if outside else None)
        return Files(made, label, self._objects)

    def close(self) -> None:
        """Let other sessions use the directory."""
        os.close(self._lock)

    def _scan(self) -> Iterator[tuple[Label, State, Files]]:
        for path in batch_folders(self.path):
            if HALF.fullmatch(path.name):
                check(path, folder=True)
                shutil.rmtree(path)
                continue
            label, state, files = batch_of(path, self._rank, self._objects)
            if state.used == label.units:
                files.remove()
            else:
                files.clean(state)
                yield label, state, files


def bring(batches: Sequence[tuple[Files, State]]) -> None:
    """Bring results of batches, with how far these are used, from object storage into their
    folders, if they are not there; batches are of one directory. PoolError when some are lost, or
    the storage fails.
    """
    away = {
        opener: (files, state) for files, state in batches if (opener := files.opener()) is not None
    }
    if not away:
        return
    first = next(iter(away.values()))[0]
    objects, lost = first._objects, 0
    if objects is None:
        raise PoolError(
            f"the results of {first.folder} are in object storage, and no file {STORE_FILE!r} of "
            "the pool says where"
        )
    for group in in_groups(away):
        contents = objects.get([(opener.name, opener.nbytes) for opener in group])
        for opener, data in zip(group, contents, strict=True):
            files, state = away[opener]
            lost += not files.take_back(opener, data, state)
        drop_objects(objects, group)
    if lost:
        raise PoolError(
            f"object storage has lost the results of batches of {first.folder.parent.parent}: "
            f"{lost} of {len(away)}; they are removed, and the next session goes on without them"
        )


def drop_objects(objects: ObjectStore | None, openers: Sequence[Opener]) -> None:
    """Remove objects that nobody can open any more, where the storage lets it."""
    if objects is not None:
        with suppress(PoolError):
            objects.remove([opener.name for opener in openers])


def store(
    directory: Path,
    label: Label,
    results: np.ndarray,
    state: State,
    objects: ObjectStore | None = None,
) -> Path:
    """Store a batch below `directory`, its results in `objects` if there are any that take so much:
    after a crash it is there whole, or not at all. Return its folder.
    """
    content = io.BytesIO()
    np.save(content, results, allow_pickle=False)
    opener: Opener | None = None
    if objects is not None:
        opener, data = seal(content.getvalue())
        if opener.nbytes > MAX_OBJECT_BYTES:
            opener = None
        else:
            objects.put(opener.name, data)

    def write(made: Path) -> None:
        if opener is None:
            with creating(made / RESULTS) as file:
                file.write(content.getbuffer())
        else:
            with creating(made / name_of(opener)) as file:
                file.write(content_of(opener))
        with creating(made / "meta.json") as file:
            file.write(sealed({"format": FORMAT, **asdict(label)}))
        with creating(made / "state.json") as file:
            file.write(_state_bytes(label, state))

    try:
        return _stored(directory / _folder_name(label.name), label.id, write)
    except BaseException:
        if opener is not None:
            drop_objects(objects, [opener])
        raise


def store_files(directory: Path, kind: str, name: str, contents: Mapping[str, bytes]) -> Path:
    """Store a batch, given as the contents of its files by name, as folder `name` in the folder
    `kind` below `directory`; return its folder. PoolError unless it is whole and unused: then, as
    after a crash, nothing of it is there.
    """

    def write(made: Path) -> None:
        for file_name, data in contents.items():
            with creating(made / file_name) as file:
                file.write(data)
        _, state = load(made, name)
        if state != replace(state, used=0, index=0, rest=None):
            raise PoolError(f"{made} is used already")

    return _stored(directory / kind, name, write)


def contents_of(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of files of the batch in folder `path`, by name. PoolError for what is no
    plain file of this user's, or is larger than a batch is.
    """
    contents = {}
    for name in names:
        with opened(path / name) as file:
            contents[name] = file.read(MAX_FILE_BYTES + 1)
        if len(contents[name]) > MAX_FILE_BYTES:
            raise PoolError(f"{path / name} is larger than a batch is")
    return contents


def discard(path: Path) -> None:
    """Remove the batch in folder `path`, which is gone from one moment to the next."""
    with failures(path):
        gone = path.with_name(f".{path.name}.gone")
        os.replace(path, gone)
        sync_folder(gone.parent)
        shutil.rmtree(gone)


def move(path: Path, directory: Path) -> Path:
    """Move the batch in folder `path` below `directory`, at once; return where it is."""
    folder = directory / path.parent.name
    final = folder / path.name
    with failures(final):
        if os.path.lexists(final):
            raise PoolError(f"{path} is in {directory}, too; remove both")
        if not folder.exists():
            os.mkdir(folder, 0o700)
            sync_folder(directory)
        os.replace(path, final)
        sync_folder(folder)
        sync_folder(path.parent)
    return final


def batch_of(
    path: Path, rank: int, objects: ObjectStore | None = None
) -> tuple[Label, State, Files]:
    """Read the batch in folder `path`; PoolError unless it is whole, and of the party that has this
    rank.
    """
    label, state = load(path)
    if label.rank != rank:
        raise PoolError(
            f"{path.parent.parent} holds the other party's correlated randomness; use another "
            "directory"
        )
    return label, state, Files(path, label, objects)


def _stored(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Make the folder of a batch below `folder`, whose files `write` makes; return it."""
    final, made = folder / name, folder / f".{name}.made"
    with failures(final):
        if not folder.exists():
            folder.mkdir(0o700, exist_ok=True)  # another session may just have made it
            sync_folder(folder.parent)
        os.mkdir(made, 0o700)
        try:
            write(made)
            sync_folder(made)
            os.replace(made, final)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        sync_folder(folder)
    return final


def batch_folders(directory: Path) -> Iterator[Path]:
    """Yield the folder of each batch below `directory`, half ones included; PoolError at others."""
    for folder in sorted(directory.iterdir()):
        if folder.name in ("lock", INBOX):
            continue
        check(folder, folder=True)
        for path in sorted(folder.iterdir()):
            if not (HALF.fullmatch(path.name) or BATCH_ID.fullmatch(path.name)):
                raise PoolError(f"{path} is not part of a pool; move it away")
            yield path


def load(path: Path, name: str | None = None) -> tuple[Label, State]:
    """Read what the batch in folder `path` is, and how far it is used; PoolError unless it is
    whole. `name`: of its folder to be, by default that of `path`.
    """
    check(path, folder=True)
    name = path.name if name is None else name
    meta = unsealed(path / "meta.json")
    version = meta.pop("format", None)
    if version != FORMAT:
        raise PoolError(
            f"{path / 'meta.json'} has format {str(version)[:20]}, not {FORMAT}; "
            f"remove {path} or use another directory"
        )
    try:
        label = Label(**{**meta, "sums": tuple(meta["sums"])})
        moved = label.id != name or _folder_name(label.name) != path.parent.name
        label.bounds(0)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise damaged(path / "meta.json") from None
    if moved:
        raise PoolError(f"{path} was moved here from elsewhere; remove it")
    fields = unsealed(path / "state.json", name)
    try:
        state = State(**{**fields, "key": bytes.fromhex(fields["key"])})
        # What was put back lies before slice `index`; what was burnt may end inside it.
        start, stop = label.bounds(state.index)
        first, last = (0, start) if state.rest else (start, stop)
        fits = first <= state.used <= last and len(state.key) == KEY_BYTES
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise damaged(path / "state.json")
    if (stored := stored_in(path)) is not None:
        try:
            opener_in(stored)
        except PoolError:
            if stored_in(path) is not None:
                raise
            stored = None  # a session has just taken the results back
    if stored is None:
        read_rows(path / RESULTS, (label.units, label.words), (0, 0))
    return label, state


def _folder_name(name: str) -> str:
    """Return the name of the folder with the batches of a correlation."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40]
    return f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _state_bytes(label: Label, state: State) -> bytes:
    return sealed({**asdict(state), "key": state.key.hex()}, label.id)
