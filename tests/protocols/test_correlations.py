"""Correlations: their exact integer meaning, and what making them takes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from protocols.arithmetic import product
from protocols.bits import compare, convert, gates, logic, masked_number, mux
from protocols.bits.compare import sign
from protocols.bits.convert import to_arith
from protocols.bits.polynomials import Gate
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.correlation import Correlation, evaluate
from spu_llm.core.integers import factor_from
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Owner, low_bits
from spu_llm.offline.silent.ring import N
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from tests.protocols.made_correlations import check, made

WEIGHTS = factor_from((np.arange(24 * 16).reshape(24, 16) - 100).astype(np.int64).view(np.uint64))


@pytest.mark.parametrize(
    "correlation",
    [
        gates.correlation(compare.leaf(False)),
        gates.correlation(compare.node(4, True)),
        gates.correlation(logic.AND),
        product.TRIPLE,
        product.SQUARE,
        product.matrix_triple(2, 4, 3),
        mux.BIT_TIMES_WORD,
        mux.BIT_TIMES_NARROW_WORD,
    ],
    ids=lambda c: c.name,
)
def test_what_is_made_is_what_is_declared(simulation: Simulation, correlation: Correlation) -> None:
    both, _ = made(simulation, correlation)
    check(correlation, both)


@pytest.mark.parametrize(
    "correlation", [product.row_squares(24), product.scaled_row(24)], ids=lambda c: c.name
)
def test_rows_are_made_up_to_noise(simulation: Simulation, correlation: Correlation) -> None:
    both, _ = made(simulation, correlation)
    masks = [a + b for a, b in zip(both[0].masks, both[1].masks, strict=True)]
    (wanted,), actual = evaluate(correlation, masks), both[0].results[0] + both[1].results[0]
    assert np.abs((actual - wanted).view(np.int64)).max() < 2**15, "2^18 is one unit"


def test_masked_product_with_a_private_matrix(simulation: Simulation) -> None:
    """Up to noise, which is that of the hint's rounding for columns so small; no bytes. A unit is
    six deviations, which one run in 13,000 has among 32,768 results; two units, none.
    """
    correlation = product.masked_product("test", *WEIGHTS.entries.shape)
    both, per_unit = made(simulation, correlation, WEIGHTS)
    (wanted,) = evaluate(correlation, both[CLIENT].masks, WEIGHTS)
    off = (both[CLIENT].results[0] + both[PROVIDER].results[0] - wanted).view(np.int64)
    assert 2.0**20 < np.abs(off).max() < 2 * 2.0 ** (12 + 18)  # two units, after a lift by 12 bits
    assert not both[PROVIDER].masks[0].any()
    assert per_unit < 9  # a key for all positions


def test_masked_products_stay_within_memory() -> None:
    """Masks and products that are made at once, whatever the shape: 64 positions, or fewer of large
    matrices. Another number is another version of the protocols, since batches are counted.
    """
    for k, m, positions in (
        (1, 1, 64),
        (768, 3072, 64),
        (16384, 16384, 64),
        (16384, 16385, 32),
        (768, 50257, 32),
        (50257, 768, 32),
        (1 << 21, 1, 1),
    ):
        correlation = product.masked_product("test", k, m)
        assert correlation.chunk == positions and N % positions == 0


@pytest.mark.parametrize("width", [64, 32, 24, 8])
def test_a_shared_bit_takes_what_counts_of_a_word(simulation: Simulation, width: int) -> None:
    correlation = convert.shared_bits(width)
    both, per_unit = made(simulation, correlation)
    l = both[CLIENT].masks[0] ^ both[PROVIDER].masks[1]
    actual = both[CLIENT].results[0] + both[PROVIDER].results[0]
    np.testing.assert_array_equal(low_bits(actual + l, width), 0)
    assert per_unit == width // 8


@pytest.mark.parametrize(
    ("gate", "bits"),
    [(logic.AND, 0), (compare.leaf(False), 2), (compare.node(4, True), 21)],
    ids=lambda x: getattr(x, "name", None),
)
def test_gates_send_what_corrects_them(simulation: Simulation, gate: Gate, bits: int) -> None:
    """A bit each, for 64 instances a unit."""
    assert made(simulation, gates.correlation(gate))[1] == 8 * bits


@pytest.mark.parametrize("bits", [5, 14, 28])
def test_a_masked_number_is_what_its_bits_say(simulation: Simulation, bits: int) -> None:
    correlation = masked_number.masked_number(bits)
    both, _ = made(simulation, correlation)
    check(correlation, both)


def test_a_program_uses_ops_between_segments(simulation: Simulation) -> None:
    """Comparison, conversion and a segment of SPU's own in one JAX function on two parties."""

    def program(x: Any, y: Any) -> Any:
        smaller = to_arith(sign(x - y, bits=31))
        return reveal(smaller * 5 + x, to=Owner.CLIENT, label="test")

    function = SecureFunction(program, (Owner.CLIENT, Owner.PROVIDER), "program")
    x, y = (np.array(v, np.int32) for v in ([3, -7, 2**28], [4, -7, -(2**28)]))

    def work(session: PartySession) -> Any:
        own = session.private(CLIENT, lambda: x, x.shape, x.dtype)
        peers = session.private(PROVIDER, lambda: y, y.shape, y.dtype)
        return session.get(session.call(function, own, peers))

    outcomes, nothing = simulation.run(work)
    assert nothing is None
    np.testing.assert_array_equal(outcomes, (x < y) * 5 + x)
    np.testing.assert_array_equal(jax.jit(program)(x, y), outcomes)


def test_a_square_pair_costs_one_cross_term(simulation: Simulation) -> None:
    """One ciphertext there and one back, where a triple has a further one there."""
    (_, pair), (_, triple) = (made(simulation, c) for c in (product.SQUARE, product.TRIPLE))
    assert pair < 0.7 * triple, (pair, triple)
