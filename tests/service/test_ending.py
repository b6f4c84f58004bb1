"""The end of a provider waits for its sessions, on other machines too, until they are logged."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from spu_llm.cluster.doors import LEFT_S
from spu_llm.core.errors import SpuLlmError
from spu_llm.net.control import BYE_WAIT_S
from spu_llm.net.uplink import Counters
from spu_llm.service import journal, provider
from spu_llm.service.journal import Record
from spu_llm.service.provider import STOP_S, ServeOptions, _Sessions
from spu_llm.service.task import Task
from tests.kit.patience import SOON_S


class Elsewhere:
    """A session on another machine, until it is to end."""

    client = None

    def __init__(self, shown: bytes) -> None:
        self.shown = shown
        self.begun = threading.Event()

    def snapshot(self) -> Counters:
        return Counters()

    def memory_bytes(self) -> int:
        return 0

    def run(self, session: Any, admitted: Any, look: Any, begin: Any) -> None:
        self.begun.set()
        while True:
            look()
            time.sleep(0.01)

    def refuse(self, error: SpuLlmError) -> None:
        """Tell nobody."""


@pytest.mark.parametrize("admitted", [True, False])
def test_sessions_elsewhere_are_logged_before_the_end(
    monkeypatch: pytest.MonkeyPatch, admitted: bool
) -> None:
    monkeypatch.setattr(provider, "_check_door", lambda task: None)
    logged: list[Record] = []

    def log(record: Record) -> None:
        time.sleep(0.3)  # as a disk may take
        logged.append(record)

    models: Any = None
    with _Sessions(ServeOptions.rehearsal(Path("m")), models, log, print) as sessions:
        task = Task("provider", "preparation", {}, {}, 1000)
        one = Elsewhere(sessions._places.admit(task, None) if admitted else b"unknown")
        thread = threading.Thread(target=sessions.run_elsewhere, args=(one,), daemon=True)
        thread.start()
        if admitted:
            assert one.begun.wait(SOON_S)
        else:
            time.sleep(0.1)  # it is refused, which is about to be logged
    (record,) = logged
    assert record.event == (journal.FAILED if admitted else journal.REFUSED)


def test_a_door_is_left_before_the_provider_ends() -> None:
    assert BYE_WAIT_S < LEFT_S < STOP_S - 2.0
