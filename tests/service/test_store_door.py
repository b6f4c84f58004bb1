"""A worker's door to object storage: what passes it, and what a worker that is nobody's gets."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core.errors import PoolError
from spu_llm.offline.sealed_objects import AT_ONCE, MAX_OBJECT_BYTES
from spu_llm.service import store_door
from spu_llm.service.store_door import StoreBehindDoor, StoreDoor
from tests.kit.shelf import Shelf

NAMES = [f"{number:032x}" for number in range(AT_ONCE + 1)]


@contextmanager
def door(shelf: Shelf) -> Iterator[socket.socket]:
    """Yield the worker's end, as it comes."""
    actual = StoreDoor(shelf)
    end = socket.socket(fileno=socket.dup(actual.theirs.fileno()))
    actual.theirs.close()
    try:
        yield end
    finally:
        actual.close()
        end.close()


@contextmanager
def behind(shelf: Shelf) -> Iterator[StoreBehindDoor]:
    with door(shelf) as end:
        store = StoreBehindDoor(end.detach())
        yield store
        store._end.close()


def test_objects_pass_both_ways() -> None:
    shelf = Shelf()
    large = bytes(range(256)) * 4096
    with behind(shelf) as store:
        store.put(NAMES[0], large)
        store.put(NAMES[1], b"small")
        wanted = [(NAMES[1], 5), (NAMES[2], 1), (NAMES[0], len(large))]
        assert store.get(wanted) == [b"small", None, large]
        store.remove([NAMES[0], NAMES[2]])
        assert store.get([(NAMES[0], 1)]) == [None]
    assert list(shelf.objects) == [NAMES[1]]


def test_threads_may_ask_at_once() -> None:
    shelf = Shelf()
    with behind(shelf) as store, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: store.put(name, name.encode() * 999), NAMES))
        got = list(threads.map(lambda name: store.get([(name, 999 * 32)]), NAMES))
    assert got == [[name.encode() * 999] for name in NAMES]


def test_the_storages_error_is_the_workers() -> None:
    shelf = Shelf()
    with behind(shelf) as store:
        shelf.down = True
        with pytest.raises(PoolError, match="is down"):
            store.put(NAMES[0], b"data")
        shelf.down = False
        store.put(NAMES[0], b"data")


def test_an_error_of_many_words() -> None:
    class Wordy(Shelf):
        def put(self, name: str, data: bytes) -> None:
            raise PoolError("\x01" * 4000)

    with behind(Wordy()) as store, pytest.raises(PoolError, match="\x01" * 100):
        store.put(NAMES[0], b"data")


def test_a_supervisor_that_is_gone() -> None:
    with door(Shelf()) as end:
        store = StoreBehindDoor(end.detach())
    with pytest.raises(PoolError, match="does not answer"):
        store.get([(NAMES[0], 1)])


def test_a_late_answer_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_door, "PATIENCE_S", 0.2)
    ours, theirs = socket.socketpair()
    with ours:
        store = StoreBehindDoor(theirs.detach())
        with pytest.raises(PoolError, match="does not answer"):
            store.get([(NAMES[0], 1)])
        with pytest.raises(PoolError, match="does not answer"):
            store.get([(NAMES[1], 1)])


def is_closed(end: socket.socket) -> bool:
    """Return whether the other end says no more, within a while."""
    end.settimeout(5.0)
    try:
        return end.recv(1) == b""
    except ConnectionResetError:  # with something unread
        return True


def said(words: object, content: bytes = b"") -> bytes:
    data = json.dumps(words).encode()
    return len(data).to_bytes(4, "big") + data + content


@pytest.mark.parametrize(
    "words",
    [
        [],
        {},
        {"do": "get"},
        {"do": ["get"], "names": NAMES[:1], "bytes": []},
        {"do": "list", "names": NAMES[:1], "bytes": []},
        {"do": "get", "names": [], "bytes": []},
        {"do": "get", "names": NAMES, "bytes": [1] * len(NAMES)},
        {"do": "get", "names": ["../" + NAMES[0]], "bytes": [1]},
        {"do": "get", "names": [NAMES[0] + "\n"], "bytes": [1]},
        {"do": "get", "names": [1], "bytes": [1]},
        {"do": "get", "names": NAMES[:1], "bytes": []},
        {"do": "get", "names": NAMES[:1] * 2, "bytes": [1, 1]},
        {"do": "get", "names": NAMES[:2], "bytes": [MAX_OBJECT_BYTES, 1]},
        {"do": "remove", "names": NAMES, "bytes": []},
        {"do": "remove", "names": NAMES[0], "bytes": []},
        {"do": "put", "names": NAMES[:2], "bytes": [1, 1]},
        {"do": "put", "names": NAMES[:1], "bytes": [0]},
        {"do": "put", "names": NAMES[:1], "bytes": [-1]},
        {"do": "put", "names": NAMES[:1], "bytes": [True]},
        {"do": "put", "names": NAMES[:1], "bytes": [MAX_OBJECT_BYTES + 1]},
    ],
)
def test_other_requests_close_the_door(words: object) -> None:
    shelf = Shelf()
    shelf.put(NAMES[0], b"data")
    with door(shelf) as end:
        end.sendall(said(words, b"x"))
        assert is_closed(end)
    assert shelf.objects == {NAMES[0]: b"data"} and not shelf.gets


@given(st.binary(max_size=400))
def test_bytes_that_are_no_request(data: bytes) -> None:
    shelf = Shelf()
    with door(shelf) as end:
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        assert is_closed(end)
    assert not shelf.copies and not shelf.gets
