"""Both parties of random transfers, over a pair of queues; for their tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from spu_llm.core.channel import Channel, CountingChannel, MemoryChannel, Traffic
from spu_llm.core.correlation import Correlation, deal
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline.ot.base import BySpu
from spu_llm.offline.ot.code import Parameters
from spu_llm.offline.ot.transfers import RandomTransfers

RANKS = (CLIENT, PROVIDER)
SMALL = Parameters(secrets=1 << 8, trees=12, depth=6)  # 768 rows, of which 440 serve


def dealers() -> list[BySpu]:
    """Return stand-ins for SPU's base transfers, of either party."""
    masks: list[Sequence[np.ndarray]] = [(), ()]
    barrier = threading.Barrier(2, timeout=30)

    def of(rank: int) -> BySpu:
        def make(
            correlation: Correlation, own: Sequence[np.ndarray]
        ) -> tuple[list[np.ndarray], Traffic]:
            masks[rank] = own
            barrier.wait()
            made = deal(correlation, masks, Prg.from_seed(1, correlation.name))[rank]
            barrier.wait()
            return made, Traffic()

        return make

    return [of(rank) for rank in RANKS]


class Recorded:
    """A channel that keeps what it sends, after a change."""

    def __init__(self, inner: Channel, change: Callable[[bytes], bytes] = lambda data: data):
        self._inner, self._change = inner, change
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        self._inner.send(self._change(data))

    def recv(self) -> bytes:
        return self._inner.recv()


class TransfersOfTwo:
    """The parties' transfers. `seed`: of all their randomness; change: what either sends."""

    def __init__(
        self,
        parameters: Parameters = SMALL,
        seed: int = 1,
        change: Callable[[bytes], bytes] = lambda data: data,
    ) -> None:
        ends = MemoryChannel.pair()
        self.wires = [Recorded(ends[CLIENT], change), Recorded(ends[PROVIDER], change)]
        self.channels = [CountingChannel(wire) for wire in self.wires]
        self.parties = [
            RandomTransfers(
                rank,
                Prg.from_seed(seed, f"own {rank}"),
                Prg.from_seed(seed, "common"),
                self.channels[rank],
                by_spu,
                parameters,
            )
            for rank, by_spu in enumerate(dealers())
        ]

    def both(self, work: Callable[[int, RandomTransfers], Any]) -> list[Any]:
        """Run work(rank, transfers) at both parties at the same time."""
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(work, RANKS, self.parties))

    def chosen(self, chooser: int, count: int) -> tuple[np.ndarray, ...]:
        """Take transfers in which a party chooses: its bits and strings, and its peer's both."""

        def work(rank: int, party: RandomTransfers) -> Any:
            return party.choose(count) if rank == chooser else party.offer(count)

        taken = self.both(work)
        return (*taken[chooser], *taken[1 - chooser])


def fulfilled(bits: np.ndarray, strings: np.ndarray, zero: np.ndarray, one: np.ndarray) -> bool:
    """Return whether the chooser has the strings that its bits say."""
    return bool((strings == np.where(bits[:, None] == 1, one, zero)).all())
