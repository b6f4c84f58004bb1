"""Products with rows of the provider's and a cache of shares in one op: what is sent for one of
them is under masks of its own, whatever stands beside it in the message.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.arithmetic.cached import append, times_columns, times_rows
from protocols.arithmetic.known_rows import known_rows
from spu_llm.core.correlation import Correlation, Correlations
from spu_llm.core.op import Cost, Functionality, View, protocol_op
from spu_llm.core.party import Party
from spu_llm.core.values import CLIENT, PROVIDER, Arith, Owner, Public, Value, as_words
from spu_llm.testing import Case, OpContract, reconstruct_words, run_op
from tests.protocols.composed import ComposedContract

HEADS, KNOWN, CAP, D = 2, 3, 4, 2
X = np.array([[[3, 1], [-1, 2**40]], [[2**62, -5], [5, 0]]])  # [head, n, d]
ROWS = np.array([[[1, 7], [-(2**63), 2]], [[4, 0], [2**40 - 1, -3]]])  # [head, row, d]
OTHERS = np.array([[[-6, 2**50]], [[9, -1]]])
WEIGHTS = np.array([[[1, -2], [0, 7]], [[0, 5], [-(2**40), 2**63 - 1]]])  # [head, n, row]
ONE = {"tile": 1}
FORMS = "arith", "provider", "arith"


class TestTimesRows(OpContract):
    op = times_rows
    fresh = True
    elementwise = False
    cases = [Case((X[:, :1, :1], ROWS[:, :1, :1], OTHERS[..., :1]), FORMS, ONE)]


class TestTimesColumns(OpContract):
    op = times_columns
    fresh = True
    elementwise = False
    cases = [Case((WEIGHTS[:, :1], ROWS[:, :1, :1], OTHERS[..., :1]), FORMS, ONE)]


NOTHING = np.zeros((HEADS, 0, D), np.int64)


class TestRowsOfSeveral(ComposedContract):
    op = times_rows
    fresh = True
    elementwise = False
    cases = [
        Case(
            (X % 8 * 8, OTHERS % 5, ROWS % 5),
            ("client", "arith", "provider"),
            {"tile": 4, "shift": 3},
        ),
        Case((X, NOTHING, ROWS), ("arith", "provider", "arith"), {"tile": 2}),
    ]

    @pytest.mark.slow
    def test_each_broken_correlation_is_caught(self) -> None:
        super().test_each_broken_correlation_is_caught()


THREE = np.concatenate([WEIGHTS, WEIGHTS[..., :1]], axis=2)


class TestColumnsOfSeveral(ComposedContract):
    op = times_columns
    fresh = True
    elementwise = False
    cases = [
        Case(
            (THREE % 8 * 8, OTHERS % 5, ROWS % 5),
            ("client", "arith", "provider"),
            {"tile": 2, "shift": 3},
        ),
        Case((WEIGHTS, NOTHING, ROWS), ("arith", "arith", "provider"), {"tile": 2}),
    ]

    @pytest.mark.slow
    def test_each_broken_correlation_is_caught(self) -> None:
        super().test_each_broken_correlation_is_caught()


def test_one_message_each_way_whatever_there_is() -> None:
    values, _ = run_op(times_rows, Case((X, ROWS, OTHERS), FORMS, ONE)).inputs
    cost = times_rows.cost(*values, **ONE)
    assert (cost.messages, cost.rounds) == (2, 1)


def test_caches_that_do_not_fit_are_refused() -> None:
    for caches in ((ROWS, OTHERS[..., :1]), (ROWS[:1], OTHERS)):
        with pytest.raises(ValueError, match="does not fit a cache of"):
            run_op(times_rows, Case((X, *caches), FORMS, ONE))


# ---- broken twins


def _bare(party: Party, *values: Value, of: str, op: Any, **static: Any) -> list[Value]:
    """Broken: masks of one kind of product are zeros, as then are the products of these."""
    take = party.take

    def bare(correlation: Correlation, units: int, fixed: Any = None) -> Correlations:
        made = take(correlation, units, fixed)
        if not correlation.name.startswith(of):
            return made
        return Correlations(
            *([np.zeros_like(w) for w in part] for part in (made.masks, made.results))
        )

    party.take = bare  # type: ignore[method-assign]
    try:
        return list(op.run(party, list(values), static))
    finally:
        party.take = take  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("contract", "of"),
    [
        (TestTimesRows, "known products"),
        (TestTimesRows, "cached products"),
        (TestTimesColumns, "weighted known"),
        (TestTimesColumns, "weighted cached"),
    ],
)
def test_words_without_a_mask_of_their_own_are_noticed(contract: Any, of: str) -> None:
    """Though what stands beside them in the message is masked."""
    broken = contract()
    twin = functools.partial(_bare, of=of, op=contract.op)
    broken.op = dataclasses.replace(contract.op, two_party=twin)
    broken.test_result_is_the_reference()
    with pytest.raises(AssertionError, match="(bits sent|bits are sent)"):
        broken.test_messages_are_masked()


# ---- sequences of calls

OPS = {"rows": times_rows, "columns": times_columns}
WHOLE = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (HEADS, KNOWN, D))
# Which of the two are multiplied with (both, in one call), what kind of product, and queries; or
# rows appended, and how many.
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["known", "cached", "both"]), st.sampled_from(list(OPS)), st.integers(0, 4)
    )
    | st.tuples(st.just("append"), st.integers(0, CAP - 1), st.just(1)),
    min_size=1,
    max_size=8,
)


def _plain(i: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([2, i]).integers(-(2**63), 2**63 - 1, shape)


def _share(rank: int, i: int, plain: np.ndarray, zero: bool) -> Arith:
    mask = np.random.default_rng([1, i]).integers(0, 2**64, plain.shape, np.uint64)
    words = mask if rank == CLIENT else as_words(plain) - mask
    return Arith(np.zeros_like(words) if zero else words, plain.dtype, 0)


def _run(calls: Any, tile: int, zero: bool = False) -> tuple[Any, list[Cost], list[np.ndarray]]:
    """Return both parties' results, what each has said that they cost, and what numpy finds."""
    costs, wanted = [Cost(), Cost()], []
    cache = np.zeros((HEADS, CAP, D), np.int64)

    for i, (what, *how) in enumerate(calls):
        if what == "append":
            cache = cache.copy()
            cache[:, how[0] : how[0] + 1] = _plain(i, (HEADS, 1, D))
            continue
        rows = {"known": [WHOLE], "cached": [cache], "both": [WHOLE, cache]}[what]
        whole = np.concatenate(rows, axis=1)
        x = _plain(i, (HEADS, how[1], D if how[0] == "rows" else whole.shape[1]))
        wanted.append(x @ (whole.swapaxes(1, 2) if how[0] == "rows" else whole))

    def two_party(party: Party, rows: Value, empty: Value) -> list[Value]:
        (known,) = known_rows.run(party, [rows], {})
        cached, made = empty, []
        for i, (what, *how) in enumerate(calls):
            if what == "append":
                more = _share(party.rank, i, _plain(i, (HEADS, 1, D)), zero)
                (cached,) = append.run(party, [cached, more, Public(np.array(how[0]))], {})
                continue
            others = {"known": [known], "cached": [cached], "both": [known, cached]}[what]
            columns = sum(v.shape[1] for v in others)
            plain = _plain(i, (HEADS, how[1], D if how[0] == "rows" else columns))
            x, op = _share(party.rank, i, plain, zero), OPS[how[0]]
            costs[party.rank] += op.cost(x, *others, tile=tile)
            made += op.run(party, [x, *others], {"tile": tile})
        return made

    op = protocol_op(
        "calls",
        reference=lambda x, y: x,
        two_party=two_party,
        owners=lambda *_: [Owner.JOINT] * len(wanted),
        cost=lambda x, y: Cost(),
        functionality=Functionality(),
        simulate=lambda *_: View([], []),
    )
    rows, empty = np.zeros_like(WHOLE) if zero else WHOLE, np.zeros((HEADS, CAP, D), np.int64)  # type: ignore[assignment]
    return run_op(op, Case((rows, empty), ("provider", "public"))), costs, wanted


@settings(max_examples=40, deadline=None)
@given(CALLS, st.integers(1, 6))
def test_any_sequence_of_calls(calls: Any, tile: int) -> None:
    """Results as numpy's, prices exact, no mask used twice by either party."""
    outcome, costs, wanted = _run(calls, tile)
    actual = [reconstruct_words(list(pair)) for pair in zip(*outcome.outputs, strict=True)]
    for words, plain in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(words.view(np.int64), plain)
    client, provider = outcome.traffic
    assert costs[CLIENT] == costs[PROVIDER]
    assert client.sent_messages + provider.sent_messages == costs[CLIENT].messages
    assert client.sent_bytes == costs[CLIENT].client_to_provider
    assert provider.sent_bytes == costs[CLIENT].provider_to_client
    # When all there is to hide are zeros, what is sent are masks.
    outcome, _, _ = _run(calls, tile, zero=True)
    for view in outcome.views:
        sent = [np.zeros(0, np.uint64), *(data.view(np.uint64) for data in view.outgoing)]
        words = np.concatenate(sent)
        assert words.size == len(set(words.tolist()))
