"""Where hints are kept from session to session, and the provider's key of its own hints.

    <directory>/key              32 bytes: the provider's, drawn once
    <directory>/<name>.hint      a provider's: SHA-256 of what follows, and the hint
    <directory>/<sha256>.hint    a client's: the hint
    <directory>/<sha256>.part    what a client has of it so far

Folders are 0700, files 0600. A hint of the provider's shows nothing that its clients do not have;
its key shows the weights to whoever has a hint. With a lost key the hints are made again.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from spu_llm.errors import PoolError
from spu_llm.pool_files import check, failures
from spu_llm.prg import KEY_BYTES

_SUM = 32


def default_directory(role: str) -> Path:
    """Where a party of this user keeps its hints: below XDG_CACHE_HOME, or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser().absolute() / "spu-llm" / "hints" / role


def open_directory(directory: Path) -> None:
    """Made if need be. PoolError when it is not this user's alone or cannot be used."""
    with failures(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check(directory, folder=True)


def provider_key(directory: Path | None) -> bytes:
    """The key of the hints in `directory`, drawn if there is none; of this session alone without
    one.
    """
    if directory is None:
        return os.urandom(KEY_BYTES)
    path = directory / "key"
    with failures(directory):
        if not path.exists():
            part = _part_of(path)
            _write(part, os.urandom(KEY_BYTES))
            try:
                os.link(part, path)
            except FileExistsError:
                pass  # another session was first
            finally:
                part.unlink()
        check(path, folder=False)
        key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise PoolError(f"{path} is damaged; remove it and the hints beside it")
    return key


def load_own(directory: Path | None, name: str, size: int) -> tuple[bytes, np.ndarray] | None:
    """(SHA-256, bytes [size]) of a provider's hint, from a memory map; None when there is none."""
    if directory is None:
        return None
    path = directory / f"{name}.hint"
    with failures(path):
        if not path.exists():
            return None
        check(path, folder=False)
        if path.stat().st_size != _SUM + size:
            raise PoolError(f"{path} is damaged; remove it")
        mapped = np.memmap(path, np.uint8, mode="r")
    return mapped[:_SUM].tobytes(), mapped[_SUM:]


def save_own(directory: Path | None, name: str, hint: np.ndarray) -> tuple[bytes, np.ndarray]:
    """(SHA-256, bytes [size]) of a hint [...] that was made."""
    flat = hint.reshape(-1)
    digest = hashlib.sha256(flat.data).digest()
    if directory is None:
        return digest, flat
    path = directory / f"{name}.hint"
    part = _part_of(path)
    with failures(path):
        _write(part, digest, flat.data)
        os.replace(part, path)
    found = load_own(directory, name, flat.size)
    assert found is not None
    return found


class Received:
    """A hint at the client: as much as it has of `size` bytes, under the digest it must have."""

    def __init__(self, directory: Path | None, digest: bytes, size: int) -> None:
        self._digest, self.size = digest, size
        self._memory = bytearray()
        self._path = directory / f"{digest.hex()}.hint" if directory is not None else None
        self._whole: np.ndarray | None = None
        if self._path is not None:
            self._open()

    @property
    def held(self) -> int:
        """Bytes that need not be sent again."""
        if self._whole is not None:
            return self.size
        if self._path is None:
            return len(self._memory)
        part = self._path.with_suffix(".part")
        with failures(part):
            return min(part.stat().st_size, self.size) if part.exists() else 0

    def add(self, data: bytes) -> None:
        if self._path is None:
            self._memory += data
            return
        part = self._path.with_suffix(".part")
        with failures(part):
            _write(part, data, flags=os.O_APPEND)

    def finish(self) -> np.ndarray:
        """Bytes [size]. PoolError when they are not what the digest says; they are dropped then."""
        if self._whole is not None:
            return self._whole
        if self._path is None:
            self._whole = self._checked(np.frombuffer(bytes(self._memory), np.uint8))
            self._memory = bytearray()
            return self._whole
        part = self._path.with_suffix(".part")
        with failures(part):
            try:
                self._checked(np.fromfile(part, np.uint8))
            except PoolError:
                part.unlink()
                raise
            os.replace(part, self._path)
        self._open()
        assert self._whole is not None
        return self._whole

    def _open(self) -> None:
        assert self._path is not None
        with failures(self._path):
            if not self._path.exists():
                return
            check(self._path, folder=False)
            self._whole = self._checked(np.memmap(self._path, np.uint8, mode="r"))

    def _checked(self, data: np.ndarray) -> np.ndarray:
        if data.size != self.size or hashlib.sha256(data.data).digest() != self._digest:
            where = f"{self._path}; remove it" if self._path else "the provider's message"
            raise PoolError(f"a hint of the provider's weights is damaged: {where}")
        return data


def _part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _write(path: Path, *data: bytes | memoryview, flags: int = os.O_TRUNC) -> None:
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    with os.fdopen(number, "wb") as file:
        for piece in data:
            file.write(piece)
        file.flush()
        os.fsync(number)
