"""The front door's doors, without Ray."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spu_llm.cluster.door_words import RENEW
from spu_llm.cluster.doors import Doors, _Open
from spu_llm.core.errors import InputError, PeerError
from spu_llm.service.journal import Record
from spu_llm.service.provider import ServeOptions
from tests.kit.patience import SOON_S


def identity(fingerprint: str) -> Any:
    own = SimpleNamespace(fingerprint=fingerprint)
    return SimpleNamespace(directory=Path("i"), trust=Path("t"), own=own, anchors="")


class Life:
    """A connection over which the first words are slow."""

    def __init__(self) -> None:
        self.said: list[tuple[str, ...]] = []
        self.begun, self.may_end = threading.Event(), threading.Event()

    def say(self, *words: str) -> None:
        if not self.begun.is_set():
            self.begun.set()
            assert self.may_end.wait(SOON_S)
        self.said.append(words)

    def hear(self) -> list[Any]:
        raise PeerError("it has ended")

    def close(self) -> None:
        """Close nothing."""


def doors_of(actors: Any, records: list[Record]) -> Doors:
    holders: Any = None
    return Doors(actors, holders, ServeOptions.rehearsal(Path("m")), 0, records.append)


@pytest.mark.parametrize("opens", [False, True])
def test_a_door_is_last_told_the_latest_identity(opens: bool) -> None:
    """Also where it opens meanwhile."""
    doors = doors_of(SimpleNamespace(kill=lambda actor: None), [])
    life: Any = Life()
    door = _Open("n", "m", actor="an actor")
    doors._open["n"] = door
    doors.renew(identity("a"))  # while nothing reaches the door
    if opens:
        first = threading.Thread(target=lambda: pytest.raises(PeerError, doors._live, door, life))
    else:
        door.life = life
        first = threading.Thread(target=doors.renew, args=(identity("b"),))
    first.start()
    assert life.begun.wait(SOON_S)
    last = threading.Thread(target=doors.renew, args=(identity("c"),))
    last.start()
    time.sleep(0.2)
    life.may_end.set()
    first.join(SOON_S)
    last.join(SOON_S)
    told = [words[3] for words in life.said if words[0] == RENEW]
    assert told == ["a" if opens else "b", "c"]


def test_a_machine_without_a_door_is_asked_again_later() -> None:
    """Ray may refuse the actor itself."""
    killed: list[Any] = []

    def refuse(node: str) -> Any:
        raise RuntimeError("the node has gone")

    doors = doors_of(
        SimpleNamespace(machines=lambda: {"n": "10.0.0.2"}, door=refuse, kill=killed.append), []
    )
    doors._own_node = "another"
    (error,) = doors._open_all()
    assert isinstance(error, InputError) and "10.0.0.2" in str(error)
    assert "the node has gone" in str(error) and not killed
    assert doors._open_all() == []
