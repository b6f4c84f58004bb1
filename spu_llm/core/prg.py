"""Keyed random streams: AES-256-CTR from the `cryptography` library, seeded by the OS.

Each party draws its masks from a stream of its own; a mask is taken once and never again, because
the stream only moves forward.
"""

from __future__ import annotations

import hashlib
import math
import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

KEY_BYTES = 32


class Prg:
    """An endless stream of uniform words under `key` (32 bytes)."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
        self._key = key
        # Every key is used for one stream only, so the counter may start at zero.
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    @staticmethod
    def from_os() -> Prg:
        return Prg(os.urandom(KEY_BYTES))

    @staticmethod
    def from_seed(seed: int, label: str) -> Prg:
        """Make a reproducible stream for simulation and sampling; never for masks between
        processes.
        """
        return Prg(hashlib.sha256(f"{label}:{seed}".encode()).digest())

    def child(self, label: str) -> Prg:
        """Derive a stream of its own for `label`; the same label always gives the same stream."""
        return Prg(hashlib.blake2b(label.encode(), key=self._key, digest_size=KEY_BYTES).digest())

    def words(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw uniform uint64 words of `shape`."""
        count = math.prod(shape)
        return np.frombuffer(self._stream.update(bytes(8 * count)), np.uint64).reshape(shape)

    def words_at(self, places: np.ndarray) -> np.ndarray:
        """Return the words at these places (int64, of any shape) of the stream from its beginning
        on, as `words` gives them one after the other. The stream stays where it is.
        """
        flat = np.asarray(places, np.int64).reshape(-1)
        # In counter mode block b is the encryption of b; two words of eight bytes are in each.
        counters = np.zeros((flat.size, 2), ">u8")
        counters[:, 1] = flat >> 1
        single = Cipher(algorithms.AES(self._key), modes.ECB()).encryptor()
        blocks = np.frombuffer(single.update(counters.tobytes()), np.uint64).reshape(-1, 2)
        return np.where(flat & 1, blocks[:, 1], blocks[:, 0]).reshape(np.shape(places))

    def uniform(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw float64 numbers, uniform in [0, 1) with 53 random bits."""
        return (self.words(shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53
