"""Correlations to try the pool with, and a dealer: the parties show each other their masks."""

from __future__ import annotations

import hashlib

import numpy as np

from spu_llm.core.channel import Channel
from spu_llm.core.correlation import Correlation, Correlations, Form, Part, deal
from spu_llm.core.errors import PoolError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.offline.pool import Maker

TRIPLE = Correlation(
    "triple of words / 16",
    masks=(Part((), Owner.JOINT, Form.ARITH), Part((2,), Owner.JOINT, Form.ARITH)),
    results=(Part((2,), Owner.JOINT, Form.ARITH),),
    secure=lambda a, b: [a[:, None] * b],
    chunk=16,
)
GATE = Correlation(
    "gate",
    masks=(Part((1,), Owner.CLIENT, Form.BOOL), Part((3,), Owner.PROVIDER, Form.BOOL)),
    results=(Part((3,), Owner.JOINT, Form.BOOL), Part((), Owner.JOINT, Form.BOOL)),
    secure=lambda c, d: [c & d, c[:, 0] & d[:, 0] & d[:, 1]],
    chunk=11,
)
MIXED = Correlation(
    "mixture of masks",
    masks=(Part((2,), Owner.CLIENT, Form.PRIVATE),),
    results=(Part((3,), Owner.JOINT, Form.ARITH),),
    secure=lambda r: [r @ np.array([[1, -2, 3], [4, 0, -6]])],
    chunk=3,
)
CORRELATIONS = (TRIPLE, GATE, MIXED)


class Made:
    """All that was ever made: the unit (batch, index) behind what a party is handed."""

    def __init__(self) -> None:
        self.units: dict[str, tuple[str, int]] = {}

    def add(self, shares: list[list[np.ndarray]], results: list[list[np.ndarray]]) -> None:
        batch = hashlib.sha256(results[CLIENT][0].tobytes()).hexdigest()
        for rank in (CLIENT, PROVIDER):
            for i, view in enumerate(views(Correlations(shares[rank], results[rank]))):
                self.units[f"{rank} {view}"] = batch, i

    def units_of(self, rank: int, correlations: Correlations) -> list[tuple[str, int]]:
        """Return the units in `correlated randomness`; KeyError when it is not, word for word, what
        was made.
        """
        return [self.units[f"{rank} {view}"] for view in views(correlations)]


def views(correlations: Correlations) -> list[str]:
    """Return, per unit, all the words that a party has of it."""
    arrays = [*correlations.masks, *correlations.results]
    return [b"".join(x[i].tobytes() for x in arrays).hex() for i in range(len(arrays[0]))]


def refuses(correlation: Correlation, masks: list[np.ndarray]) -> list[np.ndarray]:
    """Stand in for a dealer where nothing is to be made."""
    raise PoolError("nothing more is made here")


def dealer(rank: int, channel: Channel, made: Made) -> Maker:
    """Makes chunks with the peer's dealer at the other end of `channel`."""

    def make(correlation: Correlation, masks: list[np.ndarray]) -> list[np.ndarray]:
        mine = b"".join(x.tobytes() for x in masks)
        channel.send(mine)
        data = channel.recv()
        theirs, start = [], 0
        for x in masks:
            theirs.append(np.frombuffer(data, np.uint64, x.size, start).reshape(x.shape))
            start += x.nbytes
        both = [mine, data] if rank == CLIENT else [data, mine]
        sharing = Prg(hashlib.sha256(b"".join(both)).digest())
        shares = [masks, theirs] if rank == CLIENT else [theirs, masks]
        results = deal(correlation, shares, sharing)
        made.add(shares, results)
        return results[rank]

    return make


def zeros(correlation: Correlation, masks: list[np.ndarray]) -> list[np.ndarray]:
    """Stand in for a dealer where results do not matter."""
    units = len(masks[0]) if masks else correlation.chunk
    return [np.zeros((units, *part.shape), np.uint64) for part in correlation.stored_parts(CLIENT)]
