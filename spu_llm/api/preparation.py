"""Correlated randomness for completions to come, made ahead of time in a session of its own."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from models.tokenizer import Tokenizer
from spu_llm.api.completion import BothWays, messages, payload
from spu_llm.api.events import OnEvent, event_of
from spu_llm.api.provider import Provider
from spu_llm.core.errors import InputError
from spu_llm.core.units import mb
from spu_llm.core.values import CLIENT, PROVIDER, ROLES
from spu_llm.net.relay import Relay
from spu_llm.offline.stock import stored_bytes
from spu_llm.service.client import run_as_client
from spu_llm.service.supervisor import Look
from spu_llm.systems.decoding.records import PREPARATION, Ahead
from spu_llm.systems.program import Program

_PHASES = {"offline": ["offline"]}
_USUAL_TOKENS = 3  # of a drafted step (docs/results)


class NoRoom(InputError):
    """The correlated randomness of a single step is more than the disk that is given to it."""


@dataclass(frozen=True)
class Tokens:
    """Fewest and most tokens of a completion of so many steps."""

    least: int
    most: int

    @staticmethod
    def of(steps: int, draft_length: int) -> Tokens:
        """Return the bounds: a prefill gives one token, a step one and the drafts that stay."""
        return Tokens(1 + steps, 1 + steps * (1 + draft_length))


@dataclass(frozen=True)
class Prepared:
    """What was made ahead, and how far it goes. Its fields in JSON (`to_json`) are the command
    line's `--json`.
    """

    steps: int  # of a completion, after the prefill
    tokens: Tokens
    correlations: list[dict[str, Any]]  # a row a kind of correlation
    lacking_bytes: int  # for all steps that were asked for
    room_bytes: dict[str, int | None]  # that each party's disk had, by role; None: without a bound
    seconds: dict[str, float]  # "offline"
    bytes: dict[str, BothWays]  # "offline"
    messages: dict[str, int]  # "offline"
    learned: dict[str, list[str]]  # by "client" and "provider", from the ledger
    config: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def likely_steps(max_new_tokens: int, draft_length: int) -> int:
    """Return how many steps so many tokens are likely to take; the prefill gives the first one."""
    new = max_new_tokens - 1
    return -(-new // _USUAL_TOKENS) if draft_length else new


def prepare(
    request: Ahead,
    tokenizer: Tokenizer,
    provider: Provider,
    on_event: OnEvent = lambda event: None,
    disk_bytes: int | None = None,
    look: Look = lambda: None,
    *,
    program: Program = PREPARATION,
    text_format: str | None = None,
) -> Prepared:
    """Make correlated randomness with a provider that keeps some, too.

    `tokenizer`: of the text to come; `text_format`: the digest of what it is from, if that is the
    provider's. `disk_bytes`: only as much is made as the pool has room for, if all in it is to take
    no more; a provider may have less room. NoRoom when one step does not fit. `look` may end it.
    """
    request.check_options()
    if disk_bytes is not None:
        assert provider.pool is not None
        room = max(0, disk_bytes - stored_bytes(provider.pool))
        request = replace(request, room_bytes=room // provider.halves)

    def heard(said: dict[str, Any], relay: Relay) -> None:
        if (event := event_of(said, relay)) is not None:
            on_event(event)

    with provider.reached() as (server, pool):
        outcome, agreed = run_as_client(
            server,
            program,
            request,
            on_event=heard,
            tokenizer=tokenizer,
            text_format=text_format,
            pool=pool,
            hint_cache=provider.hint_cache,
            jobs=provider.jobs,
            look=look,
        )
    result = outcome.result
    if result["step_lacks_bytes"]:
        raise _no_room(request, provider, result)
    return Prepared(
        steps=result["steps"],
        tokens=Tokens.of(result["steps"], request.draft_length),
        correlations=result["correlations"],
        lacking_bytes=provider.halves * result["lacking_bytes"],
        room_bytes=result["room_bytes"],
        seconds={"offline": round(result["seconds"]["offline"], 3)},
        bytes=payload(result["traffic"], _PHASES),
        messages=messages(result["traffic"], _PHASES),
        learned=result["learned"],
        config={"pool": str(pool), "peer": result["peer"], **agreed},
    )


def _no_room(request: Ahead, provider: Provider, result: dict[str, Any]) -> NoRoom:
    """Return the error that says why nothing was made."""
    rooms, halves = result["room_bytes"], provider.halves
    if limiting(rooms) == ROLES[PROVIDER]:
        halves, room = 1, mb(rooms[ROLES[PROVIDER]])
        least = f"the provider has room for {room}; it may give more (serve --disk)"
    else:
        least = f"--disk leaves {mb(halves * rooms[ROLES[CLIENT]])} in {provider.pool}; give more"
    return NoRoom(
        f"a prompt of {request.prompt_tokens} tokens and one step take "
        f"{mb(halves * result['step_lacks_bytes'])} more, but {least}"
    )


def limiting(room_bytes: dict[str, int | None]) -> str:
    """Return the role of the party that has the least room; the client where none has less."""
    rooms = {role: math.inf if room is None else room for role, room in room_bytes.items()}
    return min(ROLES, key=lambda role: rooms[role])
