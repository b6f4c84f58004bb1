"""A tweaked hash of 128-bit blocks, from AES under a key that both parties know.

"TMMO" of Guo, Katz, Wang and Yu, "Efficient and Secure Multiparty Computation from Fixed-Key Block
Ciphers" (S&P 2020, section 7.4): with pi = AES-128 under that key,

    H(x, t) = pi(pi(x) ^ t) ^ pi(x).

With pi as a random permutation, H(x, .) of a uniform x is a random function to everyone who does
not know x: with q values under one key and p evaluations of pi, the difference shows with
probability about (p q + q^2) / 2^128. A tweak does not lower p q, since one evaluation of pi tests
a guess for every tweak; another key does, since values under one key do not help against those
under another (Guo et al., "Better Concrete Security for Half-Gates Garbling (in the Multi-Instance
Setting)", CRYPTO 2020). So every batch of transfers takes a key of its own, and q counts the blocks
of one batch alone: 2^27 for a message of a gigabyte.
"""

from __future__ import annotations

import numpy as np

from spu_llm.core.permutation import Permutation


class TweakedHash:
    """H under `key` (16 bytes, public), for arrays of blocks (uint64 [..., 2], little-endian).

    Many tweaks of one x share pi(x): H(x, t) = finish(start(x), t), with broadcasting.
    """

    def __init__(self, key: bytes) -> None:
        self.start = Permutation(key)  # pi

    def finish(self, started: np.ndarray, tweaks: np.ndarray) -> np.ndarray:
        """Compute H(x, t) for started = pi(x)."""
        hashed = self.start(started ^ tweaks)
        hashed ^= started
        return hashed
