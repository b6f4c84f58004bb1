"""T2T (Text2Text, TokEmbPriv, RAPT; §4 of the digest): each token gives way to one that is near.

1. d_chi noise is added to the token's embedding, afresh for every occurrence.
2. The token of the nearest embedding takes its place.

The host sees a text of wrong tokens and needs no more than the public model. NOIR reports that at
its epsilon nearly all tokens are changed.
"""

from __future__ import annotations

import numpy as np

from spu_llm.core.prg import Prg
from spu_llm.systems.split.baselines.noise import spherical

_AT_ONCE = 256  # tokens, each compared with the vocabulary


def replaced(tokens: np.ndarray, table: np.ndarray, eta: float, prg: Prg) -> np.ndarray:
    """Return token ids int64 [n] in place of `tokens` [n]; table: the public one, [V, m]."""
    rows = np.asarray(table, np.float64)
    norms = np.sum(rows**2, axis=1)
    chosen = []
    for start in range(0, len(tokens), _AT_ONCE):
        own = rows[np.asarray(tokens[start : start + _AT_ONCE])]
        noised = own + spherical(len(own), rows.shape[1], eta, prg)  # 1.
        chosen.append(np.argmin(norms - 2 * noised @ rows.T, axis=1))  # 2.
    return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)
