"""A command of spu-llm whose wall clock jumps: forwards at SIGUSR1, backwards at SIGUSR2.

Python's clock of this one process jumps, as `time.time` gives it. The machine's own clock stays, so
code in C that reads it (gRPC), and workers, see no jump.
"""

from __future__ import annotations

import signal
import time

from experiments.gateway.plan import FaultsPlan
from spu_llm.app import cli


def main() -> None:
    """Run the command line with a clock that jumps."""
    clock, clock_ns, jump = time.time, time.time_ns, 3600 * FaultsPlan().jump_hours
    hours = [0]

    def forwards(number: int, frame: object) -> None:
        hours[0] += jump

    def backwards(number: int, frame: object) -> None:
        hours[0] -= jump

    time.time = lambda: clock() + hours[0]
    time.time_ns = lambda: clock_ns() + hours[0] * 10**9
    signal.signal(signal.SIGUSR1, forwards)
    signal.signal(signal.SIGUSR2, backwards)
    cli.main()
