"""Ranges for a model from text of its owner's, in plaintext."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import rows_after
from models.family import ModelConfig, Params, bounds_of, check_ranges, family_of, tables_of
from models.ranges import LARGEST_LINEAR, LEAST_SPREAD
from protocols.functions.nonlinear import LARGEST_ACTIVATION, norm_high
from spu_llm.core.errors import InputError

_MARGIN = 4.0  # between mean squares that were seen and the range, on either side
_LEAST = 2.0**-20  # a smaller mean square is noise on shares


def calibrated(
    config: ModelConfig, params: Params, texts: Sequence[np.ndarray], public: int = 0
) -> ModelConfig:
    """`config` with ranges for these parameters: norms as in the texts (token ids [n] each) and the
    embeddings, with a margin; the rest from the weights' bounds. The residual stream is scaled down
    as far as its norms need; and as far as what may be added to it needs, where that leaves the
    texts' rows above noise.

    The first `public` tokens of each text are public wherever the model is used: ranges need not
    hold for their rows, and where they do not `public_rows` says how many these are.

    InputError for a model that cannot be served.
    """
    plain = replace(config, stream_shift=0, public_rows=public)
    fold = family_of(config).fold
    weights = fold(params, plain)
    found = bounds_of(weights, plain)
    of_texts = [mean_squares(plain, weights, ids) for ids in texts]
    rows = np.concatenate([seen[:, public:].reshape(-1) for seen in of_texts])
    if not rows.size:
        raise InputError("no text comes after what is public; give a longer text")
    seen = np.concatenate([_embeddings(plain, weights), rows])
    low, high = float(seen.min()) / _MARGIN, float(seen.max()) * _MARGIN
    for_norms = math.ceil(math.log2(high / norm_high(config.width)) / 2)
    for_sums = math.floor(math.log2(max(found.added, 1.0) / LARGEST_LINEAR)) + 1
    room = math.floor(math.log2(max(float(rows.min()), _LEAST) / _LEAST) / 2)
    shift = max(0, for_norms, min(for_sums, room))
    low = max(_power(max(low, _LEAST), math.floor) * 4.0**-shift, _LEAST)
    high = _power(high, math.ceil) * 4.0**-shift
    try:
        chosen = replace(
            plain,
            stream_shift=shift, norm_low=low, norm_high=high,
            public_rows=_misfits([s[:, :public] * 4.0**-shift for s in of_texts], low, high),
            largest_activation=min(_above(found.activation), LARGEST_ACTIVATION),
            largest_score=_above(found.score),
            logit_spread=max(LEAST_SPREAD, _above(found.spread)),
        )  # fmt: skip
    except ValueError as exc:
        raise InputError(f"this model cannot be served: {exc}") from None
    check_ranges(fold(params, chosen), chosen)
    return chosen


def _misfits(squares: Sequence[np.ndarray], low: float, high: float) -> int:
    """Rows of texts up to the last with a mean square [norm, row] out of range."""
    out = np.any([np.any((s < low) | (s >= high), axis=0) for s in squares], axis=0)
    return int(np.max(np.flatnonzero(out) + 1, initial=0))


def _above(bound: float) -> float:
    return _power(max(bound, 1.0), math.ceil)


def _power(x: float, rounded: Callable[[float], int]) -> float:
    """The power of two next to x > 0."""
    return float(2.0 ** rounded(math.log2(x)))


def _embeddings(config: ModelConfig, weights: Any) -> np.ndarray:
    """The extreme mean squares of embeddings: of every token at every position that may be secret.
    """
    tokens, positions = (table.astype(np.float64) for table in tables_of(weights, config))
    squares = np.sum(tokens**2, axis=1)
    found = []
    for position in positions:
        sums = squares + 2 * tokens @ position + position @ position
        found += [sums.min(), sums.max()]
    return np.maximum(found, 0.0) / tokens.shape[1]


def mean_squares(config: ModelConfig, weights: Any, tokens: np.ndarray) -> np.ndarray:
    """Of every row that goes into a norm, in plaintext: [norm, row]."""
    seen: list[jax.Array] = []

    def normalise(x: jax.Array, *, epsilon: float, gain: float, **range_: float) -> Any:
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        seen.append(mean_square)
        return x * (jax.lax.rsqrt(mean_square + epsilon) * gain), jnp.int32(0)

    n, family = len(tokens), family_of(config)
    x = family.embed(weights, config, jnp.asarray(tokens), jnp.arange(n))
    family.forward(
        weights, config, x, rows_after(0, n, n), config.empty_cache(n), normalise=normalise
    )
    return np.stack([np.asarray(m).reshape(-1) for m in seen])
