"""NOIR's reconstruction bounds: theorem 3 holds under its conditions, Eq. 4 and Eq. 5 do not (spec:
oracles 6 and 7).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from spu_llm.systems.split.bounds import (
    any_tail,
    eq5_bases,
    log10_eq4,
    log10_eq5,
    log10_tail,
    posterior,
    tail,
    token_bounds,
)
from spu_llm.systems.split.mechanisms import rows

LLAMA, CODEQWEN, LLAMA3, QWEN = 32_000, 92_416, 128_256, 151_936


@pytest.mark.parametrize(
    ("epsilon", "vocab", "upper"),
    [
        (13, LLAMA, 0.93255),
        (13, CODEQWEN, 0.82721),
        (13, LLAMA3, 0.77525),
        (13, QWEN, 0.74437),
        (9, LLAMA, 0.20206),
        (9, CODEQWEN, 0.08061),
        (9, LLAMA3, 0.05943),
        (9, QWEN, 0.05063),
        (27, LLAMA, 0.99999994),
    ],
)
def test_theorem_3(epsilon: float, vocab: int, upper: float) -> None:
    """Oracle 6: at the paper's epsilon the token may be known almost for sure."""
    assert token_bounds(vocab, epsilon)[1] == pytest.approx(upper, abs=5e-6)
    assert posterior(1 / vocab, epsilon) == pytest.approx(upper, abs=5e-6)


@pytest.mark.parametrize(("vocab", "epsilon"), [(LLAMA, 5.78), (QWEN, 7.34)])
def test_one_percent_takes_a_small_epsilon(vocab: int, epsilon: float) -> None:
    """Oracle 6."""
    assert token_bounds(vocab, epsilon - 0.005)[1] <= 0.01 < token_bounds(vocab, epsilon + 0.005)[1]


def test_eq_4_and_5_are_far_below_what_happens() -> None:
    """Oracle 7."""
    tokens, share, advantage = 200, 0.2, 0.146
    assert log10_eq4(QWEN, 13, tokens, share) == pytest.approx(-5.13, abs=0.005)
    assert log10_eq5(QWEN, 13, tokens, share, advantage) == pytest.approx(-12.98, abs=0.01)
    assert tail(token_bounds(QWEN, 13)[1], tokens, share) == pytest.approx(1, abs=1e-9)
    assert log10_eq4(QWEN, 9, tokens, share) == pytest.approx(-51.8, abs=0.05)
    assert log10_eq5(QWEN, 9, tokens, share, advantage) == pytest.approx(-39.2, abs=0.05)
    true = token_bounds(QWEN, 9)[1]
    assert tail(true, tokens, share) == pytest.approx(9.5e-14, rel=0.01)
    assert log10_tail(true, tokens, share) == pytest.approx(math.log10(9.5e-14), abs=0.005)
    assert tail(token_bounds(LLAMA, 9)[1], tokens, share) == pytest.approx(0.557, abs=5e-4)


def test_eq_5_falls_as_the_attacker_learns() -> None:
    assert log10_eq5(QWEN, 13, 200, 0.2, 0.146) < log10_eq4(QWEN, 13, 200, 0.2)
    assert eq5_bases(LLAMA, 13, 0.146)[0] == pytest.approx(1.079, abs=5e-4)
    for vocab in (LLAMA, CODEQWEN, LLAMA3, QWEN):
        assert eq5_bases(vocab, 20, 0.146)[0] > 1
    assert log10_eq5(LLAMA, 13, 200, 1.0, 0.146) == 0.0  # clipped
    assert log10_eq5(3, 1, 4, 0.5, 1.0) == -math.inf  # a second base below zero


def test_eq_4_fails_where_all_can_be_counted() -> None:
    """Four uniform tokens of three, each seen through GRR, which meets theorem 3 exactly: the best
    guesses read half of them or more with the binomial tail, above Eq. 4.
    """
    vocab, epsilon, tokens, share = 3, 1.0, 4, 0.5
    distribution = rows(np.arange(vocab), "grr", epsilon, 1)
    best = distribution.argmax(axis=0)  # of a uniform token, for each output
    actual = 0.0
    for text in itertools.product(range(vocab), repeat=tokens):
        for seen in itertools.product(range(vocab), repeat=tokens):
            right = sum(best[o] == t for o, t in zip(seen, text, strict=True))
            if right >= share * tokens:
                actual += math.prod(distribution[t, o] for t, o in zip(text, seen, strict=True))
    actual /= vocab**tokens
    assert actual == pytest.approx(tail(token_bounds(vocab, epsilon)[1], tokens, share), rel=1e-12)
    assert actual > 10 ** log10_eq4(vocab, epsilon, tokens, share) * 2
    # Nor do Eq. 22's factors multiply to Eq. 23's: the second exponent would be n.
    first, second = eq5_bases(vocab, epsilon, 0.0)
    upper, lower = token_bounds(vocab, epsilon)[1], 1 - token_bounds(vocab, epsilon)[0]
    printed, implied = first**2 * second**2, upper**2 * lower**2
    assert implied == pytest.approx(first**2 * second**tokens) != pytest.approx(printed)


def test_theorem_3_fails_for_tokens_that_are_not_uniform() -> None:
    """The best guess of a token that is 70 % of the text is better than its bound, by a mechanism
    that holds its epsilon exactly; `posterior` holds, and is met.
    """
    prior, epsilon = np.array([0.7, 0.1, 0.1, 0.1]), 1.0
    joint = prior[:, None] * rows(np.arange(4), "grr", epsilon, 1)
    known = joint / joint.sum(axis=0)  # P(t|o)
    assert known.max() > token_bounds(4, epsilon)[1] + 0.3
    for t, p in enumerate(prior):
        assert known[t].max() <= posterior(p, epsilon) + 1e-12
    # Met where all other tokens are alike in what they do: for the output of the token itself.
    assert known[0, 0] == pytest.approx(posterior(0.7, epsilon))


def test_dependent_guesses_leave_markov_alone() -> None:
    """One token said n times: all guesses are right, or none."""
    chance = 0.3
    assert tail(chance, 200, 0.9) < 1e-9
    assert chance <= any_tail(chance, 0.9) == pytest.approx(1 / 3)
    assert any_tail(0.9, 0.2) == 1.0
