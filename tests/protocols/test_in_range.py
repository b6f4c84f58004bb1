"""One bit that says whether activations stayed in range, and what stands behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.functions.in_range import count_outside, nonzero, require, when_in_range
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import RangeError
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.runtime.simulation import Simulation
from spu_llm.testing import Case, OpContract, reconstruct_words, run_op

WORDS = np.array([0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**61), 0])


class TestNonzero(OpContract):
    op = nonzero
    fresh = True
    cases = [
        Case((WORDS[:3],), ("arith",)),
        Case((WORDS[:2],), ("degenerate",)),
        Case((WORDS[:0],), ("arith",)),
    ]


class TestRequire(OpContract):
    op = require
    masks = False
    cases = [
        Case(
            (np.array(False), np.array([0, 0]), WORDS),
            ("public", "arith", "arith"),
            {"sites": ("first", "second")},
        )
    ]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=70))
def test_every_word_is_told_from_zero(values: list[int]) -> None:
    x = np.array([*values, 0, 1, -1, -(2**63)])
    outcome = run_op(nonzero, Case((x,), ("arith",)))
    words = reconstruct_words([o[0] for o in outcome.outputs])
    np.testing.assert_array_equal(words != 0, x != 0)
    assert (outcome.rounds, sum(t.sent_messages for t in outcome.traffic)) == (3, 6)


SITES = "first", "second", "third", "fourth", "fifth", "sixth"
WHETHER, WHERE = "whether activations left their ranges", "which ranges activations left"
BIT = [("client", WHETHER, 1, 1), ("provider", WHETHER, 1, 1)]


def _session(*counts: int) -> Any:
    """Check counts by site, each the sum of a number of each party: return a party's result or
    error, and what was opened: to whom, as what, how many elements of how many bits.
    """

    def checked(a: Any, b: Any) -> Any:
        by_site = dict(zip(SITES, a + b, strict=False))
        return reveal(when_in_range(by_site, a[0] + b[0]), to=Owner.CLIENT, label="result")

    function = SecureFunction(checked, (Owner.CLIENT, Owner.PROVIDER), "checked")
    shape = (len(counts),)

    def program(session: Any) -> Any:
        own = session.private(CLIENT, lambda: np.full(shape, 7, np.int32), shape, np.int32)
        peers = session.private(
            PROVIDER, lambda: np.array(counts, np.int64).astype(np.int32) - 7, shape, np.int32
        )
        before, actual = len(session.ledger.openings), None
        try:
            actual = session.get(session.call(function, own, peers))
        except RangeError as error:
            actual = error
        opened = session.ledger.openings[before:]
        return actual, [(o.learner, o.label, o.count, o.bits) for o in opened]

    return program


def test_a_count_of_zero_lets_results_pass(simulation: Simulation) -> None:
    (outcomes, opened), (nothing, alike) = simulation.run(_session(0, 0))
    assert int(outcomes) == 0 and nothing is None
    assert opened == alike == [*BIT, ("client", "result", 1, 64)]


@pytest.mark.parametrize("count", [1, 2, 2**20, 2**31 - 1])
def test_any_other_count_ends_both_before_an_opening(simulation: Simulation, count: int) -> None:
    """But a bit a site, to the client."""
    for outcomes, opened in simulation.run(_session(0, count)):
        assert isinstance(outcomes, RangeError) and "left the ranges" in str(outcomes)
        assert opened == [*BIT, ("client", WHERE, 2, 1)]


def test_the_client_alone_learns_where(simulation: Simulation) -> None:
    (client, _), (provider, _) = simulation.run(_session(0, 3, 0, 1))
    assert "hold, first at second (and at 1 later ones, perhaps" in str(client)
    assert not any(site in str(provider) for site in SITES)
    assert "opened but where, to the client" in str(provider)


def test_one_site_is_told_alone(simulation: Simulation) -> None:
    (client, _), _ = simulation.run(_session(0, 0, 0, 0, 0, 9))
    assert "hold, first at sixth. Nothing" in str(client)


@given(st.lists(st.integers(-9, 9)), st.integers(-9, 9), st.integers(-9, 9))
def test_what_is_not_in_range_is_counted(x: list[int], low: int, high: int) -> None:
    values = np.array(x, np.int32)
    bits = [(values < t).astype(np.int32) for t in (low, high)]
    expected = sum(v < low for v in x) + sum(v >= high for v in x)
    assert int(count_outside(bits[:1], bits[1:])) == expected
