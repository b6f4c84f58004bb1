"""One decoder block of LLaMA's shape, compiled whole by SPU: the yardstick for verification.

It is the block of Vicuna-7B (Touvron et al., LLaMA, 2023) in plain JAX, compiled by SPU without any
op of this framework: RMSNorm, rotary positions, attention over a cache, SwiGLU. The weights are the
provider's; activations and cache are shared.

Two cores cannot run the whole block in a benchmark's time. A slice keeps the width and has 1/SLICES
of the heads and of the feed-forward layer; the norms are whole. Nearly all seconds of a slice are
encrypted products, in proportion to the number of weights, so where the network takes no time

    full = norms + SLICES (slice - norms).

Bytes do not scale like that: every product sends its encrypted rows, however many columns it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.values import Owner

SLICES = 32
_EPSILON = 1e-5


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a block."""

    width: int = 4096
    heads: int = 32
    head_dim: int = 128
    hidden: int = 11008
    past: int = 64

    def sliced(self, slices: int) -> BlockShape:
        return replace(self, heads=self.heads // slices, hidden=self.hidden // slices)


class Weights(NamedTuple):
    """Weights of a block, float32; w = width, a = heads * head_dim, h = hidden."""

    attention_norm: Any  # [w]
    query: Any  # [w, a]
    key: Any  # [w, a]
    value: Any  # [w, a]
    out: Any  # [a, w]
    ffn_norm: Any  # [w]
    gate: Any  # [w, h]
    up: Any  # [w, h]
    down: Any  # [h, w]


class Inputs(NamedTuple):
    """Shared inputs of a block, float32."""

    x: Any  # [n, w]
    keys: Any  # [heads, past, head_dim]
    values: Any  # [heads, past, head_dim]


def random_weights(shape: BlockShape, rng: np.random.Generator) -> Weights:
    """Draw weights that leave the size of activations about the same."""
    w, a, h = shape.width, shape.heads * shape.head_dim, shape.hidden

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(rows**-0.5)

    def gain() -> np.ndarray:
        return rng.uniform(0.5, 1.5, w).astype(np.float32)

    return Weights(
        gain(),
        matrix(w, a),
        matrix(w, a),
        matrix(w, a),
        matrix(a, w),
        gain(),
        matrix(w, h),
        matrix(w, h),
        matrix(h, w),
    )


def random_inputs(shape: BlockShape, positions: int, rng: np.random.Generator) -> Inputs:
    cache = (shape.heads, shape.past, shape.head_dim)
    return Inputs(
        *(rng.standard_normal(s, np.float32) for s in ((positions, shape.width), cache, cache))
    )


def rms_norm(x: Array, gain: Array) -> Array:
    """Normalise rows [n, w] to mean square 1, and multiply them by `gain` [w]."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + _EPSILON) * gain


def _rotate(x: Array, first: int) -> Array:
    """Rotate x [n, heads, head_dim] by the rotary positions `first`, `first` + 1, ..."""
    n, _, size = x.shape
    angles = np.outer(first + np.arange(n), 10000.0 ** (-np.arange(0, size, 2) / size))[:, None]
    cos, sin = (np.concatenate([f(angles)] * 2, -1).astype(np.float32) for f in (np.cos, np.sin))
    left, right = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-right, left], axis=-1) * sin


def _attention(x: Array, weights: Weights, inputs: Inputs, shape: BlockShape) -> Array:
    """Compute the attention layer on normalised rows x [n, w]; returns [n, w]."""
    n = x.shape[0]
    split = (n, shape.heads, shape.head_dim)
    query = _rotate((x @ weights.query).reshape(split), shape.past) * shape.head_dim**-0.5
    key = _rotate((x @ weights.key).reshape(split), shape.past).transpose(1, 0, 2)
    value = (x @ weights.value).reshape(split).transpose(1, 0, 2)
    keys = jnp.concatenate([inputs.keys, key], axis=1)
    values = jnp.concatenate([inputs.values, value], axis=1)
    scores = jnp.einsum("nhd,htd->hnt", query, keys)
    visible = np.tril(np.ones((n, shape.past + n), bool), shape.past)
    scores = scores - jnp.max(jnp.where(visible, scores, -1024.0), axis=-1, keepdims=True)
    exponentials = jnp.where(visible, jnp.exp(scores), 0.0)
    distribution = exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)
    mixed = jnp.einsum("hnt,htd->nhd", distribution, values)
    return mixed.reshape(n, shape.heads * shape.head_dim) @ weights.out


def block(weights: Weights, inputs: Inputs, shape: BlockShape) -> Array:
    """Compute one decoder block; returns rows [n, w]."""
    x = inputs.x
    x = x + _attention(rms_norm(x, weights.attention_norm), weights, inputs, shape)
    rows = rms_norm(x, weights.ffn_norm)
    return x + (jax.nn.silu(rows @ weights.gate) * (rows @ weights.up)) @ weights.down


def norms(gains: Sequence[Array], x: Array) -> Array:
    """Compute both norms of a block, one after the other; returns rows [n, w]."""
    first, second = gains
    return rms_norm(rms_norm(x, first), second)


def secure_block(shape: BlockShape) -> SecureFunction:
    """Return `block` as a secure function of the provider's weights and shared inputs."""
    return SecureFunction(
        lambda weights, inputs: block(weights, inputs, shape),
        (Owner.PROVIDER, Owner.JOINT),
        "decoder block",
    )


SECURE_NORMS = SecureFunction(norms, (Owner.PROVIDER, Owner.JOINT), "norms of a block")
