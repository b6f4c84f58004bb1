"""The ranges in which a model's activations are computed on shares, and whether its weights fit.

Functions on shares hold on public ranges, and cost more the wider these are. Of a norm's input no
weight gives a useful bound: its range is chosen from text of the provider's (`models.calibration`),
and rows outside are noticed while the model runs (`protocols.functions.in_range`). What follows a
norm is bounded by Cauchy-Schwarz (a row of d values with mean square 1 has length sqrt(d)):
comparisons are as wide as that bound needs (`bounds`), and nothing of it is left to check. Ranges
are stored beside the weights (`ranges.json`) and public to both parties; they are powers of two, so
that they say little of the weights.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from protocols.arithmetic.product import LIFT
from protocols.functions.layers import LOOK_UP_LIFT
from protocols.functions.nonlinear import LARGEST_ACTIVATION, LARGEST_SCORE, NORM_HIGH, NORM_LOW
from protocols.verification.distribution import SPREAD
from spu_llm.core.errors import InputError

if TYPE_CHECKING:
    from models.gpt2 import GPT2Config

LEAST_SPREAD = 64.0  # nats: a race's noise spreads over 41
LARGEST_SPREAD = 2.0**12  # comparisons of logits have 31 bits at temperature 1
LARGEST_PRODUCT = 2.0**24  # of words that have 36 fraction bits before a truncation
LARGEST_LINEAR = 2.0 ** (25 - LIFT)  # of a layer's, which has LIFT more
LARGEST_ENTRY = 2.0 ** (25 - LOOK_UP_LIFT)  # of a table
LARGEST_VALUE = 2.0**17  # of attention: its rows have 44 fraction bits before they are normalised
_SLACK = 1.01  # functions on shares are approximate: norms are off by 0.001,
_GELU_ERROR = 0.002  # a GELU by this
_ROUNDING = 2.0**-18  # and words by a unit
_OCTAVES = 26  # that one table of a norm holds
_MORE_ROWS = 256  # of a cache, beyond the model's context: rejected drafts


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """norm_low, norm_high: mean squares of a norm's input, whose residual stream is scaled by
    2^-stream_shift. largest_activation, largest_score: in size, of what goes into a GELU and of
    attention scores. logit_spread: nats between two logits at temperature 1.
    """

    norm_low: float = NORM_LOW
    norm_high: float = NORM_HIGH
    stream_shift: int = 0
    largest_activation: float = 240.0
    largest_score: float = 511.0
    logit_spread: float = float(SPREAD)

    def __post_init__(self) -> None:
        """ValueError for ranges that no function on shares holds on."""
        if not 0 < self.norm_low < self.norm_high <= self.norm_low * 2.0**_OCTAVES:
            raise ValueError(f"a norm's range must be positive and within {_OCTAVES} octaves")
        if not 0 <= self.stream_shift <= 16:
            raise ValueError("stream_shift must be 0 to 16")
        limits = (
            ("largest_activation", 1.0, LARGEST_ACTIVATION),
            ("largest_score", 1.0, LARGEST_SCORE),
            ("logit_spread", LEAST_SPREAD, LARGEST_SPREAD),
        )
        for name, low, high in limits:
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be {low:g} to {high:g}")


NAMES = tuple(f.name for f in fields(Ranges))


# ---- what weights bound


@dataclass(frozen=True)
class Bounds:
    """The largest that activations of folded weights can be, in any layer; `linear`: any result of
    a matrix; `entry`: of an embedding; `product`: sums of attention over a whole cache; `value`: of
    its values.
    """

    activation: float
    score: float
    spread: float
    linear: float
    entry: float
    product: float
    value: float


def bounds(weights: Any, config: GPT2Config) -> Bounds:
    """For every input whatever. InputError for weights that are no numbers."""
    if not all(np.all(np.isfinite(w)) for w in jax.tree.leaves(weights)):
        raise InputError("the model has NaN or infinite weights; save it again")
    d, blocks = config.n_embd, weights["blocks"]
    activation = max(_largest(b["fc"], d) for b in blocks)
    spread = 2 * _largest(weights["head"], d)
    # |gelu(x)| <= |x|
    inner = [_longest(b["fc"], d) + _GELU_ERROR * math.sqrt(4 * d) for b in blocks]
    values = [_largest(b["qkv"], d) for b in blocks]
    squares: dict[str, list[float]] = {  # of the length of a row that goes in, by layer
        "qkv": [d] * len(blocks),
        "out": [d * v**2 for v in values],
        "fc": [d] * len(blocks),
        "proj": [h**2 for h in inner],
    }
    linear = [
        _largest_product(b[name], square)
        for name, by_layer in squares.items()
        for b, square in zip(blocks, by_layer, strict=True)
    ]
    linear.append(_largest_product(weights["head"], d))
    entry = max(np.max(np.abs(weights[name])) for name in ("wte", "wpe"))
    # Weights of attention are up to one each until they are normalised.
    product = max(values) * (config.n_positions + _MORE_ROWS)
    score = max(_largest_score(b["qkv"], config) for b in blocks)
    found = [activation, score, spread, max(linear), entry, product, max(values)]
    return Bounds(*(np.array(found, np.float64) * _SLACK).tolist())


def check_ranges(weights: Any, config: GPT2Config) -> None:
    """InputError when activations of a model with these folded weights may leave the ranges of its
    configuration without being noticed.
    """
    found = bounds(weights, config)
    for bound, most in (
        (found.linear, LARGEST_LINEAR),
        (found.product, LARGEST_PRODUCT),
        (found.value, LARGEST_VALUE),
    ):
        if not bound < most:
            raise InputError(
                f"the model's activations can reach {bound:.2g}; shares hold numbers below "
                f"{most:.2g} there, so this model cannot be served"
            )
    if not found.entry < LARGEST_ENTRY:
        raise InputError(
            f"the model's embeddings reach {found.entry:.2g}; shares hold numbers below "
            f"{LARGEST_ENTRY:.2g} there; have them scaled by: spu-llm calibrate"
        )
    for name, bound, chosen, most in (
        ("feed-forward inputs", found.activation, config.largest_activation, LARGEST_ACTIVATION),
        ("attention scores", found.score, config.largest_score, LARGEST_SCORE),
        ("differences of logits", found.spread, config.logit_spread, LARGEST_SPREAD),
    ):
        if not bound <= most:
            raise InputError(
                f"the model's {name} can reach {bound:.0f}; functions on shares hold up to "
                f"{most:.0f}, so this model cannot be served"
            )
        if bound > chosen:
            raise InputError(
                f"the model's {name} can reach {bound:.0f}, beyond its range of {chosen:.0f}; "
                "choose its ranges with: spu-llm calibrate"
            )


def _largest_product(linear: Any, square: float) -> float:
    """Of any entry of x @ weight, for |x|^2 = square."""
    columns = np.linalg.norm(np.asarray(linear["weight"], np.float64), axis=0)
    return float(np.sqrt(square) * np.max(columns))


def _largest(linear: Any, square: float) -> float:
    """Of any entry of x @ weight + bias, for |x|^2 = square."""
    columns = np.linalg.norm(np.asarray(linear["weight"], np.float64), axis=0)
    return float(np.max(np.sqrt(square) * columns + np.abs(linear["bias"])))


def _longest(linear: Any, square: float) -> float:
    """Of any row x @ weight + bias, for |x|^2 = square."""
    weight = np.asarray(linear["weight"], np.float64)
    spectral = np.sqrt(np.linalg.eigvalsh(weight @ weight.T)[-1])
    return float(np.sqrt(square) * spectral + np.linalg.norm(linear["bias"]))


def _largest_score(qkv: Any, config: GPT2Config) -> float:
    """Of q k^T for q = x W_q + b_q and k = y W_k + b_k with |x| = |y| = sqrt(d), in any head."""
    weight = np.asarray(qkv["weight"], np.float64)
    query, key, _ = np.split(weight, 3, axis=1)
    query_bias, key_bias, _ = np.split(np.asarray(qkv["bias"], np.float64), 3)
    root, largest = np.sqrt(config.n_embd), 0.0
    for head in range(config.n_head):
        at = slice(head * config.head_dim, (head + 1) * config.head_dim)
        (w_q, w_k), (b_q, b_k) = (query[:, at], key[:, at]), (query_bias[at], key_bias[at])
        # The largest singular value of W_q W_k^T, from two small matrices.
        r_q, r_k = np.linalg.qr(w_q)[1], np.linalg.qr(w_k)[1]
        spectral = np.linalg.norm(r_q @ r_k.T, 2)
        crossed = np.linalg.norm(w_q @ b_k) + np.linalg.norm(w_k @ b_q)
        # What rounding does to q meets all of k, and the other way round.
        lengths = root * (np.linalg.norm(r_q, 2) + np.linalg.norm(r_k, 2))
        lengths += np.linalg.norm(b_q) + np.linalg.norm(b_k)
        rounded = (config.n_embd + 2) * _ROUNDING * np.sqrt(config.head_dim) * lengths
        bound = config.n_embd * spectral + root * crossed + abs(b_q @ b_k) + rounded
        largest = max(largest, bound)
    return float(largest)


def as_dict(config: GPT2Config) -> dict[str, Any]:
    """The ranges of a configuration, as they are stored."""
    return {name: value for name, value in asdict(config).items() if name in NAMES}
