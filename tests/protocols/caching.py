"""Programs of many calls on versions of one cache, run by both parties, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protocols.arithmetic.cached import append, times_columns, times_rows
from spu_llm.core.op import Cost
from spu_llm.core.party import Party
from spu_llm.core.values import CLIENT, Arith, Public, Value
from spu_llm.testing import Case, reconstruct_words, run_op
from spu_llm.testing.run import Outcome
from tests.protocols.composed import calls

HEADS, CAP, D = 2, 5, 3
OPS = {"rows": times_rows, "columns": times_columns}


@dataclass(frozen=True)
class Append:
    """Rows of this seed, written into a version; makes the next version."""

    version: int
    at: int
    count: int
    seed: int


@dataclass(frozen=True)
class Product:
    """ "rows" or "columns" of a version, by `count` queries of this seed."""

    kind: str
    version: int
    count: int
    seed: int


Command = Append | Product


def plain_of(command: Command) -> np.ndarray:
    width = CAP if isinstance(command, Product) and command.kind == "columns" else D
    rng = np.random.default_rng(command.seed)
    return rng.integers(-(2**63), 2**63 - 1, (HEADS, command.count, width))


def expected(commands: Sequence[Command]) -> list[np.ndarray]:
    """Return the products, by numpy."""
    versions, products = [np.zeros((HEADS, CAP, D), np.int64)], []
    for command in commands:
        cache, x = versions[command.version], plain_of(command)
        if isinstance(command, Append):
            start = min(command.at, CAP - command.count)
            versions.append(cache.copy())
            versions[-1][:, start : start + command.count] = x
        else:
            products.append(x @ (cache.swapaxes(1, 2) if command.kind == "rows" else cache))
    return products


@dataclass
class Record:
    """What one party's run left beside its results."""

    cost: Cost = field(default_factory=Cost)
    caches: list[Value] = field(default_factory=list)


def _share(party: Party, command: Command, zero: bool) -> Arith:
    plain = plain_of(command)
    if zero:
        return Arith(np.zeros(plain.shape, np.uint64), plain.dtype, 0)
    mask = np.random.default_rng([1, command.seed]).integers(0, 2**64, plain.shape, np.uint64)
    words = mask if party.rank == CLIENT else plain.view(np.uint64) - mask
    return Arith(words, plain.dtype, 0)


def run(
    commands: Sequence[Command], *, tile: int, zero: bool = False
) -> tuple[Outcome, list[Record]]:
    """Return both parties' results, one array per product. `zero`: all shares are zero."""
    records = [Record(), Record()]

    def two_party(party: Party, start: Value) -> list[Value]:
        record, products = records[party.rank], []
        record.caches.append(start)
        for command in commands:
            cache, x = record.caches[command.version], _share(party, command, zero)
            if isinstance(command, Append):
                at = Public(np.array(command.at))
                record.cost += append.cost(cache, x, at)
                record.caches += append.run(party, [cache, x, at], {})
            else:
                op = OPS[command.kind]
                record.cost += op.cost(x, cache, tile=tile)
                products += op.run(party, [x, cache], {"tile": tile})
        return products

    op = calls("commands", two_party)
    outcome = run_op(op, Case((np.zeros((HEADS, CAP, D), np.int64),), ("public",)))
    return outcome, records


def results(outcome: Outcome) -> list[Any]:
    pairs = zip(*outcome.outputs, strict=True)
    return [reconstruct_words(list(pair)).view(np.int64) for pair in pairs]
