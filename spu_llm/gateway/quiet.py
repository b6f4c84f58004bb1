"""Whether now is a time for work that nobody waits for, by what the system tells."""

from __future__ import annotations

import os
from pathlib import Path

_SUPPLIES = Path("/sys/class/power_supply")


def is_quiet() -> bool:
    """Tell whether this machine has power and cores to spare."""
    return not on_battery() and not is_busy()


def on_battery(supplies: Path = _SUPPLIES) -> bool:
    """Tell whether this machine has a mains supply, and none that is on."""
    mains = [
        _read(supply / "online") == "1"
        for supply in (supplies.iterdir() if supplies.is_dir() else ())
        if _read(supply / "type") == "Mains"
    ]
    return bool(mains) and not any(mains)


def is_busy(load: float | None = None, cores: int | None = None) -> bool:
    """Tell whether more than two processes wait for each core, this one's own among them."""
    cores = os.cpu_count() or 1 if cores is None else cores
    load = os.getloadavg()[0] if load is None else load
    return load > 3 * cores


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
