"""What is trained on public text to read tokens off rows.

Features x [k] of a row give z [d], which stands for its token: the embedding e_t of token t in the
public table, and an error that is normal, of covariance R. So token t has the score
z' R^-1 e_t - e_t' R^-1 e_t / 2, up to what is the same for all.

1. z is linear in x: ridge regression of embeddings on features, in closed form, which leaves R.
2. From there on Adam trains the whole: to z comes what is linear in the states of a gated recurrent
   unit (Cho et al. 2014) over the features, as BiSR's inverter of smashed data has one. That ends
   early where the loss on public text that is held out of it no longer falls; of all weights those
   stay that were best there.

BiSR's inverter, and each of the two models of A1.
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
RATE, WARM = 2e-3, 10  # of learning, and steps until it is reached
RIDGE = 1e-5  # of mean squares
FITTED = 512  # texts of the regression
EVERY = 20  # steps between looks at held-out text; after two that are no better it ends
HELD_OUT = 64  # texts, and a tenth of all at most

Weights = dict[str, Any]
Features = Callable[[Sequence[int]], list[np.ndarray]]


class Inverter(NamedTuple):
    """weights; mean and scale of features [k]; steps that were trained until these weights."""

    weights: Weights
    mean: np.ndarray
    scale: float
    steps: int

    def tokens(self, features: Sequence[np.ndarray]) -> list[list[int]]:
        """Return the likeliest token of each row of each text."""
        rows = [np.asarray((f - self.mean) / self.scale, np.float32) for f in features]
        scores = by_batch(lambda x: _texts(self.weights, x), rows)
        return [of_text.argmax(axis=-1).tolist() for of_text in scores]


def held_out(count: int) -> int:
    """Return how many of `count` public texts nothing is trained on: the last ones."""
    return min(HELD_OUT, max(1, count // 10))


def _forward(weights: Weights, x: Array) -> Array:
    """Compute the scores [n, vocab] of features [n, k]."""
    width = weights["state"].shape[0]

    def step(h: Array, of_x: Array) -> tuple[Array, Array]:
        of_h = h @ weights["state"]
        gates = jax.nn.sigmoid(of_x[: 2 * width] + of_h[: 2 * width])
        update, reset = gates[:width], gates[width:]
        h = update * h + (1 - update) * jnp.tanh(of_x[2 * width :] + reset * of_h[2 * width :])
        return h, h

    _, states = jax.lax.scan(step, jnp.zeros(width), x @ weights["in"] + weights["bias"])
    z = x @ weights["linear"] + states @ weights["out"] + weights["offset"]
    return z @ jax.lax.stop_gradient(weights["table"]) + weights["shift"]


_texts = jax.jit(jax.vmap(_forward, in_axes=(None, 0)))


def _regression(
    x: np.ndarray, tokens: np.ndarray, table: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Fit step 1 to features x [n, k] of mean 0 and tokens [n]: returns the matrix [k, d] and the
    offset [d] that give z, the table [d, vocab] and the shift [vocab] that give scores of it, all
    in the units of R's root.
    """
    wanted = table[tokens]
    offset = wanted.mean(axis=0)
    square = (x.T @ x).astype(float) / len(x)
    cross = (x.T @ (wanted - offset)).astype(float) / len(x)
    k, d = cross.shape
    linear = np.linalg.solve(square + RIDGE * np.trace(square) / k * np.eye(k), cross)
    apart = wanted - offset - x @ linear
    within = (apart.T @ apart).astype(float) / len(x)
    within += (RIDGE * np.trace(within) / d + 1e-12) * np.eye(d)
    root = np.linalg.inv(np.linalg.cholesky(within)).T  # R^-1 = root root'
    units = table @ root
    return linear @ root, offset @ root, units.T, -0.5 * np.square(units).sum(axis=1)


def _begin(x: np.ndarray, tokens: np.ndarray, table: np.ndarray, key: Array) -> Weights:
    linear, offset, of_tokens, shift = _regression(x, tokens, table)
    k, d = linear.shape
    keys = jax.random.split(key, 2)
    return {
        "in": jax.random.normal(keys[0], (k, 3 * WIDTH)) * k**-0.5,
        "bias": jnp.zeros(3 * WIDTH),
        "state": jax.random.normal(keys[1], (WIDTH, 3 * WIDTH)) * WIDTH**-0.5,
        "out": jnp.zeros((WIDTH, d)),
        "linear": jnp.asarray(linear, jnp.float32),
        "offset": jnp.asarray(offset, jnp.float32),
        "table": jnp.asarray(of_tokens, jnp.float32),
        "shift": jnp.asarray(shift, jnp.float32),
    }


def trained(
    features: Features, texts: Sequence[Sequence[int]], table: np.ndarray, steps: int, seed: int
) -> Inverter:
    """Train an inverter on public texts of one length, but for the last ones (`held_out`), by
    `steps` steps at most; features(numbers of texts) -> [n, k] of each; table [vocab, d]: the
    public embeddings. The rate falls along a cosine.
    """
    if len({len(text) for text in texts}) != 1:
        raise ValueError("public texts of different lengths")
    tokens, known = np.asarray(texts, np.int32), len(texts) - held_out(len(texts))
    sample = np.concatenate(features(range(min(known, FITTED))))
    mean = np.asarray(sample.mean(axis=0))
    scale = float(np.sqrt(np.square(sample - mean).mean())) + 1e-12
    of_sample = tokens[: min(known, FITTED)].ravel()
    weights = _begin((sample - mean) / scale, of_sample, table, jax.random.key(seed))
    rate = optax.warmup_cosine_decay_schedule(0.0, RATE, min(WARM, steps // 2), max(2, steps))
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def loss(weights: Weights, x: Array, tokens: Array) -> Array:
        scores = _texts(weights, x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, tokens))

    @jax.jit
    def step(weights: Weights, state: Any, x: Array, tokens: Array) -> tuple[Weights, Any]:
        updates, state = optimiser.update(jax.grad(loss)(weights, x, tokens), state, weights)
        return optax.apply_updates(weights, updates), state

    def batch(those: Sequence[int]) -> tuple[Array, Array]:
        x = (np.stack(features(those)) - mean) / scale
        return jnp.asarray(x, jnp.float32), jnp.asarray(tokens[np.asarray(those)])

    judge, held = jax.jit(loss), batch(range(known, len(texts)))
    state, best = optimiser.init(weights), (float(judge(weights, *held)), 0, weights)
    for number, chosen in enumerate(_batches(known, steps, seed), 1):
        weights, state = step(weights, state, *batch(chosen))
        if number % EVERY == 0 or number == steps:
            on_held = float(judge(weights, *held))
            if on_held < best[0]:
                best = on_held, number, weights
            elif number >= best[1] + 2 * EVERY:
                break
    return Inverter(best[2], mean, scale, best[1])


def _batches(count: int, steps: int, seed: int) -> Iterator[list[int]]:
    source, left = np.random.default_rng(seed), np.zeros(0, int)
    size = min(BATCH, count)
    for _ in range(steps):
        if len(left) < size:
            left = source.permutation(count)
        yield left[:size].tolist()
        left = left[size:]
