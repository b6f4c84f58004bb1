"""The linear code of silent extension, and its parameters.

Learning parity with noise, primal form: from k random bits and n bits of noise, t of which are one,
the code makes n bits that look random. Each is the sum of `DENSITY` of the k bits, at public random
places, and of its bit of noise; noise is regular, with a single one in each of t blocks of n / t.

What the parameters stand against (k = 2^17, n = 2,555,904, t = 2,496), in bits of work:

    guessing k rows without noise, and solving (pooled Gauss)             232
    hybrid of guessing and algebra on regular noise (Briaud and Oygarden,
      EUROCRYPT 2023; ePrint 2025/1284), not computed here                199
    dense minors: some two thirds of the columns can be chosen such that as
      many rows lie inside them; of the 86 errors to be expected in these
      rows all but two must be missing, which are found by meeting in the
      middle: candidates that are tried                                   129

The first and the last are computed by tests/offline/test_ot_extension.py, with the share of columns
that peeling finds. Published estimates leave the last one out, as they know nothing of the code's
density; by the same measure DENSITY = 10 has 116 bits, and with t = 1,248 for as many rows 62. It
is unreviewed. Whoever knows what was computed on, as of a public prefix, has the noisy bits of
those rows, so the parameters must carry it alone. Liu, Wang, Yang and Yu (EUROCRYPT 2024) reduce
regular noise to the usual one at a loss that these numbers bear.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

DENSITY = 12  # table rows in a row of the code
ROWS_AT_ONCE = 1 << 16  # of a call: the places and the rows stay in the cache
_ROW_BYTES = 4 * DENSITY
_ZEROS = memoryview(bytes(ROWS_AT_ONCE * _ROW_BYTES))


@dataclass(frozen=True)
class Parameters:
    """`secrets` (k) is a power of two; `trees` (t) have 2^depth leaves each."""

    secrets: int = 1 << 17
    trees: int = 2496
    depth: int = 10

    @property
    def rows(self) -> int:
        """Return n."""
        return self.trees << self.depth

    @property
    def choices(self) -> int:
        """Return the correlated transfers that say where the noise is."""
        return self.trees * self.depth

    @property
    def serving(self) -> int:
        """Return how many rows of an extension serve."""
        return self.rows - self.stock

    @property
    def stock(self) -> int:
        """Return how many correlated transfers an extension is made of."""
        return self.secrets + self.choices


PARAMETERS = Parameters()


class Places:
    """The public places of table rows in each row of one extension's code, from AES-128 in counter
    mode under `key`.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        # The library asks for room for one block more than it writes.
        self._stream = np.empty(ROWS_AT_ONCE * _ROW_BYTES + 16, np.uint8)

    def rows(self, start: int, count: int) -> np.ndarray:
        """Return words uint32 [count, DENSITY], until the next call, of which the low bits are the
        places; at most ROWS_AT_ONCE.
        """
        assert count <= ROWS_AT_ONCE and _ROW_BYTES % 16 == 0, "rows are whole blocks"
        first = start * _ROW_BYTES // 16
        counter = Cipher(algorithms.AES(self._key), modes.CTR(first.to_bytes(16, "big")))
        size = count * _ROW_BYTES
        written = counter.encryptor().update_into(_ZEROS[:size], self._stream.data)
        assert written == size
        return self._stream[:size].view(np.uint32).reshape(count, DENSITY)


def sums_of_rows(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the sum of the table rows at the places of each row: words uint64 [rows, width]."""
    assert len(table) & (len(table) - 1) == 0, "any other number would favour some rows"
    return np.asarray(_sums(table.view(np.uint32), places)).view(np.uint64)


@jax.jit
def _sums(table: jax.Array, places: jax.Array) -> jax.Array:
    inside = (places & jnp.uint32(len(table) - 1)).astype(jnp.int32)
    total = table.at[inside[:, 0]].get(mode="promise_in_bounds")
    for i in range(1, DENSITY):
        total = total ^ table.at[inside[:, i]].get(mode="promise_in_bounds")
    return total
