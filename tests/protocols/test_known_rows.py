"""Products with rows that the provider knows: one direction, and each mask row hides one thing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.arithmetic.cached import append, times_columns, times_rows
from protocols.arithmetic.known_rows import BY_ROWS, known_products, known_rows, weighted_known_rows
from protocols.arithmetic.lasting import Lasting
from protocols.bits.convert import as_arith
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.reveal import reveal
from spu_llm.core.simulated import SimulatedParty, uniform_messages
from spu_llm.core.values import (
    CLIENT,
    PROVIDER,
    Arith,
    Owner,
    Private,
    Public,
    Value,
    as_words,
    owner_of,
)
from spu_llm.offline.packed.products import owners
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.testing import Case, OpContract, reconstruct_words, run_op
from spu_llm.testing.run import Outcome
from tests.protocols.composed import ComposedContract, calls
from tests.protocols.lasting_values import (
    check_fork,
    check_nothing_goes_on,
    check_other_sessions_are_refused,
    party,
    repeated_words,
)

HEADS, CAP, D = 2, 4, 3
OPS = {"rows": (times_rows, D), "columns": (times_columns, CAP)}
X = np.array([[[3], [-1]], [[2**62], [5]]])  # [head, n, d]
ROWS = np.array([[[1], [-(2**63)]], [[4], [2**40 - 1]]])  # [head, cap, d]
WEIGHTS = np.array([[[1, -2], [0, 7]], [[0, 5], [-(2**40), 2**63 - 1]]])  # [head, n, cap]
WHOLE = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (HEADS, CAP, D))


class TestKnownRows(OpContract):
    op = known_rows
    masks = False
    elementwise = False
    cases = [Case((ROWS,), ("provider",))]


class TestTimesRows(OpContract):
    op = times_rows
    fresh = True
    elementwise = False
    cases = [Case((X[:, :1], ROWS[:, :1]), ("arith", "provider"), {"tile": 1})]


class TestTimesColumns(OpContract):
    op = times_columns
    fresh = True
    elementwise = False
    cases = [Case((WEIGHTS[:, :1, :1], ROWS[:, :1]), ("arith", "provider"), {"tile": 1})]


def of_several_units(x: np.ndarray) -> list[Case]:
    return [
        Case((x, ROWS), ("degenerate", "provider"), {"tile": 1}),
        Case((x[:, :1] % 8 * 8, ROWS % 5), ("client", "provider"), {"tile": 2, "shift": 3}),
    ]


class TestRowsOfSeveralUnits(ComposedContract):
    op = times_rows
    fresh = True
    elementwise = False
    cases = of_several_units(X)


class TestColumnsOfSeveralUnits(ComposedContract):
    op = times_columns
    fresh = True
    elementwise = False
    cases = of_several_units(WEIGHTS)


# ---- sequences of calls

Products = Sequence[tuple[str, int]]  # kind, and queries


def plain_of(products: Products) -> list[np.ndarray]:
    rng = np.random.default_rng(len(products))
    return [rng.integers(-(2**63), 2**63 - 1, (HEADS, n, OPS[k][1])) for k, n in products]


def run(products: Products, tile: int, zero: bool = False) -> tuple[Outcome, list[Cost]]:
    """Return both parties' results, and what each has said that they cost. `zero`: all is zero."""
    costs = [Cost(), Cost()]

    def share(rank: int, i: int, plain: np.ndarray) -> Arith:
        mask = np.random.default_rng([1, i]).integers(0, 2**64, plain.shape, np.uint64)
        words = mask if rank == CLIENT else as_words(plain) - mask
        return Arith(np.zeros_like(words) if zero else words, plain.dtype, 0)

    def two_party(party: Party, rows: Value) -> list[Value]:
        (known,) = known_rows.run(party, [rows], {})
        made: list[Value] = []
        for i, ((kind, _), plain) in enumerate(zip(products, plain_of(products), strict=True)):
            x, op = share(party.rank, i, plain), OPS[kind][0]
            costs[party.rank] += op.cost(x, known, tile=tile)
            made += op.run(party, [x, known], {"tile": tile})
        return made

    op = calls("products", two_party)
    rows = np.zeros_like(WHOLE) if zero else WHOLE
    return run_op(op, Case((rows,), ("provider",))), costs


PRODUCTS = st.lists(
    st.tuples(st.sampled_from(["rows", "columns"]), st.integers(0, 5)), min_size=1, max_size=8
)


@settings(max_examples=40, deadline=None)
@given(PRODUCTS, st.integers(1, 7))
def test_any_sequence_of_calls(products: Products, tile: int) -> None:
    """Results as numpy's, prices exact, no mask used twice; nothing but f comes to the client, and
    that once for each unit.
    """
    outcome, costs = run(products, tile)
    for (kind, _), x, pair in zip(
        products, plain_of(products), zip(*outcome.outputs, strict=True), strict=True
    ):
        wanted = x @ (WHOLE if kind == "columns" else WHOLE.swapaxes(1, 2))
        np.testing.assert_array_equal(reconstruct_words(list(pair)).view(np.int64), wanted)
    client, provider = outcome.traffic
    assert costs[CLIENT] == costs[PROVIDER]
    assert client.sent_messages + provider.sent_messages == costs[CLIENT].messages
    assert client.sent_bytes == costs[CLIENT].client_to_provider
    assert provider.sent_bytes == costs[CLIENT].provider_to_client
    units = [-(-sum(n for k, n in products if k == kind) // tile) for kind in OPS]
    assert provider.sent_bytes == 8 * WHOLE.size * sum(units)
    for rank in (CLIENT, PROVIDER):
        assert repeated(products, tile, rank) == 0


def repeated(products: Products, tile: int, rank: int) -> int:
    """Return how many words a party sends twice when all it has to hide are zeros: then what it
    sends is its masks.
    """
    outcome, _ = run(products, tile, zero=True)
    return repeated_words(outcome, rank)


# ---- broken twins


def _three_queries(party: Party, x: Value, rows: Value, goes_back: bool = False) -> Arith:
    """Send three queries of one unit. `goes_back`, which is broken: the third one goes by the mask
    row of the second.
    """
    (known,) = known_rows.run(party, [rows], {})
    assert isinstance(known, Lasting)
    for _ in range(2):
        times_rows.run(party, [x, known], {"tile": 4})
    if goes_back:
        known.masks.half(BY_ROWS.of(known, 4)).used = 1
    return times_rows.run(party, [x, known], {"tile": 4})[0]  # type: ignore[return-value]


def _correct_third(*inputs: Value) -> Any:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        party.drawn[2][:, 2:3] += wanted.words - made.words

    return correct


three_queries = protocol_op(
    "three queries",
    reference=lambda x, rows: x @ rows.swapaxes(1, 2),
    two_party=_three_queries,
    owners=lambda *owners: [Owner.JOINT],
    cost=lambda x, rows: Cost(4, 2, 24 * x.shape[0], 8 * rows.shape[0]),
    simulate=uniform_messages(_three_queries, _correct_third),
)


class TestThreeQueries(ComposedContract):
    op = three_queries
    fresh = True
    elementwise = False
    cases = [Case((X[:, :1], ROWS[:, :1]), ("arith", "provider"))]


def test_a_mask_row_of_two_queries_is_noticed() -> None:
    broken = functools.partial(_three_queries, goes_back=True)
    contract = TestThreeQueries()
    contract.op = dataclasses.replace(three_queries, two_party=broken)
    contract.test_result_is_the_reference()
    with pytest.raises(AssertionError, match="rank 0: .*(bits sent|bits are sent)"):
        contract.test_messages_are_masked()


def _opens_both_ways(party: Party, x: Value, rows: Value, **static: Any) -> Arith:
    """Broken: the provider sends its share of the queries, for which it has no mask, as well."""
    (result,) = times_rows.run(party, [x, rows], static)
    if party.rank == PROVIDER:
        party.send(as_arith(party, x).words)
    else:
        party.recv(x.shape)
    assert isinstance(result, Arith)
    return result


def _shows_its_rows(party: Party, x: Value, rows: Value, **static: Any) -> Arith:
    """Broken: the provider sends f and then, after its mask, K."""
    (result,) = times_rows.run(party, [x, rows], static)
    if party.rank == PROVIDER:
        party.send(as_arith(party, rows).words)
    else:
        party.recv(rows.shape)
    assert isinstance(result, Arith)
    return result


@pytest.mark.parametrize("twin", [_opens_both_ways, _shows_its_rows])
def test_what_the_provider_shows_is_noticed(twin: Any) -> None:
    contract = TestTimesRows()
    contract.op = dataclasses.replace(times_rows, two_party=twin)
    contract.test_result_is_the_reference()
    with pytest.raises(AssertionError, match="rank 1: .*(bits sent|bits are sent)"):
        contract.test_messages_are_masked()


# ---- the value

FOUR = {"tile": 4}


def _query() -> Arith:
    return Arith(as_words(X[:, :1]), X.dtype, 0)


def _used(one: Party) -> Lasting:
    """Rows that are open."""
    value = ROWS if one.rank == PROVIDER else None
    (known,) = known_rows.run(one, [Private(PROVIDER, ROWS.shape, ROWS.dtype, value)], {})
    times_rows.run(one, [_query(), known], FOUR)
    assert isinstance(known, Lasting)
    return known


def test_rows_are_opened_once() -> None:
    """Then a query costs its own words, one way."""
    known = _used(party())
    words = X[:, :1].size
    assert times_rows.cost(_query(), known, **FOUR) == Cost(1, 1, 8 * words, 0)
    assert times_rows.cost(_query(), known.plain(), **FOUR) == Cost(2, 1, 8 * words, 8 * ROWS.size)


def test_only_rows_of_the_provider_are_known() -> None:
    for form in ("client", "arith", "public"):
        with pytest.raises(ValueError, match="private to the provider"):
            run_op(known_rows, Case((ROWS,), (form,)))


def test_rows_of_another_session_are_refused() -> None:
    check_other_sessions_are_refused(times_rows, _query(), _used, **FOUR)


@pytest.mark.parametrize("rank", [CLIENT, PROVIDER])
def test_after_a_failure_nothing_goes_on(rank: int) -> None:
    check_nothing_goes_on(times_rows, rank, _query(), _used, **FOUR)


@pytest.mark.parametrize("rank", [CLIENT, PROVIDER])
def test_a_fork_has_no_words_and_sends_none(rank: int) -> None:
    check_fork(times_rows, rank, _query(), _used, **FOUR)


def test_what_is_known_is_still_the_providers() -> None:
    """Rows written over it are a cache as any other, of shares."""
    known = _used(party(PROVIDER))
    assert owner_of(known) is Owner.PROVIDER
    more = Arith(as_words(ROWS[:, :1]), ROWS.dtype, 0)
    (cache,) = append.run(party(PROVIDER), [known, more, Public(np.array(0))], {})
    assert owner_of(cache) is Owner.JOINT
    assert "words" not in repr(known) and "Masks" not in repr(known)


def test_fixed_point() -> None:
    rng = np.random.default_rng(0)
    x, w, rows = (rng.normal(size=shape) for shape in ((2, 2, 4), (2, 2, 3), (2, 3, 4)))
    for op, left in ((times_rows, x), (times_columns, w)):
        wanted = np.asarray(op.reference(left, rows, tile=4))
        for shift, scale in ((None, 1.0), (0, 2.0**18)):
            case = Case((left, rows), ("client", "provider"), {"tile": 4, "shift": shift})
            outcome = run_op(op, case)
            words = reconstruct_words([o[0] for o in outcome.outputs])
            assert np.max(np.abs(words.view(np.int64) / 2.0**18 / scale - wanted)) < 1e-4


# ---- with SPU


@pytest.mark.parametrize(
    "correlation", [known_products(4, 5, 3), weighted_known_rows(4, 5, 3)], ids=["rows", "columns"]
)
def test_what_is_made_is_declared_up_to_noise(simulation: Simulation, correlation: Any) -> None:
    """The provider alone encrypts."""
    assert owners(correlation) == [PROVIDER]
    both = simulation.run(lambda session: session.preprocessing.take(correlation, 2))
    a, b = (x + y for x, y in zip(both[0].masks, both[1].masks, strict=True))
    assert not both[PROVIDER].masks[0].any() and not both[CLIENT].masks[1].any()
    (product,) = (x + y for x, y in zip(both[0].results, both[1].results, strict=True))
    noise = (product - correlation.secure(a, b)[0]).view(np.int64)
    assert np.max(np.abs(noise)) < 2**14, "2^18 is one unit of a fixed-point product"


def test_a_program_keeps_its_rows_from_call_to_call(simulation: Simulation) -> None:
    """What a dry run says of each call is what it takes; the rows are opened by the first, and
    again where their masks are used up.
    """
    prepare = SecureFunction(lambda rows: known_rows(2 * rows), (Owner.PROVIDER,), "rows")

    def step(rows: Any, x: Any) -> Any:
        outcomes = times_columns(times_rows(x, rows, tile=3), rows, tile=3)
        return rows, reveal(outcomes, to=Owner.CLIENT, label="test")

    function = SecureFunction(step, (Owner.PROVIDER, Owner.CLIENT), "step")
    rng = np.random.default_rng(0)
    rows, xs = rng.normal(size=(2, 4, 2)), rng.normal(size=(3, 2, 2, 2))
    rows, xs = rows.astype(np.float32), xs.astype(np.float32)

    def work(session: PartySession) -> Any:
        own = session.private(PROVIDER, np.array, rows.shape, rows.dtype, rows)
        known = session.call(prepare, own)
        outcomes, opened = [], []
        for x in xs:
            args = known, session.private(CLIENT, np.array, x.shape, x.dtype, x)
            demand, _ = session.demand(function, *args)
            mark = len(session.meter.entries)
            known, out = session.call(function, *args)
            ops = [e for e in session.meter.entries[mark:] if e.kind == "op"]
            assert [(e.name, e.traffic.bytes) for e in ops] == [
                (c.op, c.cost.client_to_provider + c.cost.provider_to_client) for c in demand.calls
            ]
            opened.append([c.cost.provider_to_client for c in demand.calls if c.op == "times_rows"])
            outcomes.append(session.get(out))
        return outcomes, opened

    (outcomes, opened), _ = simulation.run(work)
    first, bits = 8 * rows.size, 2  # of a truncation
    assert opened == [[first + bits], [first + bits], [bits]]  # queries 1 and 2, 3 and 4, 5 and 6
    for x, y in zip(xs, outcomes, strict=True):
        np.testing.assert_allclose(y, x @ (2 * rows).swapaxes(1, 2) @ (2 * rows), atol=1e-3)
