"""A hash of 128-bit blocks for oblivious transfers: AES under a public key, from the `cryptography`
library.

"MMO^" of Guo, Katz, Wang and Yu ("Efficient and Secure Multiparty Computation from Fixed-Key Block
Ciphers", S&P 2020, section 7.3): with pi = AES-128 under the key and sigma(x_1 x_0) = (x_1 ^ x_0)
x_1 on the halves of a block,

    H(x) = pi(sigma(x)) ^ sigma(x).

With pi as a random permutation H is circular correlation robust: H(x) and H(x ^ delta) ^ b delta
are uniform to who does not know delta, for any distinct x that it does not choose. Who has q values
under one key and evaluates pi p times tells the difference with probability about p q / 2^127 for a
delta of 127 random bits. Keys are public and serve one extension each, so that q counts the blocks
of one extension alone (Guo et al., CRYPTO 2020, on many instances): 2^21, so that a delta takes
some 2^106 evaluations. It is the weakest link of the transfers.
"""

from __future__ import annotations

import numpy as np

from spu_llm.core.permutation import BLOCK_WORDS, Permutation

_AT_ONCE = 1 << 15  # blocks: they and their images stay in the cache


class BlockHash:
    """H under `key` (16 bytes, public), for blocks uint64 [..., 2]."""

    def __init__(self, key: bytes) -> None:
        self._pi = Permutation(key)
        # Fresh memory for every call would cost as much as the permutation.
        self._room = np.empty(BLOCK_WORDS * (_AT_ONCE + 1), np.uint64)

    def __call__(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Compute H of every block, into `out` if it is given (contiguous, of x's shape)."""
        assert x.dtype == np.uint64 and x.shape[-1] == BLOCK_WORDS
        hashed = np.empty(x.shape, np.uint64) if out is None else out
        assert hashed.flags.c_contiguous
        blocks, images = x.reshape(-1, BLOCK_WORDS), hashed.reshape(-1, BLOCK_WORDS)
        for start in range(0, len(blocks), _AT_ONCE):
            some, sigma = blocks[start : start + _AT_ONCE], images[start : start + _AT_ONCE]
            sigma[:, 0] = some[:, 1]
            np.bitwise_xor(some[:, 0], some[:, 1], out=sigma[:, 1])
            sigma ^= self._pi(sigma, self._room)
        return hashed
