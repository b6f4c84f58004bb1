"""What the evaluator of packed products computes for every pair, compiled by XLA: a few polynomials
at a time, which stay in the cache (`spu_llm.offline.packed.products`, steps 3 and 4).

Words are uint64 [..., N], modulo 2^64 and X^N + 1. A product is a sum of products of limbs
(`packed.ring`), each at its power of two. Those that reach a result's upper bits are rounded to
integers by themselves, which is exact. All below add up before they are transformed back: only
their error counts, and it is far below a product's own. So the other factor's limbs that they are
of stand in one transform, a *low part*.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import enable_x64

from spu_llm.offline.packed import ring
from spu_llm.offline.packed.ring import KEY_BITS, KEY_DROP, KEY_LIMB, LIMB, N
from spu_llm.offline.rlwe import twist

_LOG_N = N.bit_length() - 1
_WIDTHS = (LIMB, LIMB, 64 - 2 * LIMB)  # of a word's limbs
_LOW_LIMBS = 4  # limb i of a word and limb j of 2^128 are low for i + j < 4: 2^66 over 2^64 at most
_LOW_KEY_LIMBS = 2  # of a key's: 2^18 over 2^26 at most; s multiplies the error of c0


# ---- factors: made once, for many pairs


def wide_factor(x: np.ndarray) -> jax.Array:
    """Return what `multiplied` takes of words x [2, blocks, 2, N] modulo 2^128: transforms
    [2, blocks, 7, N / 2], the low part for each limb of a word, then limbs 2 to 5.
    """
    limbs = ring.limbs(x, LIMB, 128)
    low = [
        _weighted(limbs[..., : _LOW_LIMBS - i, :], LIMB, LIMB * i - 64) for i in range(len(_WIDTHS))
    ]
    with enable_x64():
        return jnp.asarray(np.concatenate([*low, limbs[..., 2:, :]], axis=-2))


def words(x: np.ndarray) -> jax.Array:
    """Return what `scaled` takes of words [2, 2, N]."""
    with enable_x64():
        return jnp.asarray(x)


def switching_factor(keys: np.ndarray) -> jax.Array:
    """Return what `merged` takes of switching keys [2, word limbs, 2, N] modulo 2^90: transforms
    [2, word limbs, 4, N / 2], the low part, then limbs 2 to 4.
    """
    limbs = ring.limbs(keys, KEY_LIMB, KEY_BITS)
    low = _weighted(limbs[..., :_LOW_KEY_LIMBS, :], KEY_LIMB, -KEY_DROP)
    with enable_x64():
        return jnp.asarray(np.concatenate([low, limbs[..., _LOW_KEY_LIMBS:, :]], axis=-2))


def _weighted(limbs: np.ndarray, size: int, at: int) -> np.ndarray:
    """Return the sum of 2^(at + size i) limbs_i: [..., 1, N / 2]."""
    weights = 2.0 ** (at + size * np.arange(limbs.shape[-2]))
    return (limbs * weights[:, None]).sum(axis=-2, keepdims=True)


# ---- steps


def multiplied(left: np.ndarray, right: jax.Array, at_once: int, shift: int) -> jax.Array:
    """Return sum_b left_b right_b X^-shift over 2^64, rounded: words [2, N] of words left
    [blocks, N] and a `wide_factor`. Sums over `at_once` blocks are rounded together.
    """
    with enable_x64():
        return _multiplied(left, right, at_once, shift)


def scaled(x: jax.Array, word: np.uint64, shift: int) -> jax.Array:
    """Return x word X^-shift over 2^64, rounded: words [2, N] of x [2, 2, N] modulo 2^128."""
    with enable_x64():
        return _scaled(x, word, shift)


def merged(first: jax.Array, second: jax.Array | None, keys: jax.Array, d: int) -> jax.Array:
    """Return the pair that two pairs become, whose coefficients at multiples of d are wanted: words
    [2, N] of words [2, N], zero for None, and a `switching_factor` of stride d.
    """
    with enable_x64():
        if second is None:
            second = jnp.zeros_like(first)
        return _merged(first, second, keys, d // 2, pow(1 + 2 * N // d, -1, 2 * N))


@functools.partial(jax.jit, static_argnames="at_once")
def _multiplied(left: jax.Array, right: jax.Array, at_once: int, shift: jax.Array) -> jax.Array:
    x, low, upper = word_limbs(left), right[:, :, : len(_WIDTHS)], right[:, :, len(_WIDTHS) :]
    total = jnp.zeros((2, N), jnp.uint64)
    for start in range(0, len(left), at_once):
        some = slice(start, start + at_once)
        y, z = low[:, some], upper[:, some]
        sums = [_sum_of_products(x[some], y)]
        for i in range(2):  # limbs 2 to 4, then 3 to 5, the highest first
            sums.append(_sum_of_products(x[some], z[:, :, i : i + 3][:, :, ::-1]))
        low_sum, *exact = whole(jnp.stack(sums))
        total += _at(low_sum, 0) + _at(exact[0], 4 * LIMB - 64) + _at(exact[1], 5 * LIMB - 64)
    return _times_power(total, -shift)


def _sum_of_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return transforms [2, N / 2]: sums over blocks and limbs of x [blocks, limbs, N / 2] times y
    [2, blocks, limbs, N / 2].
    """
    products = x * y
    return functools.reduce(operator.add, (products[:, b, i] for b, i in np.ndindex(x.shape[:2])))


@jax.jit
def _scaled(x: Any, word: Any, shift: jax.Array) -> jax.Array:
    product: Any = ring.upper_times(x, word)
    return _times_power(product, -shift)


@jax.jit
def _merged(
    first: jax.Array, second: jax.Array, keys: jax.Array, half: jax.Array, back: jax.Array
) -> jax.Array:
    second = _times_power(second, half)
    turned = _substituted(first - second, back)
    under_s = switched(turned[0], keys)
    return first + second + under_s + jnp.stack([jnp.zeros_like(turned[1]), turned[1]])


def switched(c0: jax.Array, keys: jax.Array) -> jax.Array:
    """Return a pair under s for c0 [N] under s(X^(1 + 2N/d)): words [2, N], by a
    `switching_factor`.
    """
    x = word_limbs(c0)
    sums = functools.reduce(operator.add, (x[i] * keys[:, i] for i in range(len(_WIDTHS))))
    whole_sums = whole(sums)
    weights = [0, *(KEY_LIMB * i - KEY_DROP for i in range(_LOW_KEY_LIMBS, 5))]
    return functools.reduce(
        operator.add, (_at(whole_sums[:, i], weight) for i, weight in enumerate(weights))
    )


# ---- polynomials


def word_limbs(x: jax.Array) -> jax.Array:
    """Return the transforms [..., 3, N / 2] of the limbs of words [..., N], as `ring.limbs`."""
    starts = [LIMB * i for i in range(len(_WIDTHS))]
    half = sum(1 << at + width - 1 for at, width in zip(starts, _WIDTHS, strict=True))
    moved = x + jnp.uint64(half)
    digits = [
        (moved >> jnp.uint64(at) & jnp.uint64((1 << width) - 1)).astype(jnp.float64)
        - float(1 << width - 1)
        for at, width in zip(starts, _WIDTHS, strict=True)
    ]
    parts = jnp.stack(digits, axis=-2)
    return jnp.fft.fft((parts[..., : N // 2] + 1j * parts[..., N // 2 :]) * twist(N)[0])


def whole(z: jax.Array) -> jax.Array:
    """Return the polynomials [..., N] of transforms [..., N / 2], rounded: int64."""
    y = jnp.fft.ifft(z) * twist(N)[1]
    return jnp.rint(jnp.concatenate([y.real, y.imag], axis=-1)).astype(jnp.int64)


def _at(x: jax.Array, bits: int) -> jax.Array:
    return (x << bits).astype(jnp.uint64)


def _times_power(x: jax.Array, k: jax.Array) -> jax.Array:
    """Return x X^k for -N < k < N: words [..., N]."""
    place = jnp.arange(N, dtype=jnp.int32) - k.astype(jnp.int32)
    return _taken(x, place & (N - 1), (place >> _LOG_N & 1) == 1)


def _substituted(x: jax.Array, back: jax.Array) -> jax.Array:
    """Return x(X^k) for odd k, given its inverse modulo 2N: words [..., N]."""
    place = jnp.arange(N, dtype=jnp.int32) * back.astype(jnp.int32) & (2 * N - 1)
    return _taken(x, place & (N - 1), place >= N)


def _taken(x: jax.Array, places: jax.Array, is_negative: jax.Array) -> jax.Array:
    there = x.at[..., places].get(mode="promise_in_bounds")
    return jnp.where(is_negative, jnp.uint64(0) - there, there)
