"""Cost of a run: seconds, payload bytes and messages, by phase and by kind of work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spu_llm.core.channel import Traffic


@dataclass(frozen=True)
class Entry:
    """One executed step of a plan (or control exchange)."""

    phase: str
    kind: str  # "segment", "op", "pool", "wait", "hint", "local" or "control"
    name: str
    function: str  # the secure function it belongs to
    seconds: float
    traffic: Traffic
    scope: str = ""  # of an op: the name scope it was written in
    beside: bool = False  # while the session was at something else: no time of the session's


class _Here(threading.local):
    """The phase that one thread is in."""

    phase = "offline"
    inside = 0.0  # seconds of the current phase spent in phases inside it
    beside = False  # whether nobody waits for what this thread does


@dataclass
class Meter:
    """Entries of one party, in the order in which they ended. Every thread is in a phase of its
    own.
    """

    entries: list[Entry] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # wall time per phase
    _here: _Here = field(default_factory=_Here)

    @property
    def phase(self) -> str:
        """Return the phase that this thread is in."""
        return self._here.phase

    def record(
        self, kind: str, name: str, function: str, seconds: float, traffic: Traffic, scope: str = ""
    ) -> None:
        here = self._here
        self.entries.append(
            Entry(here.phase, kind, name, function, seconds, traffic, scope, here.beside)
        )

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Record everything inside as part of `phase`; its wall time adds up in `seconds`, less
        that of phases inside it.
        """
        here = self._here
        before, here.phase = here.phase, phase
        outer, here.inside = here.inside, 0.0
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            if not here.beside:
                self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed - here.inside
            here.phase, here.inside = before, outer + elapsed

    @contextmanager
    def beside(self, phase: str) -> Iterator[None]:
        """Record everything inside as part of `phase`, while nobody waits for it: in a thread
        beside the session's own, or before the client has anything to say. Its wall time is no time
        of the session's.
        """
        here = self._here
        before, here.beside = here.beside, True
        try:
            with self.in_phase(phase):
                yield
        finally:
            here.beside = before

    def traffic(self, *phases: str) -> Traffic:
        """Return the sum of traffic over `phases` (all of them when none is named)."""
        chosen = (e.traffic for e in self.entries if not phases or e.phase in phases)
        return sum(chosen, Traffic())
