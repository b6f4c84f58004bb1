"""What a measurement ran on, when, and of which code: part of the JSON of studies and of demo."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

_LOAD = os.getloadavg()[0]  # before anything is done


@dataclass(frozen=True)
class Machine:
    """cores: that this process may use; parties that both run here share them. load: jobs that
    wanted a core in the minute before the process began, and in the last one, its own among them.
    commit: with "-dirty" where files differ from it; "unknown" outside a checkout. date: of the
    end, UTC.
    """

    cores: int
    processor: str
    memory_gib: float
    load: list[float]
    commit: str
    date: str
    python: str
    spu: str


def machine() -> Machine:
    """Describe the machine that this process runs on, and its code, as of now."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=_processor(),
        memory_gib=round(memory, 1),
        load=[round(_LOAD, 2), round(os.getloadavg()[0], 2)],
        commit=_commit(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        python=platform.python_version(),
        spu=version("spu"),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
