"""Products with factors that the client knows: opened once, and each mask hides one thing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocols.arithmetic.known_factors import factor_products, known_factors, times_factors
from protocols.arithmetic.lasting import Lasting
from protocols.bits.convert import as_arith, known_words
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.correlation import Correlation
from spu_llm.core.op import Cost, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.reveal import reveal
from spu_llm.core.simulated import SimulatedParty, uniform_messages
from spu_llm.core.values import CLIENT, PROVIDER, Arith, Owner, Private, Value, as_words, owner_of
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

BATCH, N, K = 2, 3, 2
X = np.array([[[3, -1, 7], [2**62, 0, 5]], [[-(2**63), 9, 1], [4, -2, 2**40]]])  # [batch, k, m]
Y = np.array([[[2, -5], [0, 1], [-(2**63), 6]], [[7, -1], [2**40 - 1, 3], [1, 1]]])  # [batch, n, k]
ONE = X[:, :1, :1], Y[:, :1, :1]  # one word each
FORMS = ("arith", "client")


class TestKnownFactors(OpContract):
    op = known_factors
    masks = False
    elementwise = False
    cases = [Case((Y,), ("client",))]


class TestTimesFactors(OpContract):
    op = times_factors
    fresh = True
    elementwise = False
    cases = [
        Case(ONE, ("arith", "client"), {"uses": 1}),
        Case(ONE, ("degenerate", "client"), {"uses": 2}),
    ]


class TestSeveralFactors(ComposedContract):
    op = times_factors
    fresh = True
    elementwise = False
    cases = [
        Case((X, Y), FORMS, {"uses": 3}),
        Case((X % 8 * 8, Y % 8), ("provider", "client"), {"uses": 1, "shift": 3}),
    ]


# ---- sequences of calls


Products = Sequence[tuple[int, int]]  # columns, and how many of them a unit serves


def plain_of(products: Products) -> list[np.ndarray]:
    rng = np.random.default_rng(len(products))
    return [rng.integers(-(2**63), 2**63 - 1, (BATCH, K, m)) for m, _ in products]


def run(products: Products, zero: bool = False) -> tuple[Outcome, list[Cost]]:
    """Return both parties' results, and what each has said that they cost. `zero`: all is zero."""
    costs = [Cost(), Cost()]

    def share(rank: int, i: int, plain: np.ndarray) -> Arith:
        mask = np.random.default_rng([1, i]).integers(0, 2**64, plain.shape, np.uint64)
        words = mask if rank == CLIENT else as_words(plain) - mask
        return Arith(np.zeros_like(words) if zero else words, plain.dtype, 0)

    def two_party(party: Party, factors: Value) -> list[Value]:
        (known,) = known_factors.run(party, [factors], {})
        made: list[Value] = []
        for i, ((_, uses), plain) in enumerate(zip(products, plain_of(products), strict=True)):
            x = share(party.rank, i, plain)
            costs[party.rank] += times_factors.cost(x, known, uses=uses)
            made += times_factors.run(party, [x, known], {"uses": uses})
        return made

    op = calls("products", two_party)
    return run_op(op, Case((np.zeros_like(Y) if zero else Y,), ("client",))), costs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=9))
@example([(2, 3), (3, 2), (2, 3)])  # one correlation for products of two widths
def test_any_sequence_of_calls(products: list[tuple[int, int]]) -> None:
    """Results as numpy's, prices exact, no mask used twice; nothing but e comes to the provider,
    and that once for each unit.
    """
    outcome, costs = run(products)
    for x, pair in zip(plain_of(products), zip(*outcome.outputs, strict=True), strict=True):
        np.testing.assert_array_equal(reconstruct_words(list(pair)).view(np.int64), Y @ x)
    client, provider = outcome.traffic
    assert costs[CLIENT] == costs[PROVIDER]
    assert client.sent_messages + provider.sent_messages == costs[CLIENT].messages
    columns = sum(m for m, _ in products)
    assert provider.sent_bytes == costs[CLIENT].provider_to_client == 8 * BATCH * K * columns
    taken = sum(len(t.correlations.results[0]) for t in outcome.fresh[CLIENT].taken)
    assert client.sent_bytes == costs[CLIENT].client_to_provider == 8 * N * K * taken
    for rank in (CLIENT, PROVIDER):
        assert repeated(products, rank) == 0


@given(st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_a_unit_serves_what_was_asked(uses: int, more: int) -> None:
    products = [(2, uses)] * (uses + more)
    outcome, _ = run(products)
    assert outcome.traffic[CLIENT].sent_bytes == 8 * Y.size * -(-len(products) // uses)


def repeated(products: Products, rank: int) -> int:
    """Return how many words a party sends twice when all it has to hide are zeros: then what it
    sends is its masks.
    """
    outcome, _ = run(products, zero=True)
    return repeated_words(outcome, rank)


# ---- broken twins


def _three_products(party: Party, x: Value, y: Value, goes_back: bool = False) -> Arith:
    """Make three products of one unit. `goes_back`, which is broken: the third one goes by the
    columns of the second.
    """
    (known,) = known_factors.run(party, [y], {})
    assert isinstance(known, Lasting)
    for _ in range(2):
        times_factors.run(party, [x, known], {"uses": 4})
    if goes_back:
        known.masks.half(factor_products(1, 1, 4)).used = 1
    return times_factors.run(party, [x, known], {"uses": 4})[0]  # type: ignore[return-value]


def _correct_third(*inputs: Value) -> Any:
    def correct(party: SimulatedParty, made: Arith, wanted: Arith) -> None:
        party.drawn[2][:, :, 2:3] += wanted.words - made.words

    return correct


three_products = protocol_op(
    "three products",
    reference=functools.partial(times_factors.reference, uses=4),
    two_party=_three_products,
    owners=lambda *owners: [Owner.JOINT],
    cost=lambda x, y: Cost(4, 2, 8 * x.shape[0], 24 * x.shape[0]),
    simulate=uniform_messages(_three_products, _correct_third),
)


class TestThreeProducts(ComposedContract):
    op = three_products
    fresh = True
    elementwise = False
    cases = [Case(ONE, FORMS)]


def test_columns_of_two_products_are_noticed() -> None:
    contract = TestThreeProducts()
    contract.op = dataclasses.replace(
        contract.op, two_party=functools.partial(_three_products, goes_back=True)
    )
    contract.test_result_is_the_reference()
    with pytest.raises(AssertionError, match="rank 1: .*(bits sent|bits are sent)"):
        contract.test_messages_are_masked()


def _opens_both_ways(party: Party, x: Value, y: Value, **static: Any) -> Arith:
    """Broken: the client sends its share of x, for which it has no mask, as well."""
    (result,) = times_factors.run(party, [x, y], static)
    if party.rank == CLIENT:
        party.send(as_arith(party, x).words)
    else:
        party.recv(x.shape)
    assert isinstance(result, Arith)
    return result


def _shows_its_factors(party: Party, x: Value, y: Value, **static: Any) -> Arith:
    """Broken: the client sends e and then, after its mask, y."""
    (result,) = times_factors.run(party, [x, y], static)
    if party.rank == CLIENT:
        assert isinstance(y, Private)
        party.send(known_words(party, y))
    else:
        party.recv(y.shape)
    assert isinstance(result, Arith)
    return result


@pytest.mark.parametrize("twin", [_opens_both_ways, _shows_its_factors])
def test_what_the_client_shows_is_noticed(twin: Any) -> None:
    contract = TestTimesFactors()
    contract.op = dataclasses.replace(times_factors, two_party=twin)
    contract.test_result_is_the_reference()
    with pytest.raises(AssertionError, match="rank 0: .*(bits sent|bits are sent)"):
        contract.test_messages_are_masked()


# ---- the value

FOUR = {"uses": 4}


def _own(y: np.ndarray, rank: int = CLIENT) -> Private:
    return Private(CLIENT, y.shape, y.dtype, y if rank == CLIENT else None)


def _share() -> Arith:
    return Arith(as_words(X), X.dtype, 0)


def _used(one: Party) -> Lasting:
    """Factors that are open."""
    (known,) = known_factors.run(one, [_own(Y, one.rank)], {})
    times_factors.run(one, [_share(), known], FOUR)
    assert isinstance(known, Lasting)
    return known


def test_factors_are_opened_once() -> None:
    """Then a product costs the words of x, one way."""
    known = _used(party())
    assert times_factors.cost(_share(), known, **FOUR) == Cost(1, 1, 0, 8 * X.size)
    assert times_factors.cost(_share(), known.plain(), **FOUR) == Cost(2, 1, 8 * Y.size, 8 * X.size)


@pytest.mark.parametrize("op", [known_factors, times_factors])
@pytest.mark.parametrize("form", ["provider", "arith", "public"])
def test_only_factors_of_the_client_are_known(op: Any, form: str) -> None:
    case = Case((Y,), (form,)) if op is known_factors else Case((X, Y), ("arith", form), FOUR)
    with pytest.raises(ValueError, match="private to the client"):
        run_op(op, case)


def test_what_does_not_fit_is_refused() -> None:
    for y in (Y[:1], Y[:, :, :1], Y[0, 0]):
        with pytest.raises(ValueError, match="do not fit"):
            run_op(times_factors, Case((X, y), FORMS, FOUR))
    with pytest.raises(ValueError, match="one product or more, not 0"):
        run_op(times_factors, Case((X, Y), FORMS, {"uses": 0}))


def test_factors_of_another_session_are_refused() -> None:
    check_other_sessions_are_refused(times_factors, _share(), _used, **FOUR)


@pytest.mark.parametrize("rank", [CLIENT, PROVIDER])
def test_after_a_failure_nothing_goes_on(rank: int) -> None:
    check_nothing_goes_on(times_factors, rank, _share(), _used, **FOUR)


@pytest.mark.parametrize("rank", [CLIENT, PROVIDER])
def test_a_fork_has_no_words_and_sends_none(rank: int) -> None:
    check_fork(times_factors, rank, _share(), _used, **FOUR)


def test_what_is_known_is_still_the_clients() -> None:
    known = _used(party())
    assert owner_of(known) is Owner.CLIENT
    assert "words" not in repr(known) and "Masks" not in repr(known)


# ---- with SPU


@pytest.mark.parametrize(
    ("correlation", "count"),
    [(factor_products(2, 1, 30), 40), (factor_products(9, 40, 5000), 1)],
    ids=["turns", "rows side by side"],
)
def test_what_is_made_is_declared_up_to_noise(
    simulation: Simulation, correlation: Correlation, count: int
) -> None:
    """The provider alone encrypts."""
    assert owners(correlation) == [PROVIDER]
    both = simulation.run(lambda session: session.preprocessing.take(correlation, count))
    a, b = (x + y for x, y in zip(both[0].masks, both[1].masks, strict=True))
    assert not both[PROVIDER].masks[0].any() and not both[CLIENT].masks[1].any()
    (product,) = (x + y for x, y in zip(both[0].results, both[1].results, strict=True))
    noise = (product - correlation.secure(a, b)[0]).view(np.int64)
    # Six deviations of 2^9.8 are 2^12.4.
    assert 0 < np.max(np.abs(noise)) < 2**13, "2^18 is one unit of a fixed-point product"


def test_a_program_opens_its_factors_once(simulation: Simulation) -> None:
    """What a dry run says of each product is what it takes: fresh units in the first and in the
    third, of two products each. All turns of one row in turn are one turn by the sum of its angles.
    """

    def turned(a: Any, b: Any, angles: Any) -> Any:
        turns = known_factors(angles)
        x = a + b
        for _ in range(3):
            products = times_factors(x[:, None], turns, uses=2)
            cos, sin = products[:, 0], products[:, 1]
            x = jnp.concatenate([cos[:, :2] - sin[:, 2:], cos[:, 2:] + sin[:, :2]], axis=1)
        return reveal(x, to=Owner.CLIENT, label="test")

    function = SecureFunction(turned, (Owner.CLIENT, Owner.PROVIDER, Owner.CLIENT), "turned")
    rng = np.random.default_rng(0)
    halves = rng.normal(size=(2, 5, 4)).astype(np.float32)
    angles = rng.uniform(-3, 3, 5)
    turns = np.stack([np.cos(angles), np.sin(angles)], axis=-1)[..., None].astype(np.float32)

    def work(session: PartySession) -> Any:
        own = [session.private(r, np.array, (5, 4), np.float32, halves[r]) for r in (0, 1)]
        args = [*own, session.private(CLIENT, np.array, turns.shape, np.float32, turns)]
        demand, _ = session.demand(function, *args)
        mark = len(session.meter.entries)
        out = session.call(function, *args)
        ops = [e for e in session.meter.entries[mark:] if e.kind == "op"]
        assert [(e.name, e.traffic.bytes) for e in ops] == [
            (c.op, c.cost.client_to_provider + c.cost.provider_to_client) for c in demand.calls
        ]
        units = [
            sum(need.units for need in c.taken if need.correlation.name.startswith("known"))
            for c in demand.calls
            if c.op == "times_factors"
        ]
        return session.get(out), units

    (outcome, units), _ = simulation.run(work)
    assert units == [5, 0, 5]
    x = halves.sum(axis=0)
    whole = (x[:, :2] + 1j * x[:, 2:]) * np.exp(3j * angles)[:, None]
    np.testing.assert_allclose(outcome[:, :2] + 1j * outcome[:, 2:], whole, atol=1e-3)


def test_factors_go_from_program_to_program(simulation: Simulation) -> None:
    """Both parties' dry runs of the second one say that they are open, as they are; two products
    with the same factors, of which neither waits for the other, run one after the other.
    """
    first = SecureFunction(_first_product, (Owner.CLIENT, Owner.CLIENT), "first")
    second = SecureFunction(_two_products, (Owner.CLIENT, Owner.CLIENT), "second")
    x, y = np.array([[1.5, -2.0]], np.float32), np.array([[0.5], [4.0]], np.float32)

    def work(session: PartySession) -> Any:
        own = [session.private(CLIENT, np.array, z.shape, np.float32, z) for z in (x, y)]
        known, product = session.call(first, *own)
        demand, _ = session.demand(second, own[0], known)
        mark = len(session.meter.entries)
        twice = session.call(second, own[0], known)
        ops = [e for e in session.meter.entries[mark:] if e.kind == "op"]
        assert sorted((e.name, e.traffic.bytes) for e in ops) == sorted(
            (c.op, c.cost.client_to_provider + c.cost.provider_to_client) for c in demand.calls
        )
        sent = [c.cost.client_to_provider for c in demand.calls if c.op == "times_factors"]
        return session.get(product), session.get(twice), sent

    outcomes = simulation.run(work)
    wanted = y @ x
    for _, _, sent in outcomes:
        assert sent == [1, 1], "they are open, so there are bits of a truncation alone"
    np.testing.assert_allclose(outcomes[CLIENT][0], wanted, atol=1e-4)
    np.testing.assert_allclose(outcomes[CLIENT][1], 3 * wanted, atol=1e-4)


def _first_product(x: Any, y: Any) -> Any:
    known = known_factors(y)
    product = times_factors(x, known, uses=4)
    return known, reveal(product, to=Owner.CLIENT, label="first")


def _two_products(x: Any, known: Any) -> Any:
    once, twice = times_factors(x, known, uses=4), times_factors(x + x, known, uses=4)
    return reveal(once + twice, to=Owner.CLIENT, label="second")
