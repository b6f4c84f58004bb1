"""A public permutation of 128-bit blocks: AES under a key that both parties know, from the
`cryptography` library. No message is encrypted by it; hashes are made of it.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

KEY_BYTES = 16
BLOCK_BYTES = 16
BLOCK_WORDS = 2  # uint64, little-endian


class Permutation:
    """AES-128 under `key` (16 bytes, public), block by block."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
        self._pi = Cipher(algorithms.AES(key), modes.ECB()).encryptor()

    def __call__(self, x: np.ndarray, room: np.ndarray | None = None) -> np.ndarray:
        """Compute the images of blocks, uint64 [..., 2]; in `room` if it is given, until the next
        call with it: words for one block more than x has.
        """
        assert x.dtype == np.uint64 and x.shape[-1] == BLOCK_WORDS
        # The library asks for room for one more block than it writes.
        image = np.empty(x.size + BLOCK_WORDS, np.uint64) if room is None else room
        data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        written = self._pi.update_into(data.data, image.view(np.uint8).data)
        assert written == x.nbytes
        return image[: x.size].reshape(x.shape)
