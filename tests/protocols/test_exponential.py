"""The exponential of nonpositive shared words: its error, exact zeros, and a softmax made of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.arithmetic.field import FIELD_TRANSFER
from protocols.functions.exponential import (
    BITS,
    EDGE,
    FRAC_BITS,
    SCALE_BITS,
    client_factors,
    cut_exponential,
    exponential,
    hidden_weights,
    model,
    provider_factors,
    softmax_weights,
)
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.correlation import Form
from spu_llm.core.prg import Prg
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, Arith, Owner, Value
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.simulation import Simulation
from spu_llm.testing import ROWS, Case, OpContract, distinguish, reconstruct_words, run_op
from spu_llm.testing.broken import BrokenParty
from tests.protocols.made_correlations import check, made

UNIT = 2**FRAC_BITS
EDGES = np.array([0, -1, -2, 2 - EDGE, 1 - EDGE, -EDGE, -EDGE - 1, 1 - 2 ** (BITS - 1)])


def _case(x: np.ndarray, form: str, bits: int) -> Case:
    """Return a case with x itself for the comparison."""
    return Case((x, x), (form, form), {"bits": bits, "shift": 0})


class TestExponential(OpContract):
    op = cut_exponential
    fresh = True
    cases = [
        _case(np.array([-12345]), "arith", 24),
        _case(EDGES[:0], "arith", BITS),
        Case((EDGES, EDGES >> 8), ("arith30", "arith22"), {"bits": 22, "drop": 8, "shift": 0}),
    ]

    @pytest.mark.slow
    def test_broken_twins_are_caught(self) -> None:
        super().test_broken_twins_are_caught()

    def hidden(self, own: list[Value], peer: list[Value], case: Case) -> list[np.ndarray]:
        """Return the factors that the peer masks, whichever party it is."""
        share, _ = peer
        assert isinstance(share, Arith)
        n = np.uint64(0) - share.words
        return [client_factors(n)[0], provider_factors(n)]

    @pytest.mark.slow
    def test_each_broken_correlation_is_caught(self) -> None:
        super().test_each_broken_correlation_is_caught()


def expected(x: np.ndarray) -> np.ndarray:
    """Return the expected result in units of 2^-18."""
    return np.where(x <= -EDGE, 0.0, np.exp(x / UNIT)) * UNIT


def assert_close(words: np.ndarray, x: np.ndarray) -> None:
    """Check results that are not truncated: the factors' rounding is all that is wrong, and zeros
    are exact.
    """
    actual = words.view(np.int64) * 2.0 ** (FRAC_BITS - SCALE_BITS)
    assert np.max(np.abs(actual - expected(x)), initial=0.0) < 0.86
    assert not words[x <= -EDGE].any()
    assert np.all(np.abs(words.view(np.int64)) < 2 ** (SCALE_BITS + 1))  # what leaves the field


@pytest.mark.parametrize("form", ["arith", "degenerate", "client", "provider", "arith27"])
def test_edges(form: str) -> None:
    x = np.repeat(EDGES, 300).reshape(-1, 8)  # as many sharings of each
    outcome = run_op(cut_exponential, _case(x, form, BITS))
    assert_close(reconstruct_words([o[0] for o in outcome.outputs]), x)


WORD = st.one_of(
    st.integers(1 - 2 ** (BITS - 1), 0), st.integers(-EDGE - 9, 0), st.integers(-99, 0)
)


@given(st.lists(WORD, min_size=1, max_size=40))
@settings(max_examples=40)
def test_any_words(values: list[int]) -> None:
    x = np.array(values)
    outcome = run_op(cut_exponential, _case(x, "arith", BITS))
    assert_close(reconstruct_words([o[0] for o in outcome.outputs]), x)


def _modelled(x: Sequence[np.ndarray], top: Sequence[np.ndarray], bits: int, **static: Any) -> Any:
    """Return the op's exact result for these shares of x and of what is compared."""
    inputs = [
        [Arith(words, np.dtype(np.int64), 0) for words in pair] for pair in zip(x, top, strict=True)
    ]
    return model(inputs, Prg.from_os(), bits=bits, shift=0, **static)[0]


@given(st.lists(st.tuples(WORD, st.integers(0, 2**64 - 1)), min_size=1, max_size=200))
def test_a_coarse_comparison_cuts_only_what_is_below_a_unit(pairs: list[tuple[int, int]]) -> None:
    x, shares = np.array([v for v, _ in pairs]), np.array([s for _, s in pairs], np.uint64)
    both = (shares, x.view(np.uint64) - shares)
    kept = (x > -EDGE) & (x <= 2 * 2**8 - EDGE)  # where the two may differ
    fine = _modelled(both, both, BITS)
    for top in ((x >> 8) - 1, (x + 1) >> 8):
        # One bit more: the lowest of these is one below what 18 bits hold.
        coarse = _modelled(both, (shares, top.view(np.uint64) - shares), BITS - 7, drop=8)
        np.testing.assert_array_equal(coarse[~kept], fine[~kept])
        assert_close(np.where(coarse == 0, fine, coarse), x)
    assert np.all(expected(x[kept]) < 0.4)


@given(st.lists(st.tuples(WORD, st.integers(0, 2**64 - 1)), min_size=1, max_size=200))
def test_any_sharing(pairs: list[tuple[int, int]]) -> None:
    """The factors of any two shares, the corners of their low bits among them."""
    x = np.array([v for v, _ in pairs])
    corners = [EDGE * i + j for i in (0, 1, 2) for j in (-1, 0, 1)]
    for shares in (
        np.array([s for _, s in pairs], np.uint64),
        *(np.full(len(x), c % 2**64, np.uint64) for c in corners),
    ):
        both = (shares, x.view(np.uint64) - shares)
        assert_close(_modelled(both, both, BITS), x)


def test_rounds_and_bytes() -> None:
    """6 rounds; per value 36 bytes and two bits for the product, two bits to leave the field, 16
    bytes and two bits for the choice, and the comparison.
    """
    x = np.zeros(800, np.int64)
    outcome = run_op(cut_exponential, _case(x, "arith", BITS))
    assert (outcome.rounds, sum(t.sent_messages for t in outcome.traffic)) == (6, 12)
    assert [t.sent_bytes / x.size for t in outcome.traffic] == [29.25, 41.0]


def test_whole_numbers_are_units() -> None:
    x = np.arange(-9, 1) * UNIT
    floats, whole = (x / UNIT).astype(np.float32), x.astype(np.int32)
    wanted = cut_exponential.reference(floats, floats, bits=BITS)
    np.testing.assert_array_equal(cut_exponential(whole, whole, bits=BITS), wanted)


@pytest.mark.parametrize("bits", [23, 65])
def test_too_few_bits_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="give 24 to 64"):
        run_op(cut_exponential, _case(EDGES, "arith", bits))


def test_narrow_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="26 bits; give 27 or more"):
        run_op(cut_exponential, _case(EDGES, "arith26", BITS))


def test_transfers_of_elements_take_nothing_but_transfers(simulation: Simulation) -> None:
    both, per_unit = made(simulation, FIELD_TRANSFER)
    check(FIELD_TRANSFER, both)
    assert not both[PROVIDER].masks[0].any() and not both[CLIENT].masks[1].any()
    assert per_unit < 3, per_unit


class _OneKeyForBoth(BrokenParty):
    """Broken: the provider's two keys are one, so that f_0 - f_1 is +-(b_0 - b_1)."""

    def spoil(self, words: np.ndarray, form: Form) -> np.ndarray:
        return np.zeros_like(words) if form is Form.FIELD else words


def test_one_key_for_both_factors_is_noticed() -> None:
    case = _case(np.full(ROWS, -12345), "arith", 24)
    assert distinguish(cut_exponential, case, CLIENT, _OneKeyForBoth, fresh=True)


def _as_shared(function: Any, name: str, x: np.ndarray) -> Any:
    """Return a program of `function` on x [rows, n], of which each party brings a half."""
    secure = SecureFunction(
        lambda a, b: reveal(function(a + b), to=Owner.CLIENT, label=name),
        (Owner.CLIENT, Owner.PROVIDER),
        name,
    )

    def program(session: PartySession) -> Any:
        halves = [session.private(r, lambda: x / 2, x.shape, np.float32) for r in (0, 1)]
        return session.get(session.call(secure, *halves))

    return program


def test_two_parties_exponentiate(simulation: Simulation) -> None:
    """Within two units after the truncation; zeros stay exact."""
    x = np.tile(EDGES / UNIT, (64, 1)).astype(np.float32)
    outcomes, nothing = simulation.run(_as_shared(exponential, "exponential", x))
    assert nothing is None
    words = 2 * np.round(x.astype(np.float64) / 2 * UNIT)  # what two halves add up to
    assert np.max(np.abs(outcomes * float(UNIT) - expected(words))) <= 2
    assert not outcomes[words <= -EDGE].any()


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (softmax_weights, 1.0),
        (hidden_weights, np.exp(-3 / 16)),
        (functools.partial(hidden_weights, bits=25), np.exp(-3 / 16)),  # of logits that spread 64
    ],
)
def test_softmax_is_close_at_full_vocabulary(
    simulation: Simulation, function: Any, least: float
) -> None:
    """Total variation from the exact softmax at V = 4096, normalised by the row's own sum."""
    logits = np.random.default_rng(2).normal(0, 3, (1, 4096)).astype(np.float32)
    scores, _ = simulation.run(_as_shared(function, "softmax weights", logits))
    assert least - 2 / UNIT <= np.max(scores) <= 1.0 + 2 / UNIT
    p = np.exp(logits.astype(np.float64))
    variation = np.abs(scores / scores.sum(dtype=np.float64) - p / p.sum()).sum() / 2
    assert variation < 0.003
    # In plaintext the same function is the softmax but for what lies beyond its reach.
    plain = np.asarray(function(logits), np.float64)
    assert np.abs(plain / plain.sum() - p / p.sum()).sum() / 2 < 1e-4
