"""Masks and their products from random transfers: exact for any gate, each message masked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.bits import convert, gates, mux
from protocols.bits.compare import leaf, node
from protocols.bits.masked_number import masked_number
from protocols.bits.polynomials import Gate, Polynomial, is_mask
from protocols.bits.recipe import recipe
from protocols.bits.stars import correction_bits, products, stars
from protocols.functions.maximum import all_of
from protocols.ot.transfer import TRANSFER
from spu_llm.core.correlation import Correlation, Correlations, Form, evaluate
from spu_llm.core.values import CLIENT, PROVIDER
from tests.offline.ot_pair import RANKS, TransfersOfTwo

KNOWN = [leaf(False), leaf(True), node(3, False), node(4, True), all_of(5)]


def polynomials(inputs: int) -> st.SearchStrategy[Polynomial]:
    monomial = st.frozensets(st.integers(0, inputs - 1), min_size=1, max_size=4)
    return st.frozensets(monomial, min_size=1, max_size=3)


@st.composite
def any_gate(draw: st.DrawFn) -> Gate:
    client, provider = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    joint = draw(st.integers(0 if client + provider else 2, 3))
    outputs = draw(st.lists(polynomials(client + provider + joint), min_size=1, max_size=3))
    return Gate("any", client, provider, joint, tuple(outputs))


def made(one: Correlation, units: int) -> tuple[list[Correlations], TransfersOfTwo]:
    two = TransfersOfTwo()
    assert one.by_transfers is not None
    return two.both(lambda rank, party: one.by_transfers(party, units)), two


def is_fulfilled(one: Correlation, both: list[Correlations]) -> bool:
    masks = [
        a + b if part.form in (Form.ARITH, Form.PRIVATE) else a ^ b
        for part, a, b in zip(one.masks, both[0].masks, both[1].masks, strict=True)
    ]
    return all(
        np.array_equal(a ^ b if part.form is Form.BOOL else a + b, wanted)
        for part, a, b, wanted in zip(
            one.results, both[0].results, both[1].results, evaluate(one, masks), strict=True
        )
    )


@settings(max_examples=60, deadline=None)
@given(any_gate(), st.integers(1, 3))
def test_any_gate_is_made(gate: Gate, units: int) -> None:
    if not gate.sums:
        return  # nothing to prepare
    one = gates.correlation(gate)
    both, two = made(one, units)
    assert is_fulfilled(one, both)
    sent = sum(channel.traffic.sent_bytes for channel in two.channels)
    extended = sum(cost.channel.bytes for cost in two.parties[CLIENT].extensions)
    if units == 2:
        assert sent - extended == 16 * correction_bits(gate)


@settings(max_examples=60, deadline=None)
@given(any_gate(), st.sampled_from(RANKS), st.booleans())
def test_stars_have_every_product_and_masks_once(gate: Gate, first: int, alone: bool) -> None:
    plan = stars(gate, first, alone=alone)
    wanted = {ends for steps in recipe(gate).levels for s in steps for ends in products(gate, s)}
    covered = [
        (star.choice, string) if star.chooser == CLIENT else (string, star.choice)
        for star in plan
        for strings in star.strings
        for string in strings
    ]
    assert len(covered) == len(set(covered)) and set(covered) == wanted
    assert not alone or {star.chooser for star in plan} <= {first}
    fresh = [(star.chooser, star.choice) for star in plan if star.fresh_choice]
    fresh += [(1 - star.chooser, string) for star in plan for string in star.fresh]
    assert len(fresh) == len(set(fresh))
    assert all(len(bit) == 1 and is_mask(*bit) for _, bit in fresh)


@pytest.mark.parametrize(
    ("one", "sent"),
    [
        (convert.shared_bits(64), 8),
        (convert.shared_bits(24), 3),
        (mux.BIT_TIMES_WORD, 8),
        (mux.BIT_TIMES_NARROW_WORD, 4),
        (TRANSFER, 0),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_words_are_made(one: Correlation, sent: int) -> None:
    both, two = made(one, 150)
    if one.name != "shared bit 24":
        assert is_fulfilled(one, both)
    all_sent = sum(channel.traffic.sent_bytes for channel in two.channels)
    extended = sum(cost.channel.bytes for cost in two.parties[CLIENT].extensions)
    assert all_sent - extended == 150 * sent


@pytest.mark.parametrize(
    "one",
    [*map(gates.correlation, KNOWN), convert.shared_bits(64), mux.BIT_TIMES_WORD, masked_number(9)],
    ids=lambda c: c.name,
)
def test_messages_and_masks_are_uniform(one: Correlation) -> None:
    """Bit by bit: a false alarm in a million, each. A correction sent without its random bit is
    what it corrects: of products, a quarter of whose bits are ones.
    """
    units = 128 if one.name.startswith("masked") else 16
    two = TransfersOfTwo()
    assert one.by_transfers is not None
    both = two.both(lambda rank, party: one.by_transfers(party, units))
    for wire, party in zip(two.wires, two.parties, strict=True):
        assert party.extensions
        corrections = [m for m in wire.sent if len(m) not in sizes_of_extension(two)]
        for message in corrections:
            bits = np.unpackbits(np.frombuffer(message, np.uint8))
            assert abs(bits.mean() - 0.5) < 2.5 / np.sqrt(bits.size)
    for rank in (CLIENT, PROVIDER):
        for part, words in zip(one.masks, both[rank].masks, strict=True):
            if part.form is Form.BOOL and part.is_held_by(rank) and words.size:
                bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8))
                assert abs(bits.mean() - 0.5) < 2.5 / np.sqrt(bits.size)


def sizes_of_extension(two: TransfersOfTwo) -> set[int]:
    """Return the sizes of messages of base transfers and of trees."""
    parameters = two.parties[CLIENT]._parameters
    return {127 * -(-parameters.stock // 8), 16 * parameters.choices}
