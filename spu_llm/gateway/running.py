"""Requests in their order: one after another, or a few at once, each in a thread, whose events come
out in the server's loop. A chat goes on in the session of its earlier turns where that is kept, and
a session is opened ahead for the next chat.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from models.chat import Message
from spu_llm.api.client import Client
from spu_llm.api.conversation import Ahead, Answer
from spu_llm.api.events import Event, Learned, Stock
from spu_llm.core.errors import BusyError, PeerError, SpuLlmError
from spu_llm.gateway.answering import Answering, News
from spu_llm.gateway.asked import Asked
from spu_llm.gateway.kept import Kept, Kind, can_be_kept, kind_of
from spu_llm.gateway.outcome import Outcome, of_answer, of_answers, of_completion
from spu_llm.gateway.quiet import is_quiet
from spu_llm.gateway.refusals import Refused, refused

MOST = 64  # requests that wait or are answered; further ones are refused
IDLE_S = 3540.0  # before the session of a conversation that has no turn ends by itself
SPARE_AFTER_S = 1.0  # without a request, before a session is opened for the next chat
WATCH_S = 30.0  # between two looks whether that session is still there


@dataclass
class Requests:
    """Requests to one provider, whose models are asked by `clients`, by the names that requests
    have for them: `at_once` are answered at a time, and `keep` conversations stay open beside them.
    One more is opened ahead of any chat (`ahead`; None: none is); where sessions have a pool, which
    one at a time has, it is there only while no other is.
    """

    clients: Mapping[str, Client]
    at_once: int
    keep: int
    ahead: Ahead | None = None
    learned: dict[str, list[str]] | None = field(default=None, init=False)  # in the last session
    _open: dict[Answering, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _kept: list[Kept] = field(default_factory=list, init=False)  # idle; the last used one last
    # Of each kept one, what ends it when it was idle for too long.
    _ends: dict[Kept, asyncio.TimerHandle] = field(default_factory=dict, init=False)
    _begun: set[Kept] = field(default_factory=set, init=False)  # whose threads may run
    _asked: deque[Kind] = field(default_factory=lambda: deque(maxlen=5), init=False)
    _beside: set[asyncio.Future[None]] = field(default_factory=set, init=False)
    _ending: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    # Whoever opens or ends a conversation that is kept: places, and a pool, are few.
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

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

    @property
    def stocks(self) -> list[tuple[int, Stock]]:
        """Return of each conversation how many turns it had, and what is there for the next one, as
        far as that is known.
        """
        return [(one.turns, one.stock) for one in self._kept if one.is_open and one.stock]

    def open(self, kind: Kind) -> None:
        """Open a conversation ahead of any request, which is likely to be of this kind, and see to
        it that there is one from now on.
        """
        self._asked.append(kind)
        if self.ahead is not None and self.keep:
            self._beside_requests(self._watch())

    def begin(self, asked: Asked) -> Answering:
        """Take a request, which is answered when its turn comes. Refused where too many wait."""
        if self.count >= MOST:
            raise Refused(503, f"{MOST} requests wait already; try again later")
        request = Answering(asked)
        task = self._open[request] = asyncio.ensure_future(self._run(request))
        task.add_done_callback(lambda _: self._open.pop(request))
        return request

    def stop(self, id: str) -> bool:
        """End a request's answer where it is, after the step that is computed. Return whether it
        does: a chat's does that stays open.
        """
        return any(request.stop() for request in self._open if request.id == id)

    async def close(self) -> None:
        """End all sessions, and wait until they have."""
        self._ending.set()
        for request in self._open:
            request.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        await asyncio.gather(*self._beside, return_exceptions=True)
        async with self._changing:
            await self._evict(0)

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
        """Draw the answers to a request one after another; repeat one that is not drawn."""
        asked = request.asked
        outcomes: list[Outcome] = []
        for draw in range(asked.draws):
            if outcomes:
                request.begin_next(outcomes[-1].finish_reason)
                request.look()
            outcomes.append(await self._drawn(request, asked.draw(draw)))
        for _ in range(asked.answers - asked.draws):
            request.repeat(outcomes[-1].finish_reason)
        return of_answers(outcomes, asked.answers)

    async def _drawn(self, request: Answering, asked: Asked) -> Outcome:
        try:
            return await self._answered(request, asked)
        except BusyError:
            if not self._kept:
                raise
            async with self._changing:
                await self._evict(0)  # whose places at the provider it can have
            return await self._answered(request, asked)

    async def _answered(self, request: Answering, asked: Asked) -> Outcome:
        if self.keep and can_be_kept(asked):
            return await self._turn(request)
        async with self._changing:
            if self._have_pool:
                await self._evict(0)  # one session at a time has it
        return await asyncio.to_thread(self._completed, request, asked)

    async def _turn(self, request: Answering) -> Outcome:
        """Answer a turn in the conversation that it goes on with, or in another one."""
        kept, was_there = await self._conversation_for(request.asked)
        try:
            answer = await self._said_next(request, kept)
        except PeerError:
            if not was_there or request.has_text:
                raise
            # Its session had ended, and nobody knew yet.
            kept, _ = await self._conversation_for(request.asked)
            answer = await self._said_next(request, kept)
        finally:
            self._asked.append(kind_of(request.asked, self.ahead))
            self._beside_requests(self._open_spare(SPARE_AFTER_S))
        async with self._changing:
            self._keep(kept)
            self._forget_closed()
            await self._evict(self.keep, spares=False, but=kept)
        return of_answer(answer)

    async def _said_next(self, request: Answering, kept: Kept) -> Answer:
        """Return a conversation's answer, which can be stopped meanwhile."""
        request.stop = kept.stop
        return await asyncio.to_thread(kept.answer, request.asked, request.heard, request.look)

    async def _conversation_for(self, asked: Asked) -> tuple[Kept, bool]:
        """Return a conversation for a request, and whether it was there already."""
        assert not isinstance(asked.prompt, str)
        async with self._changing:
            if (kept := await self._that_goes_on(asked)) is not None:
                return kept, True
            await self._evict(self._most - 1)
            kind, before = kind_of(asked, self.ahead), asked.prompt[:-1]
            return await asyncio.to_thread(self._conversation, kind, before), False

    @property
    def _most(self) -> int:
        """Return how many sessions are open at most, beside those that a request has."""
        return self.keep if self.ahead is None or self._have_pool else self.keep + 1

    @property
    def _have_pool(self) -> bool:
        return any(client.provider.pool is not None for client in self.clients.values())

    async def _that_goes_on(self, asked: Asked) -> Kept | None:
        """Return a conversation that a request goes on with, out of those that are kept."""
        self._forget_closed()
        # A spare one last: what a chat has said already is worth more.
        for kept in sorted(self._kept, key=lambda one: one.is_spare):
            if await asyncio.to_thread(kept.goes_on, asked):
                self._release(kept)
                return kept
        return None

    def _conversation(self, kind: Kind, before: list[Message]) -> Kept:
        """Begin a conversation, which is known from then on, even where nobody waits for it."""
        provider = self.clients[kind.model].provider
        kept = Kept(provider, kind, before, self.ahead, self._may_make)
        self._begun = {one for one in self._begun if one.is_open} | {kept}
        return kept

    def _may_make(self, kept: Kept) -> bool:
        """Return whether now is a time to make what a conversation's next turn takes: where nobody
        asks, and all is there for every other that is likelier to be asked. The one that was used
        last comes first, and one that was opened ahead of any chat last.
        """
        if self._open or not is_quiet():
            return False
        likeliest = sorted(reversed(self._kept), key=lambda one: one.is_spare)
        others = itertools.takewhile(lambda one: one is not kept, likeliest)
        return not any(one.lacks_stock for one in others)

    async def _watch(self) -> None:
        """Open spare conversations, also in place of one that has ended."""
        while not self._ending.is_set():
            await self._open_spare(0.0)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), WATCH_S)

    async def _open_spare(self, after_s: float) -> None:
        """Open a conversation for the next chat, of the kind that most of the last requests were
        of, where there is a place for one and nobody has asked for so long.
        """
        if self.ahead is None:
            return
        await asyncio.sleep(after_s)
        async with self._changing:
            self._forget_closed()
            likely = Counter(self._asked).most_common(1)[0][0]
            if self._open or any(one.is_spare and one.kind == likely for one in self._kept):
                return
            if spare := next((one for one in self._kept if one.is_spare), None):
                await self._end(spare)
            if self._ending.is_set() or self._open or len(self._kept) >= self._most:
                return
            try:
                kept = await asyncio.to_thread(self._conversation, likely, [])
            except SpuLlmError:
                return  # a request will say why
            self._keep(kept)

    async def _end(self, kept: Kept) -> None:
        self._release(kept)
        await asyncio.to_thread(kept.close, self._heard_last)

    def _keep(self, kept: Kept) -> None:
        """Keep a conversation until it is used, or was idle for too long."""
        self._kept.append(kept)
        self._ends[kept] = asyncio.get_running_loop().call_later(IDLE_S, self._expire, kept)

    def _release(self, kept: Kept) -> None:
        """Keep a conversation no more. Its timer goes with it, which would hold it for an hour."""
        self._kept.remove(kept)
        self._ends.pop(kept).cancel()

    def _forget_closed(self) -> None:
        for kept in [one for one in self._kept if not one.is_open]:
            self._release(kept)

    def _expire(self, kept: Kept) -> None:
        """End a conversation that nobody has gone on with."""
        self._beside_requests(self._end_idle(kept))

    async def _end_idle(self, kept: Kept) -> None:
        async with self._changing:
            if kept in self._kept:
                await self._end(kept)

    def _beside_requests(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done that no request waits for."""
        task = asyncio.ensure_future(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _completed(self, request: Answering, asked: Asked) -> Outcome:
        client, prompt, options = self.clients[asked.model], asked.prompt, asked.options
        if isinstance(prompt, str):
            completion = client.complete(prompt, options, request.heard, look=request.look)
        else:
            completion = client.chat(prompt, options, request.heard, look=request.look)
        self.learned = completion.learned
        return of_completion(completion)

    async def _evict(self, most: int, *, spares: bool = True, but: Kept | None = None) -> None:
        """End conversations until `most` are left, spare ones not counted unless `spares`: spare
        ones first, those of a single turn, which may never have another, then those that were used
        longest ago. `but`: one that stays, since its next turn may come now.
        """
        while len(some := [one for one in self._kept if spares or not one.is_spare]) > most:
            others = [one for one in some if one is not but]
            await self._end(min(others, key=lambda one: min(one.turns, 2)))

    def _heard_last(self, event: Event) -> None:
        if isinstance(event, Learned):
            self.learned = event.learned
