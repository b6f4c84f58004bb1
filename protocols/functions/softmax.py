"""Softmax: exact in plaintext; on shares exponentials below a bound, and one reciprocal a row.

Over 64 columns it takes 46 messages, and is off by 4e-4, relative, and 2^-14.7
(tests/protocols/test_nonlinear.py). Scores follow norms through known matrices, so they have
bounds: comparisons are as wide as the caller's bound needs (`score_bits`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from protocols.arithmetic.field_product import field_scale_rows
from protocols.arithmetic.narrow import FRAC_BITS, narrow
from protocols.functions.exponential import (
    COARSE,
    FINE_BITS,
    LEAST_COARSE_BITS,
    REACH,
    TOO_LOW,
    bound_of,
    exponentials_below,
)
from protocols.functions.piecewise import Lines, Untruncated, evaluate, lines
from protocols.functions.ragged import Ragged
from protocols.functions.reciprocals import inverse
from spu_llm.core.approx import approximation

LARGEST_SCORE = 2.0**18  # what comparisons of narrow words hold
RECIPROCAL_BITS = 26  # fraction bits of the reciprocal of a row's sum


def score_bits(largest: float, secret: bool = False) -> int:
    """Return the bits of comparisons for scores |z| <= largest, which is at most LARGEST_SCORE: of
    differences of coarse scores, hidden ones below all others; more than 2 REACH below, where it is
    `secret` which scores are hidden. They are as many as exponents take in any case.
    """
    units, more = 2.0 ** (FRAC_BITS - COARSE), REACH if secret else 0
    needed = 2 + math.ceil(math.log2(2 * (largest + more) * units + 4))
    return max(LEAST_COARSE_BITS, needed)


_SCORE_BITS = score_bits(511)


def softmax_weights(scores: Any, visible: Any = None, bits: int = _SCORE_BITS) -> tuple[Any, Any]:
    """Compute unnormalised weights exp(z - m) [rows, n] of the rows z of scores, from 0 to 1, and m
    [rows], as words of `bits` bits in units of 1/16.

    scores: [rows, n] shared product words (36 fraction bits; as floats z 2^18); `bits`, from
    `score_bits`, holds |z| where visible, and wherever that is a secret. visible: [rows, n], bool
    and public; or a secret, the parties' or one's own, as int32: 0, or -1 where hidden. Hidden
    scores weigh exactly nothing, and nothing is sent for it: 2^(bits - 2) is taken from them, m is
    no less than -2^(bits - 3), and so they are REACH below it, where exponentials are zero.

    m is an upper bound of the row's maximum, 3/16 above it at most: the maximum of coarse scores;
    far below all scores where a row sees none.
    """
    fine, coarse = _narrowed(scores, visible, bits)
    competing = coarse
    if _is_secret(visible):
        least = jnp.full((len(coarse), 1), _least(bits), coarse.dtype)
        competing = jnp.concatenate([coarse, least], axis=1)
    shift = bound_of(competing, bits=bits)
    bound = jnp.broadcast_to(shift[:, None], coarse.shape)
    return _weights_below(bound, fine, coarse, visible, bits), shift


def causal_weights(scores: Any, visible: Any, lengths: tuple[int, ...], bits: int) -> Any:
    """Compute `softmax_weights` of scores [k, n, width] of which row i of n sees the first
    `lengths[i]` at most: what comes after them weighs nothing and costs nothing. `visible`, of the
    scores' shape, says which of them it sees.
    """
    rows = Ragged(lengths)
    visible = rows.flat(visible)
    fine, coarse = _narrowed(rows.flat(scores), visible, bits)
    longer, competing = rows, coarse
    if _is_secret(visible):
        longer, competing = rows.with_last(coarse, _least(bits))
    shift = longer.maxima(competing, bits=bits) + TOO_LOW
    weights = _weights_below(rows.spread(shift), fine, coarse, visible, bits)
    return rows.padded(weights, scores.shape[2])


def _narrowed(scores: Any, visible: Any, bits: int) -> tuple[Any, Any]:
    """Return scores in units, and coarse ones, hidden ones below all others."""
    # Half the way to a softmax is free: narrow words need no truncation.
    fine = narrow(scores, drop=FRAC_BITS, bits=FINE_BITS)
    coarse = narrow(scores, drop=FRAC_BITS + COARSE, bits=bits)
    return fine, coarse if visible is None else _hide(coarse, visible, bits)


def _is_secret(visible: Any) -> bool:
    return visible is not None and visible.dtype != jnp.bool_


def _least(bits: int) -> int:
    """Return what competes in a row that may see no score: less than all scores that are seen."""
    return -(1 << (bits - 3))


def _weights_below(bound: Any, fine: Any, coarse: Any, visible: Any, bits: int) -> Any:
    """Compute the weights of scores below bounds in coarse units."""
    weights = exponentials_below(fine - bound * (1 << COARSE), coarse - bound, bits=bits)
    if visible is not None and not _is_secret(visible):  # of a row that sees nothing, too
        weights = jnp.where(visible, weights, 0.0)
    return weights


def reciprocal_of_sums(sums: Any, n: int) -> tuple[Untruncated, Any]:
    """Compute reciprocals [rows] of sums of n weights, the largest of which is from exp(-3/16) to
    one, as words of 26 fraction bits when they are truncated, and an int32, positive if a sum was
    out of range, else 0.
    """
    return evaluate(sums, _sum_lines(n))


def _hide(rows: Any, visible: Any, bits: int) -> Any:
    """Return scores of `bits` bits with hidden ones below all others."""
    far = 1 << (bits - 2)
    if visible.dtype == jnp.bool_:
        return jnp.where(visible, rows, -far)
    return rows + (visible * far).astype(rows.dtype)


@functools.cache
def _sum_lines(n: int) -> Lines:
    """Return lines for 1 / s of a sum of n weights, the largest of them from exp(-3/16) to one."""
    return lines(inverse, 0.8, max(n, 2) + 0.5, FRAC_BITS, RECIPROCAL_BITS)


def _softmax(scores: Array) -> Array:
    return jax.nn.softmax(scores * 2.0**-FRAC_BITS, axis=-1)


def _softmax_on_shares(scores: Any) -> Any:
    weights, _ = softmax_weights(scores)
    # No score leaves a sum out of range.
    inverse, _ = reciprocal_of_sums(jnp.sum(weights, axis=-1), scores.shape[1])
    cuts, shift = (3, inverse.shift + 3), inverse.shift + RECIPROCAL_BITS
    return field_scale_rows(weights, inverse.words, cuts=cuts, shift=shift)


softmax_of_product = approximation(
    "softmax_of_product", reference=_softmax, on_shares=_softmax_on_shares
)
"""The softmax of every row of scores [rows, n], given as product words (36 fraction bits)."""
