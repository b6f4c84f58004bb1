"""What a provider gives to one client, so that none of them takes what others need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from spu_llm.core.errors import LimitError
from spu_llm.net.identity import Certificate
from spu_llm.net.uplink import Counters

MINUTES = 60  # that traffic counts for


@dataclass(frozen=True)
class Quota:
    """Bounds for one client; None for no bound. A client is a certificate, with all its sessions;
    without certificates, a session.
    """

    sessions: int | None = None  # at a time
    minutes: int | None = None  # of a session
    traffic_bytes: int | None = None  # within an hour: on the wire, both ways
    memory_bytes: int | None = None  # of its workers, beside what they share
    disk_bytes: int | None = None  # of what is kept for it


@dataclass(frozen=True)
class Quotas:
    """Quotas of all clients: `named` by a certificate's fingerprint, or else by the name in it;
    `others` for all others.
    """

    others: Quota = Quota()
    named: Mapping[str, Quota] = field(default_factory=dict)

    def of(self, client: Certificate | None) -> Quota:
        """Return a client's quota."""
        if client is None:
            return self.others
        by_name = self.named.get(client.name, self.others)
        return self.named.get(client.fingerprint, by_name)


class Moves(Protocol):
    """Counter of a session's bytes."""

    def snapshot(self) -> Counters: ...


class Takes(Protocol):
    """Gauge of the memory of a session's worker, in bytes; 0 once it has gone."""

    def memory_bytes(self) -> int: ...


@dataclass(eq=False)
class _Session:
    relay: Moves
    worker: Takes
    quota: Quota  # when it began
    started: float
    counted: int = 0  # bytes of its traffic that its account has


@dataclass
class _Account:
    """The use of one client: its sessions, the latest one last, and bytes moved, by the minute."""

    sessions: list[_Session] = field(default_factory=list)
    moved: dict[int, int] = field(default_factory=dict)

    def count(self, session: _Session, now: float) -> None:
        """Enter what the session has moved since it was last looked at."""
        seen = session.relay.snapshot()
        total = seen.wire_bytes_sent + seen.wire_bytes_received
        self.enter(total - session.counted, now)
        session.counted = total

    def enter(self, moved: int, now: float) -> None:
        """Enter that `moved` bytes were moved at `now`."""
        minute = int(now // 60)
        self.moved[minute] = self.moved.get(minute, 0) + moved

    def traffic_bytes(self, now: float) -> int:
        """Return the bytes that were moved within the last hour."""
        first = int(now // 60) - MINUTES + 1
        self.moved = {minute: n for minute, n in self.moved.items() if minute >= first and n}
        return sum(self.moved.values())

    def memory(self) -> list[tuple[_Session, int]]:
        """Return the memory of each session whose worker is alive, in bytes."""
        used = [(session, session.worker.memory_bytes()) for session in self.sessions]
        return [(session, memory) for session, memory in used if memory]


class Accounts:
    """The accounts of all clients."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._lock = threading.Lock()
        self._of: dict[str, _Account] = {}

    def renew(self, quotas: Quotas) -> None:
        """Give clients `quotas` from here on; sessions under way keep what they began with."""
        self._quotas = quotas

    def check(self, client: Certificate | None) -> None:
        """Raise LimitError when this client has had all that it gets for now."""
        quota = self._quotas.of(client)
        with self._lock:
            if client is not None and (account := self._of.get(client.fingerprint)):
                _check_traffic(quota, account, time.monotonic())
                _check_memory(quota, account.memory())

    def enter(self, client: Certificate | None, moved: int) -> None:
        """Count bytes that a client has moved outside of sessions."""
        if client is not None:
            with self._lock:
                account = self._of.setdefault(client.fingerprint, _Account())
                account.enter(moved, time.monotonic())

    @contextmanager
    def watching(
        self, client: Certificate | None, relay: Moves, worker: Takes
    ) -> Iterator[Callable[[], None]]:
        """Count a session to its client's account until it ends. Yield a check to be called all the
        while: it raises LimitError once the session, or its client, has used all that it gets.
        """
        session = _Session(relay, worker, self._quotas.of(client), time.monotonic())
        with self._lock:
            account = _Account()
            if client is not None:
                account = self._of.setdefault(client.fingerprint, account)
            account.sessions.append(session)
        try:
            yield lambda: self._look(account, session)
        finally:
            with self._lock:
                account.count(session, time.monotonic())
                account.sessions.remove(session)
                self._forget()

    def _look(self, account: _Account, session: _Session) -> None:
        quota, now = session.quota, time.monotonic()
        if quota.minutes is not None and now - session.started >= 60 * quota.minutes:
            raise LimitError(f"the provider ends a session after {quota.minutes} minutes")
        with self._lock:
            account.count(session, now)
            _check_traffic(quota, account, now)
            if quota.memory_bytes is None:
                return
            memory = account.memory()
            # Who came last goes first: the others may have enough then.
            if memory and memory[-1][0] is session:
                _check_memory(quota, memory)

    def _forget(self) -> None:
        """Forget clients that have nothing left to count."""
        now = time.monotonic()
        for name, account in list(self._of.items()):
            if not account.sessions and not account.traffic_bytes(now):
                del self._of[name]


def _check_traffic(quota: Quota, account: _Account, now: float) -> None:
    limit, moved = quota.traffic_bytes, account.traffic_bytes(now)
    if limit is not None and moved > limit:
        raise LimitError(
            f"the provider lets a client move {_mb(limit)} within an hour, and this one moved "
            f"{_mb(moved)}; try again later"
        )


def _check_memory(quota: Quota, memory: list[tuple[_Session, int]]) -> None:
    limit, taken = quota.memory_bytes, sum(n for _, n in memory)
    if limit is not None and taken > limit:
        raise LimitError(
            f"the provider gives a client {_mb(limit)} of memory, and this one took "
            f"{_mb(taken)}; ask for less at a time"
        )


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
