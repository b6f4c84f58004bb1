"""What a race emits."""

from __future__ import annotations

import numpy as np


def expected(rows: np.ndarray, drafts: np.ndarray) -> tuple[int, int]:
    winners = rows.argmax(axis=-1)
    k = 0
    while k < len(drafts) and winners[k] == drafts[k]:
        k += 1
    return k, int(winners[k])
