"""Drafts that need no model: what followed the last time that the text's last tokens stood in it.

Prompt look-up decoding (Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with
Reference", 2023): summaries, corrections and rewritten code repeat long parts of their prompt. The
draft is certain, so its distribution q has all its mass on one token: speculative sampling keeps it
with probability p(draft), and text has the private model's distribution all the same.
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
    """Proposes by the text itself; with a `model`, by it wherever fewer than LEAST tokens of the
    text's end have stood in the text before. The model follows the text all the same: what it has
    to do in a step, and so the time, does not say which of the two proposes.
    """

    size: int  # tokens of the vocabulary
    model: Drafter | None = None

    @property
    def vocab_size(self) -> int:
        return self.size

    def logits(self, tokens: list[int]) -> np.ndarray:
        token, length = continuation(tokens)
        of_model = None if self.model is None else self.model.logits(tokens)
        if of_model is not None and length < LEAST:
            return of_model
        certain = np.full(self.size, -np.inf)
        certain[token] = 0.0
        return certain


def continuation(text: Sequence[int]) -> tuple[int, int]:
    """Return the token that stood after the text's end where that stood before, and how many of the
    last tokens stood there (MOST at most): at the latest place of those where most did. Without any
    such place, the text's commonest token and 0.
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
