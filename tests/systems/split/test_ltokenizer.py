"""LTokenizer's permutation, and what it hides of a gradient (spec: oracle 8 of NOIR)."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spu_llm.core.prg import Prg
from spu_llm.systems.split.ltokenizer import Permutation


def test_the_inverse_undoes_it() -> None:
    tau = Permutation.draw(5000, Prg.from_seed(0, "tau"))
    tokens = np.random.default_rng(0).integers(0, 5000, (3, 40))
    assert np.array_equal(tau.tokens(tau.labels(tokens)), tokens)
    assert np.array_equal(tau.labels(tau.tokens(tokens)), tokens)
    assert not np.array_equal(tau.labels(tokens), tokens)
    table = np.arange(5000)[:, None]
    assert np.array_equal(tau.rows(table)[tau.labels(tokens)], table[tokens])
    other = Permutation.draw(5000, Prg.from_seed(1, "tau"))
    assert np.mean(other.forward == tau.forward) < 0.01


def test_permutations_are_uniform() -> None:
    """All 24 of four tokens; a false alarm once in a million seeds."""
    prg = Prg.from_seed(2, "tau")
    drawn = [tuple(Permutation.draw(4, prg).forward) for _ in range(4800)]
    counts = [drawn.count(p) for p in itertools.permutations(range(4))]
    assert sum(counts) == 4800 and stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("wrong", [([0, 1], [1, 0]), ([0, 0], [0, 0]), ([0, 1], [0])])
def test_what_is_no_permutation_is_refused(wrong: tuple[list[int], list[int]]) -> None:
    with pytest.raises(ValueError, match="no permutation"):
        Permutation(np.array(wrong[0]), np.array(wrong[1]))


def test_relabelling_hides_labels_of_the_unpermuted_head() -> None:
    """Oracle 8: label and head permuted together leave dL/dh as it was; the label alone gives the
    very gradient of another token.
    """
    source, vocab = np.random.default_rng(0), 50
    head, h = (jnp.asarray(source.normal(size=s)) for s in ((vocab, 8), (8,)))
    tau, token = Permutation.draw(vocab, Prg.from_seed(3, "tau")), 7
    label = int(tau.labels(np.array(token)))

    def gradient(head: jax.Array, label: int) -> np.ndarray:
        return np.asarray(jax.grad(lambda h: -jax.nn.log_softmax(head @ h)[label])(h))

    plain = gradient(head, token)
    along = gradient(jnp.asarray(tau.rows(np.asarray(head))), label)
    np.testing.assert_allclose(along, plain, atol=1e-6)
    relabelled = gradient(head, label)
    assert np.abs(relabelled - plain).max() > 0.1
    # Whoever takes the gradient at its word reads the label, not the token.
    guesses = [gradient(head, t) for t in range(vocab)]
    nearest = int(np.argmin([np.abs(g - relabelled).max() for g in guesses]))
    assert nearest == label != token
