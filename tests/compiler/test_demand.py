"""What a call needs, found by a dry run: exactly what it then takes and sends, the same at both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from protocols.arithmetic.product import linear, multiply
from protocols.bits.compare import less_than
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.dry_run import DryRun
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.correlation import Correlation, Correlations, Form, Part
from spu_llm.core.errors import PoolError
from spu_llm.core.integers import Factor
from spu_llm.core.meter import Meter
from spu_llm.core.op import Cost, Functionality, View, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Arith, Owner, State, Stateful, Value, public
from spu_llm.runtime.dry_session import DrySession
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession, private_array
from spu_llm.runtime.simulation import Simulation
from tests.kit.dealing import refuses

C, P, J, X = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT, Owner.PUBLIC
WEIGHTS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def _layer(x: Any, w: Any) -> Any:
    y = linear(x, w * 0.5, label="tests w")
    small = less_than(y, multiply(y, y), bits=32)
    return y + 1.0, reveal(small, to=C, label="small")


MASKED = "masked product tests w 4 3"
LAYER = SecureFunction(_layer, (C, P), "layer")


@dataclass
class Recorded:
    """A session's pool, and what is taken from it."""

    pool: Any
    units: dict[str, int] = field(default_factory=dict)
    fixed: dict[str, Factor | None] = field(default_factory=dict)

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        self.units[correlation.name] = self.units.get(correlation.name, 0) + units
        self.fixed[correlation.name] = fixed
        return self.pool.take(correlation, units, fixed)


def arguments(session: PartySession, x: np.ndarray, w: np.ndarray = WEIGHTS) -> Any:
    return (
        session.private(CLIENT, lambda: x, x.shape, np.float32),
        session.private(PROVIDER, lambda: w, w.shape, np.float32),
    )


def units(demand: Demand) -> dict[str, int]:
    return {name: need.units for name, need in demand.correlations.items()}


def recorded_call(session: PartySession, function: SecureFunction, *args: Any) -> Any:
    """Result, units taken by name, and the meter's entries."""
    recorded, mark = Recorded(session.preprocessing), len(session.meter.entries)
    with session.supplied_by(recorded):
        result = session.call(function, *args)
    return result, recorded.units, session.meter.entries[mark:]


def test_a_call_takes_and_sends_what_was_found(simulation: Simulation) -> None:
    def program(session: PartySession) -> Any:
        args = arguments(session, np.ones((2, 4), np.float32))
        demand, results = session.demand(LAYER, *args)
        session.make(demand)
        real, taken, entries = recorded_call(session, LAYER, *args)
        assert taken == units(demand)
        assert [e for e in entries if e.kind == "pool"] == []
        ops = [e for e in entries if e.kind == "op"]
        assert [c.op for c in demand.calls] == [e.name for e in ops]
        assert demand.cost.messages == sum(e.traffic.messages for e in ops)
        sent = demand.cost.client_to_provider + demand.cost.provider_to_client
        assert sent == sum(e.traffic.bytes for e in ops)
        form = [(type(v), v.shape, v.dtype) for v in jax.tree.leaves(real)]
        assert form == [(type(v), v.shape, v.dtype) for v in jax.tree.leaves(results)]
        return units(demand), demand.calls

    client, provider = simulation.run(program)
    assert client == provider
    assert client[0][MASKED] == 2


def test_secrets_do_not_matter_nor_are_they_needed(simulation: Simulation) -> None:
    shape = jax.ShapeDtypeStruct((2, 4), np.float32)

    def program(session: PartySession) -> Any:
        collected = [
            session.demand(LAYER, *arguments(session, x, w))[0]
            for x, w in (
                (np.zeros((2, 4), np.float32), WEIGHTS),
                (np.full((2, 4), 1e3, np.float32), -WEIGHTS),
            )
        ]
        collected.append(session.demand(LAYER, shape, arguments(session, np.ones((2, 4)))[1])[0])
        collected.append(session.demand(LAYER, shape, jax.ShapeDtypeStruct((4, 3), np.float32))[0])
        recorded = Recorded(session.preprocessing)
        with session.supplied_by(recorded):
            session.call(LAYER, *arguments(session, np.ones((2, 4), np.float32)))
        bound = [n.correlations[MASKED].fixed for n in collected]
        return [(units(n), n.calls) for n in collected], bound, recorded.fixed.get(MASKED)

    (client, nothing, _), (provider, bound, real) = simulation.run(program)
    assert client == provider and client == client[:1] * 4
    assert nothing == [None] * 4
    assert bound[0] is real and bound[2] is real
    assert bound[1].entries.shape == real.entries.shape
    assert (bound[1].entries != real.entries).any()
    assert bound[3] is None  # nothing is made for weights that nobody has named


READY = SecureFunction(
    lambda x, w: less_than(linear(x, w, label="tests ready"), 0.0, bits=32), (C, P), "ready"
)


def test_nothing_is_made_inside_a_call_that_was_made_ready(simulation: Simulation) -> None:
    def program(session: PartySession) -> Any:
        def batches(demand: Demand) -> int:
            lacking = (
                (
                    need.units - session.preprocessing.available(need.correlation),
                    need.correlation.chunk,
                )
                for need in demand.correlations.values()
            )
            return sum(-(-units // chunk) for units, chunk in lacking if units > 0)

        def made_ready(rows: int) -> tuple[int, list[tuple[int, int]], list[Any]]:
            """Batches that were lacking, what was heard of them, and what was made."""
            args = arguments(session, np.ones((rows, 4), np.float32))
            lacking, mark = batches(session.demand(READY, *args)[0]), len(session.meter.entries)
            heard: list[tuple[int, int]] = []
            session.preprocessing._on_batch = lambda made, total: heard.append((made, total))
            session.preprocess(READY, *args)
            session.preprocessing._on_batch = lambda made, total: None
            return lacking, heard, [e for e in session.meter.entries[mark:] if e.kind == "pool"]

        before = session.meter.seconds.get("offline", 0.0)
        with session.meter.in_phase("online"):
            lacking, heard, made = made_ready(50)
            # These weights have a name of their own: tests before this one left nothing.
            assert lacking > 0 and len(made) == lacking
            assert heard == [(i, lacking) for i in range(lacking + 1)]
            assert {e.phase for e in made} == {"offline"}
            spent = session.meter.seconds["offline"] - before
            assert spent >= sum(e.seconds for e in made) > 0
            # Nothing is left to be made, and nothing that is not there can be taken.
            assert made_ready(50) == (0, [], [])
            pool = session.preprocessing.pool
            make, pool._make = pool._make, refuses
            with pytest.raises(PoolError, match="nothing more is made"):
                missing = Correlation("tests missing", (Part((), J, Form.ARITH),), (), lambda: [])
                pool.take(missing, 1)
            args = arguments(session, np.ones((50, 4), np.float32))
            _, taken, entries = recorded_call(session, READY, *args)
            pool._make = make
        assert taken["masked product tests ready 4 3"] == 50
        assert entries and {e.phase for e in entries} == {"online"}
        return heard

    client, provider = simulation.run(program)
    assert client == provider


def test_nothing_is_made_inside_merged_rounds(simulation: Simulation) -> None:
    """The peer may ask for it at another time: a dry run that counted too little ends both."""
    kind = Correlation(
        "made in the background of others",
        (Part((), Owner.JOINT, Form.ARITH),),
        (Part((), Owner.JOINT, Form.ARITH),),
        lambda a: [a],
    )

    def program(session: PartySession) -> None:
        with ThreadPoolExecutor(1) as merged:
            with pytest.raises(
                PoolError, match="made in the background of others: a call takes more"
            ):
                merged.submit(session.party.take, kind, 1).result()

    simulation.run(program)


def test_needs_add_up(simulation: Simulation) -> None:
    def program(session: PartySession) -> Any:
        one = session.demand(LAYER, *arguments(session, np.ones((2, 4), np.float32)))[0]
        two = session.demand(LAYER, *arguments(session, np.ones((5, 4), np.float32)))[0]
        both = one + two
        for name in both.correlations:
            assert units(both)[name] == units(one)[name] + units(two)[name]
        assert both.calls == one.calls + two.calls
        assert both.cost == one.cost + two.cost
        return (one + Demand()).correlations.keys() == one.correlations.keys()

    assert simulation.run(program) == [True, True]


def test_in_plaintext_nothing_is_needed() -> None:
    session = PlaintextSession()
    session.preprocess(LAYER, np.ones((2, 4), np.float32), WEIGHTS)
    assert session.meter.entries == [] and session.meter.seconds == {}


def test_phases_inside_a_phase_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("spu_llm.core.meter.time", clock)
    meter = Meter()
    with meter.in_phase("decode"):
        now[0] += 1
        with meter.in_phase("offline"):
            now[0] += 2
            with meter.in_phase("offline"):
                now[0] += 4
        with meter.in_phase("offline"):
            now[0] += 8
        assert meter.phase == "decode"
    assert meter.seconds == {"decode": 1, "offline": 14}


# ---- values with state


TICKET = Correlation(
    "tests ticket",
    (Part((), Owner.JOINT, Form.ARITH),),
    (Part((), Owner.JOINT, Form.ARITH),),
    secure=lambda a: [a * a],
    chunk=8,
)


@dataclass(eq=False)
class Roll(State):
    """Tickets that are given out once."""

    given: int = 0

    def fork(self) -> Roll:
        return Roll(self.given)

    def give(self, count: int) -> Iterator[int]:
        self.given += count
        return iter(range(self.given - count, self.given))


@dataclass(frozen=True, eq=False)
class Marked(Arith, Stateful):
    """Shares whose rows know which ticket they have been given."""

    tickets: tuple[int, ...] = ()
    roll: Roll = field(default_factory=Roll)

    @property
    def state(self) -> Roll:
        return self.roll

    def fork(self, state: State) -> Marked:
        assert isinstance(state, Roll)
        return dataclasses.replace(self, words=np.zeros_like(self.words), roll=state)

    def plain(self) -> Arith:
        return Arith(self.words, self.dtype, self.frac_bits, self.bits)


def _mark(party: Party, x: Value, rows: Value) -> Marked:
    """Return every row without a ticket takes a unit."""
    assert isinstance(x, Arith)
    before = x if isinstance(x, Marked) else Marked(x.words, x.dtype, x.frac_bits, x.bits)
    missing = rows.shape[0] - len(before.tickets)
    party.take(TICKET, missing)
    tickets = (*before.tickets, *before.roll.give(missing))
    return dataclasses.replace(before, tickets=tickets)


def _nothing_to_simulate(*args: Any, **static: Any) -> View:
    raise NotImplementedError


mark = protocol_op(
    "tests_mark",
    reference=lambda x, rows: x,
    two_party=_mark,
    owners=lambda x, rows: [J],
    cost=lambda x, rows: Cost(),
    functionality=Functionality(),
    simulate=_nothing_to_simulate,
)


def test_state_goes_on_from_call_to_call_and_not_by_looking(simulation: Simulation) -> None:
    function = SecureFunction(lambda x, rows: mark(x, rows), (J, X), "mark")
    rows = [public(np.zeros(n, np.float32)) for n in (2, 5)]

    def program(session: PartySession) -> Any:
        session.preprocessing.prepare(TICKET, 64)
        plain = Arith(np.zeros(7, np.uint64), np.dtype(np.float32), 18)
        demand, stand_in = session.demand(function, plain, rows[0])
        assert units(demand) == {"tests ticket": 2}
        # A dry run goes on from what another one has left.
        demand, _ = session.demand(function, stand_in, rows[1])
        assert units(demand) == {"tests ticket": 3}
        first = session.call(function, plain, rows[0])
        for _ in range(2):  # looking changes nothing
            assert units(session.demand(function, first, rows[1])[0]) == {"tests ticket": 3}
        second, taken, _ = recorded_call(session, function, first, rows[1])
        assert taken == {"tests ticket": 3}
        return first.tickets, second.tickets

    assert simulation.run(program) == [((0, 1), (0, 1, 2, 3, 4))] * 2


def test_weights_beside_randomness_that_is_not_drawn_yet() -> None:
    """The provider does both in one go; its matrix is the real one all the same."""

    def program(x: Any, w: Any, r: Any) -> Any:
        table = jnp.concatenate([w, w])
        return linear(x, table, label="table", shift=0) + 2 * r

    function = SecureFunction(program, (Owner.CLIENT, Owner.PROVIDER, Owner.PROVIDER), "mixed")
    shape = jax.ShapeDtypeStruct
    w = private_array(PROVIDER, np.ones((2, 3), np.float32), (2, 3), np.float32)
    session = DrySession(DryRun(PROVIDER, 18))
    session.call(function, shape((5, 4), np.float32), w, shape((5, 3), np.float32))
    (need,) = [n for n in session.demand().correlations.values() if n.correlation.fixed is not None]
    assert need.fixed is not None and need.fixed.entries.shape == (4, 3)
