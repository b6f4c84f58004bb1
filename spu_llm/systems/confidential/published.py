"""Greedy quantized sampling, as published: what it claims does not hold (`attacks`).

"Confidential Prompting" (Gim, Li, Zhong), section 5 and algorithm 1, GQS(S, S_target, eps, lambda).
Its bins are additive, eps' = eps / n wide for a target of n tokens; theorem 5.1 concludes that a
fake's probability is within eps of the target's, and the paper from that, that a guess succeeds
with probability at most 1 / (lambda + 1) + eps + 2 Delta. But closeness of small probabilities says
nothing of their ratio. Every target is sampled by itself, given the original text around it, which
the model reads as a prompt for infilling (`infilling`).

`as_printed`  The algorithm, with two corrections without which it does nothing or betrays itself:
              S_fake starts with the empty string, not empty; the target itself is taken out. Top
              lambda of a step, whose criterion is not stated: by joint probability. Deterministic.
`as_programmed`  What the authors' program does: bins [floor(rho N) / N + 0.001, + 1 / N), N =
              1 / eps'; a random lambda of those in the bin; a fake ends early at a full stop or a
              new line; the result is sorted by |probability - the target's|.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from models.scoring import Scored
from spu_llm.core.prg import Prg
from spu_llm.systems.confidential.obfuscation import Public, TooFewError, shuffled
from spu_llm.systems.confidential.spans import Prompt

PROGRAM_MARGIN = 1e-3
VARIANTS = ("printed", "program")
_AT_ONCE = 64  # texts whose next tokens are looked at together


@dataclass(frozen=True)
class PublishedFakes:
    """Fakes of one target: token rows, which `as_programmed` may leave shorter, with the joint
    probability of each given what is before; and the target's.
    """

    fakes: list[list[int]]
    probabilities: np.ndarray
    target: float


def as_printed(
    public: Public, prompt: Prompt, target: range, eps: float, fakes: int
) -> PublishedFakes:
    """Sample fakes of a target by algorithm 1."""
    own = prompt.tokens[target.start : target.stop]
    before = public.around(prompt.tokens, target)
    step = eps / len(own)  # eps'
    texts = public.scorer.begin(before)  # S_fake, the empty string
    start = texts.tokens.shape[1]
    columns, totals = np.zeros((1, 0), np.int32), np.zeros(1)
    rhos = _probabilities(public, before, own)
    for i, rho in enumerate(rhos):
        # floor(rho / eps') eps' < P(x) <= (floor(rho / eps') + 1) eps'
        low = np.floor(rho / step) * step
        # The target is one too many while it may be among them.
        parents, tokens, joint = _likeliest(texts, low, low + step, fakes + 1)
        if not len(parents):
            return PublishedFakes([], np.zeros(0), math.prod(rhos))
        columns, totals = np.column_stack([texts.tokens[parents, start:], tokens]), joint
        if i + 1 < len(own):  # what follows the last token does not matter
            texts = public.scorer.extended(texts, parents, tokens[:, None])
    made = columns.tolist()
    others = [i for i, fake in enumerate(made) if fake != own][:fakes]
    return PublishedFakes([made[i] for i in others], np.exp(totals[others]), math.prod(rhos))


def as_programmed(
    public: Public, prompt: Prompt, target: range, eps: float, fakes: int, prg: Prg
) -> PublishedFakes:
    """Sample fakes of a target as the authors' program does."""
    own = prompt.tokens[target.start : target.stop]
    before = public.around(prompt.tokens, target)
    bins = len(own) / eps  # N
    texts = public.scorer.begin(before)
    start = texts.tokens.shape[1]
    ended: list[tuple[list[int], float]] = []
    for rho in _probabilities(public, before, own):
        low = np.floor(rho * bins) / bins + PROGRAM_MARGIN
        chances = np.exp(texts.next.astype(np.float64))
        parents, tokens = np.nonzero((low <= chances) & (chances < low + 1 / bins))
        drawn = np.argsort(prg.uniform((len(parents),)))[: fakes + 1]
        if not len(drawn):
            break
        texts = public.scorer.extended(texts, parents[drawn], tokens[drawn, None])
        going = []
        for i, row in enumerate(texts.tokens[:, start:].tolist()):
            if public.tokenizer.decode(row[-1:]).rstrip(" ").endswith((".", "\n")):
                ended.append((row, float(np.exp(texts.total[i]))))
            else:
                going.append(i)
        if not going:
            break
        texts = public.scorer.chosen(texts, np.array(going))
    else:
        ended += [
            (row, float(np.exp(total)))
            for row, total in zip(texts.tokens[:, start:].tolist(), texts.total, strict=True)
        ]
    joint = _joint(public, before, own)
    others = {tuple(row): chance for row, chance in ended if row != own}
    ordered = sorted(others, key=lambda row: abs(others[row] - joint))[:fakes]
    return PublishedFakes(
        [list(row) for row in ordered], np.array([others[r] for r in ordered]), joint
    )


# Of one target, its fakes.
Sample = Callable[[range], PublishedFakes]


def sampler(
    variant: str, public: Public, prompt: Prompt, eps: float, fakes: int, prg: Prg
) -> Sample:
    """Return one of `VARIANTS`, with targets sampled one by one, eps each."""
    if variant == "printed":
        return lambda target: as_printed(public, prompt, target, eps, fakes)
    return lambda target: as_programmed(public, prompt, target, eps, fakes, prg)


def among_fakes(
    variant: str, public: Public, prompt: Prompt, eps: float, fakes: int, fewest: int
) -> tuple[list[list[int]], int]:
    """Return what goes out: token rows in a random order (section 5, step 5), and where the prompt
    is. TooFewError with fewer than `fewest` fakes, the alert of lambda_min.
    """
    prg = Prg.from_os()
    prompts = rows(prompt, sampler(variant, public, prompt, eps, fakes, prg))
    if len(prompts) - 1 < fewest:
        raise TooFewError(len(prompts) - 1, fewest)
    return shuffled(prompts, prg)


def rows(prompt: Prompt, sample: Sample) -> list[list[int]]:
    """Return the prompt's tokens, then those of fakes: number j of every target together, as many
    as the target with the fewest has.
    """
    samples = [sample(target).fakes for target in prompt.targets]
    out = [list(prompt.tokens)]
    for together in zip(*samples, strict=False):
        row, end = [], 0
        for target, fake in zip(prompt.targets, together, strict=True):
            row += [*prompt.tokens[end : target.start], *fake]
            end = target.stop
        out.append([*row, *prompt.tokens[end:]])
    return out


def claimed_bound(eps: float, targets: int, fakes: int) -> float:
    """Return the most a guess reaches by the paper, with Delta = 0; eps adds up over targets."""
    return 1 / (fakes + 1) + targets * eps


def _likeliest(
    texts: Scored, low: float, high: float, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the `count` likeliest of all texts longer by one token x with low < P(x) <= high, the
    likeliest first: numbers of the texts, tokens, and log-probabilities.
    """
    parents, tokens = np.zeros(0, int), np.zeros(0, int)
    joint = np.zeros(0)
    for start in range(0, len(texts.next), _AT_ONCE):
        chances = np.exp(texts.next[start : start + _AT_ONCE].astype(np.float64))
        some, others = np.nonzero((low < chances) & (chances <= high))
        parents, tokens = np.append(parents, start + some), np.append(tokens, others)
        added = texts.total[start + some] + texts.next[start + some, others]
        best = _largest(np.append(joint, added), count)
        joint = np.append(joint, added)[best]
        parents, tokens = parents[best], tokens[best]
    return parents, tokens, joint


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return where the `count` largest values are, the largest first, of equal ones the first."""
    near = np.arange(len(values))
    if len(values) > count:
        near = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return near[np.argsort(-values[near], kind="stable")][:count]


def _probabilities(public: Public, before: list[int], own: list[int]) -> list[float]:
    """Compute rho of every step: of the target's next token, given what is before it."""
    texts, chances = public.scorer.begin(before), []
    for i, token in enumerate(own):
        if i:
            texts = public.scorer.extended(texts, np.zeros(1, int), np.array([[own[i - 1]]]))
        chances.append(float(np.exp(texts.next[0, token].astype(np.float64))))
    return chances


def _joint(public: Public, before: list[int], own: list[int]) -> float:
    return float(np.exp(public.scorer.log_probability(before, np.array([own]))[0]))
