"""Which of some prompts, one the user's own, the others fakes: what an engine can go by that has
read the tokens of all of them (`layer0`), and has the public model and the method.

Each guess gives the number of a row. Ties are broken at random, so that the order tells nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from models.scoring import Scorer
from spu_llm.core.prg import Prg
from spu_llm.systems.confidential import published
from spu_llm.systems.confidential.obfuscation import Limits, Public, TooFewError, alike
from spu_llm.systems.confidential.spans import Prompt


@dataclass(frozen=True)
class Sent:
    """Prompts that went out together. `shape`: a prompt with any of the secrets, for its spans."""

    shape: Prompt
    rows: list[list[int]]
    own: int


def by_likelihood(public: Public, owner: Scorer, sent: Sent) -> dict[str, int]:
    """Guess by extremes of what the public model says, and the owner's: of whole prompts, of the
    secrets before the text after them is read, and of that text. Where a bound is sound, none of
    them may pass it.
    """
    ranks: dict[str, int] = {}
    of_models = {"the public model": public.scorer, "the owner's model": owner}
    ties = Prg.from_os()
    for name, scorer in of_models.items():
        logs, before = _logs(public, scorer, sent)
        scores = {
            "the likeliest prompt": logs,
            "the least likely prompt": -logs,
            "the likeliest secret": before,
            "the oddest secret": -before,
            "the likeliest text after it": logs - before,
            "the least likely text after it": before - logs,
        }
        for what, score in scores.items():
            ranks[f"{what} by {name}"] = _largest(score, ties)
    return ranks


def by_regeneration(public: Public, sent: Sent, eps: float, fakes: int) -> int:
    """Guess by the rank attack (spec section 8.4) on the printed algorithm, which is deterministic:
    for which row as the target does it give the others? One that the others would not have chosen
    is the user's.
    """
    rows = {tuple(row) for row in sent.rows}
    fits = []
    for row in sent.rows:
        prompt = _with(sent, row)
        sample = published.sampler("printed", public, prompt, eps, fakes, Prg.from_os())
        made = {tuple(other) for other in published.rows(prompt, sample)}
        fits.append(len(made & rows) / len(made | rows))
    return _largest(np.array(fits), Prg.from_os())


def by_redrawing(public: Public, sent: Sent, limits: Limits) -> int:
    """Guess by drawing again with the repaired method: how many of the other rows come when a row's
    fakes are drawn, with a key of the attacker's own.
    """
    rows = {tuple(row) for row in sent.rows}
    fits = []
    for row in sent.rows:
        try:
            made = {
                tuple(other.tolist())
                for other in alike(public, _with(sent, row), Prg.from_os(), limits)
            }
        except TooFewError:
            made = set()
        fits.append(len(made & rows))
    return _largest(np.array(fits, float), Prg.from_os())


def by_coherence(public: Public, sent: Sent) -> int:
    """Guess by secrets that go together: those that say the same in the most spans, and of these
    the one that is likeliest as a whole, against what its spans are each by themselves.
    """
    logs, _ = _logs(public, public.scorer, sent)
    apart = np.zeros(len(sent.rows))
    for target in sent.shape.targets:
        # Each span before the own text of the first row, so that all are judged alike.
        before = public.before(sent.rows[0], target.start)
        rest = np.array([row[target.start : target.stop] for row in sent.rows])
        apart += public.scorer.log_probability(before, rest)
    equal = [_equal_spans(public, sent, row) for row in sent.rows]
    return _largest(1e6 * np.array(equal) + logs - apart, Prg.from_os())


def by_length(sent: Sent) -> int:
    """Guess the longest row: fakes may end early."""
    return _largest(np.array([len(row) for row in sent.rows], float), Prg.from_os())


def by_intersection(sets: Sequence[Sent]) -> int:
    """Guess the row of the first set that is in most others, of one prompt sent again and again."""
    others = [set(map(tuple, sent.rows)) for sent in sets[1:]]
    counts = [sum(tuple(row) in rows for rows in others) for row in sets[0].rows]
    return _largest(np.array(counts, float), Prg.from_os())


def nearest(away: Sequence[float]) -> int:
    """Guess the row that agrees best with an exact forward of its tokens: of the prompts that
    `compact` makes, only the user's own does.
    """
    return _largest(-np.array(away), Prg.from_os())


def best_of(ranked: Sequence[dict[str, int]], own: Sequence[int]) -> tuple[str, int, int]:
    """Return the strategy with most successes on the first fifth of the tries, and its successes on
    the others, of how many: so that choosing among many is not counted as skill.
    """
    some = len(ranked) // 5

    def hits(name: str, part: slice) -> int:
        return sum(g[name] == right for g, right in zip(ranked[part], own[part], strict=True))

    best = max(ranked[0], key=lambda name: hits(name, slice(some)))
    return best, hits(best, slice(some, None)), len(ranked) - some


def _logs(public: Public, scorer: Scorer, sent: Sent) -> tuple[np.ndarray, np.ndarray]:
    """Compute each row's log-probability from the first span on: to the row's end, and to the end
    of the last span.
    """
    shape = sent.shape
    first, after = shape.targets[0].start, len(shape.tokens) - shape.targets[-1].stop
    before = public.before(shape.tokens, first)
    whole, secret = np.zeros(len(sent.rows)), np.zeros(len(sent.rows))
    lengths = np.array([len(row) for row in sent.rows])
    for length in set(lengths.tolist()):
        at = np.flatnonzero(lengths == length)
        rows = np.array([sent.rows[i] for i in at])
        last = length - after
        texts = scorer.extended(scorer.begin(before), np.zeros(len(at), int), rows[:, first:last])
        secret[at] = whole[at] = texts.total
        if after:
            whole[at] = scorer.extended(texts, np.arange(len(at)), rows[:, last:]).total
    return whole, secret


def _with(sent: Sent, row: list[int]) -> Prompt:
    """Return the prompt if this row were the user's."""
    return replace(sent.shape, tokens=row)


def _equal_spans(public: Public, sent: Sent, row: list[int]) -> int:
    words = [tuple(row[target.start : target.stop]) for target in sent.shape.targets]
    texts = [public.tokenizer.decode(word).strip() for word in words]
    return len(texts) - len(set(texts))


def _largest(scores: np.ndarray, prg: Prg) -> int:
    """Draw any of the rows with the largest score."""
    best = np.flatnonzero(scores == scores.max())
    return int(best[int(prg.uniform(()) * len(best))])
