"""Both parties of packed products, over a pair of queues; for their tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spu_llm.core.channel import CountingChannel, MemoryChannel
from spu_llm.core.correlation import Correlation, Form, Part
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.offline import rlwe
from spu_llm.offline.packed.layout import Layout, columns_apart
from spu_llm.offline.packed.products import PackedProducts
from spu_llm.offline.packed.ring import N
from tests.offline.silent_pair import RANKS, Two, Wire

NOISE = 3.24
KEY, SWITCHING = 8 * N, 3 * 12 * N  # bytes
Masks = Sequence[Sequence[np.ndarray]]  # of each party


def correlation_of(
    n: int, k: int, m: int, x: Owner = Owner.JOINT, y: Owner = Owner.JOINT
) -> Correlation:
    """X [n, k] times Y [k, m], of these holders."""
    parts = [
        Part(shape, holder, Form.ARITH if holder is Owner.JOINT else Form.PRIVATE)
        for shape, holder in (((n, k), x), ((k, m), y))
    ]
    return Correlation(
        f"packed {n} {k} {m}",
        masks=tuple(parts),
        results=(Part((n, m), Owner.JOINT, Form.ARITH),),
        secure=lambda a, b: [a @ b],
        matrices=lambda a, b: (a, b),
    )


def one_way(n: int, k: int, m: int) -> Correlation:
    """X of the client, Y of the provider, who encrypts it."""
    return correlation_of(n, k, m, Owner.CLIENT, Owner.PROVIDER)


def layouts_of(c: Correlation, masks: Masks) -> list[Layout]:
    """Return the layouts of all columns, in order."""
    assert c.matrices is not None
    x, y = c.matrices(*masks[CLIENT])
    return [of for _, of in columns_apart(len(x), x.shape[1], x.shape[2], y.shape[2])]


def layout_of(c: Correlation, masks: Masks) -> Layout:
    """Return the one of all columns together."""
    (of,) = layouts_of(c, masks)
    return of


def deviation(of: Layout) -> float:
    """Compute the deviation of the error of a product that is encrypted in one direction, as the
    table in `packed.products` has it.
    """
    g = len(of.switches)
    later = (4.0**g - 1) / 3  # what a switching adds is doubled by the steps after it
    # One word stands for a number from 0 to 2^64; several, limb by limb, are balanced around zero.
    x = 2.0**126.4 if of.is_scalar else 2.0**124.4
    return np.sqrt(
        x * NOISE**2 * of.rows * of.k / 2.0**128 * 4.0**g
        + (1 + 2 * N / 3) / 12 * (4.0**g + later)
        + 2.0**40.4 * NOISE**2 * 2 * N / 2.0**52 * later
        + NOISE**2 * 4 * N / 3
    )


class PackedTwo(Two):
    """A session of two parties."""

    def __init__(self, seed: int | None = None, common: bytes = b"session", jobs: int = 1) -> None:
        """Connect both parties; `seed` fixes their own streams, which are random without."""
        self.wires = [Wire(end) for end in MemoryChannel.pair()]
        self.products: list[Any] = [
            PackedProducts(
                rank,
                Prg.from_os() if seed is None else Prg.from_seed(seed, f"own {rank}"),
                common,
                CountingChannel(self.wires[rank]),
                jobs,
            )
            for rank in RANKS
        ]

    def draw(self, c: Correlation, units: int, seed: int = 1) -> Masks:
        return [c.draw(rank, Prg.from_seed(seed, f"masks {rank}"), units) for rank in RANKS]

    def make(self, c: Correlation, masks: Masks) -> list[np.ndarray]:
        """Shares [units, n, m], the client's and the provider's."""
        (client,), (provider,) = self.both(lambda rank, p: p.make(c, masks[rank]))  # type: ignore[call-arg]
        return [client, provider]

    def error(self, c: Correlation, masks: Masks) -> np.ndarray:
        """Return how far the sum of the shares is from the product, int64."""
        assert c.matrices is not None
        client, provider = self.make(c, masks)
        x, y = c.matrices(*(a + b for a, b in zip(*masks, strict=True)))
        return (client + provider - x @ y).view(np.int64)

    def answer(self, of: Layout, at: int = -1) -> np.ndarray:
        """Return c0 [answers, N] of the client's message number `at`."""
        return np.frombuffer(self.wires[CLIENT].sent[at], np.uint64).reshape(of.answers, N)

    def ciphertexts(self, of: Layout, at: int = -1) -> np.ndarray:
        """Return b_b [groups blocks, 2, N] of the provider's message number `at`."""
        sent = np.frombuffer(self.wires[PROVIDER].sent[at], np.uint64)
        return sent.reshape(of.groups * of.blocks, 2, N)

    def secret(self, rank: int = PROVIDER) -> np.ndarray:
        """Return s, as its transform."""
        return rlwe.transform(self.products[rank]._secret)


def as_bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)
