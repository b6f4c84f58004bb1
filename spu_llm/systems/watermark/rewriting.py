"""Candidates by paraphrase: one sample of the model, and m rewritings of it by a cheaper one.

The paper names them as an extension (§3) for who cannot afford m samples. What rewrites here is a
small language model that goes through the sample and draws blocks of tokens afresh, chosen at
random, each after the prompt and what stands before it, without a look at what comes after; it
understands nothing. Two things are given up: the text has the distribution of what rewrites, not
of the model; and candidates share the n-grams of the blocks that both keep, each of which only one
of them may count.
"""

from __future__ import annotations

import numpy as np

from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.model_sampler import ANY, ModelSampler
from spu_llm.systems.watermark.sampler import Drawn, Sampler
from spu_llm.systems.watermark.units import Content

BLOCK = 4  # tokens that are rewritten together
SHARE = 0.5  # of blocks that are rewritten


class Rewriter:
    """A sampler whose candidates are rewritings of one sample of `model`, by `cheaper`, which has
    the same tokens. Only tokens that the cheaper model draws may end a candidate early.
    """

    def __init__(
        self, model: Sampler, cheaper: ModelSampler, prg: Prg | None = None, *, share: float = SHARE
    ) -> None:
        self._model, self._cheaper = model, cheaper
        self._prg, self._share = prg or Prg.from_os(), share

    def sample(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
        (one,) = self._model.sample(prefix, 1, max_tokens)
        if not one.content:
            return [one] * n
        assert not isinstance(one.content, str)
        length = len(one.content)
        given = np.tile(np.array(one.content), (n, 1))
        blocks = self._prg.uniform((n, -(-length // BLOCK))) < self._share
        given[np.repeat(blocks, BLOCK, axis=1)[:, :length]] = ANY
        made = self._cheaper.completed(prefix, given)
        return [Drawn(of.content, of.ended or one.ended) for of in made]
