"""Independent pieces of one party's work on several cores.

NumPy and SciPy let go of the interpreter while they compute, so threads are enough.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MAX_JOBS = 48  # as many as SPU makes at once


def own_cores(parties_here: int = 1) -> int:
    """Return this process's cores, split among `parties_here` parties; MAX_JOBS at most."""
    return min(MAX_JOBS, max(1, len(os.sched_getaffinity(0)) // parties_here))


def for_each(jobs: int, work: Callable[[T], None], items: Iterable[T]) -> None:
    """Call `work` on every item, `jobs` at a time. The first error is raised after all items are
    done; with one job, immediately. Items are drawn one after the other, in this thread: what they
    carry may come from one stream of secrets.
    """
    if jobs == 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(work, item) for item in items]
    for one in running:
        one.result()
