"""Prices of correlated randomness: transfers by the products that take them, extensions apart, and
the correlated randomness of complete generations within a quarter of what was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from experiments.common import saved
from experiments.common.measured import FIGURES
from experiments.common.report import both_ways
from experiments.common.transfers import extensions
from experiments.cost_model import prices
from experiments.cost_model.prices import Prices
from experiments.cost_model.workload import Workload
from models.gpt2 import GPT2Config
from protocols.arithmetic.cached import cached_products, weighted_rows
from protocols.arithmetic.known_rows import known_products, weighted_known_rows
from protocols.arithmetic.product import SQUARE, TRIPLE, matrix_triple, row_squares, scaled_row
from protocols.bits.compare import leaf, node
from protocols.bits.convert import shared_bits
from protocols.bits.gates import correlation
from protocols.bits.logic import AND
from protocols.bits.mux import BIT_TIMES_NARROW_WORD, BIT_TIMES_WORD
from protocols.functions.aggregation import tile_for
from protocols.functions.exponential import WORD_TIMES_CHOSEN
from protocols.functions.maximum import all_of
from protocols.ot.transfer import TRANSFER
from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import SpuLlmError
from spu_llm.offline.ot.transfers import EXTENSION
from spu_llm.systems.decoding.request import Request

LEAF = correlation(leaf(root=False))
TRANSFERS = [
    LEAF,
    correlation(leaf(root=True)),
    correlation(node(4, root=False)),
    correlation(AND),
    correlation(all_of(5)),
    shared_bits(64),
    shared_bits(24),
    BIT_TIMES_WORD,
    BIT_TIMES_NARROW_WORD,
    TRANSFER,
]


@pytest.mark.parametrize("one", TRANSFERS, ids=lambda c: c.name)
def test_what_is_made_of_transfers_says_how_many(one: Correlation) -> None:
    assert one.by_transfers is not None
    assert extensions(one, 1.0) > 0
    assert prices.priced(one) == sum(one.transfers)


@pytest.mark.parametrize("one", [SQUARE, TRIPLE, matrix_triple(2, 4, 2), row_squares(9)])
def test_what_is_encrypted_takes_no_transfers(one: Correlation) -> None:
    assert not any(one.transfers) and extensions(one, 1.0) == 0


# ---- fitting


def _batch(seconds: float, size: float, messages: float) -> dict[str, float]:
    return {
        "seconds": seconds,
        "client_to_provider": size,
        "provider_to_client": size,
        "messages": messages,
    }


def _work(one: Correlation, units: float) -> Workload:
    counts = {"calls": 1.0, "messages": 1.0, "words": 1.0, "weight_products": 0.0}
    return Workload(counts, {one.name: units}, {one.name: one}, {})


def test_an_extension_is_priced_apart() -> None:
    """The batch that compiles counts for nothing, nor the extension that makes the first stock."""
    usual, longer = _batch(0.05, 1000.0, 2), _batch(0.3, 400.0, 2)
    rows = [
        {"name": LEAF.name, "batches": [_batch(9.0, 1000.0, 2), usual, usual]},
        {"name": EXTENSION, "batches": [_batch(5.0, 9000.0, 12), longer]},
    ]
    result, work = {"correlations": rows}, _work(LEAF, 1.0)
    made, extended = prices.made_in(result, work), prices.extended_in(result)
    actual = prices.fit({}, [], made, extended, [(work, 1.0)])
    assert actual.extension == pytest.approx(longer)
    units = 2.0 / extensions(LEAF, 1.0)
    batches = units / LEAF.chunk
    wanted = {n: batches * usual[n] + 2 * actual.extension[n] for n in FIGURES}
    assert actual.of_units(LEAF, units) == pytest.approx(wanted)
    assert actual.extensions(_work(LEAF, units)) == pytest.approx(2)
    with pytest.raises(SpuLlmError, match="no run extended"):
        prices.fit({}, [], made, [], [(work, 1.0)])


def test_a_unit_of_known_rows_takes_half_the_bytes_of_a_tile() -> None:
    """It is encrypted in one direction."""
    actual = Prices.load()
    for known, tile in (
        (known_products(128, 128, 64), cached_products(128, 64)),
        (weighted_known_rows(128, 128, 64), weighted_rows(128, 64)),
    ):
        size, whole = (both_ways(actual.of_units(unit, 1.0)) for unit in (known, tile))
        assert size == pytest.approx(whole / 2)


# ---- against complete sessions


def _alike(config: GPT2Config, tile: int) -> dict[str, Correlation]:
    """Return a correlation of every kind in the records of complete generations."""
    return {
        "shared bit": shared_bits(32),
        "square pair": SQUARE,
        "gate leaf": LEAF,
        "gate node": correlation(node(4, root=False)),
        "gate all": correlation(all_of(4)),
        "gate prefix": correlation(AND),
        "gate or": correlation(AND),
        "product triple": TRIPLE,
        "row squares": row_squares(config.width),
        "scaled row": scaled_row(config.width),
        "cached products": cached_products(tile, config.head_dim),
        "weighted cached": weighted_rows(tile, config.head_dim),
        "bits times": BIT_TIMES_WORD,
        "word times": WORD_TIMES_CHOSEN,
        "transfer": TRANSFER,
    }


def _predicted(record: dict[str, Any], actual: Prices) -> dict[str, float]:
    """Predict the price of the correlated randomness that a complete generation made, as much as
    took so many bytes. Silent products, which take none, are left out.
    """
    asked, kinds, agreed = record["asked"], record["costs"]["kinds"], record["config"]
    assert agreed["model.family"] == "gpt2"
    config = GPT2Config(**{name: agreed[f"model.{name}"] for name in GPT2Config.size_names()})
    drafts = agreed["request.draft_length"]
    request = Request(record["prompt_tokens"], asked["tokens"], drafts, temperature=0.0)
    total = dict.fromkeys(FIGURES, 0.0)
    for kind, one in _alike(config, tile_for(request.capacity(config))).items():
        if kind in kinds:
            units = both_ways(kinds[kind]) / both_ways(actual.of_units(one, 1.0))
            cost = actual.of_units(one, units)
            total = {n: total[n] + cost[n] for n in FIGURES}
    return total


def _ratios(system: str, actual: Prices) -> Iterator[tuple[str, float]]:
    """Yield what is predicted of all generations of a system, by what was measured."""
    runs = saved.load("completions")["runs"] + saved.load("standard")["runs"]
    records = [r for r in runs if r["asked"]["system"] == system]
    assert len(records) >= 4
    predicted = [_predicted(r, actual) for r in records]
    measured = [
        cost
        for r in records
        for kind, cost in r["costs"]["kinds"].items()
        if kind != "masked product"
    ]
    for name in FIGURES:
        yield name, sum(p[name] for p in predicted) / sum(cost[name] for cost in measured)


@pytest.mark.parametrize("system", ["ours-drafted", "ours-standard"])
def test_material_of_complete_generations(system: str) -> None:
    """Within a third, since half of these runs met a machine that was a third slower than when it
    was priced, as the stock path's beside them show; without the price of extensions far from it.
    """
    actual = Prices.load()
    ratios = dict(_ratios(system, actual))
    assert ratios["seconds"] == pytest.approx(1, abs=0.35)
    assert ratios["messages"] == pytest.approx(1, abs=0.05)
    without = dataclasses.replace(actual, extension=dict.fromkeys(FIGURES, 0.0))
    fewer = dict(_ratios(system, without))
    assert fewer["seconds"] < 0.75 * ratios["seconds"] and fewer["messages"] < 0.2
