"""Drafting without a model: the draft is the token after the latest earlier occurrence of the
text's last tokens.

Prompt look-up decoding (Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with
Reference", 2023): summaries, corrections and rewritten code repeat long parts of their prompt. The
draft is deterministic, so its distribution q has all its mass on one token: speculative sampling
accepts it with probability p(draft), and the text has the private model's distribution all the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.draft import Drafter, Proposer

MOST = 8  # tokens of the text's end that are compared
# Of a match that goes before a draft model: after shorter ones a sampled text keeps fewer drafts
# than of the model's alone.
LEAST = 6


@dataclass
class Ngrams(Proposer):
    """Proposes the token that the text itself suggests; with a `model`, the model proposes wherever
    fewer than LEAST of the text's last tokens match an earlier place. The model runs in either
    case, so that a step's time does not tell which of the two proposed.
    """

    size: int  # tokens of the vocabulary
    model: Drafter | None = None

    @property
    def vocab_size(self) -> int:
        return self.size

    @property
    def beside(self) -> Proposer:
        """Return the model, since the text suggests one token alone; without one, this."""
        return self if self.model is None else self.model

    def logits(self, tokens: list[int]) -> np.ndarray:
        token, length = continuation(tokens)
        of_model = None if self.model is None else self.model.logits(tokens)
        if of_model is not None and length < LEAST:
            return of_model
        certain = np.full(self.size, -np.inf)
        certain[token] = 0.0
        return certain


def continuation(text: Sequence[int]) -> tuple[int, int]:
    """Find the earlier place in the text that ends with most of its last tokens (MOST at most), the
    latest such place. Return the token after it and the number of matching tokens; without such a
    place, the text's commonest token and 0.
    """
    tokens = np.asarray(text)
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])  # of what stood there before
    if not ends.size:
        return int(np.bincount(tokens).argmax()), 0
    length = 1
    while length < MOST:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not longer.size:
            break
        ends, length = longer, length + 1
    return int(tokens[ends[-1] + 1]), length
