"""The front door's side of a worker elsewhere: what counts as silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from spu_llm.cluster import remote_worker
from spu_llm.cluster.hosting import PARCEL, USAGE
from spu_llm.cluster.remote_worker import RemoteWorker
from spu_llm.core.errors import PeerError, WorkerError
from spu_llm.offline.inbox import Parcel


class Words:
    """A connection for words that says what it is told to, and then nothing."""

    def __init__(self, *words: list[Any]) -> None:
        self._words = list(words)
        self.closed = threading.Event()

    def hear(self) -> list[Any]:
        if self._words:
            return self._words.pop(0)
        self.closed.wait()
        raise PeerError("closed")

    def close(self) -> None:
        self.closed.set()


class OneDialer:
    """Dials one connection."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def dial(self, *purpose: Any) -> Words:
        return self._words


def worker(words: Words, deliver: Callable[[Parcel], None]) -> RemoteWorker:
    dialer: Any = OneDialer(words)
    return RemoteWorker("m", dialer, b"", lambda: None, deliver)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_worker, "UNHEARD_S", 0.3)


def test_storing_a_batch_is_no_silence() -> None:
    stored = threading.Event()

    def slowly(parcel: Parcel) -> None:
        time.sleep(1.0)
        stored.set()

    actual = worker(Words([PARCEL, "kind", "id", {}], [USAGE, 0.0, 0]), slowly)
    while not stored.is_set():
        assert actual.next_event(0.05) is None
    actual.stop()


def test_a_machine_that_says_nothing_is_lost() -> None:
    actual = worker(Words([USAGE, 0.0, 0]), lambda parcel: None)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="was lost: m"):
        while time.monotonic() - began < 10:
            actual.next_event(0.05)
    assert actual.killed
