"""Pieces of work on several cores."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from spu_llm.core.parallel import MAX_JOBS, for_each, own_cores


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_every_item_is_worked_on_once(jobs: int) -> None:
    """Drawn in this thread, in their order."""
    drawn: list[tuple[int, int]] = []
    done: list[int] = []

    def items() -> Iterator[int]:
        for i in range(20):
            drawn.append((i, threading.get_ident()))
            yield i

    for_each(jobs, done.append, items())
    assert drawn == [(i, threading.get_ident()) for i in range(20)]
    assert sorted(done) == list(range(20))


def test_so_many_are_under_way() -> None:
    together = threading.Barrier(3)
    for_each(3, lambda i: (together.wait(5.0), None)[1], range(6))
    with pytest.raises(threading.BrokenBarrierError):
        for_each(2, lambda i: (together.wait(0.2), None)[1], range(3))


def test_an_error_comes_after_all_work() -> None:
    done = []

    def work(i: int) -> None:
        if i == 1:
            raise ValueError("one")
        time.sleep(0.01)
        done.append(i)

    with pytest.raises(ValueError, match="one"):
        for_each(2, work, range(5))
    assert sorted(done) == [0, 2, 3, 4]


def test_cores_are_divided_among_parties() -> None:
    assert 1 <= own_cores(2) <= own_cores(1) <= MAX_JOBS
    assert own_cores(10**6) == 1
