"""What a piece of a session costs: its wall time, its traffic, and the memory of both workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from jax.experimental import enable_x64

from experiments.common.memory import resident
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.channel import Traffic
from spu_llm.core.meter import Entry
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, ROLES, Owner
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import Session

T = TypeVar("T")
FIGURES = ("seconds", "client_to_provider", "provider_to_client", "messages")

_note = SecureFunction(
    lambda x: reveal(x, to=Owner.CLIENT, label="provider's peak memory (study)"),
    (Owner.PROVIDER,),
    "note",
)


def timed(session: Session, phase: str, work: Callable[[], T]) -> tuple[T, dict[str, Any]]:
    """The result of `work` and its cost, as phase `phase` of the session's meter.

    Wall seconds, bytes by direction and `messages` (sends of both parties) are online ones; what
    was made meanwhile for later is in `offline`, its seconds included.
    """
    meter, rank = session.meter, getattr(session, "rank", CLIENT)
    mark, before, started = len(meter.entries), meter.seconds.get(phase, 0.0), time.perf_counter()
    with meter.in_phase(phase):
        result = work()
    elapsed = time.perf_counter() - started
    online = meter.seconds[phase] - before
    entries = meter.entries[mark:]
    offline = total([e for e in entries if e.phase != phase], rank)
    return result, total([e for e in entries if e.phase == phase], rank) | {
        "seconds": round(online, 4),
        "offline": offline | {"seconds": round(elapsed - online, 4)},
    }


def price(entries: Sequence[Entry], demand: Demand, rank: int) -> dict[str, dict[str, Any]]:
    """What the material of `demand` costs to make, by name: its part of the batches among
    `entries`.

    The first batch of a kind is left out where there are others: it compiles. Kinds that no batch
    was made of are not there.
    """
    made: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.kind == "pool":
            made.setdefault(entry.name, []).append(entry)
    found = {}
    for name, need in demand.material.items():
        if name in made:
            batches = made[name][1:] or made[name]
            part = need.units / (len(batches) * need.correlation.chunk)
            costs = total(batches, rank).items()
            found[name] = {"units": need.units} | {k: part * n for k, n in costs}
    return found


def summed(costs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Seconds, bytes by direction and sends of all together."""
    found = list(costs)
    return {name: sum(cost[name] for cost in found) for name in FIGURES}


def total(entries: Sequence[Entry], rank: int) -> dict[str, Any]:
    """Seconds, bytes by direction and sends of both parties over entries of the party `rank`."""
    traffic = sum((e.traffic for e in entries), Traffic())
    ours, peers = traffic.sent_bytes, traffic.received_bytes
    return {
        "seconds": round(sum(e.seconds for e in entries), 4),
        "client_to_provider": ours if rank == CLIENT else peers,
        "provider_to_client": peers if rank == CLIENT else ours,
        "messages": traffic.messages,
    }


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median over runs of every figure, nested ones included."""
    return {
        name: medians([run[name] for run in runs])
        if isinstance(value, dict)
        else statistics.median(run[name] for run in runs)
        for name, value in runs[0].items()
    }


def peaks(session: PartySession) -> dict[str, int]:
    """Largest resident bytes of both workers since `forget_peak`, at the client."""
    own = resident("VmHWM")
    with enable_x64():
        note = session.private(PROVIDER, lambda: [own], (1,), np.int64)
        heard = session.get(session.call(_note, note))
    return dict(zip(ROLES, (own, int(heard[0]) if heard is not None else 0), strict=True))
