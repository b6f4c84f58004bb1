"""How long tests wait for what must come: many times what it takes on an idle machine, so that on a
slow or busy one nothing fails but what never comes. `docs/reference/faults.md` says what it takes,
and holds that against its limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SOON_S = 30.0  # for what happens at once, within one process
END_S = 60.0  # for a command to end by itself
GONE_S = 10.0  # for all of its processes after it
RUN_S = 900.0  # for a run of a model, or a phase of it to begin


def eventually(condition: Callable[[], bool], timeout_s: float = SOON_S) -> bool:
    """Return whether `condition` came true within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.002
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return True
