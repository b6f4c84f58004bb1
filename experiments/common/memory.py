"""Memory of this process, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def resident(field_name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field_name}:"):
            return 1024 * int(line.split()[1])
    return 0


def forget_peak() -> None:
    """Start a new peak; where the kernel does not allow it, peaks are those of the process."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        pass
