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
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

KEY_BYTES = 16
BLOCK_BYTES = 16


class TweakedHash:
    """H under `key` (16 bytes, public), for arrays of blocks (uint64 [..., 2], little-endian).

    Many tweaks of one x share pi(x): H(x, t) = finish(start(x), t), with broadcasting.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
        # A permutation of single blocks is what is wanted here: no message is encrypted by this.
        self._pi = Cipher(algorithms.AES(key), modes.ECB()).encryptor()

    def start(self, x: np.ndarray) -> np.ndarray:
        """Compute pi(x)."""
        assert x.dtype == np.uint64 and x.shape[-1] == 2
        # The library asks for room for one more block than it writes.
        out = np.empty(x.size + 2, np.uint64)
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        written = self._pi.update_into(data.data, out.view(np.uint8).data)
        assert written == x.nbytes
        return out[: x.size].reshape(x.shape)

    def finish(self, started: np.ndarray, tweaks: np.ndarray) -> np.ndarray:
        """Compute H(x, t) for started = pi(x)."""
        hashed = self.start(started ^ tweaks)
        hashed ^= started
        return hashed
