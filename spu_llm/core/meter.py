"""Cost of a run: seconds, payload bytes and messages, by phase and by kind of work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spu_llm.core.channel import Traffic


@dataclass(frozen=True)
class Entry:
    """One executed step of a plan (or control exchange)."""

    phase: str
    kind: str  # "segment", "op", "pool", "hint", "local" or "control"
    name: str
    function: str  # the secure function it belongs to
    seconds: float
    traffic: Traffic
    scope: str = ""  # of an op: the name scope it was written in


@dataclass
class Meter:
    """Entries of one party, in order; `phase` names what is going on now."""

    phase: str = "offline"
    entries: list[Entry] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # wall time per phase
    _inside: float = 0.0  # of the current phase, spent in phases inside it

    def record(
        self, kind: str, name: str, function: str, seconds: float, traffic: Traffic,
        scope: str = "",
    ) -> None:  # fmt: skip
        self.entries.append(Entry(self.phase, kind, name, function, seconds, traffic, scope))

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Everything recorded inside belongs to `phase`; its wall time adds up in `seconds`, less
        that of phases inside it.
        """
        before, self.phase = self.phase, phase
        outer, self._inside = self._inside, 0.0
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed - self._inside
            self.phase, self._inside = before, outer + elapsed

    def traffic(self, *phases: str) -> Traffic:
        """Sum over `phases` (all of them when none is named)."""
        chosen = (e.traffic for e in self.entries if not phases or e.phase in phases)
        return sum(chosen, Traffic())
