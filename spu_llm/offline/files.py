"""Files of the pool: batches of correlated randomness, each written whole or not at all.

    <directory>/lock                    held by the one session that uses the directory
    <directory>/<name>-<digest>/<id>/   a batch of the correlation of that name
    <directory>/inbox/                  batches that no session has taken in yet (`offline.inbox`),
                                        in folders as above
        meta.json      what it is; never changes
        results.npy    words [units, words]: results, and before them masks that no key gives again;
                       rows of units that are gone become zero
        state.json     how far it is used, and the key of other masks of what is left
        rest.npy       units that a clean end put back: words of their masks and results

Folders are 0700, files 0600. Whatever is not as this module writes it is refused: PoolError with
the path. Checksums find damage, not malice: who can write here can do anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spu_llm.core.errors import PoolError
from spu_llm.core.prg import KEY_BYTES
from spu_llm.offline.access import check, failures, take_lock

FORMAT = 3
IN_USE = "is in use by another session"  # what a second one is told of a directory
SLICES = 8  # of a batch: one is used up on disk before its first unit is handed out
BATCH_ID = re.compile(r"[0-9a-f]{32}")
# numpy reads headers with Python's parser, in which two threads disturb each other (CPython 3.11).
_parsing = threading.Lock()
INBOX = "inbox"
HALF = re.compile(r"\.[0-9a-f]{32}\.(made|gone)")  # a batch on its way in or out
_JSON_BYTES = 1 << 16
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
    """A batch in a folder of its own. PoolError when a file cannot be used."""

    def __init__(self, folder: Path, label: Label) -> None:
        self.folder, self.label = folder, label

    def rows(self, index: int) -> np.ndarray:
        """Return the result words [units, words] of one slice."""
        path = self.folder / "results.npy"
        words = _read_rows(path, (self.label.units, self.label.words), self.label.bounds(index))
        if checksum(words) != self.label.sums[index]:
            raise _damaged(path)
        return words

    def rest(self, state: State) -> np.ndarray:
        """Return the words [units, mask words and result words] of what was put back."""
        path = self.folder / "rest.npy"
        words = _read_rows(path)
        if checksum(words) != state.rest:
            raise _damaged(path)
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
            with _replacing(self.folder / "rest.npy") as file:
                np.save(file, rest, allow_pickle=False)
            self._write_state(state)

    def remove(self) -> None:
        """Remove the batch, which is gone from one moment to the next."""
        discard(self.folder)

    def size(self) -> int:
        """Return the bytes of the batch's files."""
        with failures(self.folder):
            return sum(entry.stat().st_size for entry in os.scandir(self.folder))

    def clean(self, state: State) -> None:
        """Finish what a session that died had begun."""
        with failures(self.folder):
            for name in (".state.json", ".rest.npy", *(["rest.npy"] if not state.rest else [])):
                (self.folder / name).unlink(missing_ok=True)
            self._wipe(0, state.index)

    def _write_state(self, state: State) -> None:
        with _replacing(self.folder / "state.json") as file:
            file.write(_state_bytes(self.label, state))

    def _wipe(self, first: int, last: int) -> None:
        """Zero the results of the slices from `first` to before `last`."""
        start, stop = self.label.bounds(first)[0], self.label.bounds(last)[0]
        path = self.folder / "results.npy"
        with _opened(path, write=True) as file:
            file.seek(_header(file, path)[1] + 8 * self.label.words * start)
            file.write(bytes(8 * self.label.words * (stop - start)))


def open_folder(directory: Path) -> None:
    """Make a directory if need be. PoolError when it is not this user's alone or cannot be used."""
    with failures(directory):
        with suppress(FileExistsError):  # what it is, is checked next
            directory.mkdir(mode=0o700, parents=True)
        check(directory, folder=True)


class PoolDirectory:
    """One party's directory of batches, locked until `close`; `found` is what it held at first.

    PoolError when another session has it, when others than its owner may read it, or when anything
    in it is not as it was written.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.path, self._rank = directory, rank
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

    def add(self, label: Label, results: np.ndarray, state: State) -> Files:
        """Store a batch: after a crash it is there whole, or not at all."""
        return store(self.path, label, results, state)

    def close(self) -> None:
        """Let other sessions use the directory."""
        os.close(self._lock)

    def _scan(self) -> Iterator[tuple[Label, State, Files]]:
        for path in batch_folders(self.path):
            if HALF.fullmatch(path.name):
                check(path, folder=True)
                shutil.rmtree(path)
                continue
            label, state, files = batch_of(path, self._rank)
            if state.used == label.units:
                files.remove()
            else:
                files.clean(state)
                yield label, state, files


def store(directory: Path, label: Label, results: np.ndarray, state: State) -> Files:
    """Store a batch below `directory`: after a crash it is there whole, or not at all."""

    def write(made: Path) -> None:
        with _creating(made / "results.npy") as file:
            np.save(file, results, allow_pickle=False)
        with _creating(made / "meta.json") as file:
            file.write(_sealed({"format": FORMAT, **asdict(label)}))
        with _creating(made / "state.json") as file:
            file.write(_state_bytes(label, state))

    return Files(_stored(directory / _folder_name(label.name), label.id, write), label)


def store_files(directory: Path, kind: str, name: str, contents: Mapping[str, bytes]) -> Path:
    """Store a batch, given as the contents of its files by name, as folder `name` in the folder
    `kind` below `directory`; return its folder. PoolError unless it is whole and unused: then, as
    after a crash, nothing of it is there.
    """

    def write(made: Path) -> None:
        for file_name, data in contents.items():
            with _creating(made / file_name) as file:
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
        with _opened(path / name) as file:
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


def batch_of(path: Path, rank: int) -> tuple[Label, State, Files]:
    """Read the batch in folder `path`; PoolError unless it is whole, and of the party that has this
    rank.
    """
    label, state = load(path)
    if label.rank != rank:
        raise PoolError(
            f"{path.parent.parent} holds the other party's correlated randomness; use another "
            "directory"
        )
    return label, state, Files(path, label)


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
    meta = _unsealed(path / "meta.json")
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
        raise _damaged(path / "meta.json") from None
    if moved:
        raise PoolError(f"{path} was moved here from elsewhere; remove it")
    fields = _unsealed(path / "state.json", name)
    try:
        state = State(**{**fields, "key": bytes.fromhex(fields["key"])})
        # What was put back lies before slice `index`; what was burnt may end inside it.
        start, stop = label.bounds(state.index)
        first, last = (0, start) if state.rest else (start, stop)
        fits = first <= state.used <= last and len(state.key) == KEY_BYTES
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise _damaged(path / "state.json")
    _read_rows(path / "results.npy", (label.units, label.words), (0, 0))
    return label, state


def _folder_name(name: str) -> str:
    """Return the name of the folder with the batches of a correlation."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40]
    return f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _state_bytes(label: Label, state: State) -> bytes:
    return _sealed({**asdict(state), "key": state.key.hex()}, label.id)


def _sealed(fields: dict[str, Any], owner: str = "") -> bytes:
    """Return JSON with a checksum: a flipped bit must not pass for another number."""
    text = json.dumps(fields, sort_keys=True)
    seal = hashlib.sha256((owner + text).encode()).hexdigest()
    return json.dumps({**fields, "seal": seal}, sort_keys=True).encode()


def _unsealed(path: Path, owner: str = "") -> dict[str, Any]:
    with _opened(path) as file:
        data = file.read(_JSON_BYTES + 1)
    try:
        fields = json.loads(data.decode())
        seal = fields.pop("seal")
        expected = json.loads(_sealed(fields, owner))["seal"]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise _damaged(path) from None
    if seal != expected:
        raise _damaged(path)
    return fields


def _header(file: BinaryIO, path: Path) -> tuple[tuple[int, ...], int]:
    """Read the shape of an array file of uint64 words, and where its words begin."""
    try:
        version = np.lib.format.read_magic(file)
        with _parsing:
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception:  # numpy raises many kinds on a bad header, some of them undocumented
        raise _damaged(path) from None
    offset, size = file.tell(), os.fstat(file.fileno()).st_size
    if (
        (version, fortran, dtype, len(shape)) != ((1, 0), False, np.dtype("<u8"), 2)
        or min(shape) < 0
        or size != offset + 8 * shape[0] * shape[1]
    ):
        raise _damaged(path)
    return shape, offset


def _read_rows(
    path: Path, expected: tuple[int, int] | None = None, rows: tuple[int, int] | None = None
) -> np.ndarray:
    """Read rows of an array file [rows, words], all of them by default."""
    with _opened(path) as file:
        shape, offset = _header(file, path)
        if expected is not None and shape != expected:
            raise PoolError(f"{path} has shape {shape}, not {expected}; remove {path.parent}")
        start, stop = rows or (0, shape[0])
        file.seek(offset + 8 * shape[1] * start)
        data = file.read(8 * shape[1] * (stop - start))
    return np.frombuffer(data, np.uint64).reshape(stop - start, shape[1])


def _damaged(path: Path) -> PoolError:
    return PoolError(f"{path} is damaged; remove {path.parent}")


@contextmanager
def _opened(path: Path, *, write: bool = False) -> Iterator[BinaryIO]:
    """Yield a file of the pool, opened after a look at what it is."""
    with failures(path):
        check(path, folder=False)
        mode = os.O_RDWR if write else os.O_RDONLY
        number = os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(number, "r+b" if write else "rb") as file:
            check(path, os.fstat(number), folder=False)
            yield file


@contextmanager
def _creating(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that did not exist; its contents (not yet its name) are durable in the end."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(number, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def create(path: Path, *data: bytes | memoryview) -> None:
    """Write a new file, 0600, there whole or not at all; one that another session has made
    meanwhile stays. A process that is killed may leave a file that begins with a dot.
    """
    made = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with _creating(made) as file:
            for piece in data:
                file.write(piece)
        os.link(made, path)
    except FileExistsError:
        pass
    finally:
        made.unlink(missing_ok=True)


def drawn_once(path: Path, drawn: bytes) -> bytes:
    """Return what the file `path` holds, which is made of `drawn` if there is none; where several
    sessions make it at once, the first one's stays.
    """
    with failures(path):
        if not os.path.lexists(path):
            create(path, drawn)
    with _opened(path) as file:
        return file.read()


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file for new contents of `path`: after a crash it has the old or the new ones;
    durable in the end.
    """
    part = path.with_name(f".{path.name}")
    part.unlink(missing_ok=True)
    with _creating(part) as file:
        yield file
    os.replace(part, path)
    sync_folder(path.parent)


def replace_whole(path: Path, data: bytes) -> None:
    """Write a file, 0600, that has these contents or, after a crash, its old ones."""
    with _replacing(path) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
