"""Cost of a piece of a session: its wall time, its traffic, and the memory of both workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import enable_x64

from experiments.common.transfers import extensions
from protocols.verification.variants import lanes_of
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.plan import Step
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.channel import Traffic
from spu_llm.core.meter import Entry
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, ROLES, Owner
from spu_llm.offline.ot.transfers import EXTENSION
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import Session
from spu_llm.systems.decoding.decoder import Decoder, VerificationResult
from spu_llm.systems.decoding.generate import announce

T = TypeVar("T")
FIGURES = ("seconds", "client_to_provider", "provider_to_client", "messages")


def opening(label: str, owner: Owner, name: str, to: Owner = Owner.CLIENT) -> SecureFunction:
    """Return a secure function that opens its argument, owned by `owner`, to the party `to`."""
    return SecureFunction(lambda x: reveal(x, to=to, label=label), (owner,), name)


_note = opening("provider's peak memory (study)", Owner.PROVIDER, "note")


def timed(session: Session, phase: str, work: Callable[[], T]) -> tuple[T, dict[str, Any]]:
    """Run `work` as phase `phase` of the session's meter; return its result and its cost.

    Wall seconds, bytes by direction and `messages` (sends of both parties) are online; the cost of
    correlated randomness that was made meanwhile is in `offline`, its seconds included.
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


class Forward(NamedTuple):
    """A measured forward."""

    cost: dict[str, Any]
    entries: list[Entry]
    steps: Sequence[Step]
    demand: Demand


def forward(
    session: PartySession,
    decoder: Decoder,
    phase: str,
    run: Callable[[], VerificationResult],
    resolve: Callable[..., int],
    *args: Any,
) -> Forward:
    """Run a forward of one sequence, resolve its outcome and announce the result, timed as phase
    `phase`; the correlations that the forward takes are made before it, as offline cost.
    resolve(*args, outcome) returns, at the client, the number of accepted drafts.
    """
    mark = len(session.meter.entries)

    def work() -> None:
        seen = jax.tree.map(session.get, run().outcome)
        stay = session.local(CLIENT, lambda: resolve(*args, *lanes_of(seen)))
        session.call(announce, session.private(CLIENT, np.array, (2,), np.int32, [stay, 0]))

    _, cost = timed(session, phase, work)
    assert decoder.last is not None
    function, inputs = decoder.last
    entries = [
        e
        for e in session.meter.entries[mark:]
        if e.phase == phase and e.function == function.name and e.kind != "control"
    ]
    return Forward(cost, entries, function.plan(*inputs)[0].steps, decoder.demand)


def make_second_batches(session: PartySession, demand: Demand) -> None:
    """Make a second batch of each correlation of `demand` of which one batch was made, because the
    seconds of the first include compilation.
    """
    made = batches_made(session.meter.entries)
    for name, need in demand.correlations.items():
        if len(made.get(name, ())) == 1:
            there = session.preprocessing.available(need.correlation)
            session.preprocessing.prepare(need.correlation, there + 1, need.fixed)


def grouped(entries: Iterable[Entry], name_of: Callable[[Entry], str]) -> dict[str, list[Entry]]:
    """Group entries by their `name_of`, in order."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(name_of(entry), []).append(entry)
    return groups


def batches_made(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Select the entries that are batches of a correlation, grouped by its name."""
    return grouped((e for e in entries if e.kind == "pool"), lambda e: e.name)


def price(entries: Sequence[Entry], demand: Demand, rank: int) -> dict[str, dict[str, Any]]:
    """Return the cost of making the correlations of `demand`, by name: their part of the cost of
    the batches among `entries`, and of extending the transfers that they take.

    The first batch of a correlation is left out where there are others, because it compiles. A
    correlation without a batch is missing in the result.
    """
    made = batches_made(entries)
    prices = {}
    for name, need in demand.correlations.items():
        if name in made:
            batches, one = made[name][1:] or made[name], need.correlation
            part = need.units / (len(batches) * one.chunk)
            costs = _times(part, total(batches, rank))
            if EXTENSION in made and max(one.transfers):
                # The first extension of a session makes what it starts from, too.
                longer = made[EXTENSION][1:] or made[EXTENSION]
                part = extensions(one, need.units) / len(longer)
                costs = summed([costs, _times(part, total(longer, rank))])
            prices[name] = {"units": need.units} | costs
    return prices


def _times(part: float, cost: dict[str, Any]) -> dict[str, Any]:
    return {name: part * cost[name] for name in FIGURES}


def summed(costs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Add up costs: seconds, bytes by direction and sends."""
    entries = list(costs)
    return {name: sum(cost[name] for cost in entries) for name in FIGURES}


def total(entries: Sequence[Entry], rank: int) -> dict[str, Any]:
    """Add up the meter entries of party `rank`: seconds, bytes by direction, and sends of both
    parties.
    """
    traffic = sum((e.traffic for e in entries), Traffic())
    ours, peers = traffic.sent_bytes, traffic.received_bytes
    return {
        "seconds": round(sum(e.seconds for e in entries), 4),
        "client_to_provider": ours if rank == CLIENT else peers,
        "provider_to_client": peers if rank == CLIENT else ours,
        "messages": traffic.messages,
    }


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median over runs of every figure, nested ones included."""
    return {
        name: medians([run[name] for run in runs])
        if isinstance(value, dict)
        else statistics.median(run[name] for run in runs)
        for name, value in runs[0].items()
    }


# ---- memory


def resident(field_name: str) -> int:
    """Return the resident bytes of this process by the kernel's count: VmRSS, the present ones;
    VmHWM, the largest since `forget_peak`.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field_name}:"):
            return 1024 * int(line.split()[1])
    return 0


def forget_peak() -> None:
    """Reset the peak of resident bytes; where the kernel does not allow it, peaks count from the
    start of the process.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        pass


def peaks(session: PartySession) -> dict[str, int]:
    """Return the peak resident bytes of both workers since `forget_peak`, by role; valid at the
    client only.
    """
    own = resident("VmHWM")
    return dict(zip(ROLES, (own, *hear(session, _note, own)), strict=True))


def hear(session: PartySession, note: SecureFunction, *numbers: int) -> list[int]:
    """Open the provider's numbers to the client by `note`; return them, zeros at the provider."""
    with enable_x64():  # whole words
        own = session.private(PROVIDER, lambda: numbers, (len(numbers),), np.int64)
        heard = session.get(session.call(note, own))
    return heard.tolist() if heard is not None else [0] * len(numbers)
