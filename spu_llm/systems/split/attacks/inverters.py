"""Networks that are trained on public text to read tokens off rows.

A gated recurrent unit (Cho et al. 2014) over features of the rows, and a linear layer on its states
and the features: BiSR's inverter of smashed data, and each of the two models of A1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from spu_llm.systems.split.attacks.views import BATCH, by_batch

WIDTH = 256  # of recurrent states
RATE = 2e-3

Weights = dict[str, Any]


class Inverter(NamedTuple):
    """weights; mean and scale of features [k]."""

    weights: Weights
    mean: np.ndarray
    scale: np.ndarray

    def tokens(self, features: Sequence[np.ndarray]) -> list[list[int]]:
        """The likeliest token of each row of each text."""
        rows = [(np.asarray(f) - self.mean) / self.scale for f in features]
        logits = by_batch(lambda x: _texts(self.weights, x), rows)
        return [of_text.argmax(axis=-1).tolist() for of_text in logits]


def _forward(weights: Weights, x: Array) -> Array:
    """Logits [n, vocab] of features [n, k]."""
    width = weights["state"].shape[0]

    def step(h: Array, of_x: Array) -> tuple[Array, Array]:
        of_h = h @ weights["state"]
        gates = jax.nn.sigmoid(of_x[: 2 * width] + of_h[: 2 * width])
        update, reset = gates[:width], gates[width:]
        h = update * h + (1 - update) * jnp.tanh(of_x[2 * width :] + reset * of_h[2 * width :])
        return h, h

    _, states = jax.lax.scan(step, jnp.zeros(width), x @ weights["in"] + weights["bias"])
    return jnp.concatenate([x, states], axis=1) @ weights["out"] + weights["shift"]


_texts = jax.jit(jax.vmap(_forward, in_axes=(None, 0)))


def _begin(features: int, vocab: int, width: int, key: Array) -> Weights:
    keys = jax.random.split(key, 3)

    def normal(i: int, shape: tuple[int, int]) -> Array:
        return jax.random.normal(keys[i], shape) * shape[0] ** -0.5

    return {
        "in": normal(0, (features, 3 * width)), "bias": jnp.zeros(3 * width),
        "state": normal(1, (width, 3 * width)),
        "out": normal(2, (features + width, vocab)), "shift": jnp.zeros(vocab),
    }  # fmt: skip


def trained(
    features: Callable[[Sequence[int]], list[np.ndarray]],
    texts: Sequence[Sequence[int]],
    vocab: int,
    steps: int,
    seed: int,
) -> Inverter:
    """By Adam on batches of public texts of one length; features(numbers of texts) -> [n, k] of
    each. The rate falls along a cosine.
    """
    if len({len(text) for text in texts}) != 1:
        raise ValueError("public texts of different lengths")
    tokens = np.asarray(texts, np.int32)
    sample = np.concatenate(features(range(min(len(texts), 4 * BATCH))))
    mean = np.asarray(sample.mean(axis=0))
    scale = np.full_like(mean, np.sqrt(np.square(sample - mean).mean()) + 1e-12)
    weights = _begin(sample.shape[1], vocab, WIDTH, jax.random.key(seed))
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(optax.cosine_decay_schedule(RATE, max(1, steps))),
    )

    @jax.jit
    def step(weights: Weights, state: Any, x: Array, tokens: Array) -> tuple[Weights, Any]:
        def loss(weights: Weights) -> Array:
            logits = _texts(weights, x)
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens))

        updates, state = optimiser.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, updates), state

    state = optimiser.init(weights)
    for chosen in _batches(len(texts), steps, seed):
        x = (np.stack(features(chosen)) - mean) / scale
        weights, state = step(weights, state, jnp.asarray(x), jnp.asarray(tokens[chosen]))
    return Inverter(weights, mean, scale)


def _batches(count: int, steps: int, seed: int) -> Iterator[list[int]]:
    source, left = np.random.default_rng(seed), np.zeros(0, int)
    size = min(BATCH, count)
    for _ in range(steps):
        if len(left) < size:
            left = source.permutation(count)
        yield left[:size].tolist()
        left = left[size:]
