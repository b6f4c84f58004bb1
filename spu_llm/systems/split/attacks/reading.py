"""A2 and A3: the public model reads the code off.

A2 (CodeRA-direct): what comes back goes into the public back; the likeliest token of each row is
the next one, at positions of a prompt as well as at generated ones.

A3 (CodeRA via the prompt): a guessed prompt goes into the whole public model, which goes on as the
client's would.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.cache import Block, Rows, see
from models.family import ModelConfig, Params, family_of
from spu_llm.systems.split.attacks import NONE
from spu_llm.systems.split.attacks.views import HostView, Public, Texts


def attack(view: HostView, public: Public) -> list[list[int]]:
    """Read tokens off what came back by the public back (A2): nothing says how a text begins."""
    logits = public.logits(public.returned(view.rows))
    return [[NONE, *np.argmax(rows[:-1], axis=-1).tolist()] for rows in logits]


def of_prompts(public: Public, prompts: Texts, count: int) -> list[list[int]]:
    """Generate the `count` likeliest next tokens, one after the other, of each guessed prompt (A3),
    all prompts of one length. Token 0, which ends texts in most models, stands where a guess lacks
    a token.
    """
    config = public.config
    tokens = np.maximum(np.asarray(prompts, np.int32), 0)
    lanes, length = tokens.shape
    cache, written = config.empty_cache(length + count, lanes), []
    some: Any = tokens
    for i in range(count):
        at = 0 if i == 0 else length + i - 1
        some, cache = _said(public.weights, config, some, jnp.int32(at), cache)
        written.append(np.asarray(some))
        some = some[:, None]
    return np.stack(written, axis=1).tolist() if count else [[] for _ in prompts]


@partial(jax.jit, static_argnums=1)
def _said(
    weights: Params, config: ModelConfig, tokens: Array, at: Array, cache: Block
) -> tuple[Array, Block]:
    """Return the likeliest next token [lane] after the further tokens [lane, n], which stand at
    `at`, and the cache with these.
    """
    family, room = family_of(config), cache.positions
    lanes, n = tokens.shape
    positions = jnp.broadcast_to(at + jnp.arange(n, dtype=jnp.int32), (lanes, n))
    visible = jnp.broadcast_to(see(at, n, room), (lanes, n, room))
    x = family.embed(weights, config, tokens.reshape(-1), positions.reshape(-1))
    rows = Rows(positions, visible, at)
    normed, cache, _ = family.forward(weights, config, x, rows, cache)
    last = normed.reshape(lanes, n, -1)[:, -1]
    return jnp.argmax(family.head(weights, last), axis=-1), cache


def continued(public: Public, prompts: Texts, count: int) -> list[list[int]]:
    """Return prompts and what the public model says after them: texts as a client has them."""
    more = of_prompts(public, prompts, count)
    return [[*prompt, *added] for prompt, added in zip(prompts, more, strict=True)]
