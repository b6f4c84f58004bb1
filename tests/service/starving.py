"""Processes that get a small share of a core: stopped most of the time, and let go on again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tests.kit.processes import Process


@contextmanager
def starved(
    processes: Callable[[], Sequence[Process]], share: float, period_s: float
) -> Iterator[None]:
    """Let each of `processes` run for `share` of every `period_s`, and all go on afterwards.

    They are looked up anew each time, since a command starts some as it goes.
    """
    over = threading.Event()

    def alternate() -> None:
        while not over.is_set():
            held = processes()
            _send(held, signal.SIGSTOP)
            over.wait(period_s * (1 - share))
            _send(held, signal.SIGCONT)
            over.wait(period_s * share)

    thread = threading.Thread(target=alternate, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _send(processes: Sequence[Process], signum: int) -> None:
    for process in processes:
        process.send(signum)
