"""Fake prompts among which nobody can tell the user's own, with a bound that is proved.

"Confidential Prompting" (Gim, Li, Zhong), section 5, repaired. The model's owner sees 1 + lambda
prompts that differ in the redacted spans alone, and knows how they were made, but not the user's
key. They are drawn like this, with a public model P (`alike`):

1. A beam walks through the prompt from the first span to the end of the last one. At a position of
   a span each beginning that was kept is extended by every token; candidates are those of the own
   beginning's bin, [k width, (k + 1) width) in log P, so that what is odd is hidden among what is
   odd. The own one stays; any other one, c, with probability p(c), apart from each other. p(c) is
   a function of all candidates: min(1, e^(W(c) - const)), such that some `beam` stay, where W is
   log P less the log p of the draws that were stood before. So a beginning counts for as many as
   it stands for. At a position between spans all are extended by its token. A span with the word of
   an earlier one, up to white space and punctuation around it, is no choice: each beginning has its
   own word there, too, in the tokens of that place (`repeats`). A beginning that cannot be said
   again like this, in as many tokens and with the same around it, drops out where its word ends.
2. Of what is left, prompts count that could have been the user's (their text has these tokens, with
   the same of them in spans, the same spans of one word and the same around those words, and no
   secret in the clear, `typed`), and whose W = log P(from the first span to the end of the *whole*
   prompt) - sum of log p is in the own one's bin of width eta, [k eta, (k + 1) eta).
3. The set is the own prompt and up to lambda others of these, drawn uniformly; fewer than
   lambda_min are refused. Its order is uniform.

**Claim.** If prompts are distributed like P, given what is public, whoever sees the set guesses the
user's own with probability at most 1 / (1 + lambda e^-eta).

*Proof.* Fix what the beam kept, K_1, ..., K_n, and the final set R, and let r be in R. By `typed`,
steps 1 to 3 look at the same positions, spans and repeats for every own prompt in R. All of R
descends from each K_i, whose candidates E_i lie in one bin and are a function of K_(i-1) and that
bin: the same for every own prompt in R. (What of K_(i-1) drops out, and what the others say again,
follows from each beginning and the common shape; an own prompt that would drop out is refused, and
no r does, being in R.) With r_i for the beginning of r in K_i,

    Pr[K_i | K_(i-1), own = r] = (product over K_i of p) (product over E_i - K_i of 1 - p) / p(r_i),

and the last draw is uniform: 1 / C(|F| - 1, |R| - 1) for all of F, which is in one bin of W. So for
every history H = (K_1..K_n)

    P(r) Pr[H, R | own = r] = P(r) / prod p(r_i) * const(H, R) = e^W(r) const(H, R),

which for r, r' in R differs by a factor below e^eta. So does its sum over histories, which is the
posterior of r in R up to a constant. The largest of 1 + lambda numbers with all ratios below e^eta
is at most 1 / (1 + lambda e^-eta) of their sum.  QED

If the true distribution D is another one, |log D - log P - const| <= delta on R, eta + 2 delta
takes the place of eta: a prompt that P finds odd for a reason that its fakes lack is not hidden by
it. The claim is about one attempt: who is refused and tries again with another key, or with other
limits until it passes, shows which prompts pass. Log-probabilities are float32: a prompt within
some 1e-5 of an edge may be binned otherwise in another batch.

What it does not hide: all text outside of spans, the number of tokens in a span, which spans have
the same word and what stands around it there, that the public model could make enough fakes at all.
One response per prompt comes back, and how the user goes on tells which one was read. The same
secret in another prompt: `spu_llm.systems.confidential.book`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from models.scoring import Scored, Scorer
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.confidential.infilling import Infilling
from spu_llm.systems.confidential.repeats import Repeats
from spu_llm.systems.confidential.spans import Prompt, filled, said, secret_in, tokenised

_BLANK = "\u02ee"  # in place of a secret: a letter that texts do not have


@dataclass(frozen=True)
class Limits:
    """lambda, lambda_min and eta; some `beam` beginnings are kept, of bins of `width`, which the
    bound does not depend on.
    """

    fakes: int = 8
    fewest: int = 4
    eta: float = 0.5
    beam: int = 512
    width: float = 4.0

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.fakes < self.beam:
            raise InputError(
                f"there must be 1 fake prompt at least and {self.beam - 1} at most, and no more "
                f"required than wanted; found {self.fewest} of {self.fakes}"
            )
        if not 0 < self.eta <= 10:
            raise InputError(f"eta must be above 0 and at most 10, found {self.eta:g}")

    def bound(self, fakes: int) -> float:
        """Return the most that a guess among so many fakes and the own prompt can reach."""
        return 1 / (1 + fakes * math.exp(-self.eta))


class TooFewError(InputError):
    """The public model finds fewer fake prompts than the user wants at least: lambda <
    lambda_min.
    """

    def __init__(self, count: int, fewest: int) -> None:
        super().__init__(
            f"found {count} of the {fewest} fake prompts that must be (--min-fakes): what is "
            "redacted stands out, and nothing was sent; redact more of the text, say it otherwise, "
            "or use 'spu-llm generate' (trying until it passes would give the prompt away)"
        )


@dataclass(frozen=True)
class Public:
    """The public model and tokenizer, as every party may have them; digest: of the model;
    infilling: how it is asked what stands in a gap, as published.
    """

    scorer: Scorer
    tokenizer: Tokenizer
    digest: str = ""
    infilling: Infilling = Infilling()

    def before(self, tokens: Sequence[int], first: int) -> list[int]:
        """Return what the model reads before token `first`: a text's end where there is nothing."""
        return list(tokens[:first]) or [min(self.tokenizer.eos_ids)]

    def around(self, tokens: Sequence[int], target: range) -> list[int]:
        """Return what the model reads before it fills a gap of a text in place of a target."""
        return self.infilling.context(tokens, target) or [min(self.tokenizer.eos_ids)]


def alike(public: Public, prompt: Prompt, prg: Prg, limits: Limits) -> np.ndarray:
    """Draw fakes of a prompt: int32 [1 + found, n], the prompt's tokens, and those of fakes in a
    random order. TooFewError with fewer than `limits.fewest`.
    """
    own, targets = np.asarray(prompt.tokens, np.int32), prompt.targets
    if typed(public.tokenizer, prompt, own) is None:
        raise InputError("this tokenizer cannot redact what a prompt begins with; put text before")
    first, last = targets[0].start, targets[-1].stop
    inside = set(prompt.hidden)
    starts, repeats = _starts(public, prompt), Repeats(public.tokenizer, prompt)
    if not repeats.hold():
        raise InputError(
            "a redacted word is there again in tokens that do not follow from it; put white space "
            "around both, or redact one of them with more text"
        )
    context = public.before(prompt.tokens, first)
    begins = first - len(context)  # where rows of the beam begin
    # 1. The own beginning comes first.
    beam = _Beam(public.scorer.begin(context), np.zeros(1))
    for position in range(first, last):
        if position in repeats.starts:
            later = repeats.starts[position]
            there = beam.texts.tokens[:, _columns(repeats.first_of(later), begins)]
            beam = _followed(public, beam, repeats.tokens(later, there))
        elif position in repeats.inside:
            continue
        elif position in inside:
            fits = None
            if position in repeats.ends:
                fits = functools.partial(_fit, repeats, repeats.ends[position], targets, begins)
            token = int(own[position])
            beam = _pruned(public, beam, token, starts.get(position), fits, limits, prg)
        else:
            beam = _followed(public, beam, own[None, position : position + 1])
    # 2.
    if last < len(own):
        beam = _followed(public, beam, own[None, last:])
    bins = np.floor((beam.texts.total - beam.drawn) / limits.eta)
    before = np.tile(own[:first], (len(bins), 1))
    # The scored context may be another one, where the prompt begins with a span.
    rows = np.concatenate([before, beam.texts.tokens[:, first - len(own) :]], axis=1)
    inside_bin = 1 + np.flatnonzero(bins[1:] == bins[0])
    # 3. In a uniform order, until there are enough: a uniform draw among those that count.
    texts = [own]
    for i in inside_bin[np.argsort(prg.uniform(inside_bin.shape), kind="stable")]:
        if len(texts) > limits.fakes:
            break
        if typed(public.tokenizer, prompt, rows[i]) is not None:
            texts.append(rows[i])
    if len(texts) - 1 < limits.fewest:
        raise TooFewError(len(texts) - 1, limits.fewest)
    return np.stack(texts)


class _Beam(NamedTuple):
    """Beginnings that are kept; drawn: sum of log p over the draws that each has stood (W is their
    log-probability less that).
    """

    texts: Scored
    drawn: np.ndarray


def _followed(public: Public, beam: _Beam, tokens: np.ndarray) -> _Beam:
    """Extend every beginning by tokens: its own ones of [m, k], or those of [1, k] for all."""
    count = len(beam.drawn)
    rows = np.broadcast_to(tokens, (count, tokens.shape[1]))
    return _Beam(public.scorer.extended(beam.texts, np.arange(count), rows), beam.drawn)


def _columns(target: range, begins: int) -> slice:
    """Return the columns of a target, in rows whose first column is the position `begins`."""
    return slice(target.start - begins, target.stop - begins)


def _fit(
    repeats: Repeats, first: int, targets: Sequence[range], begins: int, rows: np.ndarray
) -> np.ndarray:
    """Return which rows can say again what they say in target `first`."""
    return repeats.fit(first, rows[:, _columns(targets[first], begins)])


def _pruned(
    public: Public,
    beam: _Beam,
    own: int,
    allowed: np.ndarray | None,
    fits: Callable[[np.ndarray], np.ndarray] | None,
    limits: Limits,
    prg: Prg,
) -> _Beam:
    """Take step 1 at one position of a span; `own`: the prompt's token there. `fits`: what of the
    rows that stay does not drop out.
    """
    logs = beam.texts.total[:, None] + beam.texts.next  # log P of every candidate
    same = np.floor(logs / limits.width) == np.floor(logs[0, own] / limits.width)
    if allowed is not None:
        same &= allowed
    parents, tokens = np.nonzero(same)
    weights = logs[parents, tokens] - beam.drawn[parents]
    log_p = np.minimum(weights - _threshold(weights, limits.beam), 0.0)
    mine = (parents == 0) & (tokens == own)
    stays = (prg.uniform(log_p.shape) < np.exp(log_p)) & ~mine
    chosen = np.concatenate([np.flatnonzero(mine), np.flatnonzero(stays)])
    if fits is not None:
        rows = np.concatenate([beam.texts.tokens[parents], tokens[:, None]], axis=1)
        chosen = chosen[fits(rows[chosen])]
    texts = public.scorer.extended(beam.texts, parents[chosen], tokens[chosen, None])
    return _Beam(texts, beam.drawn[parents[chosen]] + log_p[chosen])


def _threshold(weights: np.ndarray, count: int) -> float:
    """Return c such that p = min(1, e^(w - c)) adds up to `count`; -inf for `count` or fewer."""
    if len(weights) <= count:
        return -math.inf
    parted = np.partition(weights, len(weights) - count)
    ordered = np.sort(parted[len(weights) - count :])[::-1]  # the largest `count`
    top = ordered[0]
    # The k largest are certain to stay, the others share what is left of the count.
    rest = np.exp(parted[: len(weights) - count] - top).sum()
    rest = rest + np.cumsum(np.exp(ordered - top)[::-1])[::-1]  # of those from k on
    shared = np.log(rest / (count - np.arange(count))) + top
    return float(shared[np.flatnonzero(ordered <= shared)[0]])


def shuffled(rows: Sequence[Any], prg: Prg) -> tuple[list[Any], int]:
    """Return the rows in a uniform order, and where the first of them has come to: the user's own,
    which nobody without the key of `prg` finds.
    """
    order = np.argsort(prg.uniform((len(rows),))).tolist()
    return [rows[i] for i in order], order.index(0)


def typed(tokenizer: Tokenizer, prompt: Prompt, row: np.ndarray) -> list[str] | None:
    """Return what stands in each redacted span of a row of tokens; None unless a user with these
    secrets would have made the same of it: the tokens, and what in them is a target, repeated, or
    public.
    """
    kinds = []
    for target, edges in zip(prompt.targets, prompt.edges, strict=True):
        text = secret_in(tokenizer, row[target.start : target.stop].tolist(), edges)
        if text is None:
            return None
        kinds.append(text)
    return kinds if sent_with(tokenizer, prompt, kinds) == row.tolist() else None


def sent_with(tokenizer: Tokenizer, prompt: Prompt, secrets: Sequence[str]) -> list[int] | None:
    """Return the tokens of the prompt with these secrets; None where they would be sent in another
    way: as other targets, repeats or public tokens than the prompt's, or not, being in the clear,
    too.
    """
    if stand_clear(prompt, secrets):
        return None
    try:
        other = tokenised(filled(prompt.marked, secrets), tokenizer)
    except InputError:
        return None
    fits = len(other.tokens) == len(prompt.tokens) and other.shape == prompt.shape
    return other.tokens if fits else None


def around(prompt: Prompt) -> str:
    """Return the prompt's text outside of its redacted spans."""
    return filled(prompt.marked, [_BLANK] * len(prompt.targets)).text


def stand_clear(prompt: Prompt, secrets: Sequence[str]) -> bool:
    """Return whether the word of one of these also stands outside of the spans, by itself."""
    words = [re.escape(said(secret)[1].strip()) for secret in secrets]
    return any(
        word and re.search(rf"(?<!\w){word}(?!\w)", around(prompt), re.IGNORECASE) for word in words
    )


def _starts(public: Public, prompt: Prompt) -> dict[int, np.ndarray]:
    """Return what may begin a target whose first token holds text before it: bool [vocab] for each
    position where such a target begins.
    """
    tokenizer, starts = public.tokenizer, {}
    for target, (left, _) in zip(prompt.targets, prompt.edges, strict=True):
        if left:
            starts[target.start] = np.array(
                [
                    tokenizer.token_bytes([i]).startswith(left)
                    for i in range(public.scorer.vocab_size)
                ]
            )
    return starts


def log_probabilities(public: Public, prompt: Prompt, rows: np.ndarray) -> np.ndarray:
    """Compute the log-probability of each row's tokens from the first span on, float64 [row]."""
    first = prompt.targets[0].start
    before = public.before(prompt.tokens, first)
    return public.scorer.log_probability(before, rows[:, first:])
