"""Sign and less-than: exact over the whole ring, few messages, views that tell nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.bits import compare, gates
from protocols.bits.compare import leaf, levels, node, sign
from protocols.bits.planes import to_planes, words_for
from protocols.bits.stars import correction_bits, transfers
from protocols.functions.maximum import all_of
from spu_llm.core.correlation import Correlation, Correlations, deal
from spu_llm.core.correlation import evaluate as plain_results
from spu_llm.core.integers import Factor
from spu_llm.core.party import Party, Source
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, Bool, Owner, Value
from spu_llm.testing import Case, OpContract, reconstruct_words, run_op

# x_0 x_1 y_0 z_0 + x_1 y_1 + y_0 z_0 z_1 + 1 and y_0 y_1 + x_0 y_1 + z_1, of two bits x that the
# client knows, two bits y that the provider knows, and two shared bits z.
MIXED = gates.Gate(
    "mixed",
    2,
    2,
    2,
    (
        frozenset(map(frozenset, ({0, 1, 2, 4}, {1, 3}, {2, 4, 5}, ()))),
        frozenset(map(frozenset, ({2, 3}, {0, 3}, {5}))),
    ),
)
INT64 = st.integers(-(2**63), 2**63 - 1)


def edges(bits: int) -> np.ndarray:
    top = 2 ** (bits - 1)
    return np.array(sorted({-top, 1 - top, -1, 0, min(1, top - 1), top - 1}))


class TestSign(OpContract):
    op = sign
    fresh = True
    cases = [
        *(Case((edges(b),), ("arith",), {"bits": b}) for b in (2, 24)),
        Case((edges(12)[:1],), ("degenerate",), {"bits": 12}),
        Case((edges(5),), ("arith24",), {"bits": 5}),
        Case((np.arange(2),), ("bool8",), {"bits": 3}),
        Case((np.zeros((0, 3), np.int64),), ("arith",), {"bits": 24}),
    ]


class TestSignOfPrivate(OpContract):
    op = sign
    cases = [Case((edges(5),), (form,), {"bits": 5}) for form in ("client", "provider")]


@given(st.lists(INT64, min_size=1, max_size=70), st.integers(1, 64))
def test_sign_is_a_bit_of_any_ring_value(values: list[int], bits: int) -> None:
    x = np.array(values, np.int64)
    outcome = run_op(sign, Case((x,), ("arith",), {"bits": bits}))
    words = reconstruct_words([o[0] for o in outcome.outputs])
    expected = (x.view(np.uint64) >> np.uint64(bits - 1)) & np.uint64(1)
    np.testing.assert_array_equal(words, expected)


@given(st.data(), st.sampled_from([12, 16, 24, 32, 63]))
def test_less_than(data: Any, bits: int) -> None:
    half = st.integers(-(2 ** (bits - 2)), 2 ** (bits - 2) - 1)  # so that x - y fits
    pairs = data.draw(st.lists(st.tuples(half, half), min_size=1, max_size=9))
    x, y = np.array(pairs, np.int64).T
    np.testing.assert_array_equal(compare.less_than(x, y, bits=bits), x < y)
    outcome = run_op(sign, Case((x - y,), ("arith",), {"bits": bits}))
    np.testing.assert_array_equal(reconstruct_words([o[0] for o in outcome.outputs]), x < y)


def test_messages_and_bytes() -> None:
    """At most 8 messages for up to 24 bits (SPU: 36), and few bytes."""
    for count, bits, messages, per_value in (
        (1000, 12, 6, 8.75),
        (1000, 16, 6, 11.75),
        (1000, 24, 6, 16.75),
        (1000, 64, 8, 48.25),
        (8000, 24, 6, 16.75),
    ):
        x = np.zeros(count, np.int64)
        outcome = run_op(sign, Case((x,), ("arith",), {"bits": bits}))
        traffic = outcome.traffic[CLIENT]
        assert (traffic.messages, traffic.bytes / x.size) == (messages, per_value)
        assert outcome.rounds == messages // 2


@pytest.mark.parametrize("root", [True, False])
def test_gates_mean_what_they_say(root: bool) -> None:
    """Every input of every gate, by its plain polynomials."""

    def value(polynomial: gates.Polynomial, x: tuple[int, ...]) -> int:
        return sum(all(x[i] for i in monomial) for monomial in polynomial) % 2

    for a in range(4):
        for b in range(4):
            n = 3 - a
            bits = (n & 1, n >> 1, int(n == 3), b & 1, b >> 1, int(b == 3))
            collected = [value(p, bits) for p in leaf(root).outputs]
            assert collected == [a < b, a == b][: len(collected)]
    for fan_in in (2, 3, 4):
        gate = node(fan_in, root)
        for word in range(3**fan_in):
            digits = [word // 3**i % 3 for i in range(fan_in)]  # 0 greater, 1 equal, 2 less
            less = [int(d == 2) for d in digits]
            equal = [int(d == 1) for d in digits]
            inputs = tuple(less + equal[1 if root else 0 :])
            decided = [d for d in reversed(digits) if d != 1]
            expected = [bool(decided) and decided[0] == 2, not decided]
            collected = [value(p, inputs) for p in gate.outputs]
            assert collected == expected[: len(collected)]


def test_sums_of_mask_products_are_what_polynomials_need() -> None:
    """The prepared correlation against a direct sum of products; nobody gets one for free that
    involves the other's mask."""
    for gate in (leaf(False), leaf(True), node(4, False), node(3, True), all_of(5), MIXED):
        correlation = gates.correlation(gate)
        masks = [correlation.draw(r, Prg.from_os(), 5) for r in (CLIENT, PROVIDER)]
        plain = [a ^ b for a, b in zip(*masks, strict=True)]
        (actual,) = plain_results(correlation, plain)
        columns = np.concatenate(plain, axis=1)
        for i, total in enumerate(gate.sums):
            products = [np.bitwise_and.reduce(columns[:, sorted(s)], axis=1) for s in total]
            np.testing.assert_array_equal(actual[:, i], np.bitwise_xor.reduce(products))
            alone = ({Owner.CLIENT}, {Owner.PROVIDER})
            assert any(len(s) > 1 and {gate.holder(j) for j in s} not in alone for s in total)


@pytest.mark.parametrize(
    ("gate", "taken", "sent"),
    [
        (leaf(False), 3, 2),
        (leaf(True), 3, 0),
        (node(2, False), 2, 0),
        (node(3, False), 4, 10),
        (node(4, False), 8, 34),
        (node(3, True), 4, 6),
        (node(4, True), 7, 21),
        (all_of(5), 10, 52),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_transfers_that_a_gate_takes(gate: gates.Gate, taken: int, sent: int) -> None:
    """In an instance, and bits that correct them."""
    assert (sum(transfers(gate)), correction_bits(gate)) == (taken, sent)


@pytest.mark.parametrize("gate", [leaf(False), node(4, False), MIXED], ids=lambda g: g.name)
def test_shares_of_a_gate(gate: gates.Gate) -> None:
    """What the parties come to, for all inputs, under random masks."""
    inputs = gate.client + gate.provider + gate.joint
    words = -(-(1 << inputs) // 64)
    plain = to_planes(np.arange(64 * words, dtype=np.uint64), inputs)
    correlation = gates.correlation(gate)
    masks = [correlation.draw(r, Prg.from_os(), words) for r in (CLIENT, PROVIDER)]
    dealt = deal(correlation, masks, Prg.from_os())
    opened = plain ^ np.concatenate([a ^ b for a, b in zip(*masks, strict=True)], axis=1).T
    collected = [
        gates._combine(
            gate, r, opened[None], np.concatenate(masks[r], axis=1).T[None], dealt[r][0].T[None]
        )
        for r in (CLIENT, PROVIDER)
    ]
    for i, output in enumerate(gate.outputs):
        products = [np.bitwise_and.reduce(plain[sorted(s)], axis=0) for s in output if s]
        wanted = np.bitwise_xor.reduce(products) ^ (~np.uint64(0) if frozenset() in output else 0)
        np.testing.assert_array_equal(collected[CLIENT][0, i] ^ collected[PROVIDER][0, i], wanted)


@dataclass
class _ReusesUnits:
    """Broken: in the leaves, digit 7 of every row takes the units of digit 3."""

    source: Source

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        correlations = self.source.take(correlation, units, fixed)
        if not correlation.name.startswith("gate leaf"):
            return correlations

        def reused(words: np.ndarray) -> np.ndarray:
            groups = words.copy().reshape(len(words) // 12, 12, words.shape[1])
            groups[:, 7] = groups[:, 3]
            return groups.reshape(words.shape)

        return Correlations(
            list(map(reused, correlations.masks)), list(map(reused, correlations.results))
        )


def test_units_that_serve_twice_in_one_message_are_noticed() -> None:
    """The result is right and every word alone uniform; two planes together open a xor."""

    def twin(party: Party, x: Value, *, bits: int) -> Bool:
        party.supply = _ReusesUnits(party.supply)
        return sign.two_party(party, x, bits=bits)

    contract = OpContract()
    contract.op = dataclasses.replace(sign, two_party=twin)
    contract.fresh = True
    contract.cases = [Case((np.array([-1]),), ("arith",), {"bits": 24})]
    contract.test_result_is_the_reference()
    with pytest.raises(AssertionError, match="bits are sent under|fresh ones move"):
        contract.test_messages_are_masked()
    # Not in the party's own units, which are what they were: in what comes in.
    with pytest.raises(AssertionError, match="relation of incoming 0"):
        contract.test_views_are_simulated()


def test_few_values_take_the_fewest_rounds() -> None:
    assert [len(levels(b - 1, 9)) for b in (2, 3, 12, 16, 24, 32, 33, 34, 64)] == [
        0,
        0,
        2,
        2,
        2,
        2,
        2,
        3,
        3,
    ]


@pytest.mark.parametrize("bits", [3, 11, 17, 23, 26, 31, 63])
def test_more_values_never_take_fewer_rounds(bits: int) -> None:
    """What is chosen is the cheapest tree of all, by the price that is stated."""
    digits, depths, each = (bits + 1) // 2, [], []
    for rows in (1, 640, 6_400, 64_000, 640_000):
        plan = levels(bits, rows)
        depths.append(len(plan))
        each.append(compare.less_ahead(rows, bits) / (64 * words_for(rows)))
        cheapest = min(_priced(other, rows) for other in _trees(digits))
        assert _priced(plan, rows) == cheapest
    assert depths == sorted(depths)
    assert each == sorted(each, reverse=True)


def _trees(digits: int) -> list[tuple[compare.Level, ...]]:
    if digits == 1:
        return [()]
    collected: list[tuple[compare.Level, ...]] = []
    for fan_in in (2, 3, 4):
        nodes = digits // fan_in + (digits % fan_in > 1)
        left = nodes + (digits % fan_in == 1)
        collected += [((fan_in, nodes), *then) for then in _trees(left)]
    return collected


def _priced(tree: tuple[compare.Level, ...], rows: int) -> int:
    """Return the price in nanoseconds."""
    total = 0
    for i, (fan_in, nodes) in enumerate(tree):
        gate = node(fan_in, i == len(tree) - 1)
        cost = gates.gate_cost(gate, rows, nodes)
        sent = max(cost.client_to_provider, cost.provider_to_client)
        each = 80 * sum(transfers(gate)) + 6 * correction_bits(gate)
        total += 30_000_000 * cost.rounds + 80 * sent + round(each) * nodes * 64 * words_for(rows)
    return total
