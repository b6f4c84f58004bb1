"""Sequential siblings without replacement: several drafts for one place under the rule `token`.

Siblings x_1, x_2, ... are drawn from q one after the other, each without those before it. The first
one stays with probability min(1, p / q); after a rejection, p becomes max(0, p - q) and q loses the
sibling, both normalised, and the next one is decided; after the last, the token is drawn from what
is left of p. It has the distribution p whatever q is.

In plaintext. Source: Jeon et al. 2024, "Recursive Speculative Decoding", Theorem 3.1; one sibling
is Leviathan et al. 2023, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from models.draft import Proposer
from protocols.verification.distribution import Sampling, Streams, draw, residual
from protocols.verification.plain import Plain


def kept(p: np.ndarray, q: np.ndarray, sibling: int) -> float:
    """Return the probability that a sibling drawn from q [vocab] stays, of p [vocab]."""
    return float(min(1.0, p[sibling] / q[sibling]))


def after_rejection(
    p: np.ndarray, q: np.ndarray, sibling: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return p and q [vocab] after a sibling was rejected; None for a q that has no other token."""
    others = np.where(np.arange(q.size) == sibling, 0.0, q)
    total = others.sum()
    return residual(p, q), others / total if total > 0 else None


def first_token(
    p: np.ndarray, q: np.ndarray, most: int, uniform: Callable[[], float]
) -> tuple[int, bool]:
    """Return the token after up to `most` siblings, and whether it is one of them."""
    rest: np.ndarray | None = q
    for _ in range(most):
        if rest is None:
            break
        sibling = draw(rest, uniform())
        if uniform() < kept(p, rest, sibling):
            return sibling, True
        p, rest = after_rejection(p, rest, sibling)
    return draw(p, uniform()), False


def step(
    text: list[int],
    model: Proposer,
    drafter: Proposer,
    siblings: int,
    drafts: int,
    sampling: Sampling,
    streams: Streams,
) -> list[int]:
    """Return the tokens that a step verifies: `siblings` drafts of the first place, behind each of
    which a chain goes on to `drafts` drafts.
    """

    def uniform() -> float:
        return float(streams.sampling.uniform(()))

    rule = Plain(sampling)
    p, q = (sampling.distribution(one.logits(text)) for one in (model, drafter))
    first, stays = first_token(p, q, siblings, uniform)
    if not stays:
        return [first]
    before = [*text, first]
    chain, each = drafter.propose(
        before, drafts - 1, lambda logits, at: rule.propose(logits, at, streams)
    )
    rows: Sequence[np.ndarray] = [model.logits(before + chain[:i]) for i in range(drafts)]
    accepted, token = rule.resolve(np.array(rows), chain, each, uniform)
    return [first, *chain[:accepted], token]
