"""SnD, Split-and-Denoise (Mai et al., ICML 2024; §4 of the digest).

1. The client adds noise to its token embeddings, afresh for every occurrence, and sends the rows.
2. The host runs the model on them.
3. The client, who knows embeddings and noise, denoises what comes back.

The denoiser here is a linear one of each row, fitted on public text by ridge regression: received
row, clean embedding and noise in, what the clean embedding would have given out. The paper's is a
small transformer over whole texts, which also sees the neighbours' embeddings; at noise that leaves
nothing of the text in what comes back, that is the client guessing from its own embeddings without
a model. So utility found here is that of the noise with a simple denoiser, a lower bound of SnD's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spu_llm.core.prg import Prg
from spu_llm.systems.split.baselines.noise import NOISES


def noised(rows: np.ndarray, eta: float, noise: str, prg: Prg) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows + noise, noise), float64 [n, m], of rows [n, m] (step 1); noise: of `NOISES`."""
    drawn = NOISES[noise](len(rows), rows.shape[1], eta, prg)
    return rows + drawn, drawn


@dataclass(frozen=True)
class Denoiser:
    """3.: a linear map of (received, clean, noise), each [n, ..], to rows [n, d]."""

    mean: np.ndarray
    scale: np.ndarray
    weights: np.ndarray
    offset: np.ndarray

    @staticmethod
    def fit(
        received: np.ndarray,
        clean: np.ndarray,
        noise: np.ndarray,
        wanted: np.ndarray,
        ridge: float = 1e-2,
    ) -> Denoiser:
        """Fit a denoiser on public text. wanted: what comes back for the clean embeddings; ridge:
        relative to the number of rows.
        """
        x = np.hstack([received, clean, noise]).astype(np.float64)
        mean, scale = x.mean(axis=0), x.std(axis=0) + 1e-12
        z, offset = (x - mean) / scale, wanted.mean(axis=0, dtype=np.float64)
        gram = z.T @ z + ridge * len(z) * np.eye(z.shape[1])
        return Denoiser(mean, scale, np.linalg.solve(gram, z.T @ (wanted - offset)), offset)

    def rows(self, received: np.ndarray, clean: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Denoise what was received: returns float64 [n, d] in its place."""
        x = np.hstack([received, clean, noise]).astype(np.float64)
        return np.asarray((x - self.mean) / self.scale @ self.weights + self.offset)
