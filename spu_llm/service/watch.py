"""Whether a session still gets anywhere: deadlines that a slow party keeps, a stuck one does not.

A worker gets somewhere when it sends a message, finishes a piece of work, or computes. That a
thread of it shows life says nothing of the one that works: a worker that is deadlocked does so too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from spu_llm.core.errors import StalledError, WorkerError
from spu_llm.net.control import Control

# With no event and no computing at all, the process itself is frozen.
SILENT_S = 30.0
# Neither worker got anywhere: both wait, for a message that does not come or a disk that hangs.
STALL_S = 120.0
# This worker only waited, while the other party claims that it computes: it is believed for so
# long after each message, since a claim cannot be checked. The longest work without a message is a
# product with a vocabulary's matrix: for 64 rows and GPT-2 small's some 4 minutes on two busy
# cores, by docs/results.
WAIT_S = 600.0
# SPU computes on threads of its own and says nothing of it, so CPU time stands for its progress: so
# much within STALL_S. A worker that only waits was measured to take a sixth of it, 1.3 ms a second.
COMPUTED_S = 1.0


class Watch:
    """Judges one session, look by look. `cpu_s` reads the worker's CPU time, in seconds."""

    def __init__(self, control: Control, cpu_s: Callable[[], float]) -> None:
        self._control, self._read_cpu_s = control, cpu_s
        self._events = self._finished = 0
        self._own, self._peers = (0, 0, 0), control.peer_progress
        self._cpu_s, self._cpu_at = cpu_s(), time.monotonic()
        self._heard_at = self._own_at = self._either_at = self._cpu_at

    def look(self, event: dict[str, Any] | None) -> None:
        """Take notice of the worker's next event, or that there was none for a moment.

        WorkerError when the worker is frozen, StalledError when the session stands still.
        """
        now = time.monotonic()
        if event is not None:
            self._heard_at = now
            if event["event"] == "alive":
                self._finished = event["finished"]
            else:
                self._events += 1
        if self._moved(now):
            # Told to the peer with the next heartbeat, so that it waits for a slow worker.
            self._control.progress += 1
            self._heard_at = self._own_at = self._either_at = now
        if self._control.peer_progress != self._peers:
            self._peers, self._either_at = self._control.peer_progress, now
        if now - self._heard_at > SILENT_S:
            raise WorkerError(f"the worker process showed no life for {SILENT_S:g} s")
        if now - self._either_at > STALL_S:
            raise StalledError(
                f"no progress for {STALL_S:g} s: neither party's worker sent a message, finished "
                "any work or computed"
            )
        if now - self._own_at > WAIT_S:
            raise StalledError(f"no message from the other party's worker for {WAIT_S:g} s")

    def _moved(self, now: float) -> bool:
        sent = self._control.relay.snapshot().payload_bytes_sent
        own, cpu_s = (self._events, self._finished, sent), self._read_cpu_s()
        moved = own != self._own or cpu_s >= self._cpu_s + COMPUTED_S
        if moved or now - self._cpu_at > STALL_S:
            self._cpu_s, self._cpu_at = cpu_s, now
        self._own = own
        return moved
