"""Where a session's correlated randomness comes from: silent products with the provider's weights,
and the pool for everything that is bound to nobody's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

from spu_llm.compiler.demand import CorrelationRequest, Demand
from spu_llm.core.correlation import Correlation, Correlations
from spu_llm.core.integers import Factor
from spu_llm.offline import schedule
from spu_llm.offline.pool import Pool
from spu_llm.offline.silent.products import SilentProducts


class Supply:
    """Both parties prepare and take the same units in the same order."""

    def __init__(self, pool: Pool, products: SilentProducts) -> None:
        self.pool, self.products = pool, products

    def available(self, correlation: Correlation) -> int:
        """Return how many units are made and not taken."""
        if correlation.fixed is not None:
            return self.products.available(correlation)
        return self.pool.available(correlation)

    def set_up(self, demand: Demand) -> None:
        """Set up what correlated randomness that is bound to weights takes before the first unit of
        it: hints.
        """
        wanted = demand.correlations.values()
        self.products.set_up(
            [(n.correlation, n.fixed) for n in wanted if n.correlation.fixed is not None]
        )

    def make(self, demand: Demand, on_batch: Callable[[int, int], None]) -> None:
        """Make what `demand` asks for and is not there; both parties at the same time.

        on_batch(made, total) is called before each batch and, if there was any, in the end.
        PoolError, with nothing made, when what is there was made for other weights.
        """
        lacking = self.lacking(demand)
        total = schedule.batches(lacking)
        if total:
            on_batch(0, total)
        for made, add in enumerate(self.produce(lacking), 1):
            add()
            on_batch(min(made, total), total)

    def lacking(self, demand: Demand) -> list[CorrelationRequest]:
        """Return what `demand` asks for and is not there, set up so that it can be produced.
        PoolError when what is there was made for other weights.
        """
        wanted = list(demand.correlations.values())
        for one in wanted:
            if one.correlation.fixed is None:
                self.pool.prepare(one.correlation, 0)
        self.set_up(demand)
        return schedule.lacking(wanted, self.available)

    def produce(self, lacking: Sequence[CorrelationRequest]) -> Iterator[Callable[[], None]]:
        """Make whole batches until all that lacks is made, and yield for each a function that adds
        it. Making may run in one other thread while units are taken; adding may not.
        """
        for one in lacking:
            kind, made = one.correlation, 0
            while made < one.units:
                if kind.fixed is not None:
                    positions = self.products.make(kind)
                    made += len(positions.results[0])
                    yield partial(self.products.add, kind, positions)
                else:
                    batch = self.pool.make(kind)
                    made += batch.label.units
                    yield partial(self.pool.add, batch)

    def make_batches(self, demand: Demand, most: int) -> None:
        """Make up to `most` batches of what `demand` asks for and is not there."""
        for add in islice(self.produce(self.lacking(demand)), most):
            add()

    def batches_lacking(self, demand: Demand) -> int:
        """Return how many batches make what `demand` asks for and is not there."""
        return schedule.batches(schedule.lacking(demand.correlations.values(), self.available))

    def prepare(self, correlation: Correlation, units: int, fixed: Factor | None = None) -> None:
        """Make units until `units` are there; `fixed`: the provider's array, if there is one and at
        the provider.
        """
        if correlation.fixed is not None:
            self.products.prepare(correlation, units, fixed)
        else:
            self.pool.prepare(correlation, units)

    def lease(self, demand: Demand) -> None:
        """Bring what `demand` asks for and is there into memory, to be handed out without the
        disk.
        """
        wanted = demand.correlations.values()
        self.pool.lease_all([(n.correlation, n.units) for n in wanted if not n.correlation.fixed])

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        """Return `units` units that nobody ever gets again."""
        if correlation.fixed is not None:
            return self.products.take(correlation, units, fixed)
        return self.pool.take(correlation, units)
