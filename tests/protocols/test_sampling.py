"""Speculative sampling on shares: integer rules, exact probabilities, views that tell nothing."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.verification.sampling import Widths, locate, reject, residual
from spu_llm.testing import Case, reconstruct_words, run_op
from tests.protocols.composed import ComposedContract

W = Widths(total=7, draft=4, draw=5, most_accept=3)


def result(op: Any, case: Case) -> np.ndarray:
    outcome = run_op(op, case)
    return reconstruct_words([o[0] for o in outcome.outputs]).view(np.int64)


# What these ops are made of is under contract with more cases; here are the edges of their rules.


class TestReject(ComposedContract):
    op = reject
    fresh = True
    cases = [
        # p just below q at the smallest r, p = q at the largest.
        Case(
            tuple(np.array(c) for c in ([24, 25], [100] * 2, [4] * 2, [0, 7])),
            (f"arith{W.chosen}", "arith", "client", form),
            {"widths": W},
        )
        for form in ("arith", "client")
    ]

    @pytest.mark.slow
    def test_each_broken_correlation_is_caught(self) -> None:
        super().test_each_broken_correlation_is_caught()


class TestResidual(ComposedContract):
    op = residual
    elementwise = False
    fresh = True
    cases = [Case((np.array([[5], [2]]), np.array([[0], [1]])), ("arith", "client"), {"widths": W})]

    @pytest.mark.slow
    def test_each_broken_correlation_is_caught(self) -> None:
        super().test_each_broken_correlation_is_caught()


class TestLocate(ComposedContract):
    op = locate
    elementwise = False
    fresh = True
    cases = [
        Case(
            (np.array([[3, 1], [1, 3]]), np.array([31, 0])),
            ("arith", "arith"),
            {"draw": 5, "total": 4},
        )
    ]


# ---- the rules, over their whole range


@given(st.data(), st.sampled_from([12, 19, 31, 33, 36]))
def test_reject_is_the_integer_rule(data: Any, total: int) -> None:
    """Against integers of any size, the edges of p = q among them."""
    widths = Widths(total)
    rows = []
    for _ in range(data.draw(st.integers(1, 4))):
        z = data.draw(st.integers(1, 2**total - 1))
        q = data.draw(st.integers(1, 2**widths.draft))
        edge = q * z // 2**widths.draft  # the weight of p = q
        near = st.integers(max(0, edge - 2), min(z, edge + 2))
        w = data.draw(st.one_of(near, st.integers(0, z)))
        rows.append((w, z, q, data.draw(st.integers(0, 2**widths.accept - 1))))
    w_, z_, q_, r_ = (np.array(c, np.int64) for c in zip(*rows, strict=True))
    form = data.draw(st.sampled_from(["arith", f"arith{widths.chosen}"]))
    actual = result(
        reject, Case((w_, z_, q_, r_), (form, "arith", "client", "arith"), {"widths": widths})
    )
    expected = [(2 * r + 1) * q * z >= w << widths.scale for w, z, q, r in rows]
    np.testing.assert_array_equal(actual.astype(bool), expected)
    for (w, z, q, _), rejected in zip(rows, expected, strict=True):
        if w << widths.draft >= q * z:
            assert not rejected  # p >= q is certain


@given(st.data(), st.sampled_from([12, 33, 36]))
def test_residual_is_the_integer_rule(data: Any, total: int) -> None:
    widths = Widths(total)
    n = data.draw(st.integers(1, 6))
    w = data.draw(st.lists(st.integers(0, (2**total - 1) // n), min_size=n, max_size=n))
    q = data.draw(st.lists(st.integers(0, 2**widths.draft), min_size=n, max_size=n))
    case = Case((np.array([w]), np.array([q])), ("arith", "client"), {"widths": widths})
    expected = [max(0, (x << widths.draft) - y * sum(w)) for x, y in zip(w, q, strict=True)]
    np.testing.assert_array_equal(result(residual, case)[0], expected)


@given(st.data(), st.sampled_from([5, 20]))
def test_locate_is_the_integer_rule(data: Any, draw: int) -> None:
    n = data.draw(st.integers(1, 6))
    top = 2 ** (62 - draw) // n - 1
    weight = st.one_of(st.just(0), st.just(1), st.integers(0, top))
    v = data.draw(st.lists(weight, min_size=n, max_size=n))
    u = data.draw(st.integers(0, 2**draw - 1))
    static = {"draw": draw, "total": 62 - draw}
    case = Case((np.array([v]), np.array([u])), ("arith", "arith"), static)
    expected = [u * sum(v) < p << draw for p in itertools.accumulate(v)]
    actual = result(locate, case)[0].astype(bool)
    np.testing.assert_array_equal(actual, expected)
    place = int((~actual).sum())
    assert place == n if sum(v) == 0 else v[place] > 0


@pytest.mark.parametrize("vocab", [2, 4096, 32000, 50257, 128256, 151936, 1 << 18])
def test_widths_fit_the_ring(vocab: int) -> None:
    widths = Widths.of_weights(vocab)
    most = vocab * (2**18 + 4)
    assert most < 2**widths.total
    assert most * 2**widths.scale < 2**_ROOM and widths.accept >= 8
    for excess in (0, widths.draft):
        kept = (most << excess) / 2 ** widths.shift(excess)
        assert kept * 2**widths.draw <= 2**_ROOM


@pytest.mark.parametrize(("vocab", "accept"), [(4096, 14), (50257, 11)])
def test_acceptance_is_rounded_to_as_many_bits_as_readme_says(vocab: int, accept: int) -> None:
    assert Widths.of_weights(vocab).accept == accept


_ROOM = 62


# ---- the distribution that these rules give, by enumeration


@pytest.mark.parametrize("seed", range(5))
def test_one_token_follows_the_weights(seed: int) -> None:
    """Every draft, every r and every u of a three-token vocabulary: the emitted token's
    distribution.

    It differs from W / Z by what rounding r and u to a few bits can do, and by no more.
    """
    rng = np.random.default_rng(seed)
    widths = Widths(total=8, draft=5, draw=8, most_accept=7)
    w = rng.multinomial(200, rng.dirichlet(np.ones(3)))
    q = rng.multinomial(2**widths.draft, rng.dirichlet(np.ones(3)))
    distribution = one_token_distribution(w, q, widths)
    assert sum(distribution) == 1
    bound = Fraction(1, 2 ** (widths.accept + 1)) + Fraction(3, 2**widths.draw)
    for x in range(3):
        assert abs(distribution[x] - Fraction(int(w[x]), int(w.sum()))) <= bound, (
            w,
            q,
            distribution,
        )


def one_token_distribution(w: np.ndarray, q: np.ndarray, widths: Widths) -> list[Fraction]:
    """Distribution of the first token of a step with one draft, by the ops' own plaintext."""
    n, z = len(w), int(w.sum())
    distribution = [Fraction(0)] * n
    r = np.arange(2**widths.accept)
    u = np.arange(2**widths.draw)
    rest = residual.reference(w[None], q[None], widths=widths)
    spread = np.repeat(rest, u.size, axis=0)
    places = (~locate.reference(spread, u, draw=widths.draw, total=13)).sum(axis=1)
    drawn = [Fraction(int(c), u.size) for c in np.bincount(places, minlength=n + 1)]
    for d in range(n):
        if not q[d]:
            continue
        of_draft = Fraction(int(q[d]), 2**widths.draft)
        same = np.ones_like(r)
        rejected = reject.reference(same * w[d], same * z, same * q[d], r, widths=widths)
        refused = Fraction(int(rejected.sum()), r.size)
        distribution[d] += of_draft * (1 - refused)
        if refused:
            assert drawn[n] == 0 and rest[0, d] == 0  # there is a token, and it is another one
            for x in range(n):
                distribution[x] += of_draft * refused * drawn[x]
    return distribution
