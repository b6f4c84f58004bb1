"""Calibration: a model's ranges chosen from its owner's texts, in plaintext."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import rows_after
from models.draft import Drafter
from models.encoder_decoder import source_length
from models.family import ModelConfig, Params, bounds_of, check_ranges, family_of, tables_of
from models.ranges import LARGEST_INNER, LARGEST_LINEAR, LEAST_SPREAD, Bounds
from protocols.functions.activations import LARGEST_ACTIVATION
from protocols.functions.norms import norm_high
from spu_llm.core.errors import InputError

MARGIN = 2.0  # between lengths that were seen and the range, on either side
LEAST_SQUARE = 2.0**-20  # a smaller mean square is noise on shares
_BEGIN = "; begin every text with something public: --public-prefix TEXT, or --chats FILE"


class Seen(NamedTuple):
    """Sizes of activations of every row of some texts."""

    squares: np.ndarray
    inner: np.ndarray


def calibrated(
    config: ModelConfig, params: Params, texts: Sequence[np.ndarray], public: int = 0
) -> ModelConfig:
    """Return `config` with ranges for these parameters. The range of each norm, and of each block's
    products of gates where weights do not bound them, is what the texts (token ids [n] each) show,
    widened by the factor MARGIN in lengths; the first norm's range also holds for every token's
    embedding; all other ranges follow from the weights' bounds. The residual stream is scaled down
    as far as its norms need, and further as far as the terms added to it need, while the texts'
    rows stay above noise.

    The first `public` tokens of each text are public wherever the model is used, so ranges need not
    hold for their rows; `public_rows` is set to the number of first rows that reach up to the last
    one outside its range.

    InputError for a model that cannot be served.
    """
    # 1. What there is.
    plain = replace(config, stream_shift=0, public_rows=public)
    fold = family_of(config).fold
    weights = fold(params, plain)
    bounds = bounds_of(weights, plain)
    seen = [activations(plain, weights, ids) for ids in texts]
    rows = together([Seen(s.squares[:, public:], s.inner[:, public:]) for s in seen])
    if not rows.squares.size:
        raise InputError("no text comes after what is public; give a longer text")
    low, high = rows.squares.min(axis=1), rows.squares.max(axis=1)
    embedded = _embeddings(plain, weights)
    for site in config.first_norms:
        low[site] = min(low[site], embedded.min())
        high[site] = max(high[site], embedded.max())
    low, high = low / MARGIN**2, high * MARGIN**2
    inner = [_power(max(MARGIN * length, 1.0), math.ceil) for length in rows.inner.max(axis=1)]
    # 2. How far the stream is scaled down.
    for_norms = math.ceil(math.log2(high.max() / norm_high(config.width)) / 2)
    added = max(b.added(min(s, LARGEST_INNER)) for b, s in zip(bounds.blocks, inner, strict=True))
    for_sums = math.floor(math.log2(max(added, 1.0) / LARGEST_LINEAR)) + 1
    least = max(float(rows.squares.min()), LEAST_SQUARE)
    room = math.floor(math.log2(least / LEAST_SQUARE) / 2)
    shift = max(0, for_norms, min(for_sums, room))
    # 3. Ranges.
    scale = 4.0**-shift
    lows = [max(_power(x, math.floor) * scale, LEAST_SQUARE) for x in np.maximum(low, 2.0**-60)]
    highs = [_power(x, math.ceil) * scale for x in high]
    checked = [b.inner * 2.0**-shift >= LARGEST_LINEAR for b in bounds.blocks]
    try:
        chosen = replace(
            plain,
            stream_shift=shift,
            norm_low=tuple(lows),
            norm_high=tuple(highs),
            public_rows=_misfits([s.squares[:, :public] * scale for s in seen], lows, highs),
            largest_activation=tuple(_activation_above(b) for b in bounds.blocks),
            largest_score=tuple(_score_above(b.score) for b in bounds.blocks),
            longest_inner=tuple(
                min(s, LARGEST_INNER) if check else 0.0
                for s, check in zip(inner, checked, strict=True)
            ),
            logit_spread=max(LEAST_SPREAD, _power(max(bounds.spread, 1.0), math.ceil)),
        )
    except ValueError as exc:
        raise InputError(f"this model cannot be served: {exc}{'' if public else _BEGIN}") from None
    if _misfits([rows.squares * scale], lows, highs):
        raise InputError(
            "this model cannot be served: rows of its texts are noise beside others"
            + ("" if public else _BEGIN)
        )
    check_ranges(fold(params, chosen), chosen)
    return chosen


def _misfits(squares: Sequence[np.ndarray], low: list[float], high: list[float]) -> int:
    """Return the number of rows up to and including the last one that is out of range in any text,
    0 if there is none; `squares`: the mean squares [norm, row] of each text.
    """
    lows, highs = np.array(low)[:, None], np.array(high)[:, None]
    out = np.any([np.any((s < lows) | (s >= highs), axis=0) for s in squares], axis=0)
    return int(np.max(np.flatnonzero(out) + 1, initial=0))


def _activation_above(bounds: Bounds) -> float:
    """Return the largest range of activations whose comparisons need no more bits than the block's
    bound does (`activations.activation_bits`).
    """
    largest = max(float(2 ** math.ceil(math.log2(max(bounds.activation, 1.0) + 9)) - 9), 1.0)
    return min(largest, float(LARGEST_ACTIVATION))


def _score_above(bound: float) -> float:
    """Return the largest range of scores whose comparisons need no more bits than `bound` does
    (`softmax.score_bits`).
    """
    return float(2 ** math.ceil(math.log2(max(bound, 1.0) + 1)) - 1)


def _power(x: float, rounded: Callable[[float], int]) -> float:
    """Return the power of two next to x > 0, `rounded` up or down."""
    return float(2.0 ** rounded(math.log2(x)))


def _embeddings(config: ModelConfig, weights: Any) -> np.ndarray:
    """Return, for every position that may be secret, the least and the largest mean square of an
    embedding over all tokens.
    """
    tokens, positions = (table.astype(np.float64) for table in tables_of(weights, config))
    squares = np.sum(tokens**2, axis=1)
    extremes = []
    for position in positions:
        sums = squares + 2 * tokens @ position + position @ position
        extremes += [sums.min(), sums.max()]
    return np.maximum(extremes, 0.0) / tokens.shape[1]


def activations(config: ModelConfig, weights: Any, tokens: np.ndarray) -> Seen:
    """Run the model on a text [n] in plaintext and return the sizes of its activations. Where an
    encoder reads a source, the text is the source, the start token and what is written.
    """
    squares: list[jax.Array] = []
    inner: list[jax.Array] = []

    def normalise(x: jax.Array, *others: jax.Array, epsilon: float, gain: float, **_: Any) -> Any:
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        squares.append(mean_square.reshape(-1))
        inner.extend(jnp.linalg.norm(rows, axis=-1) for rows in others)
        return x * (jax.lax.rsqrt(mean_square + epsilon) * gain), jnp.int32(0)

    # All rows that could be checked come to a norm.
    config = replace(config, longest_inner=(LARGEST_INNER,))
    n, family = len(tokens), family_of(config)
    if config.encodes:
        n -= source_length(config, tokens)
    x = family.embed(weights, config, jnp.asarray(tokens), jnp.arange(len(tokens)))
    family.forward(
        weights, config, x, rows_after(0, n, n), config.empty_cache(n), normalise=normalise
    )
    return Seen(_even(squares), _even(inner))


def _even(sites: Sequence[jax.Array]) -> np.ndarray:
    """Stack the rows of all sites [site, row]; a site with fewer has some of them again."""
    most = max(len(rows) for rows in sites)
    return np.stack([np.resize(np.asarray(rows), most) for rows in sites])


def answered(
    config: ModelConfig,
    params: Params,
    sources: Sequence[Sequence[int] | np.ndarray],
    after: Sequence[int],
    most: int,
) -> list[np.ndarray]:
    """Return texts of a model whose encoder reads the sources: each with the tokens `after` it, the
    last of them the start token, and the model's own likeliest text, of `most` tokens, without
    further start tokens.
    """
    texts, start = [], after[-1]
    for source in sources:
        drafter = Drafter(config, params, most + 1, [*source, *after[:-1]])
        text = [*source, *after]
        for _ in range(most):
            logits = drafter.logits(text)
            text.append(int(np.argmax(np.where(np.arange(len(logits)) == start, -np.inf, logits))))
        texts.append(np.array(text))
    return texts


def together(seen: Sequence[Seen]) -> Seen:
    """Concatenate what several texts show, row after row."""
    return Seen(*(np.concatenate(parts, axis=1) for parts in zip(*seen, strict=True)))
