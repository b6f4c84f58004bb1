"""A fixed cadence for what one party sends after work whose duration could tell a secret."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

_GRID_S = 0.01
_MARGIN = 2.0
_REHEARSALS = 5


@dataclass
class Cadence:
    """Time is let pass in whole intervals of `interval_s` seconds.

    Work between `begin` and `wait` takes one interval as seen from outside, and another whole one
    where it was late: then somebody who watches learns that it was, which a busy machine makes
    happen, too.
    """

    interval_s: float
    _began: float = 0.0

    @staticmethod
    def of(rehearse: Callable[[], object]) -> Cadence:
        """Return a cadence for work like `rehearse`, on data that are no secret: its interval is
        twice the longest of five runs, rounded up to 10 ms. The first run, which may compile, does
        not count.
        """
        rehearse()
        longest = 0.0
        for _ in range(_REHEARSALS):
            began = time.perf_counter()
            rehearse()
            longest = max(longest, time.perf_counter() - began)
        return Cadence(math.ceil(_MARGIN * longest / _GRID_S) * _GRID_S)

    def begin(self) -> None:
        """Start the time that `wait` fills up to whole intervals."""
        self._began = time.perf_counter()

    def wait(self) -> None:
        """Return when a whole number of intervals, one or more, has passed since `begin`."""
        passed = time.perf_counter() - self._began
        end = self._began + max(1, math.ceil(passed / self.interval_s)) * self.interval_s
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left)
