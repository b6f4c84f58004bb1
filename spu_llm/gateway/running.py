"""Sessions for requests: one after another, or a few at once, each in a thread, whose events come
out in the server's loop.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from spu_llm.api.client import Client
from spu_llm.api.completion import Completion
from spu_llm.api.events import Event, FetchingHint, Making, OnEvent, Stage, Text
from spu_llm.core.errors import SpuLlmError
from spu_llm.gateway.asked import Asked
from spu_llm.gateway.refusals import Refused, refused
from spu_llm.service.supervisor import Look

MOST = 64  # requests that wait or are answered; further ones are refused


class Cancelled(SpuLlmError):
    """Whoever asked has gone, or the gateway ends."""


@dataclass(frozen=True)
class Piece:
    """Further text."""

    text: str


@dataclass(frozen=True)
class News:
    """A few words about what is being done."""

    words: str


Said = Piece | News | Completion | Refused  # of the last two kinds one comes, at the end


@dataclass(eq=False)
class Session:
    """A request's session, which waits for its turn, runs, and ends by itself once `cancel` was
    called.
    """

    asked: Asked
    said: asyncio.Queue[Said] = field(default_factory=asyncio.Queue)
    _gone: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """End the session soon; nobody reads what it says any more."""
        self._gone.set()

    @property
    def is_cancelled(self) -> bool:
        return self._gone.is_set()

    def run(self, client: Client, loop: asyncio.AbstractEventLoop) -> Completion | Refused:
        """Run to the end, in a thread of its own, and return how it ended."""

        def put(one: Said) -> None:
            loop.call_soon_threadsafe(self.said.put_nowait, one)

        def heard(event: Event) -> None:
            if isinstance(event, Text):
                put(Piece(event.text))
            elif words := _words(event):
                put(News(words))

        def look() -> None:
            if self._gone.is_set():
                raise Cancelled("the request was cancelled")

        try:
            return _completed(client, self.asked, heard, look)
        except SpuLlmError as error:
            return refused(error)


@dataclass
class Sessions:
    """Sessions with one provider, `at_once` of them at a time, in the order they come."""

    client: Client
    at_once: int
    last: Completion | None = field(default=None, init=False)  # of a session that has ended
    _open: dict[Session, asyncio.Task[None]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.at_once)

    @property
    def count(self) -> int:
        """Return how many requests wait or are answered."""
        return len(self._open)

    def begin(self, asked: Asked) -> Session:
        """Return a session that runs when its turn comes. Refused where too many wait."""
        if len(self._open) >= MOST:
            raise Refused(503, f"{MOST} requests wait already; try again later")
        session = Session(asked)
        task = self._open[session] = asyncio.ensure_future(self._run(session))
        task.add_done_callback(lambda _: self._open.pop(session))
        return session

    async def _run(self, session: Session) -> None:
        if self._places.locked():
            session.said.put_nowait(News("waiting for earlier requests"))
        async with self._places:
            if session.is_cancelled:
                return
            loop = asyncio.get_running_loop()
            try:
                end = await asyncio.to_thread(session.run, self.client, loop)
            except Exception as error:
                session.said.put_nowait(Refused(500, f"unforeseen: {type(error).__name__}"))
                raise
            if isinstance(end, Completion):
                self.last = end
            session.said.put_nowait(end)

    async def close(self) -> None:
        """End all sessions, and wait until they have."""
        for session in self._open:
            session.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)


def _completed(client: Client, asked: Asked, heard: OnEvent, look: Look) -> Completion:
    if isinstance(asked.prompt, str):
        return client.complete(asked.prompt, asked.options, heard, look=look)
    return client.chat(asked.prompt, asked.options, heard, look=look)


def _words(event: Event) -> str:
    match event:
        case Stage():
            return event.name
        case Making():
            return f"made {event.made} of {event.total} batches of correlated randomness"
        case FetchingHint():
            return f"fetched {event.done / 1e6:.0f} of {event.total / 1e6:.0f} MB of the hint"
    return ""
