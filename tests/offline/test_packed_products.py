"""Packed products: shares that add up to products, their errors, and what is sent for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.arithmetic.cached import cached_products
from protocols.arithmetic.product import row_squares, scaled_row
from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import WireError
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.offline.packed.products import PackedProducts, owners
from spu_llm.offline.packed.ring import N
from tests.offline.packed_pair import (
    KEY,
    SWITCHING,
    Masks,
    PackedTwo,
    as_bytes,
    correlation_of,
    deviation,
    layout_of,
    layouts_of,
    one_way,
)
from tests.offline.silent_pair import looks_uniform


def directions(c: Correlation) -> int:
    return len(owners(c))


def check(c: Correlation, masks: Masks, two: PackedTwo | None = None) -> None:
    error = (two or PackedTwo()).error(c, masks)
    at = 0
    for of in layouts_of(c, masks):
        bound = 10 * np.sqrt(directions(c)) * deviation(of)
        assert np.abs(error[..., at : at + of.m]).max() <= bound
        at += of.m
    # One product is exact once in 850 times; 16 are once in 10^40.
    assert directions(c) == 0 or error.size < 16 or error.any()


# ---- shares add up


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 200),
    st.sampled_from([correlation_of, one_way]),
    st.integers(0, 10**6),
)
def test_shares_add_up(units: int, n: int, k: int, m: int, of: Any, seed: int) -> None:
    c, two = of(n, k, m), PackedTwo()
    masks = two.draw(c, units, seed)
    check(c, masks, two)
    assert np.abs(two.error(c, masks)).max() < 2**15


@pytest.mark.parametrize(
    ("units", "n", "k", "m"),
    [
        (1, 1, 1, 1),
        (2, 1, 1, N),  # all of a polynomial, nothing is packed
        (3, 2, 20, 700),  # four blocks of five
        (2, 5, 3, 700),  # three pairs, the last one half empty
        (70, 1, 1, 300),  # words times rows, in parts of columns
        (5, 1, 3000, 1),  # two of them together
        (3, 1, 5, N // 2 + 1),  # a stride of one
        (9, 3, 2, N // 8),  # more than one answer
    ],
)
def test_shapes(units: int, n: int, k: int, m: int) -> None:
    two, c = PackedTwo(), one_way(n, k, m)
    check(c, two.draw(c, units), two)


@pytest.mark.parametrize(
    "c", [correlation_of(5, 3, 40), scaled_row(96), scaled_row(2500)], ids=lambda c: c.name
)
def test_on_more_cores_the_same(c: Correlation) -> None:
    """Word for word, and what is sent."""
    one, more = PackedTwo(seed=5), PackedTwo(seed=5, jobs=3)
    masks = one.draw(c, 30)
    for a, b in zip(one.make(c, masks), more.make(c, masks), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [w.sent for w in one.wires] == [w.sent for w in more.wires]


@pytest.mark.parametrize(
    "c", [row_squares(96), scaled_row(96), scaled_row(300)], ids=lambda c: c.name
)
def test_correlations_of_rows(c: Correlation) -> None:
    two = PackedTwo()
    masks = two.draw(c, 85)
    check(c, masks, two)
    x, y = c.matrices(*(a + b for a, b in zip(*masks, strict=True)))  # type: ignore[misc]
    plain = c.secure(*(a + b for a, b in zip(*masks, strict=True)))[0]
    assert ((x @ y).reshape(plain.shape) == plain).all()


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("k", [1, 33])
def test_extreme_words(value: int, k: int) -> None:
    c, two = one_way(1, k, 90), PackedTwo()
    masks = two.draw(c, 3)
    full = [[np.where(x != 0, np.uint64(value), x) for x in mine] for mine in masks]
    for given_ in (full, [full[0], masks[1]], [masks[0], full[1]]):
        check(c, given_, two)


# ---- the error


@pytest.mark.parametrize(
    ("c", "units", "stated"),
    [
        (cached_products(128, 128, 64), 1, 10.4),
        (one_way(128, 128, 64), 1, 10.9),
        (correlation_of(128, 128, 64), 1, 11.4),
        (row_squares(768), 128, 12.2),
        (scaled_row(64), 128, 12.2),
    ],
    ids=["128 64 128", "one way", "both ways", "row squares", "scaled rows"],
)
def test_error_is_as_predicted(c: Correlation, units: int, stated: float) -> None:
    """By the docstring of `packed.products`: its figures are those of `deviation`, and of a run."""
    two = PackedTwo()
    masks = two.draw(c, units)
    error = two.error(c, masks)
    predicted = deviation(layout_of(c, masks)) * np.sqrt(directions(c))
    assert abs(np.log2(predicted) - stated) < 0.06
    assert np.abs(error).max() < 2**15
    # Errors of a session depend on each other by its s: fewer than there are count. Six deviations
    # of either: four false alarms in a billion runs.
    rough = 6 / np.sqrt(min(error.size, 1000))
    assert abs(np.sqrt((error.astype(float) ** 2).mean()) / predicted - 1) < rough * np.sqrt(0.5)
    assert abs(error.mean()) < rough * predicted


def test_shares_look_uniform() -> None:
    """Of zeros too, and of either direction by itself."""
    two = PackedTwo()
    zeros = [[np.zeros((3, 64, 8), np.uint64), np.zeros((3, 8, 64), np.uint64)]] * 2
    assert layout_of(one_way(64, 8, 64), zeros).answers == 2
    for c in (correlation_of(64, 8, 64), one_way(64, 8, 64)):
        for share in two.make(c, zeros):
            assert looks_uniform(as_bytes(share))
            for byte in range(8):
                assert looks_uniform(as_bytes(share).reshape(-1, 8)[:, byte])
            assert len(np.unique(share)) == share.size
    again = two.make(one_way(64, 8, 64), zeros)
    assert all((a != b).all() for a, b in zip(again, two.make(c, zeros), strict=True))


# ---- who encrypts


@pytest.mark.parametrize(
    ("x", "y", "keyed"),
    [
        (Owner.JOINT, Owner.JOINT, [CLIENT, PROVIDER]),
        (Owner.CLIENT, Owner.PROVIDER, [PROVIDER]),
        (Owner.PROVIDER, Owner.CLIENT, [CLIENT]),
        (Owner.JOINT, Owner.PROVIDER, [PROVIDER]),
        (Owner.JOINT, Owner.CLIENT, [CLIENT]),
        (Owner.CLIENT, Owner.JOINT, [PROVIDER]),
        (Owner.PROVIDER, Owner.JOINT, [CLIENT]),
        (Owner.CLIENT, Owner.CLIENT, []),
        (Owner.PROVIDER, Owner.PROVIDER, []),
    ],
)
def test_owners(x: Owner, y: Owner, keyed: list[int]) -> None:
    """Who has words of Y while the other one has some of X; nobody else sends keys."""
    c, two = correlation_of(2, 3, 4, x, y), PackedTwo()
    assert owners(c) == keyed
    check(c, two.draw(c, 2), two)
    for rank in (CLIENT, PROVIDER):
        sent = two.sent(rank)
        # An answer may have the size of a key, but comes alone.
        assert (sent[:2] == [KEY, SWITCHING]) == (rank in keyed)
        assert bool(sent) == bool(keyed)
        assert (two.products[rank]._secret is not None) == (rank in keyed)


def test_owners_of_what_is_made() -> None:
    assert owners(row_squares(5)) == [PROVIDER]
    assert owners(scaled_row(5)) == owners(cached_products(4, 4, 2)) == [CLIENT, PROVIDER]


# ---- what is sent


def traffic(c: Correlation, masks: Masks) -> tuple[int, int]:
    """Bytes of an owner's ciphertexts and of an evaluator's answers."""
    of = layout_of(c, masks)
    return of.groups * of.blocks * 16 * N, of.answers * N * 8


def test_exact_traffic() -> None:
    """A key and switching keys once a session, switching keys for strides that are asked for."""
    two, c = PackedTwo(), correlation_of(6, 40, 128)
    masks = two.draw(c, 3)  # a stride of 32, nine pairs: four steps
    ciphertexts, answers = traffic(c, masks)
    assert (ciphertexts, answers) == (3 * 2 * 16 * N, N * 8)
    check(c, masks, two)
    expected = [KEY, *[SWITCHING] * 4, ciphertexts, answers]
    assert two.sent(CLIENT) == two.sent(PROVIDER) == expected
    check(c, two.draw(c, 3, seed=2), two)
    expected += [ciphertexts, answers]
    assert two.sent(CLIENT) == two.sent(PROVIDER) == expected
    # From 64 on: 64 is asked for now, 32 is there.
    other = one_way(8, 1, 64)
    masks = two.draw(other, 1)
    check(other, masks, two)
    ciphertexts, answers = traffic(other, masks)
    assert two.sent(PROVIDER) == [*expected, SWITCHING, ciphertexts]
    assert two.sent(CLIENT) == [*expected, answers]
    for rank in (CLIENT, PROVIDER):
        counted = two.products[rank]._channel.traffic
        assert counted.sent_bytes == sum(two.sent(rank))
        assert counted.received_bytes == sum(two.sent(1 - rank))


@pytest.mark.parametrize("c", [row_squares(768), scaled_row(768)], ids=lambda c: c.name)
def test_traffic_of_rows(c: Correlation) -> None:
    two = PackedTwo()
    masks = two.draw(c, c.chunk)
    two.make(c, masks)
    for rank in (CLIENT, PROVIDER):
        sends, answers = rank in owners(c), 1 - rank in owners(c)
        kept = [n for n in two.sent(rank)[sends:] if n != SWITCHING]
        assert kept == [
            size
            for of in layouts_of(c, masks)
            for size in [of.ciphertext_bytes] * sends + [of.answer_bytes] * answers
        ]


# ---- a peer that sends something else


def changed(data: bytes, how: str) -> bytes:
    short = {"cut": data[:-1], "a word less": data[:-8], "empty": b""}
    return short.get(how, data + bytes(8))


@pytest.mark.parametrize("how", ["cut", "a word less", "longer", "empty"])
@pytest.mark.parametrize(
    ("sender", "number"),
    [(PROVIDER, 0), (PROVIDER, 1), (PROVIDER, 2), (CLIENT, 0)],
    ids=["key", "switching key", "ciphertexts", "answer"],
)
def test_messages_of_other_sizes(sender: int, number: int, how: str) -> None:
    two, c = PackedTwo(), one_way(4, 2, 3)
    masks = two.draw(c, 1)
    two.wires[sender].change = lambda i, data: changed(data, how) if i == number else data
    outcomes = two.outcomes(lambda rank, p: p.make(c, masks[rank]))  # type: ignore[call-arg]
    error = outcomes[1 - sender]
    size = [KEY, SWITCHING, *traffic(c, masks)][number + (3 if sender == CLIENT else 0)]
    assert isinstance(error, WireError)
    assert f"has {len(changed(bytes(size), how))} bytes, expected {size}" in str(error)
    # The client had sent its answer already, or finds the provider waiting for it.
    assert not isinstance(outcomes[sender], WireError) or "gone" in str(outcomes[sender])


@pytest.mark.parametrize("gone", [CLIENT, PROVIDER])
def test_the_other_party_is_gone(gone: int) -> None:
    two, c = PackedTwo(), correlation_of(2, 2, 2)
    masks = two.draw(c, 1)

    def work(rank: int, products: PackedProducts) -> list[np.ndarray]:
        if rank == gone:
            raise MemoryError
        return products.make(c, masks[rank])

    outcomes = two.outcomes(work)
    assert isinstance(outcomes[gone], MemoryError) and "gone" in str(outcomes[1 - gone])


@pytest.mark.parametrize(
    "c", [one_way(1, 1, N + 1), one_way(2, 1, N + 9), one_way(3, 300, 1100)], ids=lambda c: c.name
)
def test_a_matrix_that_does_not_fit_goes_apart(c: Correlation) -> None:
    """Columns beyond a polynomial's, or polynomials beyond what is kept in memory."""
    two = PackedTwo()
    masks = two.draw(c, 2)
    assert len(layouts_of(c, masks)) > 1
    check(c, masks, two)
