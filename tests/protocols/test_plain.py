"""The plain rule of speculative sampling: exact, by going through all that may happen."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from protocols.verification import plain
from protocols.verification.distribution import Sampling
from protocols.verification.plain import Plain

VOCAB, DRAFTS = 3, 2
# Every probability is a multiple of 1/4: accepting, and drawing from what is left, asks for
# quotients of whole numbers up to 4, so that 12 equal steps of a uniform number hold every edge.
GRID = 12
Q = np.array([[2, 1, 1], [0, 3, 1]]) / 4
P = {  # by what was emitted before
    (): (1, 1, 2),
    (0,): (4, 0, 0),
    (1,): (2, 2, 0),
    (2,): (1, 2, 1),
    **{(a, b): (1, a, 3 - a) for a in range(3) for b in range(3)},
}


def logits_of(text: tuple[int, ...]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(P[text]) / 4)


def emitted(sampling: Sampling) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield what the rule emits and with which probability, for all drafts and all uniform
    numbers.
    """
    rule, middle = Plain(sampling), (np.arange(GRID) + 0.5) / GRID
    for drafts in itertools.product(range(VOCAB), repeat=DRAFTS):
        chance = float(np.prod([Q[i, d] for i, d in enumerate(drafts)]))
        if not chance:
            continue
        rows = np.stack([logits_of(drafts[:i]) for i in range(DRAFTS + 1)])
        for uniforms in itertools.product(middle, repeat=DRAFTS + 1):
            left = iter(uniforms)
            k, token = rule.resolve(rows, drafts, Q, lambda left=left: next(left))
            yield (*drafts[:k], token), chance / GRID ** (DRAFTS + 1)


def texts_of(sampling: Sampling) -> np.ndarray:
    """Return the distribution [vocab^3] of texts of three tokens, those that a step leaves out
    drawn from the model.
    """
    actual: Counter[tuple[int, ...]] = Counter()
    for text, chance in emitted(sampling):
        actual[text] += chance  # type: ignore[assignment]
    whole = np.zeros((VOCAB,) * 3)
    for text in itertools.product(range(VOCAB), repeat=3):
        for n in range(1, 4):
            rest = [sampling.distribution(logits_of(text[:i]))[text[i]] for i in range(n, 3)]
            whole[text] += actual[text[:n]] * float(np.prod(rest))
    return whole


def wanted(sampling: Sampling) -> np.ndarray:
    whole = np.ones((VOCAB,) * 3)
    for text in itertools.product(range(VOCAB), repeat=3):
        for i in range(3):
            whole[text] *= sampling.distribution(logits_of(text[:i]))[text[i]]
    return whole


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_texts_have_the_models_distribution() -> None:
    actual = texts_of(Sampling())
    np.testing.assert_allclose(actual, wanted(Sampling()), atol=1e-12)
    assert actual.sum() == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("drafts", itertools.product(range(VOCAB), repeat=DRAFTS))
def test_drafts_that_are_certain_do_not_change_it(
    drafts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Q", np.eye(VOCAB)[list(drafts)])
    np.testing.assert_allclose(texts_of(Sampling()), wanted(Sampling()), atol=1e-12)


def test_a_rule_that_draws_from_p_after_a_rejection_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain, "residual", lambda p, q: p)
    assert np.abs(texts_of(Sampling()) - wanted(Sampling())).max() > 0.01


@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1, 1), Sampling(1, 0, 0.4)])
def test_nothing_else_is_drawn_than_sampling_leaves(sampling: Sampling) -> None:
    """Greedy, top-k and top-p: texts have the distribution that is cut at every place."""
    allowed = wanted(sampling)
    actual: Counter[int] = Counter()
    for text, chance in emitted(sampling):
        assert all(sampling.distribution(logits_of(text[:i]))[t] > 0 for i, t in enumerate(text))
        actual[text[0]] += chance  # type: ignore[assignment]
    np.testing.assert_allclose(
        [actual[t] for t in range(VOCAB)], allowed.sum(axis=(1, 2)), atol=1e-12
    )
