"""Report of a model's ranges, site by site: the bound by weights, what texts showed, the chosen
range, and the cost of its checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.calibration import Seen, activations, together
from models.family import ModelConfig, Params, bounds_of, family_of
from models.ranges import LARGEST_LINEAR, Bounds, of_site
from protocols.arithmetic.projection import GAP, PROJECTIONS, least_bits
from protocols.bits.compare import sign_cost
from protocols.functions.activations import PIECES, RELU_BITS, RELU_ERROR, activation_bits
from protocols.functions.norms import norm_high, norm_lines
from protocols.functions.softmax import score_bits

CHECKED, PROVED = "checked", "proved"
_SOFTMAX_ERROR = 4e-4  # relative (`protocols.functions.softmax`)


@dataclass(frozen=True)
class Site:
    """A place in a model whose activations have a range."""

    block: int | None  # None: behind the last
    name: str
    bound: float | None
    seen: tuple[float, float] | None
    low: float
    high: float
    held: str
    head_room: float | None
    error: str
    comparisons: int
    bits: int

    @property
    def bytes(self) -> int:
        cost = sign_cost(self.comparisons, self.bits)
        return cost.client_to_provider + cost.provider_to_client


def sites(
    config: ModelConfig, params: Params, texts: Sequence[np.ndarray], public: int
) -> Iterator[Site]:
    """Yield all sites of a model, in order. `texts`: as in `models.calibration.calibrated`, or
    empty. InputError for NaN or infinite weights.
    """
    weights = family_of(config).fold(params, config)
    reached = bounds_of(weights, config)
    seen = [activations(config, weights, ids) for ids in texts]
    rows = together([Seen(*(part[:, public:] for part in s)) for s in seen]) if seen else None
    blocks = family_of(config).blocks_of(weights)
    for site, (block, name) in enumerate(config.norms):
        yield _norm(config, block, site, name, rows)
        if block is None:
            continue
        bounds = reached.blocks[block]
        if name == "norm of attention":
            yield _scores(config, block, bounds)
        elif name == "norm of feed-forward":
            width = _last(blocks[block]).shape[0]
            yield _inputs(config, block, bounds, width)
            yield _inner(config, block, bounds, width, rows)
    spread = config.logit_spread
    yield Site(
        None,
        "spread of logits",
        reached.spread,
        None,
        0.0,
        spread,
        PROVED,
        spread / reached.spread,
        "-",
        0,
        0,
    )


def _norm(config: ModelConfig, block: int | None, site: int, name: str, rows: Seen | None) -> Site:
    low, high = config.norm_range(site)
    high = min(high, norm_high(config.width))
    lines, _ = norm_lines(config.width, config.norm_epsilon, 1.0, low, high)
    seen, room = None, None
    if rows is not None:
        seen = float(rows.squares[site].min()), float(rows.squares[site].max())
        room = math.sqrt(min(high / seen[1], seen[0] / low))
    return Site(
        block,
        name,
        None,
        seen,
        low,
        high,
        CHECKED,
        room,
        f"{lines.error:.1e} of it",
        len(lines.thresholds) + 2 * len(lines.above) + 2 * PROJECTIONS,
        lines.bits,
    )


def _scores(config: ModelConfig, block: int, bounds: Bounds) -> Site:
    largest = of_site(config.largest_score, block)
    heads = config.kv_heads * config.query_groups
    return Site(
        block,
        "scores, of a row before it",
        bounds.score,
        None,
        -largest,
        largest,
        PROVED,
        largest / bounds.score,
        f"{_SOFTMAX_ERROR:.0e} of it",
        heads,
        score_bits(largest),
    )


def _inputs(config: ModelConfig, block: int, bounds: Bounds, width: int) -> Site:
    largest = of_site(config.largest_activation, block)
    bits, error, thresholds = activation_bits(largest), RELU_ERROR, 1
    if config.activation == "relu":
        bits += RELU_BITS
    else:
        function = PIECES[config.activation]
        error, thresholds = function.error, len(function.thresholds)
    return Site(
        block,
        "feed-forward inputs",
        bounds.activation,
        None,
        -largest,
        largest,
        PROVED,
        largest / bounds.activation,
        f"{error:.1e}",
        thresholds * width,
        bits,
    )


def _last(block: Params) -> Any:
    """Return the last matrix of a folded block."""
    return block["down" if "down" in block else "proj"]["weight"]


def _inner(config: ModelConfig, block: int, bounds: Bounds, width: int, rows: Seen | None) -> Site:
    """Return the site of the rows that go into the block's last matrix. Where they are checked, the
    longest row that passes cannot overflow the matrix's product.
    """
    longest = of_site(config.longest_inner, block)
    bound = bounds.inner / bounds.per_length
    seen = None
    if rows is not None:
        seen = float(rows.inner[block].min()), float(rows.inner[block].max())
    if not longest:
        most = LARGEST_LINEAR / bounds.per_length
        return Site(block, "rows of gates", bound, seen, 0.0, most, PROVED, most / bound, "-", 0, 0)
    assert GAP * longest * bounds.per_length < LARGEST_LINEAR, "ranges were checked"
    return Site(
        block,
        "rows of gates",
        bound,
        seen,
        0.0,
        longest,
        CHECKED,
        None if seen is None else longest / seen[1],
        "-",
        2 * PROJECTIONS,
        least_bits(width, longest),
    )


def table(sites: Sequence[Site]) -> str:
    """Format the sites as a text table, a line each."""
    lines = [_HEAD]
    for site in sites:
        seen = "-" if site.seen is None else f"{site.seen[0]:.3g} to {site.seen[1]:.3g}"
        lines.append(
            (
                "-" if site.block is None else str(site.block),
                site.name,
                "-" if site.bound is None else f"{site.bound:.3g}",
                seen,
                f"{site.low:.3g} to {site.high:.3g}",
                site.held,
                "-" if site.head_room is None else f"{site.head_room:.2g}",
                site.error,
                f"{site.comparisons} of {site.bits} bits" if site.comparisons else "-",
                f"{site.bytes:,}" if site.comparisons else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


_HEAD = (
    "block",
    "site",
    "weights bound",
    "text showed",
    "range",
    "held by",
    "head-room",
    "error",
    "comparisons of a row",
    "their bytes",
)
