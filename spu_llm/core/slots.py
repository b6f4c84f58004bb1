"""Products of random elements of the field, as what makes correlated randomness sees them."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Slots(Protocol):
    """This party's end. Both parties ask for the same products in the same order."""

    rank: int

    def products(self, units: int) -> tuple[np.ndarray, np.ndarray]:
        """Return uniform elements u [units] of this party's, and its share of the products u_0 u_1
        of both parties' elements.
        """

    def crossed(self, units: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return uniform elements a, b [units] of this party's, and its share of a_0 b_1 + a_1 b_0
        of both parties' elements.
        """
