"""What a draw between two parties spends, and what it takes its token from."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from protocols.dp.choice import Choice
from protocols.dp.noise import Gumbel
from spu_llm.core.errors import InputError, WireError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.candidates import Candidates
from spu_llm.systems.dp_text.parameters import Parameters
from spu_llm.systems.dp_text.secure_budget import choice_of, epsilon_of_text, for_budget
from spu_llm.systems.dp_text.secure_records import TextRequest
from tests.kit.models import PRIVATE
from tests.protocols.verifying import chi_square_p

REQUEST = TextRequest(
    query=(40, 41), room=6, batch=3, clip=0.8, temperature=0.9, max_new_tokens=4, top_k=2, places=6
)


@pytest.mark.parametrize("epsilon, clip", [(1, 0.08291), (3, 0.22855), (5, 0.36152), (10, 0.65913)])
def test_the_paper_s_clip_norms_hold_between_two_parties(epsilon: float, clip: float) -> None:
    """Table 12 to a part in a thousand, which a thousandth of delta for the noise's bounds takes;
    and no more than the budget is spent.
    """
    actual = for_budget(
        epsilon, 1e-6, batch=7, temperature=1.2, max_new_tokens=500, top_k=50, places=57
    )
    assert 0.999 * clip < actual.clip < clip + 5e-6
    spent = epsilon_of_text(choice_of(actual, 60.0), 57, 500, 1e-6)
    assert 0.999 * epsilon < spent <= epsilon


def test_bounds_of_the_noise_are_charged() -> None:
    """Noise with a support that leaves out more than delta allows has no epsilon."""
    choice = Choice.of(7, 0.2, 1.2, 60.0)
    assert math.isfinite(epsilon_of_text(choice, 57, 500, 1e-6))
    for tail_bits in (20, 40):
        short = replace(choice, noise=Gumbel.of(choice.noise.scale, tail_bits))
        assert math.isinf(epsilon_of_text(short, 57, 500, 1e-6))


def test_what_is_not_accounted_for_is_refused() -> None:
    for wrong in ({"adjacency": "zero-out"}, {"centre": True}, {"batch": 2000}, {"clip": 0.0}):
        parameters = replace(Parameters(3, 0.5, 1.0, 4, 5), **wrong)
        with pytest.raises(InputError, match="two parties"):
            choice_of(parameters, 60.0)
    for wrong, words in (  # type: ignore[assignment]
        ({"batch": 65}, "the batch must be 1 to 64"),
        ({"places": 1}, "top-k must be 1 to 1"),
        ({"top_k": 0}, "top-k must be"),
        ({"room": 61}, "do not fit"),
        ({"query": ()}, "do not fit"),
        ({"query": (288,)}, "the model lacks"),
        ({"texts": 0}, "the number of texts"),
        ({"temperature": 0.0}, "temperature"),
    ):
        with pytest.raises(InputError, match=words):
            replace(REQUEST, **wrong).check(PRIVATE)  # type: ignore[arg-type]
    REQUEST.check(PRIVATE)


def test_candidates_are_those_of_the_mechanism() -> None:
    """V_k+ of the spec's worked example, in places of a uniform order; one vector gives both what
    references are compared with and the scores; the rest never wins.
    """
    choice = REQUEST.choice(PRIVATE)
    logits = np.array([2.0, 1, 0, -1])
    counts = np.zeros(6)
    for seed in range(600):
        scores = Candidates.of(logits, replace(REQUEST, clip=0.5), choice, Prg.from_seed(seed, "o"))
        assert scores.tokens.tolist() == [0, 1]
        assert [scores.token(int(at)) for at in scores.at] == [0, 1]
        public, base = scores.public[scores.at], scores.base[scores.at]
        np.testing.assert_array_equal(base, 3 * (public - public.max()))
        others = np.setdiff1d(np.arange(6), scores.at)
        assert np.all(scores.base[others] == -choice.behind)
        with pytest.raises(WireError, match="no candidate"):
            scores.token(int(others[0]))
        counts[scores.at[0]] += 1
    assert chi_square_p(counts, np.full(6, 1 / 6)) > 1e-6
    in_order = Candidates.of(logits, replace(REQUEST, clip=0.5), choice)
    assert in_order.at.tolist() == [0, 1]


def test_the_likeliest_stay_where_there_are_too_many() -> None:
    logits = np.array([1.0, 3, 2.9, -np.inf, 2.95, np.nan, 2.99, 2.97, 2.96, 2.91])
    scores = Candidates.of(logits, REQUEST, REQUEST.choice(PRIVATE))
    assert scores.tokens.tolist() == [1, 4, 6, 7, 8, 9]
