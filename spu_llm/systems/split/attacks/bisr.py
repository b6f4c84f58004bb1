"""A4: BiSR (Chen et al. 2024, "Unveiling the vulnerability of private fine-tuning in split-based
frameworks for large language models", and its public code), whose three parts are tried here each
by itself.

(a) An inverter trained on public text (`trained.Inverters`), as first guess.
(b) Backward gradient matching: soft labels are optimised so that the gradient by what the host
    returned, at the public back, is the one that came.
(c) Forward embedding matching: dummy embeddings are optimised so that what the public front makes
    of them has the direction of the rows that came; each stands for the nearest token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from models.cache import Block, rows_after
from models.family import ModelConfig, Params, family_of
from models.split import back_texts
from spu_llm.systems.split.attacks import NONE
from spu_llm.systems.split.attacks.views import HostView, Public, Texts

ITERATIONS = 300  # at most:
SOME, LEAST = 20, 0.01  # they end where so many lower the loss by less than this part of it
RATE = 0.09
SQUARES, SIZES = 0.85, 0.15  # of the two losses of (b)
SURE = 5.0  # logit of the inverter's guess in first soft labels


def by_gradients(
    view: HostView, public: Public, guesses: Texts, iterations: int = ITERATIONS
) -> list[list[int]]:
    """Find the labels of tuning texts by gradient matching (b); `guesses` of the texts are from
    (a).

    The gradient is linear in soft labels q: J' (p - q), J the back's derivative. Both sides are
    divided by the size of the gradient that came, so that the losses have their shares.
    """
    assert view.gradients is not None and view.tuning_rows is not None
    back, config = public.parts[2], public.config
    read = []
    returned = public.returned(view.tuning_rows)
    for y, gradient, guess in zip(returned, view.gradients, guesses, strict=True):
        # Of the last token's label (a) says nothing.
        first = SURE * jax.nn.one_hot(np.array([*guess[1:], NONE]), config.vocab_size)
        soft = np.asarray(_soft_labels(back, config, iterations, y, gradient, first))
        read.append(soft.argmax(axis=1).tolist())
    return read


@partial(jax.jit, static_argnums=(1, 2))
def _soft_labels(
    back: Params, config: ModelConfig, iterations: int, y: Array, wanted: Array, first: Array
) -> Array:
    """Fit logits of soft labels [n, vocab], from `first` on, so that their gradient at y [n, d]
    matches `wanted` [n, d].
    """

    def logits(y: Array) -> Array:
        return back_texts(back, config, y[None])[0]

    outputs, pull = jax.vjp(logits, y)
    chances, size = jax.nn.softmax(outputs), jnp.sqrt(jnp.mean(wanted**2)) + 1e-30

    def loss(soft: Array) -> Array:
        (would,) = pull(chances - jax.nn.softmax(soft))
        apart = (would - wanted) / size
        return SQUARES * jnp.mean(apart**2) + SIZES * jnp.mean(jnp.abs(apart))

    return _minimised(loss, first, iterations)


def by_embeddings(
    view: HostView, public: Public, guesses: Texts, iterations: int = ITERATIONS
) -> list[list[int]]:
    """Find tokens by embedding matching (c), from the embeddings of the `guesses` of (a) on.
    Nearest is by the dot product with tokens' own embeddings of length one.
    """
    config, front = public.config, public.parts[0]
    family = family_of(config)
    table = public.table
    lengths = np.linalg.norm(table, axis=1, keepdims=True)
    scale = float(np.sqrt(np.square(table).mean()))
    read = []
    for rows, guess in zip(view.rows, guesses, strict=True):
        n = len(rows)
        at = jnp.arange(n)
        places = np.asarray(
            family.embed(front, config, jnp.zeros(n, jnp.int32), at) - table[0]
        )  # what positions add
        first = (table[np.asarray(guess)] + places) / scale
        dummies = _dummies(front, config, iterations, scale, first, jnp.asarray(rows))
        own = scale * np.asarray(dummies) - places
        read.append((own @ (table / (lengths + 1e-30)).T).argmax(axis=1).tolist())
    return read


@partial(jax.jit, static_argnums=(1, 2))
def _dummies(
    front: Params, config: ModelConfig, iterations: int, scale: float, first: Array, rows: Array
) -> Array:
    """Fit embeddings [n, d], in units of `scale` and from `first` on, so that they give the
    direction of the rows [n, d].
    """
    family, layers, n = family_of(config), len(front["blocks"]), first.shape[0]
    cache = config.with_layers(layers).empty_cache(n) if layers else Block((), ())

    def loss(dummies: Array) -> Array:
        x = scale * dummies
        x, _, _ = family.through(front["blocks"], config, x, rows_after(0, n, n), cache)
        sizes = jnp.linalg.norm(x, axis=1) * jnp.linalg.norm(rows, axis=1)
        return 1 - jnp.mean(jnp.sum(x * rows, axis=1) / (sizes + 1e-30))

    return _minimised(loss, first, iterations)


class _Descent(NamedTuple):
    """losses: the least of the last steps, and of those before."""

    at: Array
    state: Any
    losses: tuple[Array, Array]
    steps: Array


def _minimised(loss: Callable[[Array], Array], first: Array, iterations: int) -> Array:
    """Minimise `loss` from `first` on by AdamW, in `SOME` steps at a time."""
    optimiser = optax.adamw(RATE, weight_decay=0.0)

    def step(carried: tuple[Array, Any], _: None) -> tuple[tuple[Array, Any], Array]:
        at, state = carried
        value, slope = jax.value_and_grad(loss)(at)
        updates, state = optimiser.update(slope, state, at)
        return (optax.apply_updates(at, updates), state), value

    def some(now: _Descent) -> _Descent:
        (at, state), values = jax.lax.scan(step, (now.at, now.state), None, length=SOME)
        return _Descent(at, state, (values.min(), now.losses[0]), now.steps + SOME)

    def goes_on(now: _Descent) -> Array:
        falls = now.losses[0] < (1 - LEAST) * now.losses[1]
        return (now.steps < iterations) & ((now.steps < 2 * SOME) | falls)

    far = jnp.float32(jnp.inf), jnp.float32(jnp.inf)
    begin = _Descent(first, optimiser.init(first), far, jnp.int32(0))
    return jax.lax.while_loop(goes_on, some, begin).at
