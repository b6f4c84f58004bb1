"""The program behind `chat`: a conversation, this party's side.

The client's user says `turn` (token ids, with the `most` tokens of its answer), `stop` (the answer
that is being written), `make` (whether now is a time to make something for the next turn) and
`end`; the worker says `answer` after each, `open` before the first one where that comes later, and
`stock`, how far correlated randomness for the next one goes.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from spu_llm.core.channel import Traffic
from spu_llm.core.errors import InputError
from spu_llm.core.meter import Entry
from spu_llm.core.settings import OWN
from spu_llm.core.values import CLIENT
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.ahead import Ahead
from spu_llm.systems.decoding.chat_request import ChatRequest
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.completion import (
    PHASES,
    client_side_of,
    held_text,
    held_weights,
    provider_stream,
)
from spu_llm.systems.decoding.conversation import IDLE_S, Turns, converse
from spu_llm.systems.decoding.generate import Completion, Report
from spu_llm.systems.decoding.records import ClientInputs
from spu_llm.systems.program import Hear, Job, Send


class User:
    """The user whose turns the client's worker reads."""

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._turns: list[dict[str, Any]] = []
        self._most: int | None = None
        self._ended = self._stopped = False
        self.may_make = True
        self._silent_since = time.monotonic()

    def interrupted(self) -> bool:
        """Return whether the answer that is being written is to end."""
        while self._listen(0.0):
            pass
        stopped, self._stopped = self._stopped, False
        return stopped or self._ended

    def next_tokens(self, seconds: float) -> list[int] | None:
        """Return the next turn's tokens, as `Turns` asks for them; None, too, once nothing was said
        for IDLE_S.
        """
        if not self._turns and not self._ended and self._listen(seconds):
            while self._listen(0.0):
                pass
        if self._turns:
            self._stopped, turn = False, self._turns.pop(0)
            self._most = turn.get("most")
            return list(turn["turn"])
        return None if self._ended or time.monotonic() - self._silent_since > IDLE_S else []

    def most(self) -> int | None:
        """Return how many tokens the answer to the last turn may have, within what was agreed."""
        return self._most

    def answered(self) -> None:
        """Begin to count the user's silence: an answer has ended."""
        self._silent_since = time.monotonic()

    def _listen(self, seconds: float) -> bool:
        said = self._hear(seconds)
        if said is None:
            return False
        self._turns += [dict(said)] if "turn" in said else []
        self._stopped |= "stop" in said
        self.may_make = said.get("make", self.may_make)
        self._ended |= "end" in said
        return True


def run(
    session: PartySession, job: Job[ChatRequest, ClientInputs], send: Send, hear: Hear
) -> dict[str, Any]:
    """Prepare, then answer turn after turn; at the client an `answer` event for each."""
    config = job.model
    completion = Completion.of(config, job.request, job.before, job.backend)
    with session.meter.in_phase("offline"):
        text = held_text(session, completion, job)
        decoder = completion.decoder(session, held_weights(session, config, job), text)
    user = User(hear)
    turns = None
    told = asked = 0  # of the meter's entries: up to the last answer, and to its turn

    def next_tokens(seconds: float) -> list[int] | None:
        nonlocal asked
        if tokens := user.next_tokens(seconds):
            asked = len(session.meter.entries)
        return tokens

    if session.rank == CLIENT:
        side = client_side_of(job.client, completion, send)
        side.interrupted, side.most = user.interrupted, user.most
        turns = Turns(side, next_tokens)
    provider = None if turns is not None else provider_stream(job.provider)
    ahead = None
    if job.request.begins_later:
        if job.backend != OWN:
            raise InputError("SPU's own functions take nothing that is made ahead")
        ahead = Ahead(session, decoder, job.request)
        if turns is not None:
            ahead.on_stock = lambda steps, lacking: send("stock", steps=steps, lacking=lacking)
            ahead.may_make = lambda: user.may_make

    def on_step(report: Report) -> None:
        send("step", steps=report.steps, accepted=report.accepted, drafted=report.drafted)

    if job.request.begins_later:
        send("open")
    else:
        send("stage", name=f"prefilling {job.request.prompt_tokens} tokens")
    for report in converse(session, completion, decoder, turns, provider, on_step, ahead):
        entries = session.meter.entries
        if turns is not None:
            send("answer", **_answer(turns.side, report, entries[asked:], entries[told:]))
            user.answered()
        told = len(entries)
    return {
        "seconds": session.meter.seconds,
        "traffic": {phase: asdict(session.meter.traffic(phase)) for phase in PHASES},
        "learned": session.ledger.learned(),
    }


def _answer(
    side: ClientSide, report: Report, waited: list[Entry], entries: list[Entry]
) -> dict[str, Any]:
    """Return what the client's user gets of an answer: the text, the seconds that it was waited
    for, and all traffic since the answer before.
    """
    own = [entry for entry in waited if not entry.beside]
    return {
        "text": side.text,
        "token_ids": side.tokens,
        "report": asdict(report),
        "seconds": {p: sum((e.seconds for e in own if e.phase == p), 0.0) for p in PHASES},
        "traffic": {
            p: asdict(sum((e.traffic for e in entries if e.phase == p), Traffic())) for p in PHASES
        },
    }
