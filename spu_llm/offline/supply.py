"""Where a session's material comes from: silent products with the provider's weights, and the pool
for everything that is bound to nobody's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from spu_llm.compiler.demand import Demand, Taken
from spu_llm.core.correlation import Correlation, Material
from spu_llm.core.integers import Factor
from spu_llm.offline.pool import Pool
from spu_llm.offline.silent.products import SilentProducts


class Supply:
    """Both parties prepare and take the same units in the same order."""

    def __init__(self, pool: Pool, products: SilentProducts) -> None:
        self.pool, self.products = pool, products

    def available(self, correlation: Correlation) -> int:
        """Units that are made and not taken."""
        if correlation.fixed is not None:
            return self.products.available(correlation)
        return self.pool.available(correlation)

    def set_up(self, demand: Demand) -> None:
        """What material that is bound to weights takes before the first unit of it: hints."""
        wanted = demand.material.values()
        self.products.set_up(
            [(n.correlation, n.fixed) for n in wanted if n.correlation.fixed is not None]
        )

    def make(self, demand: Demand, on_batch: Callable[[int, int], None]) -> None:
        """Make what `demand` asks for and is not there; both parties at the same time.

        on_batch(made, total) is called before each batch and, if there was any, in the end.
        PoolError, with nothing made, when what is there was made for other weights.
        """
        wanted = list(demand.material.values())
        for one in wanted:
            if one.correlation.fixed is None:
                self.prepare(one.correlation, 0)
        self.set_up(demand)
        total, made = sum(map(self._batches, wanted)), 0
        for one in wanted:
            while self._batches(one):
                on_batch(made, total)
                there = self.available(one.correlation)
                units = min(one.units, there + one.correlation.chunk)
                self.prepare(one.correlation, units, one.fixed)
                made += 1
        if total:
            on_batch(total, total)

    def prepare(self, correlation: Correlation, units: int, fixed: Factor | None = None) -> None:
        """Make units until `units` are there; `fixed`: the provider's array, if there is one and at
        the provider.
        """
        if correlation.fixed is not None:
            self.products.prepare(correlation, units, fixed)
        else:
            self.pool.prepare(correlation, units)

    def lease(self, demand: Demand) -> None:
        """Ready to be handed out without the disk: what `demand` asks for and is there."""
        for one in demand.material.values():
            if one.correlation.fixed is None:
                self.pool.lease(one.correlation, one.units)

    def take(self, correlation: Correlation, units: int, fixed: Factor | None = None) -> Material:
        """`units` units that nobody ever gets again."""
        if correlation.fixed is not None:
            return self.products.take(correlation, units, fixed)
        return self.pool.take(correlation, units)

    def _batches(self, wanted: Taken) -> int:
        """Batches of one chunk that are missing."""
        missing = wanted.units - self.available(wanted.correlation)
        return max(0, math.ceil(missing / wanted.correlation.chunk))
