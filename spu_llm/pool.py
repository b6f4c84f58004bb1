"""The pool of correlated randomness: made in bulk, used once."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from spu_llm.correlation import Correlation, Material, digest
from spu_llm.errors import PoolError
from spu_llm.prg import KEY_BYTES, Prg


class Maker(Protocol):
    """Runs a correlation between the two parties: the peer calls its own at the same time."""

    def __call__(
        self, correlation: Correlation, masks: list[np.ndarray], fixed: np.ndarray | None
    ) -> list[np.ndarray]:
        """Result words for one chunk of masks; `fixed` only at the party that holds it."""


class Pool:
    """This party's half. Both parties make and take the same units in the same order."""

    def __init__(self, rank: int, own: Prg, make: Maker | None) -> None:
        """`make` None: never refilled; a request for more than there is fails."""
        self._rank, self._own, self._make = rank, own, make
        self._stock: dict[str, Material] = {}
        self._fixed: dict[str, str] = {}

    def available(self, correlation: Correlation) -> int:
        """Units not yet used."""
        stock = self._stock.get(correlation.name)
        return len(stock.results[0]) if stock is not None else 0

    def prepare(
        self, correlation: Correlation, units: int, fixed: np.ndarray | None = None
    ) -> None:
        """Make whole chunks until `units` units are there. PoolError when it may not."""
        while (there := self.available(correlation)) < units:
            if self._make is None:
                raise PoolError(
                    f"the pool has {there} of {units} units of {correlation.name} and may not "
                    "make more; prepare more ahead of time"
                )
            key = self._own.words((KEY_BYTES // 8,)).tobytes()
            masks = correlation.draw(self._rank, Prg(key), correlation.chunk)
            made = Material(masks, self._make(correlation, masks, fixed))
            old = self._stock.get(correlation.name)
            self._stock[correlation.name] = _join(old, made) if old is not None else made

    def take(
        self, correlation: Correlation, units: int, fixed: np.ndarray | None = None
    ) -> Material:
        """`units` units that nobody ever gets again."""
        name = correlation.name
        if fixed is not None and self._fixed.setdefault(name, digest(fixed)) != digest(fixed):
            raise PoolError(f"material of {name} was made for other weights")
        self.prepare(correlation, units, fixed)
        stock = self._stock[name]
        taken = Material([x[:units] for x in stock.masks], [x[:units] for x in stock.results])
        self._stock[name] = Material(
            [x[units:] for x in stock.masks], [x[units:] for x in stock.results]
        )
        return taken


def _join(a: Material, b: Material) -> Material:
    return Material(
        [np.concatenate(pair) for pair in zip(a.masks, b.masks, strict=True)],
        [np.concatenate(pair) for pair in zip(a.results, b.results, strict=True)],
    )
