"""Requests in their order: one after another, or a few at once, each in a thread, whose events come
out in the server's loop. A chat goes on in the session of its earlier turns where that is kept.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from models.chat import Message
from spu_llm.api.client import Client, CompletionOptions
from spu_llm.api.events import Event, FetchingHint, Learned, Making, Stage, Text
from spu_llm.core.errors import BusyError, SpuLlmError
from spu_llm.gateway.asked import Asked
from spu_llm.gateway.kept import Kept, can_be_kept
from spu_llm.gateway.outcome import Outcome, of_answer, of_completion
from spu_llm.gateway.refusals import Refused, refused

MOST = 64  # requests that wait or are answered; further ones are refused
IDLE_S = 540.0  # before the session of a conversation that has no turn ends by itself


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


Said = Piece | News | Outcome | Refused  # one of the last two kinds comes, at the end


@dataclass(eq=False)
class Answering:
    """A request that waits for its turn, is answered, and ends by itself once `cancel` was called.
    Its events go to the loop that it was made in.
    """

    asked: Asked
    said: asyncio.Queue[Said] = field(default_factory=asyncio.Queue)
    _gone: threading.Event = field(default_factory=threading.Event)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def cancel(self) -> None:
        """End soon; nobody reads what is said any more."""
        self._gone.set()

    @property
    def is_cancelled(self) -> bool:
        return self._gone.is_set()

    def heard(self, event: Event) -> None:
        """Say what an event has for whoever asked; from any thread."""
        if isinstance(event, Text):
            self._put(Piece(event.text))
        elif words := _words(event):
            self._put(News(words))

    def look(self) -> None:
        """Raise Cancelled when whoever asked has gone."""
        if self._gone.is_set():
            raise Cancelled("the request was cancelled")

    def _put(self, one: Said) -> None:
        self._loop.call_soon_threadsafe(self.said.put_nowait, one)


@dataclass
class Requests:
    """Requests to one provider: `at_once` are answered at a time, and `keep` conversations stay
    open beside them.
    """

    client: Client
    at_once: int
    keep: int
    learned: dict[str, list[str]] | None = field(default=None, init=False)  # in the last session
    _open: dict[Answering, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _kept: list[Kept] = field(default_factory=list, init=False)  # idle; the last used one last
    _begun: set[Kept] = field(default_factory=set, init=False)  # whose threads may run
    _closing: set[asyncio.Future[None]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.at_once)

    @property
    def count(self) -> int:
        """Return how many requests wait or are answered, whose programs are there."""
        return sum(not request.is_cancelled for request in self._open)

    @property
    def conversations(self) -> int:
        """Return how many conversations are open and wait for a turn."""
        return len(self._kept)

    def begin(self, asked: Asked) -> Answering:
        """Take a request, which is answered when its turn comes. Refused where too many wait."""
        if self.count >= MOST:
            raise Refused(503, f"{MOST} requests wait already; try again later")
        request = Answering(asked)
        task = self._open[request] = asyncio.ensure_future(self._run(request))
        task.add_done_callback(lambda _: self._open.pop(request))
        return request

    async def close(self) -> None:
        """End all sessions, and wait until they have."""
        for request in self._open:
            request.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        await self._evict(0)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def abandon(self) -> None:
        """Let all sessions end by themselves, without a loop, which may have ended at any point of
        a request.
        """
        for request in self._open:
            request.cancel()
        for kept in list(self._begun):
            kept.abandon()

    async def _run(self, request: Answering) -> None:
        if self._places.locked():
            request.said.put_nowait(News("waiting for earlier requests"))
        async with self._places:
            if request.is_cancelled:
                return
            try:
                end = await self._outcome(request)
            except SpuLlmError as error:
                request.said.put_nowait(refused(error))
            except Exception as error:
                request.said.put_nowait(Refused(500, f"unforeseen: {type(error).__name__}"))
                raise
            else:
                request.said.put_nowait(end)

    async def _outcome(self, request: Answering) -> Outcome:
        try:
            return await self._answered(request)
        except BusyError:
            if not self._kept:
                raise
            await self._evict(0)  # whose places at the provider it can have
            return await self._answered(request)

    async def _answered(self, request: Answering) -> Outcome:
        if self.keep and can_be_kept(request.asked):
            return await self._turn(request)
        return await asyncio.to_thread(self._completed, request)

    async def _turn(self, request: Answering) -> Outcome:
        """Answer a turn in the conversation that it goes on with, or in another one."""
        asked = request.asked
        assert not isinstance(asked.prompt, str)
        *before, turn = asked.prompt
        kept = next((one for one in self._kept if one.goes_on(asked)), None)
        if kept is not None:
            self._kept.remove(kept)
        else:
            await self._evict(self.keep - 1)
            kept = await asyncio.to_thread(self._conversation, asked.options, before)
        answer = await asyncio.to_thread(kept.answer, turn.content, request.heard, request.look)
        self._kept.append(kept)
        asyncio.get_running_loop().call_later(IDLE_S, self._expire, kept, kept.turns)
        await self._evict(self.keep)
        return of_answer(answer)

    def _conversation(self, options: CompletionOptions, before: list[Message]) -> Kept:
        """Begin a conversation, which is known from then on, even where nobody waits for it."""
        kept = Kept(self.client.provider, options, before)
        self._begun = {one for one in self._begun if one.is_open} | {kept}
        return kept

    def _expire(self, kept: Kept, turns: int) -> None:
        """End a conversation that is as it was."""
        if kept in self._kept and kept.turns == turns:
            self._kept.remove(kept)
            closing = asyncio.ensure_future(asyncio.to_thread(kept.close, self._heard_last))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _completed(self, request: Answering) -> Outcome:
        prompt, options = request.asked.prompt, request.asked.options
        if isinstance(prompt, str):
            completion = self.client.complete(prompt, options, request.heard, look=request.look)
        else:
            completion = self.client.chat(prompt, options, request.heard, look=request.look)
        self.learned = completion.learned
        return of_completion(completion)

    async def _evict(self, most: int) -> None:
        """End conversations until `most` are left: those of a single turn first, which may never
        have another, then those that were used longest ago.
        """
        while len(self._kept) > most:
            kept = min(self._kept, key=lambda one: one.turns > 1)
            self._kept.remove(kept)
            await asyncio.to_thread(kept.close, self._heard_last)

    def _heard_last(self, event: Event) -> None:
        if isinstance(event, Learned):
            self.learned = event.learned


def _words(event: Event) -> str:
    match event:
        case Stage():
            return event.name
        case Making():
            return f"made {event.made} of {event.total} batches of correlated randomness"
        case FetchingHint():
            return f"fetched {event.done / 1e6:.0f} of {event.total / 1e6:.0f} MB of the hint"
    return ""
