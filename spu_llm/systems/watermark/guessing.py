"""Which tokens of a text a client's model had drafted, as the text alone tells.

With `--verify marked` a draft is the likeliest token of the public model after all that is before
it. Its prompt is not known here: the guess is made after the text's own beginning, and gets better
as the text goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from models.family import ModelConfig, Params, logits


def drafts_of(config: ModelConfig, params: Params, tokens: Sequence[int]) -> np.ndarray:
    """Return which tokens are taken for drafts, bool [token]: whether each is the likeliest after
    the tokens before it, of which the model sees the last half of its context at least. The first
    one is none. params: not folded.
    """
    known = np.asarray(tokens, np.int32)
    as_drafted = np.zeros(len(known), bool)
    likeliest = jax.jit(functools.partial(_likeliest, config))
    context = config.context
    for start in range(0, max(1, len(known) - context // 2), max(1, context // 2)):
        window = known[start : start + context]
        padded = np.zeros(context, np.int32)
        padded[: len(window)] = window
        after = np.asarray(likeliest(params, padded))
        first = 1 if start == 0 else context // 2
        as_drafted[start + first : start + len(window)] = (
            after[first - 1 : len(window) - 1] == window[first:]
        )
    return as_drafted


def _likeliest(config: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Return the likeliest token after each of `tokens`, int32 [n]."""
    return jnp.argmax(logits(params, config, tokens), axis=-1)
