"""What a provider gives to one client, so that none of them takes what others need."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spu_llm.core.errors import LimitError
from spu_llm.net.identity import Certificate
from spu_llm.net.relay import Relay
from spu_llm.service.supervisor import Worker

HOUR_S = 3600.0


@dataclass(frozen=True)
class Limits:
    """Each of them: None for as much as there is. Those of a client are those of a certificate;
    clients without any count as one.
    """

    minutes: int | None = None  # of a session
    traffic_bytes: int | None = None  # of a client within an hour: on the wire, both ways
    memory_bytes: int | None = None  # of a client: of its workers, beside what they share


@dataclass(frozen=True, eq=False)
class _Session:
    started: float
    relay: Relay
    worker: Worker

    @property
    def traffic_bytes(self) -> int:
        moved = self.relay.snapshot()
        return moved.wire_bytes_sent + moved.wire_bytes_received


@dataclass
class _Account:
    """What one client takes: by its sessions, and by those that have ended (when, how much)."""

    sessions: list[_Session] = field(default_factory=list)
    ended: deque[tuple[float, int]] = field(default_factory=deque)

    def traffic_bytes(self, now: float) -> int:
        while self.ended and self.ended[0][0] <= now - HOUR_S:
            self.ended.popleft()
        running = sum(session.traffic_bytes for session in self.sessions)
        return running + sum(moved for _, moved in self.ended)


class Accounts:
    """Those of all clients."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._of: dict[str | None, _Account] = {}

    def check(self, client: Certificate | None) -> None:
        """LimitError when this client has had all that it gets for now."""
        with self._lock:
            if account := self._of.get(_name(client)):
                self._check_traffic(account, time.monotonic())

    @contextmanager
    def watching(
        self, client: Certificate | None, relay: Relay, worker: Worker
    ) -> Iterator[Guard]:
        """A session counts to its client's account from here to the end."""
        session = _Session(time.monotonic(), relay, worker)
        with self._lock:
            account = self._of.setdefault(_name(client), _Account())
            account.sessions.append(session)
        try:
            yield Guard(self, account, session)
        finally:
            with self._lock:
                account.sessions.remove(session)
                account.ended.append((time.monotonic(), session.traffic_bytes))
                self._forget()

    def look(self, account: _Account, session: _Session) -> None:
        """LimitError once the session, or its client, has had all that it gets."""
        limits, now = self._limits, time.monotonic()
        if limits.minutes is not None and now - session.started >= 60 * limits.minutes:
            raise LimitError(f"the provider ends a session after {limits.minutes} minutes")
        with self._lock:
            self._check_traffic(account, now)
            # Who came last goes first: the others may have enough then.
            last = account.sessions[-1] is session
            memory = sum(one.worker.memory_bytes() for one in account.sessions) if last else 0
        if limits.memory_bytes is not None and memory > limits.memory_bytes:
            raise LimitError(
                f"the provider gives a client {_mb(limits.memory_bytes)} of memory, and this one "
                f"took {_mb(memory)}; ask for less at a time"
            )

    def _check_traffic(self, account: _Account, now: float) -> None:
        limit, moved = self._limits.traffic_bytes, account.traffic_bytes(now)
        if limit is not None and moved > limit:
            raise LimitError(
                f"the provider lets a client move {_mb(limit)} within an hour, and this one moved "
                f"{_mb(moved)}; try again later"
            )

    def _forget(self) -> None:
        """Clients that have nothing left to count."""
        now = time.monotonic()
        for name, account in list(self._of.items()):
            if not account.sessions and not account.traffic_bytes(now):
                del self._of[name]


@dataclass(frozen=True)
class Guard:
    """Watches one session."""

    _accounts: Accounts
    _account: _Account
    _session: _Session

    def look(self) -> None:
        """LimitError once it has had all that it gets."""
        self._accounts.look(self._account, self._session)


def _name(client: Certificate | None) -> str | None:
    return None if client is None else client.fingerprint


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
