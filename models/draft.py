"""Drafting, in the clear at the client, by its own public model with a key/value cache.

A `Proposer` drafts; the one in `models.ngrams` needs no model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import Cache, CacheT, rows_after
from models.encoder_decoder import encoded
from models.family import ModelConfig, Params, family_of

# A draft for a position of the text from logits [vocab], and the distribution it was drawn from.
Pick = Callable[[np.ndarray, int], tuple[int, np.ndarray]]


# Tokens that go through the model at a time, always as many: neither its shapes nor its time say
# how many drafts were accepted. A step brings two at most that the cache does not hold: the last
# draft, if all stayed, and the token after it.
WIDTH = 8


class Proposer:
    """Proposes tokens after a text. Subclasses define the logits, which are fixed before the draft
    and the randomness of its verification are drawn, so that every draft has the distribution that
    `pick` returns for it.
    """

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return logits [vocab] of the token after `tokens`; -inf for a token of probability 0."""
        raise NotImplementedError

    @property
    def beside(self) -> Proposer:
        """Return what drafts further continuations, which are to begin with another token."""
        return self

    def begin(self) -> None:
        """Expect a text that goes on with tokens which no drafts were made for, such as a turn's of
        a chat.
        """

    def propose(self, context: list[int], count: int, pick: Pick) -> tuple[list[int], np.ndarray]:
        """Draw `count` drafts after `context` (token ids); return them and the distributions they
        were drawn from, float64 [count, vocab].
        """
        drafts: list[int] = []
        q = np.zeros((count, self.vocab_size))
        for i in range(count):
            draft, q[i] = pick(self.logits(context + drafts), len(context) + i)
            drafts.append(draft)
        return drafts, q


@dataclass
class Drafter(Proposer):
    """A public model that proposes tokens after a context of up to `capacity` tokens, not counted
    the `source` at its beginning, which an encoder reads where the model has one.

    The cache follows the context it is given: rows of tokens that it has already seen are kept, and
    rejected tokens are rolled back by setting the length back. The constructor compiles the model,
    for one shape.
    """

    config: ModelConfig
    params: Params
    capacity: int
    source: Sequence[int] = ()
    _seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shared: Cache = self.config.empty_cache(self.capacity + WIDTH)
        self._step, encode = _compiled(self.config)
        self._weights = jax.device_put(family_of(self.config).fold(self.params, self.config))
        if self.config.encodes:
            self._shared = encode(self._weights, np.array(self.source, np.int32), self._shared)
        self.logits([*self.source, 0])
        self._seen = []

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return logits [vocab] after `tokens`, feeding only tokens that the cache lacks."""
        tokens = tokens[len(self.source) :]
        same = len(os.path.commonprefix([self._seen, tokens[:-1]]))
        self._seen = self._seen[:same]
        for start in range(same, len(tokens), WIDTH):
            fresh = tokens[start : start + WIDTH]
            logits, self._shared = self._step(
                self._weights,
                np.pad(np.array(fresh, np.int32), (0, WIDTH - len(fresh))),
                self._shared,
                np.int32(start),
                np.int32(len(fresh) - 1),
            )
        self._seen = list(tokens)
        return np.asarray(logits)


@lru_cache(maxsize=8)
def _compiled(config: ModelConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the step of a model of this shape, and its encoder, compiled."""
    return jax.jit(partial(_draft_step, config)), jax.jit(partial(encoded, config))


def _draft_step(
    config: ModelConfig,
    weights: Params,
    tokens: jax.Array,
    cache: CacheT,
    length: jax.Array,
    last: jax.Array,
) -> tuple[jax.Array, CacheT]:
    """Return logits [vocab] after tokens[last], and the cache with all tokens. Tokens after `last`
    are padding: no token before them sees them, and later calls write over their rows.
    """
    family, at = family_of(config), rows_after(length, tokens.shape[0], cache.positions)
    # Those that only fill up may stand past the context.
    at = at._replace(positions=jnp.minimum(at.positions, config.context - 1))
    x = family.embed(weights, config, tokens, at.positions[0])
    rows, cache, _ = family.forward(weights, config, x, at, cache)
    return family.head(weights, jax.lax.dynamic_slice_in_dim(rows, last, 1))[0], cache
