"""The program behind `prepare`: both parties make correlated randomness for a completion to come.

Neither prompt nor drafts are needed: what a completion takes follows from its request. Of products
with the provider's weights only the hint is kept (`spu_llm.offline.silent`): masks are made in the
session.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import numpy as np

from spu_llm.compiler.demand import CorrelationRequest, Demand
from spu_llm.core.channel import Traffic
from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import InputError, PoolError
from spu_llm.core.values import CLIENT, PROVIDER, ROLES
from spu_llm.offline import inbox
from spu_llm.offline.pool import Pool
from spu_llm.runtime.dry_session import DrySession
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.completion import held_text, held_weights
from spu_llm.systems.decoding.decoder import Retained
from spu_llm.systems.decoding.generate import Completion
from spu_llm.systems.decoding.records import Ahead
from spu_llm.systems.decoding.session_shape import Text
from spu_llm.systems.program import Job, Nothing, Send


def run(session: PartySession, job: Job[Ahead, Nothing], send: Send) -> dict[str, Any]:
    """Make what a prefill and `steps` decode steps take and the pool lacks, or as much of it as
    there is room for, step by step; nothing if there is no room for the prefill and a step, or the
    request only counts. `made_beside` where it asks for batches.

    Raise PoolError when one of the parties would not keep it.
    """
    if job.request.beside:
        return made_beside(session, job, send)
    if session.pool_folder is None:
        raise _not_kept()
    config, rooms = job.model, {CLIENT: job.request.room_bytes}
    rooms[PROVIDER] = session.tell(PROVIDER, session.preprocessing.pool.room())
    if rooms[CLIENT] is not None:
        session.ledger.declare(PROVIDER, "how much disk the client gives to correlated randomness")
    if rooms[PROVIDER] is not None:
        session.ledger.declare(
            CLIENT, "how much disk the provider has left for correlated randomness"
        )
    completion = Completion.of(config, job.request, job.before)
    with session.meter.in_phase("offline"):
        weights = held_weights(session, config, job, completion.layout.part)
        text = held_text(session, completion, job)
        completion.prepare(session, completion.decoder(session, weights, text))
        send("stage", name="finding out what is needed")
        course = demand_of(session.dry(), completion, weights, job.request.steps, text)
        send("stage", name="making correlated randomness")
        session.set_up(sum(course, Demand()))
        course = [demand.unbound for demand in course]
        count = demands_within(session.preprocessing.pool, course, least(rooms.values()))
        wanted = sum(course[:count], Demand())
        lacking = lacking_batches(session.preprocessing.pool, course, wanted)
        session.make(Demand() if job.request.counts else wanted)
    whole = count == len(course)
    return {
        "peer": session.pool_folder.name,
        "room_bytes": {ROLES[who]: room for who, room in rooms.items()},
        "steps": steps_covered(session.preprocessing.pool, course) if whole else max(0, count - 1),
        "lacking_bytes": growth_bytes(session.preprocessing.pool, sum(course, Demand())),
        "step_lacks_bytes": growth_bytes(session.preprocessing.pool, sum(course[:2], Demand())),
        "lacking_batches": lacking,
        "correlations": summary(session, course),
        "seconds": session.meter.seconds,
        "traffic": {"offline": asdict(session.meter.traffic("offline"))},
        "learned": session.ledger.learned(),
    }


def made_beside(session: PartySession, job: Job[Ahead, Nothing], send: Send) -> dict[str, Any]:
    """Make the batches that the request asks for, one by one and each kind in turn, for the inbox
    of a pool that another session may have; hints are not needed.

    Raise PoolError when one of the parties would not keep it or has no room for more, InputError
    when the completion takes other kinds.
    """
    if session.inbox_folder is None:
        raise _not_kept()
    completion = Completion.of(job.model, job.request, job.before)
    with session.meter.in_phase("offline"):
        weights = held_weights(session, job.model, job, completion.layout.part)
        text = held_text(session, completion, job)
        send("stage", name="finding out what is needed")
        course = demand_of(session.dry(), completion, weights, job.request.steps, text)
        kinds = [one.correlation for one in sum(course, Demand()).unbound.correlations.values()]
        if len(kinds) != len(job.request.batches):
            raise InputError(
                f"the completion takes {len(kinds)} kinds of correlated randomness, not "
                f"{len(job.request.batches)}"
            )
        send("stage", name="making correlated randomness")
        pool, total = session.preprocessing.pool, sum(job.request.batches)
        for made, kind in enumerate(in_turn(kinds, job.request.batches)):
            send("making", made=made, total=total)
            room = pool.room()
            if room is not None and room < pool.growth_bytes(kind, 1):
                raise PoolError("there is no room for more correlated randomness")
            batch = pool.make(kind)
            inbox.put(session.inbox_folder, batch.label, batch.key, batch.results, session.objects)
        send("making", made=total, total=total)
    return {
        "correlations": [{"kind": kind.name, **made_of(session, kind)} for kind in kinds],
        "seconds": session.meter.seconds,
        "traffic": {"offline": asdict(session.meter.traffic("offline"))},
        "learned": session.ledger.learned(),
    }


def in_turn(kinds: Sequence[Correlation], batches: Sequence[int]) -> Iterator[Correlation]:
    """Yield each kind as often as `batches` says, spread evenly: a session that ends early leaves
    some of each.
    """
    places = [
        ((number + 0.5) / count, index)
        for index, count in enumerate(batches)
        for number in range(count)
    ]
    for _, index in sorted(places):
        yield kinds[index]


def _not_kept() -> PoolError:
    return PoolError(
        "one of the parties keeps no correlated randomness; both need a pool directory"
    )


def lacking_batches(pool: Pool, course: Sequence[Demand], wanted: Demand) -> list[int]:
    """Return how many batches of each kind that `course` takes the pool lacks of `wanted`."""
    return [
        math.ceil(max(0, units - pool.available(kind)) / kind.chunk)
        for kind, units in (
            (one.correlation, wanted.correlations[name].units if name in wanted.correlations else 0)
            for name, one in sum(course, Demand()).correlations.items()
        )
    ]


def demand_of(
    session: DrySession, completion: Completion, weights: Any, steps: int, text: Text | None = None
) -> list[Demand]:
    """Return the demand of the prefill, and of each of `steps` decode steps, as if no draft were
    accepted: then there are the most steps. Hints are of matrices that may follow from `text`, as
    from the weights.
    """
    course = dry_course(session, completion, weights, [0] * steps, text)
    return [session.demand() for _ in course]


def dry_course(
    session: DrySession,
    completion: Completion,
    weights: Any,
    accepted: Sequence[int],
    text: Text | None = None,
) -> Iterator[None]:
    """Go through the prefill and then a step for each of `accepted`, in which so many drafts stay;
    yields after each.
    """
    decoder, request = completion.decoder(session, weights, text), completion.request
    layout, count = completion.layout, request.step_rows
    decoder.prefill(layout.rows_in(request.prompt_tokens), decoder.judge_shapes(1))
    yield
    retained: Retained = None
    for stay in accepted:
        decoder.step(layout.rows_in(count), decoder.judge_shapes(count), retained)
        retained = np.arange(count)[None] <= stay
        yield


def growth_bytes(pool: Pool, demand: Demand) -> int:
    """Return by how many bytes a party's files grow, at most, when what the pool lacks of `demand`
    is made.
    """
    return sum(pool.growth_bytes(n.correlation, n.units) for n in demand.correlations.values())


def demands_within(pool: Pool, course: Sequence[Demand], room_bytes: int | None) -> int:
    """Return how many demands of `course`, from the first on, can be met if files grow by
    `room_bytes` or less (None: by any number); 0 when a prefill's and one step's cannot.
    """
    if room_bytes is None:
        return len(course)
    count = sum(growth_bytes(pool, total) <= room_bytes for total in accumulate(course))
    return count if count >= len(course[:2]) else 0


def least(rooms: Iterable[int | None]) -> int | None:
    """Return the least of some limits; None where there is no limit."""
    return min((room for room in rooms if room is not None), default=None)


def steps_covered(pool: Pool, course: Sequence[Demand]) -> int:
    """Return how many decode steps the pool has all correlations for, after a prefill; further
    steps are taken to be like the last of `course`, which is of what a pool keeps.
    """
    total = sum(course, Demand())
    if any(pool.available(n.correlation) < n.units for n in total.correlations.values()):
        return 0
    more = [
        (pool.available(n.correlation) - total.correlations[name].units) // n.units
        for name, n in course[-1].correlations.items()
        if n.units
    ]
    return len(course) - 1 + (min(more, default=0) if len(course) > 1 else 0)


def summary(session: PartySession, course: Sequence[Demand]) -> list[dict[str, Any]]:
    """Return, per kind of correlation, what a prefill, a step and all of `course` take, and what is
    there and was made.
    """
    prefill, step = course[0], course[-1] if len(course) > 1 else Demand()
    rows = []
    for name, taken in sum(course, Demand()).correlations.items():
        kind = taken.correlation
        nothing = CorrelationRequest(kind, 0)
        rows.append(
            {
                "kind": name,
                "prefill_units": prefill.correlations.get(name, nothing).units,
                "step_units": step.correlations.get(name, nothing).units,
                "needed_units": taken.units,
                "batch_units": kind.chunk,
                "available_units": session.preprocessing.pool.available(kind),
                "stored_bytes": session.preprocessing.pool.stored_bytes(kind),
                **made_of(session, kind),
            }
        )
    return rows


def made_of(session: PartySession, kind: Correlation) -> dict[str, Any]:
    """Return how many units of a kind the session made, and what they cost."""
    entries = [e for e in session.meter.entries if e.kind == "pool" and e.name == kind.name]
    traffic = sum((e.traffic for e in entries), Traffic())
    return {
        "made_units": len(entries) * kind.chunk,
        "seconds": round(sum(e.seconds for e in entries), 3),
        "bytes": traffic.bytes,
        "messages": traffic.messages,
    }
