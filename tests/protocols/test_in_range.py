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
            (np.array(False), np.array([0, 0]), WORDS), ("public", "arith", "arith"),
            {"sites": ("first", "second")},
        )
    ]  # fmt: skip


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=70))
def test_every_word_is_told_from_zero(values: list[int]) -> None:
    x = np.array([*values, 0, 1, -1, -(2**63)])
    outcome = run_op(nonzero, Case((x,), ("arith",)))
    found = reconstruct_words([o[0] for o in outcome.outputs])
    np.testing.assert_array_equal(found != 0, x != 0)
    assert (outcome.rounds, sum(t.sent_messages for t in outcome.traffic)) == (3, 6)


SITES = "first", "second", "third", "fourth", "fifth", "sixth"


def _session(*counts: int) -> Any:
    """Of counts by site, each the sum of a number of each party: whether an opening comes after the
    bit, and what it is.
    """

    def checked(a: Any, b: Any) -> Any:
        by_site = dict(zip(SITES, a + b, strict=False))
        return reveal(when_in_range(by_site, a[0]), to=Owner.CLIENT, label="result")

    function = SecureFunction(checked, (Owner.CLIENT, Owner.PROVIDER), "checked")
    shape = (len(counts),)

    def program(session: Any) -> Any:
        own = session.private(CLIENT, lambda: np.full(shape, 7, np.int32), shape, np.int32)
        peers = session.private(
            PROVIDER, lambda: np.array(counts, np.int64).astype(np.int32) - 7, shape, np.int32
        )
        try:
            return session.get(session.call(function, own, peers)), session.ledger.learned()
        except RangeError as error:
            return error, session.ledger.learned()

    return program


def test_a_count_of_zero_lets_results_pass(simulation: Simulation) -> None:
    (found, _), (nothing, learned) = simulation.run(_session(0, 0))
    assert int(found) == 7 and nothing is None
    assert "whether activations left their ranges" in str(learned)


@pytest.mark.parametrize("count", [1, 2, 2**20, 2**31 - 1])
def test_any_other_count_ends_both_before_anything_else_is_opened(
    simulation: Simulation, count: int
) -> None:
    for found, learned in simulation.run(_session(0, count)):
        assert isinstance(found, RangeError) and "left the ranges" in str(found)
        assert "whether activations left their ranges" in str(learned)
        assert "result" not in str(learned)


def test_the_client_alone_learns_where(simulation: Simulation) -> None:
    (client, learned), (provider, _) = simulation.run(_session(0, 3, 0, 1))
    assert "functions on shares hold: second, fourth. Nothing" in str(client)
    assert not any(site in str(provider) for site in SITES)
    assert "opened but where, to the client" in str(provider)
    assert any("which ranges" in fact for fact in learned["client"])
    assert all("which ranges" not in fact for fact in learned["provider"])


def test_many_sites_are_told_in_one_line(simulation: Simulation) -> None:
    (client, _), _ = simulation.run(_session(1, 1, 1, 1, 1, 1))
    assert "first, second, third, fourth and 2 more. Nothing" in str(client)


@given(st.lists(st.integers(-9, 9)), st.integers(-9, 9), st.integers(-9, 9))
def test_what_is_not_in_range_is_counted(x: list[int], low: int, high: int) -> None:
    values = np.array(x, np.int32)
    bits = [(values < t).astype(np.int32) for t in (low, high)]
    expected = sum(v < low for v in x) + sum(v >= high for v in x)
    assert int(count_outside(bits[:1], bits[1:])) == expected
