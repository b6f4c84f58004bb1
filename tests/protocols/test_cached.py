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
QUERY, ROWS = (Arith(as_words(x), x.dtype, 0) for x in (X, CACHE))
FOUR, EIGHT = {"tile": 4}, {"tile": 8}


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


def of_several_tiles(several: np.ndarray, one: np.ndarray) -> list[Case]:
    return [
        Case((several, CACHE[:, :2, :1]), ("degenerate", "arith"), {"tile": 1}),
        Case((one[..., :1] % 8 * 8, ONES), ("client", "public"), {"tile": 2, "shift": 3}),
    ]


class TestRowsOfSeveralTiles(ComposedContract):
    op = times_rows
    fresh = True
    elementwise = False
    cases = of_several_tiles(XS, X)


class TestColumnsOfSeveralTiles(ComposedContract):
    op = times_columns
    fresh = True
    elementwise = False
    cases = of_several_tiles(WS, W)


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
    """Results as numpy's, prices exact, both parties allocate the same; no mask is used twice."""
    outcome, records = caching.run(commands, tile=tile)
    for actual, wanted in zip(caching.results(outcome), caching.expected(commands), strict=True):
        np.testing.assert_array_equal(actual, wanted)
    assert records[0].cost == records[1].cost
    client, provider = outcome.traffic
    cost = records[CLIENT].cost
    assert client.sent_messages + provider.sent_messages == cost.messages
    assert client.sent_bytes == cost.client_to_provider
    assert provider.sent_bytes == cost.provider_to_client
    assert repeated(commands, tile) == 0


def repeated(commands: Sequence[Command], tile: int) -> int:
    """Return how many words the client sends twice when all it has to hide are zeros: then what it
    sends is its masks.
    """
    outcome, _ = caching.run(commands, tile=tile, zero=True)
    sent = [data.view(np.uint64) for data in outcome.views[CLIENT].outgoing]
    words = np.concatenate([np.zeros(0, np.uint64), *sent])
    return words.size - len(set(words.tolist()))


ROLL_BACK: list[Command] = [
    Append(0, 0, 2, 0),
    Product("rows", 1, 1, 1),
    Append(1, 1, 1, 2),
    Product("rows", 2, 1, 3),
]


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
    """Write three rows and use them, overwrite the first of them and use them again."""
    here = Public(np.array(0))
    empty = Public(np.zeros((x.shape[0], 3, x.shape[2]), np.int64))
    (cache,) = append.run(party, [empty, first, here], {})
    times_rows.run(party, [x, cache], FOUR)
    (cache,) = append.run(party, [cache, second, here], {})
    return times_rows.run(party, [x, cache], FOUR)[0]  # type: ignore[return-value]


def _correct_last(*inputs: Value) -> Any:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        # The second query; the fourth slot, and what stayed.
        party.drawn[2][:, 1:2, [3, 1, 2]] += wanted.words - made.words

    return correct


write_and_overwrite = protocol_op(
    "write and overwrite",
    reference=lambda x, first, second: (
        x @ np.concatenate([second, first[:, 1:]], axis=1).swapaxes(1, 2)
    ),
    two_party=_write_and_overwrite,
    owners=lambda *owners: [Owner.JOINT],
    cost=lambda x, *rows: Cost(4, 2, *[48 * x.shape[0] * x.shape[2]] * 2),
    functionality=Functionality(),
    simulate=uniform_messages(_write_and_overwrite, _correct_last),
)


class TestOverwriting(ComposedContract):
    """Of a roll-back: what is sent before and after it hides both rows."""

    op = write_and_overwrite
    fresh = True
    elementwise = False
    cases = [Case((X[..., :1], CACHE[:, :3, :1], CACHE[:, 1:2, :1]), ("arith",) * 3)]


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
    assert _traffic(columns, 16) == words * (caching.D * CAP + 8)


def test_nothing_is_sent_for_an_empty_cache() -> None:
    outcome, _ = caching.run([Product("rows", 0, 2, 0), Product("columns", 0, 2, 0)], tile=4)
    assert outcome.traffic[CLIENT].messages == 0
    assert not any(result.any() for result in caching.results(outcome))


def _party(rank: int = CLIENT, seed: int = 0) -> SimulatedParty:
    return SimulatedParty(rank, Prg.from_seed(seed, "test"), Prg.from_seed(0, "common"))


def _used(party: Party) -> Cached:
    """Return a cache whose rows are open."""
    (cache,) = append.run(party, [Public(np.zeros_like(CACHE)), ROWS, Public(np.array(0))], {})
    times_rows.run(party, [QUERY, cache], EIGHT)
    assert isinstance(cache, Cached)
    return cache


def test_a_cache_of_another_session_is_refused() -> None:
    cache = _used(_party())
    with pytest.raises(ValueError, match="another session"):
        times_rows.run(_party(seed=1), [QUERY, cache], EIGHT)


def test_after_a_failure_nothing_goes_on() -> None:
    """What the slots say may not have been opened."""
    party = _party()
    cache = _used(party)

    def fail(words: np.ndarray) -> None:
        raise PeerError("gone")

    party.send = fail  # type: ignore[method-assign]
    with pytest.raises(PeerError):
        times_rows.run(party, [QUERY, cache], EIGHT)
    with pytest.raises(ValueError, match="has failed"):
        times_rows.run(party, [QUERY, cache], EIGHT)


def test_a_fork_has_no_words_and_sends_none() -> None:
    """A dry run on a fork leaves the cache as it was, and gives nothing away."""
    party = _party()
    cache = _used(party)
    (dry,) = fork([cache])
    assert not dry.words.any() and cache.words.any()
    price = times_rows.cost(QUERY, cache, **EIGHT)
    assert times_rows.cost(QUERY, dry, **EIGHT) == price
    for _ in range(3):
        before = len(party.outgoing)
        (result,) = times_rows.run(party, [QUERY, dry], EIGHT)
        assert isinstance(result, Arith) and not result.words.any()
        assert not any(sent.any() for sent in party.outgoing[before:])
    assert times_rows.cost(QUERY, cache, **EIGHT) == price


def test_versions_of_a_cache_stay_versions_in_forks() -> None:
    """What one of them opens is open for the other, as in the real ones."""
    party = _party()
    cache = _used(party)
    row = Arith(ROWS.words[:, :1], CACHE.dtype, 0)
    (other,) = append.run(party, [cache, row, Public(np.array(0))], {})
    one, two = fork([cache, other])
    assert one.state is two.state is not cache.state
    before = times_rows.cost(QUERY, two, **EIGHT)
    times_rows.run(party, [QUERY, two], EIGHT)
    assert times_rows.cost(QUERY, two, **EIGHT) != before == times_rows.cost(QUERY, other, **EIGHT)


def test_other_words_have_no_slots() -> None:
    """A cache's words are never replaced, not by equal ones either: nothing is opened anew without
    a word. Its plain share has no rows that are open.
    """
    cache = _used(_party())
    with pytest.raises(ValueError, match="other words"):
        dataclasses.replace(cache, words=np.array(cache.words))
    whole = times_rows.cost(QUERY, Arith(cache.words, cache.dtype, 0), **EIGHT)
    assert times_rows.cost(QUERY, cache.plain(), **EIGHT) == whole
    assert times_rows.cost(QUERY, cache, **EIGHT) != whole


@pytest.mark.parametrize("values", [(X, CACHE[:, :, :1]), (X[:1], CACHE)])
def test_shapes_that_do_not_fit(values: Any) -> None:
    with pytest.raises(ValueError, match="does not fit"):
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
            case = Case((left, cache), ("provider", "client"), {"tile": 4, "shift": shift})
            outcome = run_op(op, case)
            words = reconstruct_words([o[0] for o in outcome.outputs])
            actual = words.view(np.int64) / 2.0**18 / scale
            assert np.max(np.abs(actual - wanted)) < 1e-4


# ---- with SPU


@pytest.mark.parametrize("correlation", [cached_products(4, 5, 3), weighted_rows(4, 5, 3)])
def test_what_is_made_is_declared_up_to_noise(simulation: Simulation, correlation: Any) -> None:
    both = simulation.run(lambda session: session.preprocessing.take(correlation, 2))
    a, b = (x + y for x, y in zip(both[0].masks, both[1].masks, strict=True))
    (product,) = (x + y for x, y in zip(both[0].results, both[1].results, strict=True))
    noise = (product - correlation.secure(a, b)[0]).view(np.int64)
    assert np.max(np.abs(noise)) < 2**14, "2^18 is one unit of a fixed-point product"


def owned(session: PartySession, owner: int, x: np.ndarray) -> Any:
    return session.private(owner, np.array, x.shape, x.dtype, x)


def test_a_program_keeps_its_cache_from_call_to_call(simulation: Simulation) -> None:
    def step(cache: Any, rows: Any, x: Any, at: Any) -> Any:
        cache = append(cache, rows, at)
        outcomes = times_columns(times_rows(x, cache, tile=8), cache, tile=8)
        return cache, reveal(outcomes, to=Owner.CLIENT, label="test")

    owners = (Owner.JOINT, Owner.CLIENT, Owner.PROVIDER, Owner.PUBLIC)
    first = SecureFunction(step, (Owner.PUBLIC, *owners[1:]), "first step")
    then = SecureFunction(step, owners, "step")
    rng = np.random.default_rng(0)
    rows, xs = (rng.normal(size=(3, 2, 1, 2)).astype(np.float32) for _ in range(2))
    places = (0, 1, 1)

    def work(session: PartySession) -> list[Any]:
        cache: Any = Public(np.zeros((2, 4, 2), np.float32))
        outcomes = []
        for i, at in enumerate(places):
            given = owned(session, CLIENT, rows[i]), owned(session, PROVIDER, xs[i])
            function, args = then if i else first, (cache, *given, Public(np.array(at)))
            demand, _ = session.demand(function, *args)
            mark = len(session.meter.entries)
            cache, out = session.call(function, *args)
            ops = [e for e in session.meter.entries[mark:] if e.kind == "op"]
            assert [(e.name, e.traffic.bytes) for e in ops] == [
                (c.op, c.cost.client_to_provider + c.cost.provider_to_client) for c in demand.calls
            ]
            outcomes.append(session.get(out))
        return outcomes

    outcomes, _ = simulation.run(work)
    cache = np.zeros((2, 4, 2))
    for i, at in enumerate(places):
        cache[:, at] = rows[i, :, 0]
        wanted = xs[i] @ cache.swapaxes(1, 2) @ cache
        np.testing.assert_allclose(outcomes[i], wanted, atol=1e-3)


def test_an_allocation_is_no_part_of_a_value_printed() -> None:
    assert "words" not in repr(_used(_party())) and "Allocation" not in repr(_used(_party()))
    assert Allocation().ids(2).tolist() == [0, 1]


def test_a_longer_cache_stays_open_for_products_side_by_side(simulation: Simulation) -> None:
    """Rows that are open stay so, and the new ones are zero and cost nothing. Products with one
    cache run one after the other, though the first takes nothing that the second does: each finds
    the slots as the one before left them.
    """

    def products(cache: Any, x: Any, factors: Sequence[int]) -> Any:
        outcomes = [times_rows(k * x, cache, tile=2, shift=0) for k in factors]
        return reveal(jnp.concatenate(outcomes), to=Owner.CLIENT, label="test")

    def first_step(cache: Any, rows: Any, x: Any) -> Any:
        cache = append(cache, rows, 0)
        return cache, products(cache, x, [1])

    first = SecureFunction(first_step, (Owner.PUBLIC, Owner.CLIENT, Owner.PROVIDER), "first step")
    more = SecureFunction(lambda cache: lengthen(cache, positions=3), (Owner.JOINT,), "longer")
    one, three = (
        SecureFunction(functools.partial(products, factors=k), (Owner.JOINT, Owner.PROVIDER), name)
        for k, name in (([1], "product"), ([1, 2, 3], "products"))
    )
    row = np.array([[[3, -2]], [[1, 5]]], np.float32)
    x = np.array([[[7, 1]], [[2, -4]]], np.float32)

    def work(session: PartySession) -> Any:
        own, peers = owned(session, CLIENT, row), owned(session, PROVIDER, x)
        cache, _ = session.call(first, Public(np.zeros((2, 1, 2), np.float32)), own, peers)
        before, _ = session.demand(one, cache, peers)
        cache = session.call(more, cache)
        after, _ = session.demand(one, cache, peers)
        return before, after, session.get(session.call(three, cache, peers))

    (before, after, outcomes), _ = simulation.run(work)
    for demand in (before, after):
        (call,) = (c for c in demand.calls if c.op == "times_rows")
        assert call.cost.client_to_provider == 2 * 2 * 8  # the query, of two words a head
        assert demand.correlations == {}
    product = np.array([[[19, 0, 0]], [[-18, 0, 0]]])
    wanted = np.concatenate([k * product for k in (1, 2, 3)])
    np.testing.assert_allclose(outcomes / 2.0**18, wanted, atol=2**-16)
