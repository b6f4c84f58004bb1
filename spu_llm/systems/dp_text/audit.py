"""An audit: what an attacker who knows all but one reference finds out: a lower bound on epsilon.

A *game* is run many times in each of two worlds: the canary is one of the references, or null is in
its place. The attacker sees the tokens, and knows the model, the parameters, all other references
and the canary; its score is the log-likelihood ratio of the tokens between both worlds, under the
mechanism that is claimed, and infinite where a token comes that is no candidate in either: only a
broken generator draws it, and what made it a candidate must be private. An (epsilon, delta)-private
mechanism lets no test of the score have

    true positives > e^epsilon false positives + delta,

nor the other way round with the negatives. The threshold is chosen on one half of the runs; on the
other, Clopper-Pearson bounds of both rates give the epsilon that is certain with `confidence`. A
bound above what is claimed shows a broken generator; one below shows nothing more than that this
attack did not. Sources: Jagielski, Ullman, Oprea 2020; Nasr et al. 2023 (both sides, thresholds).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.generator import Generator, Made
from spu_llm.systems.dp_text.methods import Method, token_weights
from spu_llm.systems.dp_text.parameters import Parameters

# The score of one run: with the canary or without, on this randomness.
Game = Callable[[bool, Prg], float]


@dataclass(frozen=True)
class AuditResult:
    """Bounds of an audit. lower: epsilon is at least that, with the confidence that was asked for;
    0: nothing found. claimed: what the accountant says, at the same delta.
    """

    lower: float
    claimed: float
    delta: float
    runs: int  # in each world
    true_positives: float
    false_positives: float

    @property
    def broken(self) -> bool:
        return self.lower > self.claimed


def audit(
    game: Game, claimed: float, delta: float, runs: int, prg: Prg, confidence: float = 0.999
) -> AuditResult:
    """Play `runs` times in each world, and judge by the scores."""
    with_canary, without = (
        np.array([game(present, prg.child(f"{present} {i}")) for i in range(runs)])
        for present in (True, False)
    )
    return judged(with_canary, without, claimed, delta, confidence)


def judged(
    with_canary: np.ndarray,
    without: np.ndarray,
    claimed: float,
    delta: float,
    confidence: float = 0.999,
) -> AuditResult:
    """Judge by both worlds' scores, float64 [runs] each; their first half chooses the threshold."""
    runs = len(with_canary)
    half = runs // 2
    level = (1 - confidence) / 2  # of each of the two rates
    threshold = max(
        np.unique(np.concatenate([with_canary[:half], without[:half]])),
        key=lambda t: _lower(with_canary[:half], without[:half], t, delta, level),
    )
    positives = with_canary[half:] >= threshold, without[half:] >= threshold
    return AuditResult(
        _lower(with_canary[half:], without[half:], threshold, delta, level),
        claimed,
        delta,
        runs,
        float(positives[0].mean()),
        float(positives[1].mean()),
    )


def rate_bounds(successes: int, tries: int, level: float) -> tuple[float, float]:
    """Return Clopper and Pearson's bounds: below the first, or above the second, a rate is with
    probability `level` at most, each.
    """
    low = betaincinv(successes, tries - successes + 1, level) if successes else 0.0
    high = 1.0
    if successes < tries:
        high = betaincinv(successes + 1, tries - successes, 1 - level)
    return float(low), float(high)


def _lower(
    with_canary: np.ndarray, without: np.ndarray, threshold: float, delta: float, level: float
) -> float:
    """Return the lower bound on epsilon by the test `score >= threshold`. Both sides use the same
    two rates, each from both ends: a union over four events, hence level / 2.
    """
    bound = 0.0
    hits = int((with_canary >= threshold).sum()), int((without >= threshold).sum())
    sizes = len(with_canary), len(without)
    misses = sizes[1] - hits[1], sizes[0] - hits[0]
    for (more, of_more), (less, of_less) in (
        ((hits[0], sizes[0]), (hits[1], sizes[1])),
        ((misses[0], sizes[1]), (misses[1], sizes[0])),
    ):
        low, _ = rate_bounds(more, of_more, level / 2)
        _, high = rate_bounds(less, of_less, level / 2)
        if low > delta:
            bound = max(bound, math.log((low - delta) / high))
    return bound


class Attacker:
    """An attacker who sees the tokens of a text, and whether it ended, and computes all else anew,
    with `Lanes` of its own: what the generator has computed is not believed. The canary is
    reference 0.
    """

    def __init__(
        self, generator: Generator, parameters: Parameters, references: Sequence[str], canary: str
    ) -> None:
        prompts, batch = generator.prompts, parameters.batch
        self._parameters, self._prompts = parameters, prompts
        self._rows = prompts.lanes([canary, *references], batch)
        self._public = generator.lanes(1, len(prompts.public))
        self._private = generator.lanes(batch, prompts.room)
        there = np.zeros(batch, bool)
        there[: len(references) + 1] = [True, *map(bool, references)]
        self._worlds = there, there & (np.arange(batch) > 0)

    def score(self, text: Made) -> float:
        ends = sorted(self._prompts.tokenizer.eos_ids)
        drawn = [[token] for token in text.tokens] + ([ends] if text.ended else [])
        total = 0.0
        for number, outcome in enumerate(drawn):
            if not number:
                public = self._public.begin([self._prompts.public])[0]
                private = self._private.begin(self._rows)
            else:
                last = text.tokens[number - 1]
                public, private = self._public.step(last)[0], self._private.step(last)
            distributions = [
                log_distribution(self._parameters, public, private, world) for world in self._worlds
            ]
            total += float(
                log_ratio(
                    *(np.logaddexp.reduce(distribution[outcome]) for distribution in distributions)
                )
            )
        return total


def token_game(
    method: Method, parameters: Parameters, public: np.ndarray, private: np.ndarray, tokens: int
) -> Game:
    """Return a game of `tokens` draws of the method on fixed logits, phi_pub [vocab] and phi_i [B,
    vocab]; the canary is reference 0, and all others are there.
    """
    worlds = {True: np.ones(parameters.batch, bool), False: np.arange(parameters.batch) > 0}
    distributions = {
        there: log_distribution(parameters, public, private, present)
        for there, present in worlds.items()
    }
    ratios = log_ratio(distributions[True], distributions[False])

    def game(present: bool, prg: Prg) -> float:
        token = method.begin(worlds[present], prg)
        return float(sum(ratios[token(public, private)] for _ in range(tokens)))

    return game


def log_distribution(
    parameters: Parameters, public: np.ndarray, private: np.ndarray, present: np.ndarray
) -> np.ndarray:
    """Return the next token's log-probabilities, float64 [vocab]; -inf for no candidate."""
    candidates, weights = token_weights(parameters, public, private, present)
    out = np.full(len(public), -np.inf)
    out[candidates] = np.log(weights / weights.sum())
    return out


def log_ratio(with_canary: np.ndarray, without: np.ndarray) -> np.ndarray:
    """Return the log-ratio of two log-distributions [vocab]; infinite for what neither distribution
    draws.
    """
    neither = np.isneginf(with_canary) & np.isneginf(without)
    return np.where(neither, np.inf, with_canary - np.where(neither, 0.0, without))


def worst_case(parameters: Parameters) -> tuple[np.ndarray, np.ndarray]:
    """Return logits of two tokens with which one reference changes as much as it can: it pushes
    both as far as they go, from as much on one side of even to as much on the other.
    """
    push = 10 * parameters.clip + 1.0
    public = np.array([-0.5, 0.5]) * parameters.clip / parameters.batch
    private = np.tile(public, (parameters.batch, 1))
    private[0] += [push, -push]
    return public.astype(np.float32), private.astype(np.float32)


def text_game(
    generator: Generator, parameters: Parameters, references: Sequence[str], canary: str
) -> Game:
    """Return a game of texts of a real model; in the world without the canary an empty reference is
    in its place.
    """
    attacker = Attacker(generator, parameters, references, canary)

    def game(present: bool, prg: Prg) -> float:
        return attacker.score(generator.text([canary if present else "", *references], prg))

    return game
