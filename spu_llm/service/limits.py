"""What a provider gives to one session, so that none of them takes what others need."""

from __future__ import annotations

import time
from dataclasses import dataclass

from spu_llm.core.errors import LimitError
from spu_llm.net.relay import Relay
from spu_llm.service.supervisor import Worker


@dataclass(frozen=True)
class Limits:
    """Each of them: None for as much as there is."""

    minutes: int | None = None
    traffic_bytes: int | None = None  # on the wire, both ways
    memory_bytes: int | None = None  # resident, of its worker


class Guard:
    """Watches one session."""

    def __init__(self, limits: Limits, relay: Relay, worker: Worker) -> None:
        self._limits, self._relay, self._worker = limits, relay, worker
        self._started = time.monotonic()

    def look(self) -> None:
        """LimitError once the session has had all that it gets."""
        limits, moved = self._limits, self._relay.snapshot()
        minutes = (time.monotonic() - self._started) / 60
        traffic = moved.wire_bytes_sent + moved.wire_bytes_received
        if limits.minutes is not None and minutes >= limits.minutes:
            raise LimitError(f"the provider ends a session after {limits.minutes} minutes")
        if limits.traffic_bytes is not None and traffic > limits.traffic_bytes:
            raise LimitError(
                f"the provider ends a session that moves more than {_mb(limits.traffic_bytes)}"
            )
        if limits.memory_bytes is None:
            return
        if (memory := self._worker.memory_bytes()) > limits.memory_bytes:
            raise LimitError(
                f"the provider gives a session {_mb(limits.memory_bytes)} of memory, and this one "
                f"took {_mb(memory)}; ask for less at a time"
            )


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
