"""Who may have a session with a provider: places, and the tickets that stand for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spu_llm.core.errors import BusyError, PeerError
from spu_llm.net.control_plane import TICKET_BYTES
from spu_llm.net.identity import Certificate
from spu_llm.service.limits import Quotas
from spu_llm.service.task import Task

TICKET_S = 10.0  # from a ticket to the connection that shows it


@dataclass(frozen=True)
class Admitted:
    """A session that both parties have agreed on, and the client that it is with. begin: comes
    before its worker gets its inputs, and what it raises ends the session. writes: directories of
    the served system's own that the worker may change.
    """

    task: Task
    client: Certificate | None
    until: float  # by the monotonic clock
    begin: Callable[[], None]
    writes: tuple[Path, ...]


class AdmissionControl:
    """Admission of sessions: so many at a time, and so many of a certificate as its quota says."""

    def __init__(self, places: int, quotas: Quotas) -> None:
        self.renew(places, quotas)
        self._lock = threading.Lock()
        self._expected: dict[bytes, Admitted] = {}  # by their tickets
        self._running: list[Admitted] = []

    def renew(self, places: int, quotas: Quotas) -> None:
        """Admit `places` sessions from here on, under `quotas`; running ones go on."""
        self._places, self._quotas = places, quotas

    @property
    def taken(self) -> bool:
        """Return whether there is a session, or one is expected."""
        with self._lock:
            return bool(self._running or self._unexpired())

    def admit(
        self,
        task: Task,
        client: Certificate | None,
        begin: Callable[[], None] = lambda: None,
        writes: tuple[Path, ...] = (),
    ) -> bytes:
        """Return a ticket for the session in `task`; BusyError when there is no place for it."""
        with self._lock:
            self._expected = self._unexpired()
            taken = [*self._running, *self._expected.values()]
            if len(taken) >= self._places:
                raise BusyError(
                    f"the provider is busy with {self._places} sessions; try again later"
                )
            alike, most = sum(_same(one.client, client) for one in taken), self._quotas.of(client)
            if client is not None and most.sessions is not None and alike >= most.sessions:
                raise BusyError(
                    f"this certificate has {alike} sessions, as many as it may; try again later"
                )
            ticket = os.urandom(TICKET_BYTES)
            until = time.monotonic() + TICKET_S
            self._expected[ticket] = Admitted(task, client, until, begin, writes)
        return ticket

    def enter(self, shown: bytes, client: Certificate | None) -> Admitted:
        """Return the session of a ticket, which is used up by that; PeerError when there is none,
        or not for this client.
        """
        with self._lock:
            self._expected = self._unexpired()
            admitted = self._expected.pop(shown, None)
            if admitted is None:
                raise PeerError("the ticket is not known, was used, or has expired; connect anew")
            if not _same(admitted.client, client):
                raise PeerError("the ticket was given to another certificate")
            self._running.append(admitted)
        return admitted

    def leave(self, admitted: Admitted) -> None:
        """Free the place of a session."""
        with self._lock:
            self._running.remove(admitted)

    def _unexpired(self) -> dict[bytes, Admitted]:
        now = time.monotonic()
        return {ticket: one for ticket, one in self._expected.items() if one.until > now}


def _same(one: Certificate | None, other: Certificate | None) -> bool:
    return (one and one.fingerprint) == (other and other.fingerprint)
