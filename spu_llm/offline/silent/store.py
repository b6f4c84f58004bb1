"""Files of hints, and the key that the provider makes its own from.

    <root>/<version>/key         32 bytes: the provider's, drawn once for a version of a model
    <root>/<version>/<name>.hint   SHA-256 of what follows, and the hint
    <folder>/<sha256>.hint       a client's, in its folder for the provider (`silent.cache`)
    <folder>/<sha256>.part       what a client has of it so far

The folders are 0700, files are 0600; anything open to others is refused. A hint shows nothing that
the provider's clients do not have. The key shows the weights to whoever has it and a hint. With a
lost key the hints are made again.

Each version of a model has a key of its own, the salt of its hints: in every version, equal
matrices have hints under other u and e' (`hint.Secrets`), which, with their digests, nobody can
tell from those of other matrices if RLWE is hard. With one key for all, equal digests would show
which matrices two models or versions of a provider share: what a fine-tuning left alone, say. That
is the provider's secret as long as it has the keys, so it is kept, although the price is high: an
update of one matrix costs the provider to make all hints of the model again, and every client to
fetch them. A version is the whole model as it is served, weights and shape, without a text before
prompts. Two endpoints that serve one version from one root have the same hints, and so have two
names of it at one endpoint, and a client of both sees that. The folder of a version that is no
longer served is not used again; its owner may remove it.

A finished file appears whole or not at all. A hint that does not match its SHA-256 is never used: a
kept one is refused with its path, one that has just arrived is dropped. Only `silent.cache` removes
a client's, never one that a session uses: a session holds a shared lock on each. Between sessions
the whole folder may be removed. A killed provider may leave a file that begins with a dot, which
nothing reads.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

import numpy as np

from spu_llm.core.errors import InputError, PoolError
from spu_llm.core.prg import KEY_BYTES
from spu_llm.offline.access import check, failures
from spu_llm.offline.durable import create, drawn_once

_SUM = 32
_OLDER = re.compile(r"key|[0-9a-f]{64}\.(hint|part)|\.[0-9a-f]{64}\.hint\.[0-9a-f]{16}")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def default_directory(role: str) -> Path:
    """Return where a party of this user keeps all its hints, in `cache_directory`."""
    return cache_directory() / "hints" / role


def cache_directory() -> Path:
    """Return where this user's parties keep what can be had again: below XDG_CACHE_HOME, or
    ~/.cache. InputError when this user has neither.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        directory = Path(home).expanduser()
    except RuntimeError:
        raise InputError(
            "this user has no home directory to keep hints in; set XDG_CACHE_HOME or HOME"
        ) from None
    return directory.absolute() / "spu-llm"


def remove_older(root: Path) -> None:
    """Remove what lies in `root` itself, where the layout before this one kept all hints, and the
    provider's key: nothing reads it.
    """
    for path in root.iterdir():
        if _OLDER.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


# ---- the provider


def version_folder(root: Path, served: str) -> Path:
    """Return the folder of a version's key and hints. `served`: what tells it from all others."""
    with suppress(OSError):  # the worker says what is wrong with `root`
        remove_older(root)
    return root / hashlib.sha256(served.encode()).hexdigest()[:32]


def provider_key(directory: Path | None) -> bytes:
    """Return the key of the hints in `directory`, drawn if there is none; without `directory`, one
    that is not kept.
    """
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
        """Raise PoolError when a kept hint is not what it was; called before it is sent."""
        if self._path is not None and _sha256(self.content) != self.digest:
            raise _damaged(self._path)


def load_own(directory: Path | None, name: str, size: int) -> Own | None:
    """Return a kept hint, from a memory map; None when there is none."""
    if directory is None:
        return None
    path = directory / f"{name}.hint"
    if not os.path.lexists(path):
        return None
    mapped = _mapped(path, _SUM + size)
    return Own(mapped[:_SUM].tobytes(), mapped[_SUM:], path)


def save_own(directory: Path | None, name: str, hint: np.ndarray) -> Own:
    """Keep a hint [...] that was made, in `directory` or else in memory, and return it."""
    flat = hint.reshape(-1)
    digest = _sha256(flat)
    if directory is None:
        return Own(digest, flat)
    path = directory / f"{name}.hint"
    with failures(path):
        create(path, digest, flat.data)
    stored = load_own(directory, name, flat.size)
    assert stored is not None
    return stored


# ---- the client


class Received:
    """A hint at the client: as much as it has of `size` bytes, under the digest it must have."""

    def __init__(self, directory: Path | None, digest: bytes, size: int, *, keep: bool) -> None:
        """Find what is kept of the hint. `keep`: whether what comes may be written
        (`cache.HintCache.receiving`).
        """
        self._digest, self.size = digest, size
        self._memory = bytearray()
        self._path = directory / f"{digest.hex()}.hint" if directory is not None else None
        self._part = self._path.with_suffix(".part") if self._path is not None and keep else None
        self._whole: np.ndarray | None = None
        self.held = 0  # bytes that need not be sent, as the provider is told
        if self._path is not None:
            self._whole = self._checked(self._path)
        if self._whole is not None:
            self.held = size
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
        """Return bytes [size]. PoolError when they are not what the digest says; they are dropped
        then.
        """
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
            columns = self._checked(self._part)
        except PoolError:
            self._part.unlink(missing_ok=True)
            raise _dropped() from None
        if columns is None:  # somebody has removed it
            raise _dropped()
        with failures(self._part):
            _append(self._part, durable=True)
            os.replace(self._part, self._path)
        return columns

    def _checked(self, path: Path) -> np.ndarray | None:
        """Return contents that match, or raise PoolError; None when there is no such file."""
        data = _held(path, self.size)
        if data is not None and _sha256(data) != self._digest:
            raise _damaged(path)
        return data


def _held(path: Path, size: int) -> np.ndarray | None:
    """Return a file's bytes [size], as a memory map. As long as that lives the file is not removed.
    None when there is no such file; PoolError when it has more or fewer.
    """
    if not os.path.lexists(path):
        return None
    with failures(path):
        check(path, folder=False)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # the map has a duplicate, which keeps it
            status = os.fstat(file.fileno())
            if not status.st_nlink:  # removed a moment ago
                return None
            if status.st_size != size:
                raise _damaged(path)
            return np.memmap(file, np.uint8, mode="r")


def _mapped(path: Path, size: int) -> np.ndarray:
    """Return a file's bytes [size], as a memory map; PoolError when there are more or fewer."""
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
