"""Files that lie beside a key and only grow: 0600, one run at a time, and what is in one is durable
before it is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from spu_llm.core.errors import InputError
from spu_llm.offline.durable import sync_folder


class Kept:
    """One such file, which begins with `header`, of the key's fingerprint. `rest`: the bytes after
    it when it was opened. InputError when it is in use, is of another key (no `what` of this one),
    or cannot be read or written.
    """

    def __init__(self, path: Path, header: bytes, what: str) -> None:
        self._path, self._what = path, what
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o600)
        except OSError as exc:
            raise InputError(
                f"cannot keep {path}: {exc.strerror}; move the key to where it can lie beside it"
            ) from None
        try:
            check_own(self._file, path)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{path} is in use by another run") from None
            self.rest = self._begun(header)
        except BaseException:
            os.close(self._file)
            raise
        self._begins = len(header)

    def _begun(self, header: bytes) -> bytes:
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if header.startswith(data):  # empty, or torn while it was begun
            os.ftruncate(self._file, 0)
            self.append(header)
            _keep_name(self._path)
            return b""
        return after(header, data, self._path, self._what)

    def keep(self, size: int) -> None:
        """Keep so many bytes after the header, and no more: what was being written had no effect
        yet.
        """
        os.ftruncate(self._file, self._begins + size)

    def append(self, data: bytes) -> None:
        """Append data durably, and whole. Raise InputError when that cannot be, also after `close`;
        the file is then as it was.
        """
        if self._file < 0:
            raise InputError(f"cannot write {self._path}: it is closed")
        size = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as exc:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise InputError(f"cannot write {self._path}: {exc.strerror}") from None

    def close(self) -> None:
        """Close the file: nothing is written after it, not to a file that has the same descriptor
        by then, either.
        """
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _keep_name(path: Path) -> None:
    """Make a file's name as durable as the file. Raise InputError when that cannot be."""
    try:
        sync_folder(path.parent)
    except OSError as exc:
        raise InputError(f"cannot keep {path}: its folder: {exc.strerror}") from None


def check_own(file: int, path: Path) -> None:
    """Raise InputError unless the open file is a plain one that nobody else may open."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is no plain file; move it away")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise InputError(f"{path} is open to others; run: chmod 600 {path}")


def after(header: bytes, data: bytes, path: Path, what: str) -> bytes:
    """Return what follows the header in a file; raise InputError when it has another header."""
    if not data.startswith(header):
        raise InputError(f"{path} is no {what} of this key; move it away, or restore it")
    return data[len(header) :]
