"""Truncation: its distribution, computed and met bit for bit between two parties."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.arithmetic.truncate import MAX_LOCAL_BITS, model, share_of, truncate, truncate_local
from spu_llm.core.channel import MemoryChannel
from spu_llm.core.party import Party
from spu_llm.core.prg import Prg
from spu_llm.core.values import Arith, Value
from spu_llm.testing import Case, OpContract, reconstruct_words, run_op
from spu_llm.testing.run import Dealer, common_stream, share_inputs

WIDE = np.array([[0, 1, -1], [2**62 - 1, 1 - 2**62, 12345 << 18]])
NARROW = np.array([0, 1, -1, 2**23 - 1, -(2**23)])


def static(shift: int, how: str, bits: int = 64) -> dict[str, object]:
    return {"shift": shift, "how": how, "bits": bits}


class TestTruncate(OpContract):
    op = truncate
    cases = [
        Case((WIDE,), ("arith",), static(18, "unbiased")),
        Case((WIDE,), ("degenerate",), static(1, "unbiased")),
        Case((WIDE,), ("provider",), static(40, "unbiased")),
        Case((WIDE,), ("arith",), static(18, "exact")),
        Case((WIDE,), ("degenerate",), static(5, "exact")),
        Case((NARROW,), ("arith",), static(18, "local", 24)),
        Case((NARROW,), ("degenerate",), static(3, "local", 24)),
        Case((np.zeros((0, 2), np.int64),), ("arith",), static(18, "unbiased")),
    ]

    def hidden(self, own: list[Value], peer: list[Value], case: Case) -> list[np.ndarray]:
        """Return the top bit of either refreshed share, which a first message carries."""
        if case.static["how"] == "local":
            return []
        shift, words = common_stream().words(peer[0].shape), share_of(peer[0])
        return [s >> np.uint64(63) for s in (words + shift + np.uint64(1 << 62), words - shift)]


@pytest.mark.parametrize("shift", [1, 3, 6])
@pytest.mark.parametrize("how", ["unbiased", "local"])
def test_distribution(shift: int, how: str) -> None:
    """Over every low part of the client's share, x / 2^shift on average, exactly; a multiple of
    2^shift is exact; the error is below one."""

    class NoWords:
        def words(self, shape: tuple[int, ...]) -> np.ndarray:
            return np.zeros(shape, np.uint64)

    unit = 2**shift
    for x in (*range(-2 * unit, 2 * unit + 1), 2**40 + 1, -(2**40) - 1):
        shares = np.arange(unit, dtype=np.uint64) + np.uint64(7 << 50)
        peers = np.int64(x).view(np.uint64) - shares
        inputs = [[Arith(words, np.dtype(np.int64), 0)] for words in (shares, peers)]
        no_words: Prg = NoWords()  # type: ignore[assignment]
        (actual,) = model(inputs, no_words, **static(shift, how, 24))  # type: ignore[arg-type]
        actual = actual.astype(np.int64)
        assert Fraction(int(actual.sum()), unit) == Fraction(x, unit)
        assert np.all(np.abs(actual * unit - x) < unit)


@given(st.lists(st.integers(1 - 2**62, 2**62 - 1), min_size=1, max_size=9), st.integers(1, 62))
def test_exact_is_floor(values: list[int], shift: int) -> None:
    x = np.array(values)
    outcome = run_op(truncate, Case((x,), ("arith",), static(shift, "exact")))
    words = reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)
    np.testing.assert_array_equal(words, x >> shift)


@given(st.lists(st.integers(1 - 2**62, 2**62 - 1), min_size=1, max_size=9), st.integers(1, 62))
def test_unbiased_is_a_neighbour_and_keeps_multiples(values: list[int], shift: int) -> None:
    x = np.array([*values, 0, 1 << shift if shift < 62 else 0])
    for form in ("arith", "degenerate"):
        outcome = run_op(truncate, Case((x,), (form,), static(shift, "unbiased")))
        words = reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)
        floor = x >> shift
        exact = x == floor << shift
        assert np.all((words == floor) | (~exact & (words == floor + 1)))


def test_local_failures_are_as_rare_as_stated() -> None:
    """At 60 bits, against the rule, failures are common: the bound |x| / 2^64 holds and is tight;
    a failure is off by 2^(64 - shift)."""
    count, x, shift = 40_000, 2**60, 18
    values = np.full(count, x)
    inputs = share_inputs(Case((values,), ("degenerate",)))
    words = []
    for rank, (share,) in enumerate(inputs):
        assert isinstance(share, Arith)
        nowhere, common = MemoryChannel.pair()[0], Prg.from_seed(5, "both")
        party = Party(rank, nowhere, Prg.from_os(), 18, Dealer().source(rank), common)
        words.append(truncate_local(party, share, shift).words)
    wrong = (words[0] + words[1]).view(np.int64) != x >> shift
    # A failure has probability 1/16; the false-alarm rate of six standard deviations is 2e-9.
    assert abs(wrong.mean() - 1 / 16) < 6 * np.sqrt(1 / 16 * 15 / 16 / count)
    assert set((words[0] + words[1]).view(np.int64)[wrong] - (x >> shift)) == {-(2 ** (64 - shift))}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (static(18, "local", MAX_LOCAL_BITS + 1), "fails too often"),
        (static(0, "exact"), "1 to 62"),
        (static(63, "unbiased"), "1 to 62"),
    ],
)
def test_unsound_requests_are_refused(bad: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_op(truncate, Case((NARROW,), ("arith",), bad))
