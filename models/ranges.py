"""Ranges of a model's activations on shares, and the check that its weights keep to them.

Functions on shares are correct on public ranges, and cost more the wider these are. The ranges are
chosen for each site of each block (`models.calibration`):

norms    Weights give no useful bound of a norm's input: its range is chosen from texts of the
         provider's, and rows outside it are detected while the model runs.
bounded  The activations after a norm are bounded by Cauchy-Schwarz (a row of d values with mean
         square 1 has length sqrt(d)): comparisons of feed-forward inputs and scores are as wide as
         that bound needs (`Bounds`), and nothing is left to check while the model runs.
inner    Rows that go into the last matrix of a feed-forward layer, products of two gates, have
         bounds far above all that occurs. Where the matrix's product with such rows could overflow,
         the limit of their length is chosen from texts and checked while the model runs.

The checks are valid for all 64-bit words, and come before anything is opened
(`protocols.functions.in_range`). Ranges are stored beside the weights (`ranges.json`) and public to
both parties. They are powers of two, or the largest that need no more bits in a comparison, so that
they say little about the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from protocols.arithmetic.product import LIFT
from protocols.arithmetic.projection import GAP
from protocols.functions.activations import LARGEST_ACTIVATION, LARGEST_GATED
from protocols.functions.aggregation import LARGEST_VALUE
from protocols.functions.layers import LOOK_UP_LIFT
from protocols.functions.norms import NORM_HIGH, NORM_LOW
from protocols.functions.softmax import LARGEST_SCORE
from protocols.verification.distribution import SPREAD
from spu_llm.core.errors import InputError

LEAST_SPREAD = 64.0  # nats: a race's noise spreads over 41
LARGEST_SPREAD = 2.0**12  # comparisons of logits have 31 bits at temperature 1
LARGEST_PRODUCT = 2.0**24  # of words that have 36 fraction bits before a truncation
LARGEST_LINEAR = 2.0 ** (25 - LIFT)  # of a layer's, which has LIFT more
LARGEST_ENTRY = 2.0 ** (25 - LOOK_UP_LIFT)  # of a table
LARGEST_INNER = 2.0**13  # lengths that projections tell
SLACK = 1.01  # functions on shares are approximate: norms are off by 0.001,
_ROUNDING = 2.0**-18  # and words by a unit
_OCTAVES = 26  # that one table of a norm holds
LARGEST_PUBLIC = 1000  # rows, which a request can bring
MORE_ROWS = 256  # of a cache, beyond the model's context: rejected drafts

Each = tuple[float, ...]  # one number for all sites, or one for each


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Ranges of a model's activations on shares, public to both parties."""

    norm_low: Each = (NORM_LOW,)
    norm_high: Each = (NORM_HIGH,)
    stream_shift: int = 0
    public_rows: int = 0
    largest_activation: Each = (240.0,)
    largest_score: Each = (511.0,)
    longest_inner: Each = (0.0,)
    logit_spread: float = float(SPREAD)

    def __post_init__(self) -> None:
        """Raise ValueError for ranges on which no function on shares is correct."""
        if not 0 < len(self.norm_low) == len(self.norm_high):
            raise ValueError("norm_low and norm_high must have as many numbers")
        for i, (low, high) in enumerate(zip(self.norm_low, self.norm_high, strict=True)):
            if not 0 < low < high <= low * 2.0**_OCTAVES:
                raise ValueError(
                    f"the range of norm {i} must be positive and within {_OCTAVES} octaves, found "
                    f"{low:.3g} to {high:.3g}"
                )
        if not 0 <= self.stream_shift <= 16:
            raise ValueError("stream_shift must be 0 to 16")
        if not 0 <= self.public_rows <= LARGEST_PUBLIC:
            raise ValueError(f"public_rows must be 0 to {LARGEST_PUBLIC}")
        limits = (
            ("largest_activation", self.largest_activation, 1.0, LARGEST_ACTIVATION),
            ("largest_score", self.largest_score, 1.0, LARGEST_SCORE),
            ("longest_inner", self.longest_inner, 0.0, LARGEST_INNER),
            ("logit_spread", (self.logit_spread,), LEAST_SPREAD, LARGEST_SPREAD),
        )
        for name, number, low, high in limits:
            if not number or not all(low <= value <= high for value in number):
                raise ValueError(f"{name} must be {low:g} to {high:g}")

    def norm_range(self, site: int) -> tuple[float, float]:
        """Return the least and the largest mean square of the norm with this number."""
        return of_site(self.norm_low, site), of_site(self.norm_high, site)


NAMES = tuple(f.name for f in fields(Ranges))


def of_site(values: Each, site: int) -> float:
    """Return the number of a site; `values` may have one number for all sites."""
    return values[0] if len(values) == 1 else values[site]


# ---- what weights bound


class Bounds(NamedTuple):
    """Largest sizes that activations of a block with given folded weights can reach."""

    activation: float
    score: float
    linear: float
    attended: float
    inner: float
    per_length: float
    product: float
    gated: float
    value: float

    def added(self, longest_inner: float) -> float:
        """Return the most that the block can add to the residual stream; where `longest_inner` is
        not 0, given that its inner rows pass the check for this length.
        """
        checked = GAP * longest_inner * self.per_length
        return max(self.attended, min(self.inner, checked) if longest_inner else self.inner)


class ModelBounds(NamedTuple):
    """Largest sizes that activations of a model with given folded weights can reach."""

    blocks: list[Bounds]
    linear: float
    spread: float
    entry: float


def check_bounds(bounds: ModelBounds, config: Ranges) -> None:
    """Raise InputError when activations with these bounds may leave the ranges undetected."""
    check_blocks(bounds.blocks, config)
    _check_held("the head", (bounds.linear, LARGEST_LINEAR))
    if not bounds.entry < LARGEST_ENTRY:
        raise InputError(
            f"the model's embeddings reach {bounds.entry:.2g}; shares hold numbers below "
            f"{LARGEST_ENTRY:.2g} there; have them scaled by: spu-llm calibrate"
        )
    spread = "differences of logits", bounds.spread, config.logit_spread, LARGEST_SPREAD
    _check_chosen("the head", *spread)


def check_blocks(of_blocks: Sequence[Bounds], config: Ranges) -> None:
    """Raise InputError when activations of blocks with these bounds may leave the ranges
    undetected; `config` has ranges for exactly these blocks.
    """
    for i, bounds in enumerate(of_blocks):
        place, longest = f"block {i}", of_site(config.longest_inner, i)
        _check_held(
            place,
            (bounds.linear, LARGEST_LINEAR),
            (bounds.added(longest), LARGEST_LINEAR),
            (bounds.product, LARGEST_PRODUCT),
            (bounds.gated, LARGEST_GATED),
            (bounds.value, LARGEST_VALUE),
        )
        for name, bound, chosen, most in (
            (
                "feed-forward inputs",
                bounds.activation,
                config.largest_activation,
                LARGEST_ACTIVATION,
            ),
            ("attention scores", bounds.score, config.largest_score, LARGEST_SCORE),
        ):
            _check_chosen(place, name, bound, of_site(chosen, i), most)


def _check_held(place: str, *limits: tuple[float, float]) -> None:
    for bound, most in limits:
        if not bound < most:
            raise InputError(
                f"the model's activations can reach {bound:.2g} in {place}; shares hold numbers "
                f"below {most:.2g} there, so this model cannot be served with these ranges"
            )


def _check_chosen(place: str, name: str, bound: float, chosen: float, most: float) -> None:
    if not bound <= most:
        raise InputError(
            f"the model's {name} can reach {bound:.0f} in {place}; functions on shares hold up to "
            f"{most:.0f}, so this model cannot be served"
        )
    if bound > chosen:
        raise InputError(
            f"the model's {name} can reach {bound:.0f} in {place}, beyond its range of "
            f"{chosen:.0f}; choose its ranges with: spu-llm calibrate"
        )


class Linear(NamedTuple):
    """A layer x @ weight + bias of folded weights, float64; its methods' `square` is |x|^2."""

    weight: np.ndarray  # [k, m]
    bias: np.ndarray  # [m]

    @staticmethod
    def of(params: Any) -> Linear:
        weight = np.asarray(params["weight"], np.float64)
        bias = params["bias"] if "bias" in params else np.zeros(weight.shape[1])
        return Linear(weight, np.asarray(bias, np.float64))

    def columns(self, parts: int | list[int]) -> list[Linear]:
        """Split the layer by columns, as `np.split` does."""
        both = (np.split(part, parts, axis=-1) for part in self)
        return [Linear(*part) for part in zip(*both, strict=True)]

    def lengths(self) -> np.ndarray:
        """Return the lengths [m] of the weight's columns, with no other array of its size."""
        return np.asarray(np.sqrt(np.einsum("ij,ij->j", self.weight, self.weight)))

    def largest_product(self, square: float) -> float:
        """Return the most that any entry of x @ weight can be."""
        return float(np.sqrt(square) * np.max(self.lengths()))

    def largest_entries(self, square: float) -> np.ndarray:
        """Return the most that each entry [m] of x @ weight + bias can be."""
        return np.asarray(np.sqrt(square) * self.lengths() + np.abs(self.bias))

    def largest(self, square: float) -> float:
        """Return the most that any entry of x @ weight + bias can be."""
        return float(np.max(self.largest_entries(square)))

    def longest(self, square: float) -> float:
        """Return the greatest length that any row x @ weight + bias can have."""
        w = self.weight
        squares = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        spectral = np.sqrt(np.linalg.eigvalsh(squares)[-1])
        return float(np.sqrt(square) * spectral + np.linalg.norm(self.bias))


def largest_score(query: Linear, key: Linear, square: float) -> float:
    """Return the most that q k^T of one head can be for q = x W_q + b_q and k = y W_k + b_k with
    |x|^2 = |y|^2 = square.
    """
    (w_q, b_q), (w_k, b_k) = query, key
    inputs, d = w_q.shape
    # The largest singular value of W_q W_k^T, from two small matrices.
    r_q, r_k = np.linalg.qr(w_q)[1], np.linalg.qr(w_k)[1]
    spectral = np.linalg.norm(r_q @ r_k.T, 2)
    crossed = np.linalg.norm(w_q @ b_k) + np.linalg.norm(w_k @ b_q)
    # What rounding does to q meets all of k, and the other way round.
    lengths = np.sqrt(square) * (np.linalg.norm(r_q, 2) + np.linalg.norm(r_k, 2))
    lengths += np.linalg.norm(b_q) + np.linalg.norm(b_k)
    rounded = (inputs + 2) * _ROUNDING * np.sqrt(d) * lengths
    return float(square * spectral + np.sqrt(square) * crossed + abs(b_q @ b_k) + rounded)


def largest_turned_score(query: Linear, key: Linear, square: float) -> float:
    """Return the most that q R k^T can be for any rotation R, with q and k of `largest_score`:
    rotary positions turn both.
    """
    inputs, d = query.weight.shape
    of_query, of_key = query.longest(square), key.longest(square)
    # As there, and a unit for each that is turned.
    rounded = (inputs + 4) * _ROUNDING * np.sqrt(d) * (of_query + of_key)
    return float(of_query * of_key + rounded)


def as_dict(config: Ranges) -> dict[str, Any]:
    """Return the ranges of a configuration in their stored form: lists of numbers, and numbers."""
    named = {name: value for name, value in asdict(config).items() if name in NAMES}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in named.items()}
