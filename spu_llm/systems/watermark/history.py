"""Seeds that were used before, which must not decide again.

Under one key an n-gram has one number. If it takes part in two choices these depend on each other,
and texts of one key resemble each other more than the model's do (§9.1; two calls agree in .625 of
cases where chance gives .5). What has taken part once, in a candidate that lost too, is left out
from then on: each choice is then made by numbers that nothing before depends on, so that all texts
of a key together have the law of the unmarked ones. The price: a text that repeats what was written
before is marked less.

A key's history lies beside it. It holds names of seeds (`keys`), which tell nothing about their
numbers:

    KEYFILE.history    0600: a line of format, the key's fingerprint in it, then 8 bytes a seed
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from spu_llm.core.errors import InputError
from spu_llm.systems.watermark.keys import Key

NAME_BYTES = 8


def history_path(key_file: Path) -> Path:
    return key_file.with_name(key_file.name + ".history")


def unpacked(data: bytes) -> set[bytes]:
    """Names that lie one after the other; ValueError for a part of one."""
    if len(data) % NAME_BYTES:
        raise ValueError(f"names have {NAME_BYTES} bytes, found {len(data)}")
    return {data[i : i + NAME_BYTES] for i in range(0, len(data), NAME_BYTES)}


def packed(names: Iterable[bytes]) -> bytes:
    """The other way round."""
    return b"".join(sorted(names))


class History:
    """In memory. `on` False: nothing is kept, as in the paper."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self._used: set[bytes] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._used

    def __len__(self) -> int:
        return len(self._used)

    def add(self, names: Iterable[bytes]) -> None:
        """From now on these are used; durably, before what they chose is seen."""
        if self.on:
            fresh = set(names) - self._used
            self._store(fresh)
            self._used |= fresh

    def packed(self) -> bytes:
        """All of them, as a file has them."""
        return packed(self._used)

    @staticmethod
    def of(data: bytes) -> History:
        """In memory, with these used."""
        found = History()
        found.add(unpacked(data))
        return found

    def _store(self, fresh: set[bytes]) -> None:
        pass


class HistoryFile(History):
    """The same in a file, which one run at a time uses. InputError when it is in use, is of another
    key, or cannot be read or written.
    """

    def __init__(self, path: Path, key: Key) -> None:
        super().__init__()
        self._path = path
        header = f"spu-llm watermark history 1 {key.fingerprint().hex()}\n".encode()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o600)
        except OSError as exc:
            raise InputError(
                f"cannot keep {path}: {exc.strerror}; move the key to where it can lie beside it"
            ) from None
        try:
            self._read(header)
        except BaseException:
            os.close(self._file)
            raise

    def _read(self, header: bytes) -> None:
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{self._path} is no plain file; move it away")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise InputError(f"{self._path} is open to others; run: chmod 600 {self._path}")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{self._path} is in use by another run") from None
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if header.startswith(data):  # empty, or torn while it was begun
            os.ftruncate(self._file, 0)
            self._write(header)
            return
        if not data.startswith(header):
            raise InputError(f"{self._path} is no history of this key; move it away, or restore it")
        rest = data[len(header) :]
        whole = len(rest) - len(rest) % NAME_BYTES
        if whole < len(rest):  # what was being written chose nothing yet
            os.ftruncate(self._file, len(header) + whole)
        self._used = unpacked(rest[:whole])

    def _store(self, fresh: set[bytes]) -> None:
        if fresh:
            self._write(packed(fresh))

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as exc:
            raise InputError(f"cannot write {self._path}: {exc.strerror}") from None

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> HistoryFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()
