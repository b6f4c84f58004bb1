"""CPU time of the machine and of processes, to tell what else ran beside a measurement."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Return the CPU time, in seconds, that the machine has spent on all work."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / _TICKS


def own_seconds() -> float:
    """Return the CPU time, in seconds, of this process and of the child processes that it has
    waited for.
    """
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def seconds_of(pids: Iterable[int]) -> float:
    """Return the CPU time, in seconds, of running processes, without their children."""
    return sum(map(_seconds, pids))


def _seconds(pid: int) -> float:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS
