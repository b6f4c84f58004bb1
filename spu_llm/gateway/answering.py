"""A request under way: what is said to whoever asked, in order, until its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from secrets import token_hex

from spu_llm.api.events import Event, FetchingHint, Making, Stage, Text
from spu_llm.core.errors import WantedError
from spu_llm.gateway.asked import Asked
from spu_llm.gateway.outcome import Outcome
from spu_llm.gateway.refusals import Refused


class Cancelled(WantedError):
    """Whoever asked has gone, or the gateway ends."""


@dataclass(frozen=True)
class Piece:
    """Further text of an answer, so many of whose first characters were drafted; or why the answer
    ends, where another one to the same request comes next.
    """

    text: str
    drafted: int = 0
    index: int = 0  # of the answer
    end: str | None = None


@dataclass(frozen=True)
class News:
    """A few words about what is being done."""

    words: str


Said = Piece | News | Outcome | Refused  # one of the last two kinds comes, at the end


@dataclass(eq=False)
class Answering:
    """A request that waits for its turn, is answered, and ends by itself once `cancel` was called.
    Its events go to the loop that it was made in.
    """

    asked: Asked
    said: asyncio.Queue[Said] = field(default_factory=asyncio.Queue)
    id: str = field(default_factory=lambda: token_hex(12))
    pieces: list[Piece] = field(default_factory=list)  # of the answer that is written
    # Ends that answer where it is, and returns whether it does: in a session that stays open.
    stop: Callable[[], bool] = lambda: False
    _index: int = 0  # of that answer
    _gone: threading.Event = field(default_factory=threading.Event)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def cancel(self) -> None:
        """End soon; nobody reads what is said any more."""
        self._gone.set()

    @property
    def is_cancelled(self) -> bool:
        return self._gone.is_set()

    @property
    def has_text(self) -> bool:
        """Tell whether some of the answer that is written was said."""
        return bool(self.pieces)

    def heard(self, event: Event) -> None:
        """Say what an event has for whoever asked; from any thread."""
        if isinstance(event, Text):
            piece = Piece(event.text, event.drafted, self._index)
            self.pieces.append(piece)
            self._put(piece)
        elif words := _words(event):
            self._put(News(words))

    def begin_next(self, finish_reason: str) -> None:
        """Say why an answer has ended, and begin the next one; in the loop."""
        self.said.put_nowait(Piece("", index=self._index, end=finish_reason))
        self._index, self.pieces = self._index + 1, []

    def repeat(self, finish_reason: str) -> None:
        """Say the last answer once more, as the next one; in the loop."""
        pieces = self.pieces
        self.begin_next(finish_reason)
        self.pieces = [replace(piece, index=self._index) for piece in pieces]
        for piece in self.pieces:
            self.said.put_nowait(piece)

    def look(self) -> None:
        """Raise Cancelled when whoever asked has gone."""
        if self._gone.is_set():
            raise Cancelled("the request was cancelled")

    def _put(self, one: Said) -> None:
        self._loop.call_soon_threadsafe(self.said.put_nowait, one)


def _words(event: Event) -> str:
    match event:
        case Stage():
            return event.name
        case Making():
            return f"made {event.made} of {event.total} batches of correlated randomness"
        case FetchingHint():
            return f"fetched {event.done / 1e6:.0f} of {event.total / 1e6:.0f} MB of the hint"
    return ""
