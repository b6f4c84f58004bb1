"""Where a session's correlated randomness comes from. A mask's way is PRG, maker, pool, op:

    own PRG -> `Pool` and `SilentProducts` draw masks, under a key of their own for each batch
            -> a protocol gives both parties results for them: SPU or packed products
               (`BatchMaker`), or silent products with the provider's weights; random transfers
               give masks and results
            -> a batch lies in the pool, on disk where there is a place, until it is leased
            -> an op takes units, which nobody ever gets again

`Supply` is what is there, and how more is made; `BackgroundProducer` makes more of it while a call
runs; `Preprocessing` is both together, as sessions and ops use them. Each knows only those before
it, and is given them when it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from spu_llm.compiler.demand import Demand
from spu_llm.core.correlation import Correlation, Correlations
from spu_llm.core.integers import Factor
from spu_llm.core.meter import Meter
from spu_llm.offline.background_producer import BackgroundProducer
from spu_llm.offline.batch_maker import BatchMaker
from spu_llm.offline.pool import Pool
from spu_llm.offline.silent.products import SilentProducts
from spu_llm.offline.supply import Supply


class Preprocessing:
    """This party's half. Both parties prepare and take the same units in the same order; what is
    under way in the background is waited for, and added, before anything else is made.
    """

    def __init__(
        self,
        pool: Pool,
        products: SilentProducts,
        maker: BatchMaker,
        meter: Meter,
        on_batch: Callable[[int, int], None] = lambda made, total: None,
    ) -> None:
        """Take `maker`, which the pool's batches come from. on_batch(made, total) hears of every
        batch that a call waits for.
        """
        self.pool, self.products, self._on_batch = pool, products, on_batch
        self._supply = Supply(pool, products)
        self._background = BackgroundProducer(self._supply, maker, meter, on_batch)

    def available(self, correlation: Correlation) -> int:
        """Return how many units are made and not taken."""
        return self._supply.available(correlation)

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        """Return `units` units that nobody ever gets again. `fixed`: the provider's array, if there
        is one and at the provider.
        """
        if self.available(correlation) < units:
            self.settle()
        return self._supply.take(correlation, units, fixed)

    def prepare(self, correlation: Correlation, units: int, fixed: Factor | None = None) -> None:
        """Make units until `units` are there; `fixed`: as for `take`."""
        self.settle()
        self._supply.prepare(correlation, units, fixed)

    def set_up(self, demand: Demand) -> None:
        """Bring what products with weights take once: hints, which outlive the session."""
        self.settle()
        self._supply.set_up(demand)

    def make(self, demand: Demand) -> None:
        """Make what `demand` asks for and is not there; both parties at the same time. PoolError,
        with nothing made, when what is there was made for other weights.
        """
        self.settle()
        self._supply.make(demand, self._on_batch)

    def make_batches(self, demand: Demand, most: int) -> None:
        """Make up to `most` batches of what `demand` asks for and is not there, at the same time as
        the peer.
        """
        self.settle()
        self._supply.make_batches(demand, most)

    def lacking(self, demand: Demand) -> int:
        """Return how many batches would make what `demand` asks for and is not there."""
        return self._supply.batches_lacking(demand)

    def lease(self, demand: Demand) -> None:
        """Bring what `demand` asks for and is there into memory, to be handed out without the
        disk.
        """
        self._supply.lease(demand)

    # ---- in the background

    @property
    def running(self) -> bool:
        """Return whether something was started and not yet added, which both parties know."""
        return self._background.running

    def start(self, demand: Demand) -> None:
        """Begin to make what `demand` asks for and is not there, after what was begun before."""
        self.settle()
        self._background.start(demand)

    def check(self) -> None:
        """Raise what ended the background's work, if anything did."""
        self._background.check()

    def settle(self) -> None:
        """Wait for all that was started, and add it; raises as `check`."""
        self._background.settle()

    def stop(self, agree: Callable[[int], int]) -> None:
        """End the background's work after the batches that either party has begun, and add these.
        agree(n) tells the peer a number and returns the peer's.
        """
        self._background.stop(agree)

    def paused(self) -> AbstractContextManager[None]:
        """Let the background rest during a block whose duration is a secret."""
        return self._background.paused()
