"""Turns of one conversation in one session: the cache stays between them, so that a turn's forward
has its own tokens alone.

What comes between two turns is the client's to say: `announce_turn` opens how many rows the next
one has, that there is none yet, that both parties make something for it meanwhile (`ahead`), or
that there will be none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from jax import Array

from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import WireError
from spu_llm.core.prg import Prg
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, Owner
from spu_llm.runtime.session import Session
from spu_llm.systems.decoding.ahead import Ahead
from spu_llm.systems.decoding.cadence import Cadence
from spu_llm.systems.decoding.chat_request import ChatRequest
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs, Retained, VerificationResult
from spu_llm.systems.decoding.generate import Completion, Report, answer, declare, rows_of_client

# How long a conversation is kept while nobody says anything, and how often the client says so.
IDLE_S = 3600.0
STILL_S = 10.0
_LATE_S = 600.0  # by which a provider is more patient
_READ_S = 0.25  # more than a drafter takes to read the rows that a turn is rounded up to
_END, _STILL, _MAKE = -1, 0, -2


@dataclass
class Room:
    """Tokens of a conversation, by what both parties know: as many as there may be at most."""

    most: int
    taken: int = 0

    def limit(self, rows: int, asked: int) -> int:
        """Return how many tokens the answer to a turn of so many rows may have; 0: no room."""
        return max(0, min(asked, self.most - self.taken - rows))

    def take(self, rows: int, report: Report, limit: int, step_rows: int) -> None:
        """Count a turn and its answer."""
        self.taken += rows + min(limit, 1 + report.steps * step_rows)


def _announce_turn(rows: Array) -> Array:
    return reveal(rows, to=Owner.PUBLIC, label="rows of the next turn")


announce_turn = SecureFunction(_announce_turn, (Owner.CLIENT,), "announce turn")


@dataclass
class Turns:
    """The client's turns. next_tokens(seconds): of the turn that comes within that time, [] if none
    does, and None if there will be no other.
    """

    side: ClientSide
    next_tokens: Callable[[float], list[int] | None]

    empty: int = 0  # rows of the next turn, the first ones, that hold no text

    def announced(
        self, steps: int, request: ChatRequest, room: int, ahead: Ahead | None
    ) -> list[int]:
        """Return what the next announcement says, int32 [1], and have that turn begun."""
        tokens = self.next_tokens(STILL_S if ahead is None else 0.0)
        if ahead is not None and tokens == []:
            if ahead.lacking and ahead.may_make():
                return [_MAKE]
            if ahead.expected:
                tokens = self.next_tokens(STILL_S)
        if not tokens:
            return [_END if tokens is None else _STILL]
        filled = self.side.uncached(steps, request.hide_progress) + len(tokens)
        rows = request.rows_of_turn(filled, room)
        if rows >= room:
            return [_END]
        self.empty = rows - filled
        self.side = self.side.next_turn(tokens)
        # A turn that came while something was made is announced right after: how long it is to
        # read then says no more than how many rows it takes.
        read = Cadence(_READ_S * rows / request.turn_rows) if request.turn_rows else None
        if read is not None:
            read.begin()
        self.side.follow()
        if read is not None:
            read.wait()
        return [rows]


def converse(
    session: Session,
    completion: Completion,
    decoder: Decoder,
    client: Turns | None,
    provider: Prg | None,
    on_step: Callable[[Report], None] = lambda report: None,
    ahead: Ahead | None = None,
) -> Iterator[Report]:
    """Answer turn after turn, a report each, until the client has no other; `client` and `provider`
    are what each party alone has, as for `generate`; `ahead` makes what turns take before they
    come. WireError for a client that does not keep to what was agreed.
    """
    request, layout = completion.request, completion.layout
    assert isinstance(request, ChatRequest)
    hidden, count = request.hide_progress, request.step_rows
    declare(session, completion)

    def prefill(inputs: JudgeInputs, then: int | None) -> VerificationResult:
        prompt = rows_of_client(session, completion, _side(client), rows, ClientSide.prefill_input)
        return decoder.prefill(prompt, inputs, then)

    def extend(inputs: JudgeInputs, then: int | None) -> VerificationResult:
        empty = session.local(CLIENT, lambda: _turns(client).empty) if hidden else 0
        turn = rows_of_client(
            session, completion, _side(client), rows, ClientSide.turn_input, rows, empty
        )
        return decoder.extend(turn, inputs, retained, then, empty)

    room, rows, begin = Room(layout.live_rows), request.prompt_tokens, prefill
    retained: Retained = None
    if hidden:
        length = len(request.public_prefix) + (request.turn_rows or request.prompt_tokens)
        session.local(
            CLIENT,
            ClientSide.keep_time,
            _side(client),
            request.draft_length,
            completion.limit,
            length,
        )
    if request.begins_later:
        decoder.open()
        begin = extend
        rows = _next_rows(session, client, 0, request, room.most, ahead)
        if rows < 0:
            return
        completion = _limited(completion, request, room, rows)
    while True:
        report, retained = answer(
            session, completion, decoder, _side(client), provider, begin, on_step
        )
        session.stop_prefetching()
        room.take(rows, report, completion.limit, count)
        if hidden:
            retained = _retained(client, count)
        yield report
        left = room.most - room.taken
        rows = _next_rows(session, client, report.steps, request, left, ahead)
        if rows < 0:
            return
        completion, begin = _limited(completion, request, room, rows), extend


def _limited(completion: Completion, request: ChatRequest, room: Room, rows: int) -> Completion:
    """Return a completion with the limit that an answer to a turn of so many rows has. WireError
    where there is no room for one.
    """
    limit = room.limit(rows, request.max_new_tokens)
    if not limit or rows != request.rows_of_turn(rows, room.most - room.taken):
        raise WireError(f"the client's turn of {rows} rows does not fit the conversation")
    return replace(completion, limit=limit)


def _turns(client: Turns | None) -> Turns:
    assert client is not None
    return client


def _side(client: Turns | None) -> ClientSide | None:
    return None if client is None else client.side


def _retained(client: Turns | None, count: int) -> Retained:
    """Return which rows of the last step the client keeps, bool [1, count]; None at the
    provider.
    """
    return None if client is None else client.side.retained(count)[None]


def _next_rows(
    session: Session,
    client: Turns | None,
    steps: int,
    request: ChatRequest,
    room: int,
    ahead: Ahead | None,
) -> int:
    """Wait for the client's next turn, and make what it takes meanwhile; return how many rows it
    has, or -1 if there is none. Raise WireError when the client has nothing to say for too long.
    """
    began = time.monotonic()
    if ahead is not None:
        ahead.begin()
    while True:
        said = session.private(
            CLIENT, Turns.announced, (1,), np.int32, client, steps, request, room, ahead
        )
        heard = session.get(session.call(announce_turn, said))
        assert heard is not None
        rows = int(heard[0])
        if rows == _STILL and ahead is not None and not ahead.expected:
            ahead.expect()
        elif rows == _MAKE and ahead is not None and ahead.lacking:
            ahead.make_some()
        elif rows != _STILL:
            if rows < _END:
                raise WireError(f"the client announces a turn of {rows} rows")
            return rows
        if time.monotonic() - began > IDLE_S + _LATE_S and client is None:
            raise WireError("the client had nothing to say for too long")
