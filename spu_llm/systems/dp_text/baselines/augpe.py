"""AugPE (Xie et al. 2024), for a model that is reached through an interface alone (spec 3.3).

1. A random text for each that is wanted, of the public model.
2. T_AugPE times: L = 7 variations of each; each reference votes for the nearest of all candidates,
   in the space of `lanes.Features`; the best are kept by H(x) + N(0, sigma^2), H the number of
   votes. As published a variation is the model's answer to a prompt that asks for the text in
   other words, in a style that is drawn each time (`vary`: a prompt for each style). Without such
   prompts, for a model that follows none, it goes on from the text, as from a reference.

Only the votes read references. A null reference has none, so that one reference more or less moves
H by 1 (l2), one in another's place by sqrt 2; where an empty text voted, too, it would be sqrt 2 in
all adjacencies, of which the paper's experiments make 1. rho = T_AugPE s^2 / (2 sigma^2).

A corpus is one release over all references: there are no batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any

import numpy as np
from dp_accounting import dp_event

from models.family import ModelConfig
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.accounting import rho_for
from spu_llm.systems.dp_text.generator import Made
from spu_llm.systems.dp_text.lanes import Features, Lanes
from spu_llm.systems.dp_text.mechanism import expanded_top_k, sanitised, weights
from spu_llm.systems.dp_text.parameters import Parameters, check_budget
from spu_llm.systems.dp_text.prompts import LEAST_REFERENCE, Prompts, Templates, with_room
from spu_llm.systems.dp_text.sampling import draw, gaussian

VARIATIONS, ITERATIONS, MOST_ITERATIONS = 7, 3, 100
# What {style} in a prompt for variations stands for, after the manner of the authors' program.
STYLES = (
    "in a casual way",
    "in a professional way",
    "in a creative way",
    "in other words",
    "in fewer words",
    "with more details",
)
STYLE = "{style}"
_AT_ONCE = 32  # texts that go through the model together
SENSITIVITY = {"replace-by-null": 1.0, "zero-out": math.sqrt(2), "replace-one": math.sqrt(2)}


@dataclass(frozen=True)
class AugPE:
    """T_AugPE, L and sigma; how texts are drawn."""

    noise: float
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    iterations: int = ITERATIONS
    variations: int = VARIATIONS
    adjacency: str = "replace-by-null"

    @property
    def event(self) -> dp_event.DpEvent:
        """Return what the whole corpus spends."""
        multiplier = self.noise / SENSITIVITY[self.adjacency]
        return dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(multiplier), self.iterations)


def for_budget(
    epsilon: float,
    delta: float,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    adjacency: str = "replace-by-null",
    iterations: int = ITERATIONS,
) -> AugPE:
    """Return AugPE with the least noise that the budget allows."""
    check_budget(epsilon, delta)
    if not 1 <= iterations <= MOST_ITERATIONS:
        raise InputError(f"--iterations must be 1 to {MOST_ITERATIONS}, found {iterations}")
    Parameters(1, 0.0, temperature, max_new_tokens, top_k, adjacency)  # refuses nonsense
    rho = rho_for(epsilon, delta)
    noise = SENSITIVITY[adjacency] * math.sqrt(iterations / (2 * rho)) * (1 + 2.0**-40)
    return AugPE(noise, max_new_tokens, temperature, top_k, iterations, adjacency=adjacency)


def variations(
    templates: Templates, words: str, tokenizer: Tokenizer, context: int, new_tokens: int
) -> list[Prompts]:
    """Return a prompt for variations in each style: `words` with {text} and, where it is there,
    {style}. A text in them has a length of its own.
    """
    bare = [
        replace(templates, private=words.replace(STYLE, style)).prompts(tokenizer, {}, 0)
        for style in (STYLES if STYLE in words else ("",))
    ]
    return with_room(bare, context, new_tokens, max(new_tokens, LEAST_REFERENCE))


def votes(candidates: np.ndarray, references: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Compute H, float64 [candidate]: how many references each is nearest to. Rows of length 1.
    present: bool [reference]; null ones keep their rows, so that all others are computed where they
    were, and have no vote.
    """
    nearest = np.argmax(references @ candidates.T, axis=1)[np.asarray(present, bool)]
    return np.bincount(nearest, minlength=len(candidates)).astype(np.float64)


def corpus(
    settings: AugPE,
    config: ModelConfig,
    folded: Any,
    prompts: Prompts,
    references: Sequence[str],
    wanted: int,
    prg: Prg,
    say: Callable[[str], None] = lambda what: None,
    vary: Sequence[Prompts] = (),
) -> tuple[list[Made], int]:
    """Make `wanted` texts of all references, and return them with the number of next-token
    evaluations of the model that they took. vary: prompts for a variation of a text.
    """
    tokenizer, new = prompts.tokenizer, settings.max_new_tokens
    vary = vary or [prompts]
    room = max(one.room for one in vary)
    public, before = prompts.public[:-1], commonprefix([one.before[:-1] for one in vary])
    many = min(_AT_ONCE, wanted), min(_AT_ONCE, wanted * settings.variations)
    lanes = partial(Lanes, config, folded)
    first = _Writer(settings, lanes(many[0], len(prompts.public), new, public), prompts)
    again = _Writer(settings, lanes(many[1], room, new, before), prompts)
    features = Features(config, folded, _AT_ONCE, max(prompts.reference_tokens, new))
    real = features.of(
        [prompts.begin + tokenizer.encode(text, goes_on=True) for text in references]
    )
    present = np.array([bool(text) for text in references])
    say("random texts")
    kept = first.texts([prompts.public] * wanted, prg)
    for number in range(settings.iterations):
        say(f"iteration {number + 1} of {settings.iterations}")
        sources = [
            tokenizer.decode(made.tokens) for made in kept for _ in range(settings.variations)
        ]
        drawn = (prg.uniform((len(sources),)) * len(vary)).astype(int)
        repeated = [vary[i].private(text) for i, text in zip(drawn, sources, strict=True)]
        pool = kept + again.texts(repeated, prg)
        counts = votes(features.of([prompts.begin + made.tokens for made in pool]), real, present)
        noisy = counts + settings.noise * gaussian(counts.shape, prg)
        kept = [pool[i] for i in np.argsort(-noisy, kind="stable")[:wanted]]
    return kept, first.calls + again.calls


class _Writer:
    """Texts of the plain model, some at a time. calls: a token of a text each."""

    def __init__(self, settings: AugPE, lanes: Lanes, prompts: Prompts) -> None:
        self._settings, self._lanes, self._ends = settings, lanes, prompts.tokenizer.eos_ids
        self.calls = 0

    def texts(self, rows: Sequence[list[int]], prg: Prg) -> list[Made]:
        made: list[Made] = []
        for start in range(0, len(rows), self._lanes.lanes):
            made += self._some(rows[start : start + self._lanes.lanes], prg)
        return made

    def _some(self, rows: Sequence[list[int]], prg: Prg) -> list[Made]:
        made: list[list[int]] = [[] for _ in rows]
        ended = [False] * len(rows)
        unread = self._lanes.lanes - len(rows)  # lanes
        logits = self._lanes.begin([*rows, *[rows[-1]] * unread])
        for number in range(self._settings.max_new_tokens):
            tokens = [0] * self._lanes.lanes
            for i in range(len(rows)):
                if not ended[i]:
                    tokens[i] = self._token(logits[i], prg)
                    ended[i] = tokens[i] in self._ends
                    self.calls += 1
                    if not ended[i]:
                        made[i].append(tokens[i])
            if all(ended) or number + 1 == self._settings.max_new_tokens:
                break
            logits = self._lanes.step(tokens)
        return [Made(tokens, end) for tokens, end in zip(made, ended, strict=True)]

    def _token(self, logits: np.ndarray, prg: Prg) -> int:
        candidates = expanded_top_k(logits, self._settings.top_k, 0.0, 1)
        own = sanitised(logits[candidates])
        return int(candidates[draw(weights(own, own, self._settings.temperature), prg)])
