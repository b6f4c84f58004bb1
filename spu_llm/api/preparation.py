"""Correlated randomness for completions to come, made ahead of time in a session of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from models.tokenizer import Tokenizer
from spu_llm.api.completion import BothWays, messages, payload
from spu_llm.api.events import OnEvent, event_of
from spu_llm.api.provider import Provider
from spu_llm.core.errors import InputError
from spu_llm.core.units import mb
from spu_llm.core.values import CLIENT, PROVIDER, ROLES
from spu_llm.net.manifest import Manifest
from spu_llm.net.relay import Relay
from spu_llm.offline.stock import kinds_in, stored_bytes
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
    """Correlated randomness that was made ahead, and how far it goes. Its fields in JSON
    (`to_json`) are the command line's `--json`.
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


class Producers(Protocol):
    """Pairs of processes, one at each party, that make correlated randomness side by side."""

    def make(
        self,
        request: Ahead,
        text_format: str | None,
        lacking: Sequence[int],
        folder: Path,
        on_event: OnEvent,
        look: Look,
    ) -> Produced:
        """Make `lacking` batches of each kind that a completion takes, for the inbox of the peer's
        `folder` in the client's pool; return what came, which may be less. on_event hears `Making`
        and `Note`, look() may end it.
        """


@dataclass(frozen=True)
class Produced:
    """Batches that came of producers, and the result of each of their sessions that ended well."""

    batches: int
    results: tuple[dict[str, Any], ...]


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
    producers: Producers | None = None,
) -> Prepared:
    """Make correlated randomness with a provider that keeps some, too.

    `tokenizer`: of the text to come; `text_format`: the digest of what it is from, if that is the
    provider's. `disk_bytes`: only as much is made as the pool has room for, if all in it is to take
    no more; a provider may have less room. NoRoom when one step does not fit. `look` may end it.
    `producers`: they make what lacks, until nothing does; a session here makes it where nothing
    comes of them.
    """
    request.check_options()
    started = time.monotonic()
    results: list[dict[str, Any]] = []
    while True:
        if disk_bytes is not None:
            assert provider.pool is not None
            room = max(0, disk_bytes - stored_bytes(provider.pool))
            request = replace(request, room_bytes=room // provider.halves)
        counts = replace(request, counts=producers is not None)
        result, agreed, pool = _session(
            counts, tokenizer, provider, on_event, look, program, text_format
        )
        if result["step_lacks_bytes"] and not any(result["lacking_batches"]):
            raise _no_room(request, provider, result)
        results.append(result)
        if producers is None or not any(result["lacking_batches"]):
            break
        assert pool is not None
        lacking, folder = result["lacking_batches"], pool / result["peer"]
        made = producers.make(request, text_format, lacking, folder, on_event, look)
        results += made.results
        if not made.batches:
            producers = None
    seconds = result["seconds"]["offline"]
    if len(results) > 1:
        seconds = time.monotonic() - started
        _add_made(result["correlations"], results[:-1])
    traffic = _sums([one["traffic"]["offline"] for one in results])
    return _prepared(request, provider, result, agreed, pool, seconds, traffic)


def count(
    request: Ahead,
    tokenizer: Tokenizer,
    provider: Provider,
    on_event: OnEvent = lambda event: None,
    *,
    text_format: str | None = None,
) -> Prepared:
    """Find out what a completion takes and how far what is there goes; nothing is made but hints.
    Arguments as of `prepare`.
    """
    request.check_options()
    result, agreed, pool = _session(
        replace(request, counts=True),
        tokenizer,
        provider,
        on_event,
        lambda: None,
        PREPARATION,
        text_format,
    )
    seconds, traffic = result["seconds"]["offline"], result["traffic"]["offline"]
    return _prepared(request, provider, result, agreed, pool, seconds, traffic)


def _prepared(
    request: Ahead,
    provider: Provider,
    result: dict[str, Any],
    agreed: Manifest,
    pool: Path | None,
    seconds: float,
    traffic: dict[str, int],
) -> Prepared:
    cost = {"offline": traffic}
    return Prepared(
        steps=result["steps"],
        tokens=Tokens.of(result["steps"], request.draft_length),
        correlations=result["correlations"],
        lacking_bytes=provider.halves * result["lacking_bytes"],
        room_bytes=result["room_bytes"],
        seconds={"offline": round(seconds, 3)},
        bytes=payload(cost, _PHASES),
        messages=messages(cost, _PHASES),
        learned=result["learned"],
        config={"pool": str(pool), "peer": result["peer"], **agreed},
    )


def restock(
    prepared: Prepared,
    request: Ahead,
    folder: Path,
    producers: Producers,
    on_event: OnEvent = lambda event: None,
    look: Look = lambda: None,
    *,
    text_format: str | None = None,
) -> int:
    """Have producers make what the client's `folder` no longer has of what was `prepared` for a
    request, while sessions may use it; return how many batches came.
    """
    left = {kind.name: kind.units for kind in kinds_in(folder)}
    lacking = [
        -(-max(0, row["needed_units"] - left.get(row["kind"], 0)) // row["batch_units"])
        for row in prepared.correlations
    ]
    if not any(lacking):
        return 0
    return producers.make(request, text_format, lacking, folder, on_event, look).batches


def make_beside(
    request: Ahead,
    tokenizer: Tokenizer,
    provider: Provider,
    on_event: OnEvent,
    look: Look,
    *,
    program: Program = PREPARATION,
    text_format: str | None = None,
) -> dict[str, Any]:
    """Make the batches that a request asks for, for the inboxes of both parties' pools; return the
    session's result. `look` may end it.
    """
    assert request.beside
    result, _, _ = _session(request, tokenizer, provider, on_event, look, program, text_format)
    return result


_OF_MADE = ("made_units", "seconds", "bytes", "messages")


def _add_made(rows: list[dict[str, Any]], results: Sequence[dict[str, Any]]) -> None:
    """Add to rows of kinds what earlier sessions made of each, and what that cost."""
    by_kind = {row["kind"]: row for row in rows}
    for made in (one for result in results for one in result["correlations"]):
        row = by_kind[made["kind"]]
        row |= {name: row[name] + made[name] for name in _OF_MADE}


def _sums(costs: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the sum of records, name by name."""
    return {name: sum(cost[name] for cost in costs) for name in costs[0]}


def _session(
    request: Ahead,
    tokenizer: Tokenizer,
    provider: Provider,
    on_event: OnEvent,
    look: Look,
    program: Program,
    text_format: str | None,
) -> tuple[dict[str, Any], Manifest, Path | None]:
    """Return the result of a session, the agreed settings, and the client's pool directory."""

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
    return outcome.result, agreed, pool


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
