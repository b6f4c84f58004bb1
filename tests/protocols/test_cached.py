"""Products with a cache under lasting masks: each mask row hides one thing, once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.arithmetic.cached import (
    Allocation,
    Cached,
    append,
    cached_products,
    lengthen,
    times_columns,
    times_rows,
    weighted_rows,
)
from protocols.arithmetic.slots import Slots
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import PeerError
from spu_llm.core.op import Cost, Functionality, ProtocolOp, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.reveal import reveal
from spu_llm.core.simulated import SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, PROVIDER, Arith, Owner, Public, Value, as_words, fork
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.testing import Case, OpContract, reconstruct_words, run_op
from tests.protocols import caching
from tests.protocols.caching import CAP, Append, Command, Product
from tests.protocols.composed import ComposedContract

X = np.array([[[3, -1]], [[2**62, 5]]])  # [head, n, d]
CACHE = np.array([[[1, 2], [-(2**63), 7], [0, 1]], [[4, -4], [2**40, 1], [-1, -1]]])
W = np.array([[[1, -2, 2**63 - 1]], [[0, 5, -(2**40)]]])  # [head, n, cap]
SMALL = np.array([[[1], [2], [-7]], [[4], [0], [5]]])  # JAX's own integers have 32 bits here
XS = np.array([[[3], [-1]], [[2**62], [5]]])  # two queries
WS = np.array([[[1, -2], [0, 7]], [[0, 5], [-(2**40), 2**63 - 1]]])
ONES = np.array([[[9]], [[1]]])
ZEROS = np.zeros_like(CACHE)


class TestAppend(OpContract):
    op = append
    masks = False
    elementwise = False
    whole = (2,)
    cases = [
        Case((SMALL[:, :2], SMALL[:, 2:], np.array(at)), (form, "arith", "public"))
        for form, at in (("arith", 1), ("public", 0))
    ]


class TestLengthen(OpContract):
    op = lengthen
    masks = False
    elementwise = False
    whole = (0,)
    cases = [Case((SMALL,), (form,), {"positions": 4}) for form in ("arith", "public")]


class TestTimesRows(OpContract):
    op = times_rows
    fresh = True
    elementwise = False
    cases = [Case((X[..., :1], CACHE[:, :1, :1]), ("arith", "arith"), {"tile": 1})]


class TestTimesColumns(OpContract):
    op = times_columns
    fresh = True
    elementwise = False
    cases = [Case((W[..., :1], CACHE[:, :1, :1]), ("arith", "arith"), {"tile": 1})]


class TestRowsOfSeveralTiles(ComposedContract):
    op = times_rows
    fresh = True
    elementwise = False
    cases = [
        Case((XS, CACHE[:, :2, :1]), ("degenerate", "provider"), {"tile": 1}),
        Case((X[..., :1] % 8 * 8, ONES), ("client", "public"), {"tile": 2, "shift": 3}),
    ]


class TestColumnsOfSeveralTiles(ComposedContract):
    op = times_columns
    fresh = True
    elementwise = False
    cases = [
        Case((WS, CACHE[:, :2, :1]), ("degenerate", "provider"), {"tile": 1}),
        Case((W[..., :1] % 8 * 8, ONES), ("client", "public"), {"tile": 2, "shift": 3}),
    ]


# ---- sequences of calls


@st.composite
def programs(draw: Any) -> list[Command]:
    """Appends anywhere into any version, so that versions part ways; products with any of them."""
    commands: list[Command] = []
    versions = 1
    for seed in range(draw(st.integers(1, 12))):
        version = draw(st.integers(0, versions - 1) | st.just(versions - 1))
        count = draw(st.integers(1, 3))
        if draw(st.booleans()):
            commands.append(Append(version, draw(st.integers(0, CAP)), count, seed))
            versions += 1
        else:
            kind = draw(st.sampled_from(["rows", "columns"]))
            commands.append(Product(kind, version, count, seed))
    return commands


@settings(max_examples=40)
@given(programs(), st.integers(1, 9))
def test_any_sequence_of_calls(commands: list[Command], tile: int) -> None:
    """Results as numpy's, prices exact, and both parties allocate the same."""
    outcome, records = caching.run(commands, tile=tile)
    for found, wanted in zip(caching.results(outcome), caching.expected(commands), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert records[0].cost == records[1].cost
    client, provider = outcome.traffic
    cost = records[CLIENT].cost
    assert client.sent_messages + provider.sent_messages == cost.messages
    assert client.sent_bytes == cost.client_to_provider
    assert provider.sent_bytes == cost.provider_to_client


def repeated(commands: Sequence[Command], tile: int) -> int:
    """How many words the client sends twice when all it has to hide are zeros: then what it sends
    is its masks.
    """
    outcome, _ = caching.run(commands, tile=tile, zero=True)
    sent = [data.view(np.uint64) for data in outcome.views[CLIENT].outgoing]
    words = np.concatenate([np.zeros(0, np.uint64), *sent])
    return words.size - len(set(words.tolist()))


@settings(max_examples=40)
@given(programs(), st.integers(1, 9))
def test_no_mask_is_used_twice(commands: list[Command], tile: int) -> None:
    assert repeated(commands, tile) == 0


ROLL_BACK: list[Command] = [
    Append(0, 0, 2, 0), Product("rows", 1, 1, 1), Append(1, 1, 1, 2), Product("rows", 2, 1, 3),
]  # fmt: skip


def _append_keeping_slots(party: Party, cache: Value, rows: Value, at: Value) -> Cached:
    """Broken: slots of rows that are overwritten are handed out again."""
    made: Cached = append.two_party(party, cache, rows, at)
    if isinstance(cache, Cached):
        for half in cache.allocation._halves.values():
            for name in set(cache.ids.tolist()) - set(made.ids.tolist()):
                if name in half.slots.slot_of:
                    tile, slot = half.slots.slot_of[name]
                    half.slots.tiles[tile].slots = slot
    return made


keeping_slots = dataclasses.replace(append, two_party=_append_keeping_slots)


def test_a_slot_kept_shows_as_a_mask_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeated(ROLL_BACK, tile=8) == 0
    monkeypatch.setattr(caching, "append", keeping_slots)
    assert repeated(ROLL_BACK, tile=8) > 0


def _write_and_overwrite(
    party: Party, x: Value, first: Value, second: Value, append: ProtocolOp = append
) -> Arith:
    """A row is written and used, overwritten and used again."""
    here = Public(np.array(0))
    empty = Public(np.zeros((x.shape[0], 1, x.shape[2]), np.int64))
    (cache,) = append.run(party, [empty, first, here], {})
    times_rows.run(party, [x, cache], {"tile": 2})
    (cache,) = append.run(party, [cache, second, here], {})
    return times_rows.run(party, [x, cache], {"tile": 2})[0]  # type: ignore[return-value]


def _correct_last(*inputs: Value) -> Any:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        party.drawn[2][:, 1:, 1:] += wanted.words - made.words  # second query, second slot

    return correct


write_and_overwrite = protocol_op(
    "write and overwrite",
    reference=lambda x, first, second: x @ second.swapaxes(1, 2),
    two_party=_write_and_overwrite,
    owners=lambda *owners: [Owner.JOINT],
    cost=lambda x, *rows: Cost(4, 2, *[32 * x.shape[0] * x.shape[2]] * 2),
    functionality=Functionality(),
    simulate=uniform_messages(_write_and_overwrite, _correct_last),
)


class TestOverwriting(ComposedContract):
    """Of a roll-back: what is sent before and after it hides both rows."""

    op = write_and_overwrite
    fresh = True
    elementwise = False
    cases = [Case((X[..., :1], CACHE[:, :1, :1], CACHE[:, 1:2, :1]), ("arith",) * 3)]


def test_a_slot_kept_shows_in_the_views() -> None:
    broken = functools.partial(_write_and_overwrite, append=keeping_slots)
    contract = TestOverwriting()
    contract.op = dataclasses.replace(write_and_overwrite, two_party=broken)
    contract.test_result_is_the_reference()
    with pytest.raises(AssertionError, match="bits sent|bits are sent"):
        contract.test_messages_are_masked()


# ---- the value


def _traffic(commands: Sequence[Command], tile: int) -> int:
    return caching.run(commands, tile=tile)[0].traffic[CLIENT].sent_bytes


def test_a_row_is_opened_once() -> None:
    """Then a query costs its own words: d per head by rows, a tile's slots by columns."""
    first: list[Command] = [Append(0, 0, CAP, 0), Product("rows", 1, 1, 1)]
    words = 8 * caching.HEADS
    assert _traffic(first, 16) == words * caching.D * (CAP + 1)
    again = [*first, Product("rows", 1, 1, 2)]
    assert _traffic(again, 16) == words * caching.D * (CAP + 2)
    columns: list[Command] = [Append(0, 0, CAP, 0), Product("columns", 1, 1, 1)]
    assert _traffic(columns, 16) == words * (caching.D * CAP + 16)


def test_nothing_is_sent_for_an_empty_cache() -> None:
    outcome, _ = caching.run([Product("rows", 0, 2, 0), Product("columns", 0, 2, 0)], tile=4)
    assert outcome.traffic[CLIENT].messages == 0
    assert not any(result.any() for result in caching.results(outcome))

def _party(rank: int = CLIENT, seed: int = 0) -> SimulatedParty:
    return SimulatedParty(rank, Prg.from_seed(seed, "test"), Prg.from_seed(0, "common"))


def _used(party: Party) -> Cached:
    """A cache whose rows are open."""
    rows = Arith(as_words(CACHE), CACHE.dtype, 0)
    (cache,) = append.run(party, [Public(ZEROS), rows, Public(np.array(0))], {})
    times_rows.run(party, [Arith(as_words(X), X.dtype, 0), cache], {"tile": 8})
    assert isinstance(cache, Cached)
    return cache


def test_a_cache_of_another_session_is_refused() -> None:
    cache = _used(_party())
    with pytest.raises(ValueError, match="another session"):
        times_rows.run(_party(seed=1), [Arith(as_words(X), X.dtype, 0), cache], {"tile": 8})


def test_after_a_failure_nothing_goes_on() -> None:
    """What the slots say may not have been opened."""
    party = _party()
    cache = _used(party)

    def fail(words: np.ndarray) -> None:
        raise PeerError("gone")

    party.send = fail  # type: ignore[method-assign]
    x = Arith(as_words(X), X.dtype, 0)
    with pytest.raises(PeerError):
        times_rows.run(party, [x, cache], {"tile": 8})
    with pytest.raises(ValueError, match="has failed"):
        times_rows.run(party, [x, cache], {"tile": 8})


def test_a_fork_has_no_words_and_sends_none() -> None:
    """A dry run on a fork leaves the cache as it was, and gives nothing away."""
    party = _party()
    cache = _used(party)
    (dry,) = fork([cache])
    assert not dry.words.any() and cache.words.any()
    x = Arith(as_words(X), X.dtype, 0)
    price = times_rows.cost(x, cache, tile=8)
    assert times_rows.cost(x, dry, tile=8) == price
    for _ in range(3):
        before = len(party.outgoing)
        (result,) = times_rows.run(party, [x, dry], {"tile": 8})
        assert isinstance(result, Arith) and not result.words.any()
        assert not any(sent.any() for sent in party.outgoing[before:])
    assert times_rows.cost(x, cache, tile=8) == price


def test_versions_of_a_cache_stay_versions_in_forks() -> None:
    """What one of them opens is open for the other, as in the real ones."""
    party = _party()
    cache = _used(party)
    rows = Arith(as_words(CACHE[:, :1]), CACHE.dtype, 0)
    (other,) = append.run(party, [cache, rows, Public(np.array(0))], {})
    one, two = fork([cache, other])
    assert one.state is two.state is not cache.state
    x = Arith(as_words(X), X.dtype, 0)
    before = times_rows.cost(x, two, tile=8)
    times_rows.run(party, [x, two], {"tile": 8})
    assert times_rows.cost(x, two, tile=8) != before == times_rows.cost(x, other, tile=8)


def test_other_words_have_no_slots() -> None:
    """A cache's words are never replaced, not by equal ones either: nothing is opened anew without
    a word. Its plain share has no rows that are open.
    """
    cache = _used(_party())
    with pytest.raises(ValueError, match="other words"):
        dataclasses.replace(cache, words=np.array(cache.words))
    x = Arith(as_words(X), X.dtype, 0)
    whole = times_rows.cost(x, Arith(cache.words, cache.dtype, 0), tile=8)
    assert times_rows.cost(x, cache.plain(), tile=8) == whole
    assert times_rows.cost(x, cache, tile=8) != whole


@pytest.mark.parametrize(
    ("values", "match"),
    [((X, CACHE[:, :, :1]), "does not fit"), ((X[:1], CACHE), "does not fit")],
)
def test_shapes_that_do_not_fit(values: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        times_rows.cost(*map(Public, values), tile=4)


def test_rows_are_written_at_a_public_position() -> None:
    forms = ("arith", "arith", "client")
    with pytest.raises(ValueError, match="public position"):
        run_op(append, Case((CACHE, X, np.array(0)), forms))


def test_fixed_point() -> None:
    rng = np.random.default_rng(0)
    x, w, cache = (rng.normal(size=shape) for shape in ((2, 2, 4), (2, 2, 3), (2, 3, 4)))
    for op, left in ((times_rows, x), (times_columns, w)):
        wanted = np.asarray(op.reference(left, cache, tile=4))
        for shift, scale in ((None, 1.0), (0, 2.0**18)):
            case = Case((left, cache), ("client", "provider"), {"tile": 4, "shift": shift})
            outcome = run_op(op, case)
            words = reconstruct_words([o[0] for o in outcome.outputs])
            found = words.view(np.int64) / 2.0**18 / scale
            assert np.max(np.abs(found - wanted)) < 1e-4


# ---- the slots


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 20), max_size=9)), max_size=12),
)
def test_slots_only_move_forward(size: int, calls: list[tuple[int, list[int]]]) -> None:
    slots = Slots(size)
    opened: dict[tuple[int, int], int] = {}
    asked: set[tuple[int, int]] = set()
    begun: set[int] = set()
    for queries, names in calls:
        ids = np.array(sorted(set(names)) + [-1])
        plan = slots.schedule(ids, queries)
        assert not begun & set(plan.fresh)
        begun |= set(plan.fresh)
        for o in plan.openings:
            for position, slot in zip(o.positions.tolist(), o.slots.tolist(), strict=True):
                assert (o.tile, slot) not in opened and slot < size
                opened[o.tile, slot] = ids[position]
        met = np.zeros((queries, len(ids)), int)
        for use in plan.uses:
            for query in range(use.queries.start, use.queries.stop):
                assert (use.tile, query) not in asked and query < size
                asked.add((use.tile, query))
            met[use.rows, use.positions] += 1
            for position, slot in zip(use.positions.tolist(), use.slots.tolist(), strict=True):
                assert opened[use.tile, slot] == ids[position]
        assert (met == (ids >= 0)).all()
        assert set(slots.tiles) <= begun


# ---- with SPU


@pytest.mark.parametrize("correlation", [cached_products(4, 3), weighted_rows(4, 3)])
def test_spu_makes_what_is_declared(simulation: Simulation, correlation: Any) -> None:
    both = simulation.run(lambda session: session.supply.take(correlation, 2))
    a, b = (x + y for x, y in zip(both[0].masks, both[1].masks, strict=True))
    (product,) = (x + y for x, y in zip(both[0].results, both[1].results, strict=True))
    np.testing.assert_array_equal(product, correlation.secure(a, b)[0])


def test_a_program_keeps_its_cache_from_call_to_call(simulation: Simulation) -> None:
    def step(cache: Any, rows: Any, x: Any, at: Any) -> Any:
        cache = append(cache, rows, at)
        found = times_columns(times_rows(x, cache, tile=8), cache, tile=8)
        return cache, reveal(found, to=Owner.CLIENT, label="test")

    owners = (Owner.JOINT, Owner.CLIENT, Owner.PROVIDER, Owner.PUBLIC)
    first = SecureFunction(step, (Owner.PUBLIC, *owners[1:]), "first step")
    then = SecureFunction(step, owners, "step")
    rng = np.random.default_rng(0)
    rows, xs = (rng.normal(size=(3, 2, 1, 2)).astype(np.float32) for _ in range(2))

    def work(session: PartySession) -> list[Any]:
        cache: Any = Public(np.zeros((2, 4, 2), np.float32))
        found = []
        for i, at in enumerate((0, 1, 1)):
            row, x = (
                session.private(owner, functools.partial(np.array, a[i]), a[i].shape, np.float32)
                for owner, a in ((CLIENT, rows), (PROVIDER, xs))
            )
            given = (cache, row, x, Public(np.array(at)))
            function = then if i else first
            demand, _ = session.demand(function, *given)
            mark = len(session.meter.entries)
            cache, out = session.call(function, *given)
            ops = [e for e in session.meter.entries[mark:] if e.kind == "op"]
            assert [(e.name, e.traffic.bytes) for e in ops] == [
                (c.op, c.cost.client_to_provider + c.cost.provider_to_client) for c in demand.calls
            ]
            found.append(session.get(out))
        return found

    found, _ = simulation.run(work)
    cache = np.zeros((2, 4, 2))
    for i, at in enumerate((0, 1, 1)):
        cache[:, at] = rows[i, :, 0]
        np.testing.assert_allclose(
            found[i], xs[i] @ cache.swapaxes(1, 2) @ cache, atol=1e-3
        )


def test_an_allocation_is_no_part_of_a_value_printed() -> None:
    assert "words" not in repr(_used(_party())) and "Allocation" not in repr(_used(_party()))
    assert Allocation().ids(2).tolist() == [0, 1]


def test_a_longer_cache_stays_open(simulation: Simulation) -> None:
    """Rows that are open stay so, and the new ones are zero and cost nothing."""

    def first_step(cache: Any, rows: Any, x: Any) -> Any:
        cache = append(cache, rows, 0)
        return cache, reveal(times_rows(x, cache, tile=2, shift=0), to=Owner.CLIENT, label="test")

    def product(cache: Any, x: Any) -> Any:
        return reveal(times_rows(x, cache, tile=2, shift=0), to=Owner.CLIENT, label="test")

    def longer(cache: Any) -> Any:
        return lengthen(cache, positions=3)

    one, other, both = Owner.CLIENT, Owner.PROVIDER, Owner.JOINT
    first = SecureFunction(first_step, (Owner.PUBLIC, one, other), "first step")
    then = SecureFunction(product, (both, other), "product")
    more = SecureFunction(longer, (both,), "longer")
    row, x = np.array([[[3, -2]], [[1, 5]]], np.int32), np.array([[[7, 1]], [[2, -4]]], np.int32)

    def work(session: PartySession) -> Any:
        own = session.private(CLIENT, lambda: row, row.shape, row.dtype)
        peers = session.private(PROVIDER, lambda: x, x.shape, x.dtype)
        cache, _ = session.call(first, Public(np.zeros((2, 1, 2), np.int32)), own, peers)
        before = session.demand(then, cache, peers)[0]
        cache = session.call(more, cache)
        after = session.demand(then, cache, peers)[0]
        opened = [n.calls[0].cost.client_to_provider for n in (before, after)]
        return opened, [n.material for n in (before, after)], session.get(
            session.call(then, cache, peers)
        )  # fmt: skip

    (opened, material, found), _ = simulation.run(work)
    assert opened == [2 * 2 * 8] * 2  # the query, of two words a head
    assert material == [{}, {}]
    np.testing.assert_array_equal(found, [[[19, 0, 0]], [[-18, 0, 0]]])


def test_products_with_one_cache_side_by_side(simulation: Simulation) -> None:
    """They run one after the other, though the first takes nothing that the second does: each
    finds the slots as the one before left them.
    """

    def first_step(cache: Any, rows: Any, x: Any) -> Any:
        cache = append(cache, rows, 0)
        out = reveal(times_rows(x, cache, tile=2, shift=0), to=Owner.CLIENT, label="test")
        return cache, out

    def both_products(cache: Any, x: Any) -> Any:
        found = [times_rows(k * x, cache, tile=2, shift=0) for k in (1, 2, 3)]
        return reveal(jnp.concatenate(found), to=Owner.CLIENT, label="test")

    one, other = Owner.CLIENT, Owner.PROVIDER
    first = SecureFunction(first_step, (Owner.PUBLIC, one, other), "first step")
    then = SecureFunction(both_products, (Owner.JOINT, other), "products")
    rows, x = np.array([[[3, -2]], [[1, 5]]], np.int32), np.array([[[7, 1]], [[2, -4]]], np.int32)

    def work(session: PartySession) -> Any:
        own = session.private(CLIENT, lambda: rows, rows.shape, rows.dtype)
        peers = session.private(PROVIDER, lambda: x, x.shape, x.dtype)
        cache, _ = session.call(first, Public(np.zeros((2, 3, 2), np.int32)), own, peers)
        return session.get(session.call(then, cache, peers))

    found, _ = simulation.run(work)
    expected = np.zeros((2, 1, 3), np.int32)
    expected[:, :, :1] = x @ rows.swapaxes(1, 2)
    np.testing.assert_array_equal(found, np.concatenate([k * expected for k in (1, 2, 3)]))
