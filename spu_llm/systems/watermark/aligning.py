"""Detection of a provider's mark (`sessions`): a text against the rows of sessions that there were.

Which rows a text was drawn by follows from how many drafts stayed, step by step, which nobody has
recorded: forward 0 gives one token, by its row, and every forward after it one to d + 1, by its
first rows. All such alignments are tried, and excerpts, insertions and deletions with them.

The evidence for one alignment is a likelihood ratio. A token of probability p that won its row did
so by a number u of density u^(1/p - 1) / p (its maximum over 1/p chances); one that did not, by a
uniform one. p is not known here, so that the ratio of a token is a mixture over p = 2^-j, with
weights that were set once; its table has 2^16 steps, the mean of which is exactly 1. Along an
alignment rows are distinct, their numbers independent, and the product of ratios has mean 1 under
H0: the text was not drawn by the rows of the session. So has their mean over alignments, by any
distribution that the text alone decides on: a recursion over tokens, as of a hidden Markov model
(`log_evidence`).

    E evidence <= 1 under H0, so P(evidence >= 1/p) <= p                    (Markov's inequality)

for every text, every length and every nonce that the text was not made with: 1 / evidence is a
p-value, however small, without a simulation, and so is that of the mean over all recorded sessions.
(Of the best alignment, a sum of -log(1 - u), no distribution is known, and under H0 it grows by 2.1
to 2.3 a token with four drafts, where a marked token of two bits adds 2.08: taking the best loses
too much.) It errs to one side: p is seldom reached. `rank` draws the distribution itself, by fresh
nonces of the same key for the same text and shape, and is exact, but says nothing below 1 in the
number of draws.

Where the client drafts with a model that the provider has, too, the text tells how many drafts
stayed: a draft is the likeliest token after the text so far, and a forward goes on after a token
that is one. `guessed` makes a distribution of alignments of that, and short texts are found by it.
Of a client that drafted otherwise it says what is wrong; `mixed` keeps the other distributions
beside it, which costs at most a factor 5 of evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.keys import Key
from spu_llm.systems.watermark.sessions import Session, Shape, fresh_nonce

# Of the tokens that win, how many have a probability near 2^-j.
WEIGHTS = (0.45, 0.15, 0.12, 0.09, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.003, 0.001, 0.001)
STAYS = (0.3, 0.5, 0.7, 0.85)  # chances that a draft stays, where nothing is known of them
FOREIGN = 0.01  # a token that no row has drawn
LOST = 0.01  # a row that drew a token which is missing
LEAP = 0.005  # any number of them

_STEPS_BITS = 16
_CELLS = 1 << 21  # numbers that are worked on together
_BLOCK = 64  # tokens
_PARTS = 64  # of a text, that are told apart
_NOTHING = 1e-30

Progress = Callable[[int, int], None]  # sessions that are done, of how many


def table() -> np.ndarray:
    """Return the likelihood ratio of a number u in [i, i + 1) / 2^16, its mean there: float64
    [2^16].
    """
    edges = np.arange(2**_STEPS_BITS + 1) / 2**_STEPS_BITS
    cdf = np.sum([w * edges ** (2**j) for j, w in enumerate(WEIGHTS)], axis=0)
    return np.asarray(np.diff(cdf) * 2**_STEPS_BITS)


_TABLE = table()


@dataclass(frozen=True)
class AlignmentPrior:
    """A distribution of alignments. goes_on: the chance float64 [token] that the forward which drew
    a token draws the next one, too, if a row is left.
    """

    goes_on: np.ndarray

    @staticmethod
    def unknown(tokens: int) -> list[AlignmentPrior]:
        """Return several distributions, one for each chance in STAYS, of which one may be near."""
        return [AlignmentPrior(np.full(tokens, chance)) for chance in STAYS]

    @staticmethod
    def guessed(drafts: np.ndarray, sure: float = 0.95) -> list[AlignmentPrior]:
        """Return the distribution by which tokens are drafts, bool [token], as far as can be said
        without the prompt.
        """
        return [AlignmentPrior(np.where(drafts, sure, 1 - sure))]

    @staticmethod
    def mixed(drafts: np.ndarray) -> list[AlignmentPrior]:
        """Return the distribution of `guessed`, and the distributions of `unknown`: the client need
        not have drafted with the model that was asked.
        """
        return [*AlignmentPrior.guessed(drafts), *AlignmentPrior.unknown(len(drafts))]


def log_evidence(
    streams: Sequence[Prg],
    shape: Shape,
    tokens: Sequence[int],
    distributions: Sequence[AlignmentPrior],
    progress: Progress = lambda done, of: None,
) -> np.ndarray:
    """Compute the log evidence, float64 [stream], that the tokens are of a session with this
    stream; the evidence is the mean over distributions. A token that the session's vocabulary lacks
    is drawn by no row.
    """
    if not len(tokens):
        return np.zeros(len(streams))
    at_once = max(1, _CELLS // (shape.rows * min(_BLOCK, len(tokens))))
    logs = []
    for first in range(0, len(streams), at_once):
        some = streams[first : first + at_once]
        walks = [_Walk(len(some), shape, distribution) for distribution in distributions]
        for start in range(0, len(tokens), _BLOCK):
            block = tokens[start : start + _BLOCK]
            ratios = np.stack([_ratios(stream, shape, block) for stream in some], axis=1)
            for walk in walks:
                for row in ratios:
                    walk.take(row)
        logs.append(special.logsumexp([walk.log for walk in walks], axis=0))
        progress(first + len(some), len(streams))
    return np.concatenate(logs) - math.log(len(distributions))


def drawn(
    stream: Prg, shape: Shape, tokens: Sequence[int], distributions: Sequence[AlignmentPrior]
) -> np.ndarray:
    """Return how surely the rows of a session drew a token, or one of its neighbours where there
    are many: float64 [token], given that the text is of the session.

    The evidence is linear in the ratio of a token. What is left of it when that is zero is the part
    of the alignments in which no row drew the token.
    """
    size = -(-len(tokens) // _PARTS)
    parts = -(-len(tokens) // size)
    whole = log_evidence([stream], shape, tokens, distributions)[0]
    walks = [_Walk(parts, shape, distribution) for distribution in distributions]
    for i, token in enumerate(tokens):
        ratios = np.tile(_ratios(stream, shape, [token]), (parts, 1))
        ratios[i // size] *= _NOTHING
        for walk in walks:
            walk.take(ratios)
    left = special.logsumexp([walk.log for walk in walks], axis=0) - math.log(len(distributions))
    return np.asarray(np.repeat(-np.expm1(np.minimum(left - whole, 0)), size)[: len(tokens)])


def _ratios(stream: Prg, shape: Shape, tokens: Sequence[int]) -> np.ndarray:
    """Return the likelihood ratios, float64 [token, row]; (almost) zero for a token that is not in
    the vocabulary.
    """
    known = np.asarray(tokens) < shape.vocab
    words = stream.words_at(shape.places(np.where(known, tokens, 0).tolist()))
    ratios = _TABLE[words >> np.uint64(64 - _STEPS_BITS)]
    return np.where(known[:, None], ratios, _NOTHING)


class _Walk:
    """The mean over alignments, token by token, for n streams: `at` [n, row] is the part of those
    in which a row drew the last token that any row drew, `past` [n] of those that are over, both
    divided by exp(log) [n].
    """

    def __init__(self, count: int, shape: Shape, distribution: AlignmentPrior) -> None:
        self._shape, self._distribution, self._taken = shape, distribution, 0
        self._at, self._past = np.zeros((count, shape.rows)), np.zeros(count)
        self.log = np.zeros(count)
        # Half of all alignments begin with the session, half of the others anywhere in it; and so
        # they do in the text.
        self._enter = np.full(shape.rows, 0.5 / shape.rows)
        self._enter[0] += 0.5
        tokens = len(distribution.goes_on)
        self._begin = np.full(tokens, 0.5 / tokens)
        self._begin[0] += 0.5
        self._end = 0.5 / tokens

    def take(self, ratios: np.ndarray) -> None:
        """Take the next token, of ratios [n, row]."""
        i = self._taken
        begin = self._begin[i] * np.exp(-self.log)
        came = begin[:, None] * self._enter
        if i:
            chance = 1 - FOREIGN - self._end
            came += chance * moved(self._at, self._shape, float(self._distribution.goes_on[i - 1]))
        self._past += self._end * self._at.sum(axis=1)
        self._at *= FOREIGN
        self._at += ratios * came
        total = self._at.sum(axis=1) + self._past
        self._at /= total[:, None]
        self._past /= total
        self.log += np.log(total)
        self._taken += 1


def moved(at: np.ndarray, shape: Shape, goes_on: float) -> np.ndarray:
    """Return the chances [n, row] of the row that drew the next token, from the chances `at` of the
    row that drew the last one.
    """
    once = following(at, shape, goes_on)
    mass = (1 - LOST - LEAP) * once + LOST * following(once, shape, goes_on)
    mass[:, 1:] += LEAP / shape.rows * np.cumsum(at, axis=1)[:, :-1]
    return np.asarray(mass)


def following(at: np.ndarray, shape: Shape, goes_on: float) -> np.ndarray:
    """Return the chances [n, row] of the row that drew the next token, from the chances `at` of the
    row that drew the last one, where no row's token is missing from the text: it is the next row of
    the forward, or the first one of the forward after it. What comes after the last forward is
    lost.
    """
    mass = np.zeros_like(at)
    if shape.forwards == 1:
        return mass
    by_forward = len(at), shape.forwards - 1, shape.drafts + 1
    old, new = at[:, 1:].reshape(by_forward), mass[:, 1:].reshape(by_forward)
    new[..., 1:] = goes_on * old[..., :-1]
    new[:, 1:, 0] = (1 - goes_on) * old[:, :-1, :-1].sum(axis=-1) + old[:, :-1, -1]
    new[:, 0, 0] = at[:, 0]
    return mass


# ---- all sessions


@dataclass(frozen=True)
class SessionEvidence:
    """Evidence of a text for the sessions that are recorded. log_p: a bound of p that it is of none
    of them (natural logarithm). rank: p by `references` fresh nonces, None without. best: the
    session that it fits best, None where there is none.
    """

    log_p: float
    best: Session | None
    sessions: int
    tokens: int
    references: int = 0
    rank: float | None = None


def detect(
    key: Key,
    sessions: Sequence[Session],
    tokens: Sequence[int],
    distributions: Sequence[AlignmentPrior],
    references: int = 0,
    progress: Progress = lambda done, of: None,
) -> SessionEvidence:
    """Test whether a text is of one of these sessions; `references`: fresh nonces for `rank`."""
    if not sessions:
        return SessionEvidence(0.0, None, 0, len(tokens))
    logs = np.zeros(len(sessions))
    total, done = len(sessions) + references, 0

    def tell(n: int, of: int) -> None:
        progress(done + n, total)

    by_shape: dict[Shape, list[int]] = {}
    for i, session in enumerate(sessions):
        by_shape.setdefault(session.shape, []).append(i)
    for shape, which in by_shape.items():
        streams = [key.session(sessions[i].nonce) for i in which]
        logs[which] = log_evidence(streams, shape, tokens, distributions, tell)
        done += len(which)
    log_p = min(0.0, math.log(len(sessions)) - float(special.logsumexp(logs)))
    best = int(np.argmax(logs))
    evidence = SessionEvidence(log_p, sessions[best], len(sessions), len(tokens))
    if not references:
        return evidence
    others = log_evidence(
        [key.session(fresh_nonce()) for _ in range(references)],
        sessions[best].shape,
        tokens,
        distributions,
        tell,
    )
    p = rank(float(logs[best]), others) * len(sessions)
    return SessionEvidence(
        log_p, sessions[best], len(sessions), len(tokens), references, min(1.0, p)
    )


def rank(own: float, others: np.ndarray) -> float:
    """Return (1 + how many others are as good as `own`) / (1 + how many others): uniform on its
    steps under H0.
    """
    return float(1 + np.sum(others >= own)) / (1 + len(others))
