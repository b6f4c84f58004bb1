"""Fake prompts among which nobody can tell the user's own, with a bound that is proved.

"Confidential Prompting" (Gim, Li, Zhong), section 5, repaired. The model's owner sees 1 + lambda
prompts that differ in the redacted spans alone, and knows how they were made, but not the user's
key. They are drawn like this, with a public model P (`alike`):

1. A beam walks through the prompt from the first span to the end of the last one. At a position of
   a span each kept beginning is extended by every token; of those whose log-probability is in the
   same bin as the user's own beginning's (bins of public edges) the own one stays, and `beam` - 1
   others, drawn uniformly. At a position between spans all are extended by its token.
2. Of what is left, prompts count whose log-probability, from the first span to the end of the
   *whole* prompt, is in the user's own bin of width eta, [k eta, (k + 1) eta), and that a person
   could have typed: their text has these tokens, and is the prompt's outside of spans.
3. The set is the own prompt and up to lambda others of these, drawn uniformly; fewer than
   lambda_min are refused. Its order is uniform.

**Claim.** If prompts are distributed like P (given what is public), whoever sees the set guesses
the user's own with probability at most 1 / (1 + lambda e^-eta).

*Proof.* Fix the sets K_1, ..., K_n that the beam kept and the final set R. Let r, r' be in R.
All of R descends from each K_i and ends in one bin, so r and r' have beginnings in each K_i, those
of K_i lie in one bin, and the candidates to draw from in step i, a function of K_(i-1) and that
bin, are the same set E_i for both. Each draw is uniform given that the own beginning stays:
probability 1 / C(|E_i| - 1, |K_i| - 1), and 1 / C(|F| - 1, |R| - 1) at the end, for r and r'
alike. So Pr[K_1..K_n, R | own = r] = Pr[K_1..K_n, R | own = r'], for every history, and
summed over histories Pr[R | r] = Pr[R | r']. The posterior of r in R is therefore
P(r) / sum over R of P, where all ratios are below e^eta: at most 1 / (1 + lambda e^-eta).  QED

If the true distribution D is another one, |log D - log P| <= delta on R, eta + 2 delta takes the
place of eta: a prompt that the public model finds odd for a reason that its fakes lack is not
hidden by it. Log-probabilities are float32: a prompt within some 1e-5 of an edge may be binned
otherwise in another batch.

What it does not hide: all text outside of spans, the number of tokens in a span, that the public
model could make enough fakes at all. One response per prompt comes back, and how the user goes on
tells which one was read. The same secret in another prompt: `spu_llm.systems.confidential.book`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.scoring import Scored, Scorer
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.confidential.spans import Prompt


@dataclass(frozen=True)
class Limits:
    """lambda, lambda_min, eta; and what the search costs: beginnings kept, and the width of their
    bins, which no bound depends on.
    """

    fakes: int = 8
    fewest: int = 4
    eta: float = 0.5
    beam: int = 256
    width: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.fakes < self.beam:
            raise InputError(
                f"there must be 1 fake prompt at least and {self.beam - 1} at most, and no more "
                f"required than wanted; found {self.fewest} of {self.fakes}"
            )
        if not 0 < self.eta <= 10:
            raise InputError(f"eta must be above 0 and at most 10, found {self.eta:g}")

    def bound(self, fakes: int) -> float:
        """The most that a guess among so many fakes and the own prompt can reach."""
        return 1 / (1 + fakes * math.exp(-self.eta))


class TooFewError(InputError):
    """The public model finds fewer fake prompts than the user wants at least: lambda < lambda_min.
    """

    def __init__(self, found: int, fewest: int) -> None:
        super().__init__(
            f"only {found} fake prompts are as likely as this one, fewer than the {fewest} that "
            "must be (--min-fakes): what is redacted stands out, and nothing was sent; redact more "
            "of it, say it otherwise, or use 'spu-llm generate'"
        )


@dataclass(frozen=True)
class Public:
    """The public model and tokenizer, as every party may have them."""

    scorer: Scorer
    tokenizer: Tokenizer

    def before(self, tokens: Sequence[int], first: int) -> list[int]:
        """What the model reads before token `first`: a text's end where there is nothing."""
        return list(tokens[:first]) or [min(self.tokenizer.eos_ids)]


def alike(public: Public, prompt: Prompt, prg: Prg, limits: Limits) -> np.ndarray:
    """int32 [1 + found, n]: the prompt's tokens, and those of fakes in a random order. TooFewError
    with fewer than `limits.fewest`.
    """
    own, targets = np.asarray(prompt.tokens, np.int32), prompt.targets
    first, last = targets[0].start, targets[-1].stop
    # 1.
    texts = public.scorer.begin(public.before(prompt.tokens, first))
    kept = 0  # the own beginning among them
    inside = {position for target in targets for position in target}
    starts = _starts(public, prompt)
    for position in range(first, last):
        token = int(own[position])
        if position not in inside:
            everyone = np.arange(len(texts.total))
            texts = public.scorer.extended(texts, everyone, np.full((len(everyone), 1), token))
            continue
        width = limits.eta if position + 1 == len(own) else limits.width
        texts = _extended(public, texts, kept, token, starts.get(position), width, limits, prg)
        kept = 0
    # 2.
    rest = np.tile(own[last:], (len(texts.total), 1))
    if rest.shape[1]:
        texts = public.scorer.extended(texts, np.arange(len(rest)), rest)
    bins = np.floor(texts.total / limits.eta)
    before = np.tile(own[:first], (len(rest), 1))
    # The scored context may be another one, where the prompt begins with a span.
    rows = np.concatenate([before, texts.tokens[:, -(len(own) - first) :]], axis=1)
    others = [
        row for i, row in enumerate(rows)
        if i != kept and bins[i] == bins[kept] and typed(public.tokenizer, prompt, row) is not None
    ]  # fmt: skip
    # 3.
    found = min(limits.fakes, len(others))
    if found < limits.fewest:
        raise TooFewError(found, limits.fewest)
    drawn = _drawn(prg, len(others), found)
    return np.stack([own, *(others[i] for i in drawn)])


def shuffled(rows: Sequence[Any], prg: Prg) -> tuple[list[Any], int]:
    """The rows in a uniform order, and where the first of them has come to: the user's own, which
    nobody without the key of `prg` finds.
    """
    order = np.argsort(prg.uniform((len(rows),))).tolist()
    return [rows[i] for i in order], order.index(0)


def typed(tokenizer: Tokenizer, prompt: Prompt, row: np.ndarray) -> list[str] | None:
    """What stands in each redacted span of a row of tokens; None unless the row is what the
    tokenizer makes of a text that is the prompt's outside of them.
    """
    found = []
    for target, (left, right) in zip(prompt.targets, prompt.edges, strict=True):
        data = tokenizer.token_bytes(row[target.start : target.stop].tolist())
        stop = len(data) - len(right)
        if stop <= len(left) or data[: len(left)] != left or data[stop:] != right:
            return None
        try:
            found.append(data[len(left) : stop].decode())
        except UnicodeDecodeError:
            return None
    return found if tokenizer.encode(filled(prompt, found)) == row.tolist() else None


def filled(prompt: Prompt, secrets: Sequence[str]) -> str:
    """The prompt's text with these in place of its redacted spans."""
    parts, end = [], 0
    for span, secret in zip(prompt.marked.redacted, secrets, strict=True):
        parts += [prompt.marked.text[end : span.start], secret]
        end = span.stop
    return "".join([*parts, prompt.marked.text[end:]])


def _starts(public: Public, prompt: Prompt) -> dict[int, np.ndarray]:
    """bool [vocab] by position: what may begin a target whose first token holds text before it."""
    tokenizer, found = public.tokenizer, {}
    for target, (left, _) in zip(prompt.targets, prompt.edges, strict=True):
        if left:
            found[target.start] = np.array(
                [tokenizer.token_bytes([i]).startswith(left) for i in range(tokenizer.vocab_size)]
            )
    return found


def _extended(
    public: Public, texts: Scored, kept: int, token: int, allowed: np.ndarray | None, width: float,
    limits: Limits, prg: Prg,
) -> Scored:  # fmt: skip
    """Step 1 at one position of a span; the own beginning comes first."""
    totals = texts.total[:, None] + texts.next
    same = np.floor(totals / width) == np.floor(totals[kept, token] / width)
    if allowed is not None:
        same &= allowed
    same[kept, token] = False
    parents, tokens = np.nonzero(same)
    drawn = _drawn(prg, len(parents), min(limits.beam - 1, len(parents)))
    parents = np.concatenate([[kept], parents[drawn]])
    tokens = np.concatenate([[token], tokens[drawn]])
    return public.scorer.extended(texts, parents, tokens[:, None])


def _drawn(prg: Prg, among: int, count: int) -> np.ndarray:
    """So many different numbers below `among`, uniformly, in a random order."""
    return np.argsort(prg.uniform((among,)), kind="stable")[:count]


def posterior(public: Public, prompt: Prompt, rows: np.ndarray) -> np.ndarray:
    """float64 [row]: how likely each is the user's own, to whoever has the public model."""
    logs = log_probabilities(public, prompt, rows)
    weights: np.ndarray = np.exp(logs - logs.max())
    return weights / weights.sum()


def log_probabilities(public: Public, prompt: Prompt, rows: np.ndarray) -> np.ndarray:
    """float64 [row]: of the tokens from the first span on."""
    first = prompt.targets[0].start
    before = public.before(prompt.tokens, first)
    return public.scorer.log_probability(before, rows[:, first:])


