"""Both parties of products in slots, over a pair of queues; for their tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spu_llm.core import field
from spu_llm.core.channel import CountingChannel, MemoryChannel
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, from_bytes
from spu_llm.offline.slots.products import CIPHERTEXT_BYTES, SlotProducts
from spu_llm.offline.slots.ring import MODULI, MODULUS_BITS, N
from tests.offline.silent_pair import RANKS, Two, Wire

KEY, CIPHERTEXT = 0, 1  # numbers of a party's messages, of the first call


class SlotsTwo(Two):
    """A session of two parties."""

    def __init__(self, seed: int | None = None, common: bytes = b"session") -> None:
        """Connect both parties; `seed` fixes their own streams, which are random without."""
        self.wires = [Wire(end) for end in MemoryChannel.pair()]
        self.products: list[Any] = [
            SlotProducts(
                rank,
                Prg.from_os() if seed is None else Prg.from_seed(seed, f"own {rank}"),
                common,
                CountingChannel(self.wires[rank]),
            )
            for rank in RANKS
        ]

    def call(self, work: Callable[[Any], Any]) -> list[Any]:
        """Return what `work` returns for either party's half."""
        return self.both(lambda rank, products: work(products))

    def ends(self, work: Callable[[Any], Any]) -> list[Any]:
        """Return what `work` returns or raises for either party's half."""
        return self.outcomes(lambda rank, products: work(products))

    def wrong(self, units: int) -> int:
        """Return how many of so many products, and of crossed ones, are not what they should be."""
        (u, x), (v, y) = self.call(lambda p: p.products(units))
        count = int((field.added(x, y) != field.multiplied(u, v)).sum())
        (a, b, x), (c, d, y) = self.call(lambda p: p.crossed(units))
        wanted = field.added(field.multiplied(a, d), field.multiplied(b, c))
        assert all(len(part) == units for part in (u, v, a, b, c, d, x, y))
        return count + int((field.added(x, y) != wanted).sum())

    def ciphertext(self, number: int, rank: int = CLIENT) -> np.ndarray:
        """Return the first ciphertext, residues [3, N], of a party's message number `number`."""
        data = np.frombuffer(self.wires[rank].sent[number][:CIPHERTEXT_BYTES], np.uint8)
        return from_bytes(data, MODULUS_BITS).reshape(len(MODULI), N)

    def all_sent(self) -> bytes:
        """Return all that was sent."""
        return b"".join(self.wires[0].sent + self.wires[1].sent)
