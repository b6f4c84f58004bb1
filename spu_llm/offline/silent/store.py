"""Where hints are kept from session to session, and the key that the provider makes its own from.

    <directory>/key              32 bytes: the provider's, drawn once
    <directory>/<name>.hint      a provider's: SHA-256 of what follows, and the hint
    <directory>/<sha256>.hint    a client's: the hint
    <directory>/<sha256>.part    what a client has of it so far
    <directory>/lock             held by the one session that receives into .part

The folder is 0700, files are 0600; anything open to others is refused. A hint shows nothing that
the provider's clients do not have. The key shows the weights to whoever has it and a hint. With a
lost key the hints are made again.

A finished file appears whole or not at all. A hint that does not match its SHA-256 is never used: a
kept one is refused with its path, one that has just arrived is dropped. Nothing else is ever
removed; the whole folder may be, between sessions. Sessions may share a folder: the first one to
receive writes .part, another that lacks hints meanwhile holds them in memory and keeps none. A
killed provider may leave a file that begins with a dot, which nothing reads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from spu_llm.core.errors import InputError, PoolError
from spu_llm.core.prg import KEY_BYTES
from spu_llm.offline.access import check, failures, take_lock
from spu_llm.offline.files import create, drawn_once

_SUM = 32
_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def default_directory(role: str) -> Path:
    """Return where a party of this user keeps its hints: below XDG_CACHE_HOME, or ~/.cache.

    InputError when this user has neither.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        found = Path(home).expanduser()
    except RuntimeError:
        raise InputError(
            "this user has no home directory to keep hints in; set XDG_CACHE_HOME or HOME"
        ) from None
    return found.absolute() / "spu-llm" / "hints" / role


# ---- the provider


def provider_key(directory: Path | None) -> bytes:
    """The key of the hints in `directory`, drawn if there is none; without one a passing key."""
    if directory is None:
        return os.urandom(KEY_BYTES)
    path = directory / "key"
    key = drawn_once(path, os.urandom(KEY_BYTES))
    if len(key) != KEY_BYTES:
        raise PoolError(f"{path} is damaged; remove it and the hints beside it")
    return key


class Own:
    """A hint of the provider's: bytes [...] and their SHA-256."""

    def __init__(self, digest: bytes, content: np.ndarray, path: Path | None = None) -> None:
        self.digest, self.content, self._path = digest, content, path

    def check(self) -> None:
        """PoolError when a kept hint is not what it was: before it is sent."""
        if self._path is not None and _sha256(self.content) != self.digest:
            raise _damaged(self._path)


def load_own(directory: Path | None, name: str, size: int) -> Own | None:
    """A kept hint, from a memory map; None when there is none."""
    if directory is None:
        return None
    path = directory / f"{name}.hint"
    if not os.path.lexists(path):
        return None
    mapped = _mapped(path, _SUM + size)
    return Own(mapped[:_SUM].tobytes(), mapped[_SUM:], path)


def save_own(directory: Path | None, name: str, hint: np.ndarray) -> Own:
    """A hint [...] that was made."""
    flat = hint.reshape(-1)
    digest = _sha256(flat)
    if directory is None:
        return Own(digest, flat)
    path = directory / f"{name}.hint"
    with failures(path):
        create(path, digest, flat.data)
    found = load_own(directory, name, flat.size)
    assert found is not None
    return found


# ---- the client


@contextmanager
def receiving(directory: Path | None) -> Iterator[bool]:
    """Whether the caller alone may write parts here, until the block ends."""
    if directory is None:
        yield False
        return
    path = directory / "lock"
    with failures(path):
        lock = take_lock(path)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


class Received:
    """A hint at the client: as much as it has of `size` bytes, under the digest it must have."""

    def __init__(self, directory: Path | None, digest: bytes, size: int, *, keep: bool) -> None:
        """`keep`: as `receiving` says."""
        self._digest, self.size = digest, size
        self._memory = bytearray()
        self._path = directory / f"{digest.hex()}.hint" if directory is not None else None
        self._part = self._path.with_suffix(".part") if self._path is not None and keep else None
        self._whole: np.ndarray | None = None
        self.held = 0  # bytes that need not be sent, as the provider is told
        if self._path is not None and os.path.lexists(self._path):
            self._whole, self.held = self._checked(self._path), size
        elif self._part is not None and os.path.lexists(self._part):
            with failures(self._part):
                check(self._part, folder=False)
                self.held = min(self._part.stat().st_size, size)

    def add(self, data: bytes) -> None:
        if self._part is None:
            self._memory += data
            return
        with failures(self._part):
            _append(self._part, data)

    def finish(self) -> np.ndarray:
        """Bytes [size]. PoolError when they are not what the digest says; they are dropped then."""
        if self._whole is None:
            self._whole = self._from_memory() if self._part is None else self._from_part()
        return self._whole

    def _from_memory(self) -> np.ndarray:
        data = np.frombuffer(self._memory, np.uint8)
        if data.size != self.size or _sha256(data) != self._digest:
            raise _dropped()
        return data

    def _from_part(self) -> np.ndarray:
        assert self._part is not None and self._path is not None
        try:
            self._checked(self._part)
        except PoolError:
            self._part.unlink(missing_ok=True)
            raise _dropped() from None
        with failures(self._part):
            _append(self._part, durable=True)
            os.replace(self._part, self._path)
        return self._checked(self._path)

    def _checked(self, path: Path) -> np.ndarray:
        """Contents that match, or PoolError."""
        data = _mapped(path, self.size)
        if _sha256(data) != self._digest:
            raise _damaged(path)
        return data


def _mapped(path: Path, size: int) -> np.ndarray:
    """A file's bytes [size], as a memory map; PoolError when there are more or fewer."""
    with failures(path):
        check(path, folder=False)
        if path.stat().st_size != size:
            raise _damaged(path)
        return np.memmap(path, np.uint8, mode="r")


def _damaged(path: Path) -> PoolError:
    return PoolError(f"{path} is damaged; remove it")


def _dropped() -> PoolError:
    return PoolError("a hint of the provider's weights came damaged and was dropped; start again")


def _sha256(data: np.ndarray) -> bytes:
    return hashlib.sha256(data.data).digest()


def _append(path: Path, data: bytes = b"", *, durable: bool = False) -> None:
    number = os.open(path, _NEW | os.O_APPEND, 0o600)
    with os.fdopen(number, "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(number)
