"""Protocols in merged rounds: results as one by one, in as many rounds as the longest takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core.channel import Channel, CountingChannel, MemoryChannel
from spu_llm.core.errors import WireError
from spu_llm.core.merged_rounds import pack, run_together, unpack

Task = Callable[[Channel], Any]


def both(tasks: Sequence[Sequence[Task]]) -> tuple[list[Any], list[CountingChannel]]:
    """Return `run_together` at two parties; their results (or errors) and channels."""
    ends = [CountingChannel(end) for end in MemoryChannel.pair()]
    results: list[Any] = [None, None]

    def party(rank: int) -> None:
        try:
            results[rank] = run_together(ends[rank], tasks[rank])
        except BaseException as exc:
            results[rank] = exc

    threads = [threading.Thread(target=party, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    return results, ends


def talk(script: str, rank: int, name: bytes) -> Task:
    """Return a task that follows `script`: in each round "b" both parties send, "0" or "1" one of
    them.
    """

    def task(channel: Channel) -> list[bytes]:
        heard = []
        for i, who in enumerate(script):
            if who in ("b", str(rank)):
                channel.send(b"%s %d from %d" % (name, i, rank))
            if who in ("b", str(1 - rank)):
                heard.append(channel.recv())
        return heard

    return task


def heard_by(script: str, rank: int, name: bytes) -> list[bytes]:
    return [
        b"%s %d from %d" % (name, i, 1 - rank)
        for i, who in enumerate(script)
        if who in ("b", str(1 - rank))
    ]


SCRIPTS = st.lists(st.text("b01", max_size=5), min_size=1, max_size=4)


@given(SCRIPTS)
def test_every_task_hears_what_was_said_in_it(scripts: list[str]) -> None:
    names = [b"lane %d" % i for i in range(len(scripts))]
    results, ends = both(
        [[talk(s, rank, n) for s, n in zip(scripts, names, strict=True)] for rank in (0, 1)]
    )
    for rank in (0, 1):
        actual, traffics = results[rank]
        assert actual == [heard_by(s, rank, n) for s, n in zip(scripts, names, strict=True)]
        sent = sum(
            len(b"%s %d from %d" % (n, i, rank))
            for s, n in zip(scripts, names, strict=True)
            for i, who in enumerate(s)
            if who in ("b", str(rank))
        )
        assert sum(t.sent_bytes for t in traffics) == sent
        assert sum(t.sent_messages for t in traffics) == ends[rank].traffic.sent_messages
        assert sum(t.received_messages for t in traffics) == ends[1 - rank].traffic.sent_messages


def test_as_many_messages_as_the_longest_takes() -> None:
    """Both ways at once, three protocols of 3, 1 and 2 rounds: six messages, not twelve."""
    scripts = ["bbb", "b", "bb"]
    results, ends = both([[talk(s, r, b"x") for s in scripts] for r in (0, 1)])
    assert not any(isinstance(r, BaseException) for r in results)
    assert [end.traffic.sent_messages for end in ends] == [3, 3]


def test_one_task_runs_at_a_time_and_in_order() -> None:
    """Shared state is drawn from in the order of the tasks until the first message."""
    drawn: list[list[str]] = [[], []]

    def task(rank: int, name: str) -> Task:
        def run(channel: Channel) -> None:
            drawn[rank].append(name)
            channel.send(b"")
            channel.recv()

        return run

    both([[task(rank, name) for name in "abc"] for rank in (0, 1)])
    assert drawn == [["a", "b", "c"]] * 2


def test_an_error_in_one_task_ends_all() -> None:
    class Broken(Exception):
        pass

    def fails(channel: Channel) -> None:
        channel.send(b"x")
        channel.recv()
        raise Broken

    before = set(threading.enumerate())
    lanes = [
        [talk("bbb", rank, b"x"), fails if rank == 0 else talk("b", 1, b"y")] for rank in (0, 1)
    ]
    ends = MemoryChannel.pair()
    other = threading.Thread(target=lambda: run_together(ends[1], lanes[1]), daemon=True)
    other.start()
    with pytest.raises(Broken):
        run_together(ends[0], lanes[0])
    ends[0].send(pack([(0, b"x")]))
    ends[0].send(pack([(0, b"x")]))
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=20)
        assert not thread.is_alive()


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=9)), min_size=1, max_size=6))
def test_packed_parts_come_back(parts: list[tuple[int, bytes]]) -> None:
    assert unpack(pack(parts), 4) == parts


@given(st.binary(max_size=40), st.integers(1, 3))
def test_bytes_from_the_peer_are_parts_or_refused(data: bytes, lanes: int) -> None:
    try:
        parts = unpack(data, lanes)
    except WireError:
        return
    assert parts and pack(parts) == data and all(lane < lanes for lane, _ in parts)


def test_a_message_for_a_task_that_has_ended_is_refused() -> None:
    ends = MemoryChannel.pair()
    ends[1].send(pack([(0, b"x"), (1, b"y")]))
    with pytest.raises(WireError, match="ended"):
        run_together(ends[0], [lambda c: None, lambda c: c.recv()])


def test_a_part_that_no_task_reads_is_refused() -> None:
    """Also where it comes with the last one that its lane waits for."""
    ends = MemoryChannel.pair()
    ends[1].send(pack([(0, b"x"), (0, b"y")]))
    with pytest.raises(WireError, match="ended"):
        run_together(ends[0], [lambda c: c.recv()])
