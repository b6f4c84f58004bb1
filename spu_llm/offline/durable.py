"""Files that are there whole or not at all, and this user's alone: folders 0700, files 0600.

What is not so is refused: PoolError with the path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from spu_llm.offline.access import check, failures


def open_folder(directory: Path) -> None:
    """Make a directory if need be. PoolError when it is not this user's alone or cannot be used."""
    with failures(directory):
        with suppress(FileExistsError):  # what it is, is checked next
            directory.mkdir(mode=0o700, parents=True)
        check(directory, folder=True)


@contextmanager
def opened(path: Path, *, write: bool = False) -> Iterator[BinaryIO]:
    """Yield a file, opened after a look at what it is."""
    with failures(path):
        check(path, folder=False)
        mode = os.O_RDWR if write else os.O_RDONLY
        number = os.open(path, mode | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(number, "r+b" if write else "rb") as file:
            check(path, os.fstat(number), folder=False)
            yield file


@contextmanager
def creating(path: Path) -> Iterator[BinaryIO]:
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
        with creating(made) as file:
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
    with opened(path) as file:
        return file.read()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file for new contents of `path`: after a crash it has the old or the new ones;
    durable in the end.
    """
    part = path.with_name(f".{path.name}")
    part.unlink(missing_ok=True)
    with creating(part) as file:
        yield file
    os.replace(part, path)
    sync_folder(path.parent)


def replace_whole(path: Path, data: bytes) -> None:
    """Write a file, 0600, that has these contents or, after a crash, its old ones."""
    with replacing(path) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
