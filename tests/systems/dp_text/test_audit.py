"""The audit finds broken generators, and nothing against the right one. Its confidence is 99.9 %:
one seed in a thousand would raise a false alarm; seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from models.tokenizer import Tokenizer
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.audit import (
    AuditResult,
    audit,
    rate_bounds,
    text_game,
    token_game,
    worst_case,
)
from spu_llm.systems.dp_text.generator import Generator, Made
from spu_llm.systems.dp_text.lanes import folded
from spu_llm.systems.dp_text.mechanism import (
    clipped_differences,
    clipped_sum,
    expanded_top_k,
    mean_logits,
    sanitised,
    weights,
)
from spu_llm.systems.dp_text.methods import Method, Next, invisible_ink, token_weights
from spu_llm.systems.dp_text.parameters import Parameters
from spu_llm.systems.dp_text.prompts import prompts_for
from spu_llm.systems.dp_text.sampling import draw
from tests.kit.models import PRIVATE, endless, save_tokenizer, tiny_params

DELTA, RUNS, TOKENS = 0.01, 4000, 4
P = Parameters(2, 1.0, 1.0, TOKENS)
CLAIMED = P.epsilon(DELTA)


def audited(begin: Callable[[np.ndarray, Prg], Next]) -> AuditResult:
    method: Method = replace(invisible_ink(P), begin=begin)
    game = token_game(method, P, *worst_case(P), TOKENS)
    return audit(game, CLAIMED, DELTA, RUNS, Prg.from_seed(0, "audit"))


def without_noise(present: np.ndarray, prg: Prg) -> Next:
    def token(public: np.ndarray, private: np.ndarray) -> int:
        candidates, likely = token_weights(P, public, private, present)
        return int(candidates[np.argmax(likely)])

    return token


def without_clipping(present: np.ndarray, prg: Prg) -> Next:
    def token(public: np.ndarray, private: np.ndarray) -> int:
        total = ((sanitised(private) - sanitised(public)) * present[:, None]).sum(axis=0)
        return draw(weights(public, mean_logits(public, total, P.batch), P.temperature), prg)

    return token


def null_is_run(present: np.ndarray, prg: Prg) -> Next:
    """Return the prompt with an empty reference pushes the other way."""

    def token(public: np.ndarray, private: np.ndarray) -> int:
        empty = sanitised(public) - (sanitised(private) - sanitised(public))
        rows = np.where(present[:, None], private, empty)
        total = clipped_differences(public, rows, P.clip).sum(axis=0)
        return draw(weights(public, mean_logits(public, total, P.batch), P.temperature), prg)

    return token


def test_nothing_is_found_against_the_mechanism() -> None:
    right = audited(invisible_ink(P).begin)
    # An attack that finds something, and no more than may be found.
    assert 0.5 < right.lower < right.claimed == CLAIMED and not right.broken
    assert right.true_positives > 2 * right.false_positives


@pytest.mark.slow
@pytest.mark.parametrize("broken", [without_noise, without_clipping, null_is_run])
def test_broken_generators_are_caught(broken: Callable[[np.ndarray, Prg], Next]) -> None:
    assert audited(broken).broken


def candidates_of_references(p: Parameters) -> Callable[[np.ndarray, Prg], Next]:
    """Return candidates that also have what a reference has among its own top k, clipped or not."""

    def begin(present: np.ndarray, prg: Prg) -> Next:
        def token(public: np.ndarray, private: np.ndarray) -> int:
            rows = private[present]
            own = [expanded_top_k(row, p.top_k, 0.0, 1) for row in rows]
            there = np.unique([*expanded_top_k(public, p.top_k, p.clip, p.batch), *np.ravel(own)])
            total = clipped_sum(public, private, present, p.clip)
            scores = weights(public, mean_logits(public, total, p.batch), p.temperature)
            return int(there[draw(scores[there], prg)])

        return token

    return begin


def test_candidates_that_depend_on_references_are_caught() -> None:
    """One reference brings a token among the candidates that the public model has far below."""
    p = replace(P, top_k=1)
    public = np.array([1.0, -0.5, -9.0], np.float32)
    private = np.array([[0.0, 9.0, 0.0], public], np.float32)
    right = invisible_ink(p)
    broken = replace(right, begin=candidates_of_references(p))
    for method, expected in ((right, False), (broken, True)):
        game = token_game(method, p, public, private, TOKENS)
        assert audit(game, 1.0, DELTA, 500, Prg.from_seed(3, "audit")).broken == expected


def test_no_difference_gives_no_bound() -> None:
    game = token_game(invisible_ink(P), P, np.zeros(2), np.zeros((2, 2)), 1)
    same = audit(game, 0.0, 0.0, 400, Prg.from_seed(2, "audit"))
    assert same.lower == 0 and not same.broken


@pytest.mark.parametrize("successes, tries", [(0, 10), (3, 10), (10, 10), (1, 400)])
def test_rate_bounds_are_those_of_clopper_and_pearson(successes: int, tries: int) -> None:
    exact = stats.binomtest(successes, tries).proportion_ci(0.95, "exact")
    assert rate_bounds(successes, tries, 0.025) == pytest.approx((exact.low, exact.high))


def test_texts_of_a_model(tmp_path: Path) -> None:
    """With 12 runs in each world no bound is certain; but scores tell the worlds apart."""
    save_tokenizer(tmp_path)
    prompts = prompts_for(Tokenizer.load(tmp_path), "def read(", 64, 24, 16)
    p = Parameters.for_budget(100.0, 1e-6, batch=1, temperature=1.0, max_new_tokens=24)
    params = folded(PRIVATE, endless(tiny_params(PRIVATE, 1)))
    generator = Generator(invisible_ink(p), PRIVATE, params, prompts)
    game = text_game(generator, p, [], "zeta zeta zeta zeta")
    streams = [Prg.from_seed(i, "texts") for i in range(12)]
    here, away = ([game(present, prg) for prg in streams] for present in (True, False))
    assert np.mean(here) > 0 > np.mean(away)
    assert stats.mannwhitneyu(here, away).pvalue < 1e-3


class PublicWithCanary(Generator):
    """Broken: phi_pub has the first reference before it."""

    def text(self, references: Sequence[str], prg: Prg, on_token: Any = None) -> Made:
        if references[0]:
            own = self.prompts.tokenizer.encode(f"{references[0]} ", goes_on=True)
            begin = self.prompts.begin
            public = [*begin, *own, *self.prompts.public[len(begin) :]]
            prompts = replace(self.prompts, public=public)
            return Generator(self.method, *self.model, prompts).text(references, prg)  # type: ignore[attr-defined, call-arg]
        return super().text(references, prg)


@pytest.mark.parametrize("kind", [Generator, PublicWithCanary])
def test_public_logits_that_depend_on_a_reference_are_caught(
    tmp_path: Path, kind: type[Generator]
) -> None:
    save_tokenizer(tmp_path)
    prompts = prompts_for(Tokenizer.load(tmp_path), "def read(", 64, 6, 16)
    p = Parameters.for_budget(0.3, 1e-6, batch=1, temperature=1.0, max_new_tokens=6, top_k=3)
    model = PRIVATE, folded(PRIVATE, endless(tiny_params(PRIVATE, 1)))
    generator = kind(invisible_ink(p), *model, prompts)
    generator.model = model  # type: ignore[attr-defined]
    game = text_game(generator, p, [], "zeta zeta")
    actual = audit(game, 0.3, 1e-6, 60, Prg.from_seed(4, "texts"))
    assert actual.broken == (kind is not Generator)
