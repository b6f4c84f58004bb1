"""What a session says while it runs, as typed events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spu_llm.net.relay import Relay


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a session. `wire_bytes()` gives the bytes sent and received so
    far, also later than the event; None where nothing is connected.
    """

    wire_bytes: Callable[[], int] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Stage(Event):
    """A part of the session has begun, by its name for people."""

    name: str


@dataclass(frozen=True)
class Making(Event):
    """So many batches of correlated randomness of `total` are made."""

    made: int
    total: int


@dataclass(frozen=True)
class FetchingHint(Event):
    """So many bytes of `total` of the model's hint are here; it is kept for later sessions."""

    done: int
    total: int


@dataclass(frozen=True)
class Note(Event):
    """A sentence for the user."""

    text: str


@dataclass(frozen=True)
class Text(Event):
    """The next piece of the text that the model writes. continues: it goes on after the prompt,
    rather than being a text of its own, which models with an encoder write. drafted: how many of
    its first characters were drafted, and verified.
    """

    text: str
    continues: bool = True
    drafted: int = 0


@dataclass(frozen=True)
class Step(Event):
    """A secure step has ended: so many in all, and how many of all drafts were accepted."""

    steps: int
    accepted: int
    drafted: int


@dataclass(frozen=True)
class Token(Event):
    """The next token of a split model's text without shares: so many in all."""

    tokens: int


@dataclass(frozen=True)
class Round(Event):
    """A round of tuning has ended: so many of `total`, and its loss."""

    done: int
    total: int
    loss: float


@dataclass(frozen=True)
class Stock(Event):
    """While nobody says anything in a conversation that was opened ahead: the next turn has all
    that it takes, and so many steps of its answer (None: not even the turn); so many batches are
    still to be made.
    """

    steps: int | None
    lacking: int


@dataclass(frozen=True)
class Learned(Event):
    """The facts that each party learned in one session of a conversation, which has ended."""

    learned: dict[str, list[str]]  # by "client" and "provider"


OnEvent = Callable[[Event], None]


def event_of(said: dict[str, Any], relay: Relay) -> Event | None:
    """Return the typed event for what a worker said; None for what is not for callers."""

    def wire_bytes() -> int:
        counters = relay.snapshot()
        return counters.wire_bytes_sent + counters.wire_bytes_received

    match said["event"]:
        case "stage":
            return Stage(said["name"], wire_bytes=wire_bytes)
        case "making":
            return Making(said["made"], said["total"], wire_bytes=wire_bytes)
        case "hint":
            return FetchingHint(said["done"], said["total"], wire_bytes=wire_bytes)
        case "note":
            return Note(said["text"], wire_bytes=wire_bytes)
        case "text":
            return Text(said["text"], drafted=said.get("drafted", 0), wire_bytes=wire_bytes)
        case "step":
            return Step(said["steps"], said["accepted"], said["drafted"], wire_bytes=wire_bytes)
        case "token":
            return Token(said["tokens"], wire_bytes=wire_bytes)
        case "round":
            return Round(said["done"], said["rounds"], said["loss"], wire_bytes=wire_bytes)
        case "stock":
            return Stock(said["steps"], said["lacking"], wire_bytes=wire_bytes)
    return None
