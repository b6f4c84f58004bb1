"""Where a session's material comes from: silent products with the provider's weights, and the pool
for everything that is bound to nobody's weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spu_llm.core.correlation import Correlation, Material
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

    def set_up(self, wanted: Sequence[tuple[Correlation, np.ndarray | None]]) -> None:
        """What the first units of correlations with weights take, for all of them at once."""
        self.products.set_up(wanted)

    def prepare(
        self, correlation: Correlation, units: int, fixed: np.ndarray | None = None
    ) -> None:
        """Make units until `units` are there; `fixed`: the provider's array, if there is one and at
        the provider.
        """
        if correlation.fixed is not None:
            self.products.prepare(correlation, units, fixed)
        else:
            self.pool.prepare(correlation, units)

    def take(
        self, correlation: Correlation, units: int, fixed: np.ndarray | None = None
    ) -> Material:
        """`units` units that nobody ever gets again."""
        if correlation.fixed is not None:
            return self.products.take(correlation, units, fixed)
        return self.pool.take(correlation, units)
