"""Correlated randomness made in the background of a call: every unit once, the same at both
parties, and what ends it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.arithmetic.product import linear, multiply
from spu_llm.compiler.demand import CorrelationRequest, Demand
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.channel import Channel, MemoryChannel, Traffic, round_trip_s
from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import PoolError, WireError, WorkerError
from spu_llm.core.meter import Meter
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.offline.background_producer import _NICENESS, ROUND_TRIP_S
from spu_llm.offline.pool import Pool
from spu_llm.offline.preprocessing import Preprocessing
from spu_llm.offline.silent.ring import N
from spu_llm.runtime import party_session
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import Session
from spu_llm.runtime.simulation import Simulation, reconstruct
from spu_llm.runtime.spu_runtime import create_memory_link
from tests.kit.dealing import CORRELATIONS, TRIPLE, refuses
from tests.kit.patience import SOON_S
from tests.offline.parties import RANKS, Parties

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


class _NoProducts:
    def set_up(self, wanted: list[Any]) -> None:
        assert not wanted


class _AnyThread:
    """Stands for a maker: these pools' own makers ask for no thread."""

    def in_this_thread(self) -> Any:
        return nullcontext()


class Sides:
    """Both parties' production over their pools."""

    def __init__(self, parties: Parties) -> None:
        self.parties, self.meters = parties, [Meter(), Meter()]
        self.supplies: list[Any] = [
            Preprocessing(pool, _NoProducts(), _AnyThread(), meter)  # type: ignore[arg-type]
            for pool, meter in zip(parties.pools, self.meters, strict=True)
        ]
        self.productions = [supply._background for supply in self.supplies]
        self.wires = MemoryChannel.pair()

    def start(self, correlation: Correlation, units: int) -> None:
        """Start unless there is something under way, which has to be waited for before."""
        demand = Demand.of([CorrelationRequest(correlation, units)])

        def work(rank: int, pool: Pool) -> None:
            if not self.productions[rank].running:
                self.productions[rank].start(demand)

        self.parties.both(work)

    def settle(self) -> None:
        self.parties.both(lambda rank, pool: self.productions[rank].settle())

    def stop(self) -> None:
        def work(rank: int, pool: Pool) -> None:
            def agree(begun: int) -> int:
                self.wires[rank].send(bytes([begun]))
                return self.wires[rank].recv()[0]

            self.productions[rank].stop(agree)

        self.parties.both(work)

    def take(self, correlation: Correlation, units: int) -> None:
        parties = self.parties
        outcomes = parties.both(lambda rank, pool: self.supplies[rank].take(correlation, units))
        taken = [parties.made.units_of(rank, outcomes[rank]) for rank in RANKS]
        assert taken[CLIENT] == taken[PROVIDER] and len(taken[CLIENT]) == units
        parties.record(taken[CLIENT])


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from(CORRELATIONS), st.integers(0, 60)),
        st.tuples(st.just("take"), st.sampled_from(CORRELATIONS), st.integers(0, 40)),
        st.tuples(st.just("lease"), st.sampled_from(CORRELATIONS), st.integers(0, 40)),
        st.tuples(st.just("settle")),
        st.tuples(st.just("stop")),
        st.tuples(st.just("reopen"), st.booleans(), st.booleans()),
    ),
    max_size=14,
)


@settings(max_examples=30)
@given(ACTIONS)
def test_units_match_and_come_once(threads: ThreadPoolExecutor, actions: list[Any]) -> None:
    """Whatever is made in the background and taken meanwhile, and however the parties' sessions
    end.
    """
    with tempfile.TemporaryDirectory() as root:
        parties = Parties(threads, Path(root))
        parties.open()
        sides = Sides(parties)
        for kind, *rest in actions:
            if kind in ("start", "take"):
                getattr(sides, kind)(*rest)
            elif kind == "lease":
                parties.both(lambda rank, pool: pool.lease(*rest))  # noqa: B023
            elif kind == "reopen":
                if all(rest):
                    sides.stop()
                    there = [parties.available(c) for c in CORRELATIONS]
                parties.end(*rest)
                parties.open()
                sides = Sides(parties)
                if all(rest):
                    assert there == [parties.available(c) for c in CORRELATIONS]
            else:
                getattr(sides, kind)()
            assert all(parties.available(c) >= 0 for c in CORRELATIONS)
        sides.stop()
        parties.end()


def test_what_is_made_beside_is_nowhere_before_it_is_added(parties: Parties) -> None:
    """Not in the pool, hence not handed out; not on disk, where a party alone would have it."""
    sides = Sides(parties)
    sides.take(TRIPLE, 3)
    sides.start(TRIPLE, 40)
    for production in sides.productions:
        assert production.running and production._thread is not None
        production._thread.join()
    assert parties.available(TRIPLE) == 13 and batches_on_disk(parties) == [1, 1]
    sides.take(TRIPLE, 13)  # needs none of it
    assert all(production.running for production in sides.productions)
    sides.take(TRIPLE, 1)
    assert not any(production.running for production in sides.productions)
    assert parties.available(TRIPLE) == 31 and batches_on_disk(parties) == [2, 2]
    parties.end()


def batches_on_disk(parties: Parties) -> list[int]:
    return [len(list(d.rglob("meta.json"))) for d in parties.directories if d is not None]


def test_what_is_there_is_not_made(parties: Parties) -> None:
    parties.prepare(TRIPLE, 32)
    sides = Sides(parties)
    sides.start(TRIPLE, 32)
    assert not any(production.running for production in sides.productions)
    parties.end()


def test_it_stops_after_what_either_party_has_begun(parties: Parties) -> None:
    """Of ten batches, one party is at its second, the other one at its third, or before it."""
    slow, late = threading.Semaphore(2), threading.Semaphore(3)
    for rank, turn in zip(RANKS, (slow, late), strict=True):
        make = parties.pools[rank]._make

        def one_by_one(correlation: Any, masks: Any, make: Any = make, turn: Any = turn) -> Any:
            assert turn.acquire(timeout=20)
            return make(correlation, masks)

        parties.pools[rank]._make = one_by_one
    sides = Sides(parties)
    sides.start(TRIPLE, 160)
    begun = (3, 3)  # the client's third waits for its turn, the provider's for the client's
    while tuple(production._begun for production in sides.productions) != begun:
        time.sleep(0.01)
    heard: list[tuple[int, int]] = []
    sides.productions[CLIENT]._on_batch = lambda *progress: heard.append(progress)
    threading.Timer(0.5, lambda: [turn.release(10) for turn in (slow, late)]).start()
    sides.stop()
    assert parties.available(TRIPLE) == 3 * 16
    # What is waited for is told once, however long it takes: else it would seem to get on.
    assert heard == sorted(set(heard)) and heard[0] == (0, 8) and heard[-1] == (8, 8)
    sides.take(TRIPLE, 48)
    parties.end()


def test_nothing_is_made_beside_work_that_is_a_secret(parties: Parties) -> None:
    """The batch that is under way ends before that work, and no other one begins at this party; nor
    does the peer get further than to wait for it. Then it goes on, and all of it is there.
    """
    turns = threading.Semaphore(2)  # for a batch at both
    made = [0, 0]
    for rank in RANKS:
        make = parties.pools[rank]._make

        def counted(correlation: Any, masks: Any, make: Any = make, rank: int = rank) -> Any:
            assert turns.acquire(timeout=20)
            results = make(correlation, masks)
            made[rank] += 1
            return results

        parties.pools[rank]._make = counted
    sides = Sides(parties)
    sides.start(TRIPLE, 160)
    client = sides.productions[CLIENT]
    while client._begun < 2:
        time.sleep(0.01)
    threading.Timer(0.2, lambda: turns.release(100)).start()
    with client.paused():
        assert (made[CLIENT], client._begun) == (2, 2)
        time.sleep(0.3)
        assert (made[CLIENT], client._begun) == (2, 2) and made[PROVIDER] == 2
    sides.settle()
    with client.paused():  # of nothing
        pass
    assert parties.available(TRIPLE) == 160
    parties.end()


@pytest.mark.parametrize("error", [PoolError, WireError, WorkerError, RuntimeError])
def test_what_ends_it_is_raised_where_it_is_waited_for(
    parties: Parties, error: type[Exception]
) -> None:
    def fails(correlation: Any, masks: Any) -> Any:
        raise error("as it was said")

    sides = Sides(parties)
    sides.take(TRIPLE, 3)
    for pool in parties.pools:
        pool._make = fails
    sides.start(TRIPLE, 40)
    for production in sides.productions:
        while not production._error:
            time.sleep(0.01)
        for raises in (production.check, production.settle):
            with pytest.raises(error, match="as it was said"):
                raises()
    assert parties.available(TRIPLE) == 13
    parties.end()
    parties.open()
    assert parties.available(TRIPLE) == 13
    parties.end()


def test_its_phases_take_no_time_of_the_session() -> None:
    meter = Meter()

    def work() -> None:
        with meter.beside("offline"), meter.in_phase("offline"):
            time.sleep(0.05)
            meter.record("pool", "triple", "", 0.05, Traffic())

    with meter.in_phase("decode"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        meter.record("op", "multiply", "", 0.0, Traffic())
    assert [(e.phase, e.beside) for e in meter.entries] == [("offline", True), ("decode", False)]
    assert meter.seconds.keys() == {"decode"} and meter.seconds["decode"] >= 0.05


# ---- when it pays


class _Far:
    """A channel whose messages take a while."""

    def __init__(self, inner: Channel, delay_s: float) -> None:
        self._inner, self._delay_s = inner, delay_s

    def send(self, data: bytes) -> None:
        self._inner.send(data)

    def recv(self) -> bytes:
        data = self._inner.recv()
        time.sleep(self._delay_s)
        return data


def both(work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as running:
        return list(running.map(work, RANKS))


def test_the_round_trip_is_measured_by_who_asks() -> None:
    ends = MemoryChannel.pair()
    outcomes = both(lambda rank: round_trip_s(_Far(ends[rank], 0.02), asks=rank == CLIENT))
    assert outcomes[PROVIDER] is None and 0.04 <= outcomes[CLIENT] < SOON_S
    ends[PROVIDER].send(b"what?")
    with pytest.raises(WireError, match="answer"):
        round_trip_s(ends[CLIENT], asks=True)


@pytest.mark.parametrize("delay_s", [0.0, 2 * ROUND_TRIP_S])
def test_it_is_for_networks_alone(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    """Both parties decide the same, and are told no secret."""
    if not delay_s:  # however busy this machine is
        monkeypatch.setattr(party_session, "ROUND_TRIP_S", SOON_S)
    pairs = [MemoryChannel.pair() for _ in range(2)]

    def meet(rank: int) -> Any:
        left = iter(pairs)
        session = PartySession(
            create_memory_link(rank, f"far {delay_s}"),
            SpuConfig(),
            profile=False,
            open_channel=lambda: _Far(next(left)[rank], delay_s),
        )
        return session.prefetches, [e.name for e in session.meter.entries if e.kind == "control"]

    client, provider = both(meet)
    assert client == provider == (delay_s > 0, ["agree on pool", "round trip", "tell"])


# ---- in a session

C, P, J = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT
ROWS = 1500  # so many that every call needs another batch


def _forward(x: Any, w: Any) -> Any:
    y = linear(x, w, label="tests beside")
    return multiply(y, y)


FORWARD = SecureFunction(_forward, (C, P), "forward")
IN_SPU = SecureFunction(lambda x, w: jnp.sin(linear(x, w, label="tests in spu")), (C, P), "in spu")
WEIGHTS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def arguments(session: Session, x: np.ndarray) -> Any:
    return (
        session.private(CLIENT, lambda: x, x.shape, np.float32),
        session.private(PROVIDER, lambda: WEIGHTS, WEIGHTS.shape, np.float32),
    )


def course_of(calls: int, function: SecureFunction, *args: Any) -> Callable[[Session], None]:
    def course(dry: Session) -> None:
        for _ in range(calls):
            dry.call(function, *args)

    return course


def run(session: PartySession, x: np.ndarray, *, beside: bool) -> Any:
    """Return three calls, the later ones' correlated randomness made in the background of the ones
    before, if so: results, what was sent in which way, and the meter's entries. Nothing is there
    before, and the next products with weights are under another key.
    """
    args = arguments(session, x)
    for need in session.demand(FORWARD, *args)[0].correlations.values():
        there = session.preprocessing.available(need.correlation)
        if use := session.preprocessing.products._uses.get(need.correlation.name):
            there += -use.next % N
        session.preprocessing.take(need.correlation, there, need.fixed)
    session.prefetches, mark = beside, len(session.meter.entries)
    sent: list[list[int]] = []
    channels = session._channel, session._correlations
    originals = [channel.inner for channel in channels]
    for channel in channels:
        sent.append(sizes := [])
        channel.inner = _Noting(channel.inner, sizes)
    results = []
    for left in (2, 1, 0):
        session.preprocess(FORWARD, *args)
        if left:
            session.prefetch(course_of(2, FORWARD, *args))
            assert session.preprocessing.running == beside
        results.append(session.call(FORWARD, *args))
    session.stop_prefetching()
    for channel, original in zip(channels, originals, strict=True):
        channel.inner = original
    session.prefetches = False
    return results, sent, session.meter.entries[mark:]


class _Noting:
    def __init__(self, inner: Channel, sizes: list[int]) -> None:
        self._inner, self._sizes = inner, sizes

    def send(self, data: bytes) -> None:
        self._sizes.append(len(data))
        self._inner.send(data)

    def recv(self) -> bytes:
        return self._inner.recv()


def test_calls_find_and_cost_the_same(simulation: Simulation) -> None:
    """What is sent, by us in every byte and by SPU within what it varies by itself, and the results
    are those of making it before; and it does not depend on the client's secret.
    """
    x = np.random.default_rng(1).normal(size=(ROWS, 4)).astype(np.float32)

    def program(session: PartySession) -> Any:
        run(session, x, beside=False)  # keys that are sent once
        collected = [run(session, x, beside=False), run(session, x, beside=True)]
        return [*collected, run(session, -3 * x, beside=True)]

    client, provider = simulation.run(program)
    for one in (client, provider):
        before, beside, other = one
        assert before[1] == beside[1] == other[1]  # every message of ours, on either channel
        assert [e.name for e in before[2] if e.beside] == []
        made = [e for e in beside[2] if e.beside]
        assert made and {(e.phase, e.kind) for e in made} == {("offline", "pool")}
        waits = [e for e in beside[2] if e.kind == "wait"]
        assert len(waits) == 2
        assert costs(before[2]) == costs(beside[2]) == costs(other[2])
    made_before, made_beside = made_bytes(client[0][2]), made_bytes(client[1][2])
    assert made_before and made_before == pytest.approx(made_beside, rel=0.01)
    for shares in zip(client[1][0], provider[1][0], strict=True):
        np.testing.assert_allclose(reconstruct(shares), (x @ WEIGHTS) ** 2, atol=2e-3)


def made_bytes(entries: Any) -> dict[str, int]:
    """Return by name the bytes of what was made. In which order that is done depends on the time
    that calls take.
    """
    totals: dict[str, int] = {}
    for e in entries:
        if e.kind == "pool":
            totals[e.name] = totals.get(e.name, 0) + e.traffic.bytes
    return totals


def costs(entries: Any) -> list[Any]:
    """Return, by kind and name in the order of names, how often, and messages; of ours also
    bytes.
    """
    rows: dict[tuple[str, str], list[int]] = {}
    for e in entries:
        if e.kind != "wait":
            row = rows.setdefault((e.kind, e.name), [0, 0, 0])
            own = e.traffic.bytes if e.kind == "op" else 0
            for i, n in enumerate((1, e.traffic.messages, own)):
                row[i] += n
    return sorted(rows.items())


def test_a_call_that_has_spu_at_work_runs_alone(simulation: Simulation) -> None:
    """Nothing is begun beside it; and what is under way is waited for before SPU is asked."""
    x = np.ones((2, 4), np.float32)

    def program(session: PartySession) -> Any:
        args = arguments(session, x)
        session.preprocess(IN_SPU, *args)
        session.prefetches = True
        session.prefetch(course_of(2, IN_SPU, *args))
        assert not session.preprocessing.running
        session.prefetches = False
        demand = session.demand(FORWARD, *arguments(session, np.ones((ROWS, 4), np.float32)))[0]
        preprocessing, waited_for = session.preprocessing, threading.Event()
        make, settle = preprocessing.pool._make, preprocessing.settle

        def make_when_waited_for(correlation: Correlation, masks: Any) -> Any:
            assert waited_for.wait(60)
            return make(correlation, masks)

        def wait() -> None:
            waited_for.set()
            settle()

        preprocessing.pool._make = make_when_waited_for
        preprocessing.settle = wait  # type: ignore[method-assign]
        preprocessing.start(demand + demand + demand)
        assert preprocessing.running
        mark = len(session.meter.entries)
        result = session.call(IN_SPU, *args)
        assert not preprocessing.running
        preprocessing.pool._make = make
        preprocessing.settle = settle  # type: ignore[method-assign]
        kinds = [e.kind for e in session.meter.entries[mark:]]
        assert "pool" in kinds and "segment" in kinds[len(kinds) - kinds[::-1].index("pool") :]
        return result

    assert all(outcomes is not None for outcomes in simulation.run(program))


def test_what_ends_it_ends_the_call_before_its_next_message(simulation: Simulation) -> None:
    x = np.ones((ROWS, 4), np.float32)

    def program(session: PartySession) -> Any:
        args = arguments(session, x)
        session.preprocess(FORWARD, *args)
        session.prefetches, make = True, session.preprocessing.pool._make
        session.preprocessing.pool._make = refuses
        session.prefetch(course_of(20, FORWARD, *args))
        while session.preprocessing._background._error is None:
            time.sleep(0.01)
        before = session._channel.traffic
        with pytest.raises(PoolError, match="nothing more is made"):
            session.call(FORWARD, *args)
        assert session._channel.traffic == before
        session.preprocessing.pool._make, session.prefetches = make, False
        session.preprocessing._background._error = None  # the session serves other tests
        session.preprocessing.settle()

    simulation.run(program)


def test_its_thread_is_the_nicer_one(parties: Parties) -> None:
    own, actual = os.getpriority(os.PRIO_PROCESS, 0), []
    for pool in parties.pools:
        make = pool._make

        def looks(correlation: Any, masks: Any, make: Any = make) -> Any:
            actual.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return make(correlation, masks)

        pool._make = looks
    sides = Sides(parties)
    sides.start(TRIPLE, 1)
    sides.settle()
    assert actual == [max(own, _NICENESS)] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    parties.end()
