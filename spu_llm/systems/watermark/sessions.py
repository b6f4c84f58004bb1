"""A provider's mark: noise of a place in a session, and which sessions there were.

The provider of a completion adds Gumbel noise to its share (`protocols.verification.marked`). It
knows neither the text nor, with hidden progress, how far it has got: it knows the number of the
forward and of a row in it. So the noise is a pseudorandom function of

    (key, nonce of the session, forward, row, token)

which is that session's stream, drawn from its beginning: forward 0, the prefill, has one row, each
forward after it d + 1. A row has a number for each of V tokens, and row r of forward s begins V (s
(d + 1) - d + r) numbers from the beginning, or at it for the prefill. A row is drawn once, because
a stream only moves forward.

The nonce is fresh from the operating system for every session. With one that served before, two
texts would be drawn by the same numbers: after equal prompts they would be equal, and others would
resemble each other, so that neither would have the model's distribution beside the other.

Detection has to know the nonces. They are recorded beside the key, before the session's first
forward, and whoever cannot record one gives no text:

    KEYFILE.sessions    0600: a line of format, the key's fingerprint in it, then a line a session:
                        nonce, date, vocabulary, draft length, most forwards

A list of nonces says nothing without the key; with it, when there were how many sessions of what
shape.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.systems.watermark.kept import Kept, after, check_own
from spu_llm.systems.watermark.keys import Key

NONCE_BYTES = 16
_WHAT = "list of sessions"


@dataclass(frozen=True)
class Shape:
    """The noise of a session: rows of `vocab` numbers, one in the first of at most `forwards`
    forwards and `drafts` + 1 in each that follows.
    """

    vocab: int
    drafts: int
    forwards: int

    def __post_init__(self) -> None:
        if self.vocab < 1 or self.drafts < 0 or self.forwards < 1:
            raise ValueError(f"there is no such session: {self}")

    @property
    def rows(self) -> int:
        """Return how many rows all forwards have."""
        return 1 + (self.forwards - 1) * (self.drafts + 1)

    def places(self, tokens: Sequence[int]) -> np.ndarray:
        """Return where in the session's stream the number of a token stands in each row: int64
        [token, row].
        """
        return np.arange(self.rows) * self.vocab + np.asarray(tokens, np.int64)[:, None]


@dataclass(frozen=True)
class Session:
    """One that is recorded. `began`: in UTC, as 2026-01-31T12:00:00Z."""

    nonce: bytes
    began: str
    shape: Shape

    @staticmethod
    def now(nonce: bytes, shape: Shape) -> Session:
        return Session(nonce, f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}", shape)

    def line(self) -> bytes:
        return " ".join(map(str, (self.nonce.hex(), self.began, *astuple(self.shape)))).encode()

    @staticmethod
    def of_line(line: bytes) -> Session:
        """Return the session of a line. Raise ValueError for anything else than `line` gives."""
        nonce, began, *sizes = line.decode("ascii").split(" ")
        vocab, drafts, forwards = map(int, sizes)
        session = Session(bytes.fromhex(nonce), began, Shape(vocab, drafts, forwards))
        datetime.strptime(began, "%Y-%m-%dT%H:%M:%SZ")
        if len(session.nonce) != NONCE_BYTES or session.line() != line:
            raise ValueError("another nonce")
        return session


def fresh_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def sessions_path(key_file: Path) -> Path:
    """Return the sessions of a key, which are the same whatever links lead to the key."""
    key_file = key_file.resolve()
    return key_file.with_name(key_file.name + ".sessions")


class SessionsFile:
    """Records sessions; one provider at a time does, several of its threads. InputError as of
    `Kept`.
    """

    def __init__(self, path: Path, key: Key) -> None:
        self._path, self._lock = path, threading.Lock()
        self._file = Kept(path, _header(key), _WHAT)
        try:
            lines, torn = _lines(self._file.rest)
            _read(lines, path)
        except BaseException:
            self._file.close()
            raise
        if torn:  # its session never began
            self._file.keep(len(self._file.rest) - torn)

    def add(self, session: Session) -> None:
        """Record a session durably. Raise SpuLlmError when that cannot be, and then there must be
        no text of it.
        """
        with self._lock:
            try:
                self._file.append(session.line() + b"\n")
            except InputError as exc:  # no fault of who asked for the session
                raise SpuLlmError(str(exc)) from None

    def close(self) -> None:
        """Close the file: no session can be added after it."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> SessionsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def recorded(path: Path, key: Key) -> list[Session]:
    """Return all sessions so far, while a provider may be recording more. Raise InputError for a
    file that is missing, open to others, of another key, or damaged.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing: it has the sessions that serve --mark marked, and must lie beside "
            "the key"
        ) from None
    except OSError as exc:
        raise InputError(f"cannot read {path}: {exc.strerror}") from None
    try:
        check_own(file, path)
        data = os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)
    header = _header(key)
    if header.startswith(data):  # nothing is recorded yet
        return []
    return _read(_lines(after(header, data, path, _WHAT))[0], path)


def _header(key: Key) -> bytes:
    return f"spu-llm watermark sessions 1 {key.fingerprint().hex()}\n".encode()


def _lines(data: bytes) -> tuple[list[bytes], int]:
    """Return the whole lines, and how many bytes of one follow that is not whole."""
    *lines, rest = data.split(b"\n")
    return lines, len(rest)


def _read(lines: Sequence[bytes], path: Path) -> list[Session]:
    sessions = []
    for number, line in enumerate(lines, 2):
        try:
            sessions.append(Session.of_line(line))
        except ValueError:
            raise InputError(f"{path} is damaged in line {number}; restore it") from None
    return sessions
