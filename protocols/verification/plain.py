"""Speculative sampling in the clear: whoever has the logits of the rows decides by itself.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML'23), Algorithm
1: a draft d, drawn from q, stays with probability min(1, p(d) / q(d)); at the first that does not,
the token is drawn from max(0, p - q), normalised; where all stay, from p after the last. Text then
has the distribution p of the model, whatever the drafts are; top-k and top-p cut p and q alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from protocols.verification.distribution import Sampling, Streams, draft, draw, residual


@dataclass(frozen=True)
class Plain:
    """The rule alone (`protocols.verification.variants.Rule`): nothing of it runs on shares."""

    sampling: Sampling

    def propose(
        self, logits: np.ndarray, position: int, streams: Streams
    ) -> tuple[int, np.ndarray]:
        return draft(self.sampling, logits, lambda: float(streams.drafting.uniform(())))

    def client_input(
        self, drafts: Sequence[int], q: np.ndarray, position: int, streams: Streams
    ) -> None:
        return None

    def resolve(
        self,
        outcome: np.ndarray,
        drafts: Sequence[int],
        q: np.ndarray,
        uniform: Callable[[], float],
    ) -> tuple[int, int]:
        """Return the number of accepted drafts and the token after them. `outcome`: logits
        [d + 1, vocab], of the place of every draft and of the place after.
        """
        for k, token in enumerate(drafts):
            p = self.sampling.distribution(outcome[k])
            if not uniform() * q[k, token] < p[token]:
                return k, draw(residual(p, q[k]), uniform())
        return len(drafts), draw(self.sampling.distribution(outcome[len(drafts)]), uniform())
