"""What a provider writes down of its work: records, which its log, its audit file and its counts
take.

A record has what the provider may know and keep: who asked for what, when, how long it took, how
much was moved, and why it failed. Of a failure whose words may quote a secret (a worker's last
ones) it has the kind alone.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from spu_llm.core.errors import (
    InputError,
    LimitError,
    ManifestMismatch,
    PeerError,
    SpuLlmError,
    StalledError,
    WantedError,
)
from spu_llm.net.identity import Certificate
from spu_llm.net.manifest import CLIENT_PREFIX, Scalar
from spu_llm.service.agreeing import SERVED_MODEL
from spu_llm.service.listening import LINES, LINES_S, Refusals

LISTENING = "listening"
BEGUN = "session_begun"
FINISHED = "session_finished"
FAILED = "session_failed"
REFUSED = "refused"  # who got no session
WAITING = "session_waiting"  # for a machine with room
PLACED = "session_placed"  # on a machine
MACHINES = "machines"  # that sessions run on
RELOADED = "reloaded"
STOPPING = "stopping"

MAX_WORDS = 2000

# Of these the peer hears the words, or has sent them. A worker's InputError is not among them.
_OF_SESSIONS = (LimitError, PeerError, StalledError, WantedError)
_OF_REFUSALS = (*_OF_SESSIONS, InputError, ManifestMismatch)


@dataclass(frozen=True)
class Record:
    """An event of a provider. words: a line for people, who see none where it is empty; fields:
    facts for programs.
    """

    event: str
    words: str = ""
    fields: Mapping[str, Scalar] = field(default_factory=dict)

    def as_json(self, *, with_words: bool) -> str:
        """Return the record as a JSON object on one line, with the time in UTC."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        words = {"words": self.words} if with_words and self.words else {}
        return json.dumps({"time": now, "event": self.event, **words, **self.fields})


Log = Callable[[Record], None]


class Session(NamedTuple):
    """A session as records name it: by a random id, its client, and the numbers of its request.
    What a request has as text may be a prompt's public part, and is left out.
    """

    id: str
    client: Certificate | None
    program: str
    agreed: Mapping[str, Scalar]

    @staticmethod
    def of(client: Certificate | None, program: str, agreed: Mapping[str, Scalar]) -> Session:
        """Return a session with an id of its own. agreed: its settings."""
        return Session(os.urandom(8).hex(), client, program, agreed)

    @property
    def fields(self) -> dict[str, Scalar]:
        """Return what names the session: also its model, where the client names one."""
        name = self.agreed.get(SERVED_MODEL)
        of_model: dict[str, Scalar] = {} if name is None else {"model": name}
        one: dict[str, Scalar] = {"session": self.id, "program": self.program}
        return one | of_model | client_fields(self.client)

    @property
    def request(self) -> dict[str, Scalar]:
        """Return the numbers of what the client asks for."""
        return {
            name: value
            for name, value in self.agreed.items()
            if name.startswith(CLIENT_PREFIX) and isinstance(value, int | float)
        }


def client_fields(client: Certificate | None) -> dict[str, Scalar]:
    """Return what names a client, nothing in the clear."""
    if client is None:
        return {}
    return {"client": client.name, "fingerprint": client.fingerprint}


def refused(error: SpuLlmError, words: str, client: Certificate | None) -> Record:
    """Return the record of a client that gets no session."""
    return Record(REFUSED, words, client_fields(client) | _why(error, _OF_REFUSALS))


def no_room(session: Session, error: SpuLlmError) -> Record:
    """Return the record of a session that no machine had room for."""
    return Record(REFUSED, f"session refused: {error}", session.fields | _why(error, _OF_REFUSALS))


def waiting(session: Session) -> Record:
    """Return the record of a session that waits for a machine with room."""
    return Record(WAITING, fields=session.fields)


def placed(session: Session, machine: str) -> Record:
    """Return the record of a session whose worker runs on a machine. machine: its address."""
    return Record(PLACED, fields=session.fields | {"machine": machine})


def begun(session: Session) -> Record:
    """Return the record of a session whose worker is about to get its task."""
    return Record(BEGUN, fields=session.fields | session.request)


def ended(
    session: Session, seconds: float, traffic: tuple[int, int], error: SpuLlmError | None
) -> Record:
    """Return the record of a session's end. traffic: bytes on the wire, sent and received; error:
    what ended it, if anything did.
    """
    sent, received = traffic
    fields = session.fields | {
        "seconds": round(seconds, 3),
        "wire_bytes_sent": sent,
        "wire_bytes_received": received,
    }
    if error is None:
        words = f"session finished, {(sent + received) / 1e6:.1f} MB on the wire"
        return Record(FINISHED, words, fields)
    return Record(FAILED, f"session failed: {error}", fields | _why(error, _OF_SESSIONS))


def _why(error: SpuLlmError, told: tuple[type[SpuLlmError], ...]) -> dict[str, Scalar]:
    kind: dict[str, Scalar] = {"error": type(error).__name__}
    return kind | ({"reason": str(error)[:MAX_WORDS]} if isinstance(error, told) else {})


class AuditFile:
    """A file with a JSON line for each record, on disk before the session goes on. It is opened
    anew for each line, so it may be renamed at any time.
    """

    def __init__(self, path: Path) -> None:
        """Open the file once. InputError where it cannot be written."""
        self._path, self._lock = path, threading.Lock()
        try:
            os.close(self._open())
        except OSError as error:
            raise InputError(
                f"--audit {path}: {error.strerror}; give a file to append to"
            ) from None

    def write(self, record: Record) -> None:
        """Append a record. WantedError where the file cannot hold it, so that no session runs
        which is not written down.
        """
        line = record.as_json(with_words=False).encode() + b"\n"
        try:
            with self._lock:
                _append(self._open(), line)
        except OSError as error:
            raise WantedError("the provider cannot write its audit file") from error

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


class Bounded:
    """A log that no client can fill a disk with: it has `LINES` refusals of each in `LINES_S` s."""

    def __init__(self, take: Log) -> None:
        self._take, self._refusals = take, Refusals()

    def take(self, record: Record) -> None:
        """Take a record, unless it is one refusal too many; WantedError as of the log."""
        if record.event != REFUSED:
            self._take(record)
            return
        number = self._refusals.count(record.fields.get("fingerprint"))  # None in the clear
        if number <= LINES:
            self._take(record)
        elif number == LINES + 1:
            words = f"more refusals of one client; for up to {LINES_S:g} s no line says so"
            self._take(replace(record, words=words if record.words else ""))


def _append(descriptor: int, line: bytes) -> None:
    try:
        size = os.fstat(descriptor).st_size
        if os.write(descriptor, line) != len(line):
            os.ftruncate(descriptor, size)  # no half of a line stays
            raise OSError("the disk is full")
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
