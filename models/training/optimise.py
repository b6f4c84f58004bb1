"""Training loop, optimiser, and the two losses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.family import ModelConfig, Params, logits

MAX_OVERFLOWS_IN_A_ROW = 20

# loss(params, frozen, batch) -> scalar. A batch: an array [batch, length], or a tuple of such.
Loss = Callable[[Params, Any, Any], Array]


@dataclass(frozen=True)
class Schedule:
    """Hyperparameters of a training run."""

    steps: int
    batch: int  # windows a step
    learning_rate: float  # peak; warms up linearly, then falls along a cosine to 0
    warmup: int = 200
    weight_decay: float = 0.3  # keeps activations well inside the fixed-point range
    save_every: int = 500


def batch_logits(params: Params, config: ModelConfig, tokens: Array) -> Array:
    """Return logits [batch, length, vocab] of token windows [batch, length]."""
    return jax.vmap(lambda window: logits(params, config, window))(tokens)


def cross_entropy(config: ModelConfig) -> Loss:
    """Return a loss, the mean negative log likelihood of the next token, in nats."""

    def loss(params: Params, frozen: Any, tokens: Array) -> Array:
        predicted = batch_logits(params, config, tokens[:, :-1])
        per_token = optax.softmax_cross_entropy_with_integer_labels(predicted, tokens[:, 1:])
        return jnp.mean(per_token)

    return loss


def distillation(
    config: ModelConfig, teacher: ModelConfig, kl: float, rejection: float, truth: float
) -> Loss:
    """Return a loss: the mean over positions of a weighted sum of three losses, where p is the
    teacher's next-token distribution and q the trained model's.

    `kl` weighs KL(p || q), `rejection` weighs 1 - sum_x min(p(x), q(x)), the probability that
    speculative sampling rejects a draft, and `truth` weighs the cross entropy with the text. The
    loss takes the teacher's parameters as `frozen`.
    """

    def loss(params: Params, frozen: Any, tokens: Array) -> Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        log_p = jax.nn.log_softmax(batch_logits(frozen, teacher, inputs))
        log_q = jax.nn.log_softmax(batch_logits(params, config, inputs))
        return rejected(log_p, log_q, targets, kl=kl, rejection=rejection, truth=truth)

    return loss


def rejected(
    log_p: Array, log_q: Array, targets: Any, *, kl: float, rejection: float, truth: float
) -> Array:
    """Return the loss of `distillation` from log-probabilities [batch, n, vocab] of teacher and
    student, and the text's tokens [batch, n].
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    divergence = jnp.sum(p * (log_p - log_q), axis=-1)
    lost = 1 - jnp.sum(jnp.minimum(p, q), axis=-1)
    missed = -jnp.take_along_axis(log_q, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(kl * divergence + rejection * lost + truth * missed)


def optimiser(schedule: Schedule) -> optax.GradientTransformation:
    """Return AdamW with gradient clipping, weight decay on matrices only, and steps that are not
    finite left out.
    """
    rate = optax.warmup_cosine_decay_schedule(
        0.0, schedule.learning_rate, schedule.warmup, schedule.steps
    )
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            rate,
            b2=0.98,
            weight_decay=schedule.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )
    return optax.apply_if_finite(chain, max_consecutive_errors=MAX_OVERFLOWS_IN_A_ROW)


def _parts(batch: Any, size: int) -> Iterator[Any]:
    """Yield a large batch in batches of `size`; the rest is left out."""
    count = len(jax.tree.leaves(batch)[0]) // size
    for i in range(count):
        yield jax.tree.map(lambda array, at=i * size: array[at : at + size], batch)


def fit(
    name: str,
    params: Params,
    loss: Loss,
    frozen: Any,
    batches: Iterator[Any],
    held_out: Any,
    schedule: Schedule,
    save: Callable[[Params], None],
) -> Params:
    """Train `params` and return them; print progress, and every `save_every` steps print the loss
    on the batch `held_out`, however large, and save.

    Batches are split over JAX's devices: two host devices use two CPU cores better than XLA's own
    threading does.
    """
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    transform = optimiser(schedule)

    def update(params: Params, state: Any, frozen: Any, tokens: Any) -> tuple[Params, Any, Array]:
        value, gradient = jax.value_and_grad(loss)(params, frozen, tokens)
        change, state = transform.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value

    step = jax.jit(update)
    measure = jax.jit(loss)
    params = jax.device_put(params, everywhere)
    state = jax.device_put(transform.init(params), everywhere)
    frozen = jax.device_put(frozen, everywhere)
    start, recent = time.monotonic(), []
    for done in range(1, schedule.steps + 1):
        tokens = jax.device_put(next(batches), split)
        # One step at a time: two in flight can deadlock in the collectives of the CPU backend.
        params, state, value = jax.block_until_ready(step(params, state, frozen, tokens))
        recent.append(value)
        if done % 100 == 0 or done == schedule.steps:
            mean = float(jnp.mean(jnp.stack(recent)))
            recent = []
            seconds = time.monotonic() - start
            rate = done * schedule.batch / seconds
            left = seconds / done * (schedule.steps - done)
            print(
                f"{name}: step {done}/{schedule.steps}, loss {mean:.4f}, "
                f"{rate:.0f} windows/s, {left / 60:.1f} min left",
                flush=True,
            )
        if done % schedule.save_every == 0 or done == schedule.steps:
            losses = [
                float(measure(params, frozen, jax.device_put(part, split)))
                for part in _parts(held_out, schedule.batch)
            ]
            print(
                f"{name}: step {done}, held-out loss {np.mean(losses):.4f}, "
                f"{int(state.total_notfinite)} steps left out",
                flush=True,
            )
            save(jax.device_get(params))
    return jax.device_get(params)
