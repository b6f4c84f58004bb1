"""All that a protocol may touch at one party: channel, own randomness, ledger."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spu_llm.core import field
from spu_llm.core.channel import Channel, recv_exactly
from spu_llm.core.correlation import Correlation, Correlations
from spu_llm.core.errors import WireError
from spu_llm.core.integers import Factor
from spu_llm.core.ledger import Ledger
from spu_llm.core.prg import Prg
from spu_llm.core.values import Owner, Private, Public, Value, from_bytes, to_bytes


class Source(Protocol):
    """Source of units of correlated randomness: the session's supply."""

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations: ...


@dataclass
class Party:
    """One of the two parties of a running session.

    `own` is this party's secret stream: every word it sends is masked from it, or from a unit of
    `supply`, whose masks are secret, too. `common` is a stream that both parties share: it hides
    nothing. `frac_bits` is the fixed-point position of encoded floats.
    """

    rank: int
    channel: Channel
    own: Prg
    frac_bits: int
    supply: Source
    common: Prg
    ledger: Ledger = dataclasses.field(default_factory=Ledger)

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        """Take fresh units of correlated randomness, never handed out again."""
        return self.supply.take(correlation, units, fixed)

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw fresh uniform ring words of this party's own, never handed out again."""
        return self.own.words(shape)

    def send(self, words: np.ndarray) -> None:
        """Send masked ring words."""
        self.channel.send(np.ascontiguousarray(words, np.uint64).tobytes())

    def send_bytes(self, data: np.ndarray) -> None:
        """Send masked data (uint8) of a size that the peer knows."""
        self.channel.send(np.ascontiguousarray(data, np.uint8).tobytes())

    def recv_bytes(self, shape: tuple[int, ...]) -> np.ndarray:
        """Receive bytes (uint8) of a known shape; WireError when the size differs."""
        data = recv_exactly(self.channel, math.prod(shape))
        return np.frombuffer(data, np.uint8).reshape(shape)

    def recv(self, shape: tuple[int, ...]) -> np.ndarray:
        """Receive ring words of a known shape; WireError when the size differs."""
        return self.recv_bytes((8 * math.prod(shape),)).view(np.uint64).reshape(shape)

    def send_field(self, elements: np.ndarray) -> None:
        """Send masked elements of the field (`spu_llm.core.field`)."""
        self.send_bytes(to_bytes(elements, field.BITS))

    def recv_field(self, shape: tuple[int, ...]) -> np.ndarray:
        """Receive elements of the field of a known shape; WireError when the size differs, or one
        is no element.
        """
        return self.recv_bytes_and_field(0, shape)[1]

    def recv_bytes_and_field(
        self, count: int, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Receive `count` bytes and, in the same message, elements as `recv_field` does."""
        data = self.recv_bytes((count + field.BITS // 8 * math.prod(shape),))
        elements = from_bytes(data[count:], field.BITS).reshape(shape)
        if (elements >= np.uint64(field.P)).any():
            raise WireError("expected elements of the field, received larger words; session ends")
        return data[:count], elements

    def open(self, value: Value, to: Owner, label: str) -> Public | Private:
        """Open `value` to `to` through the ledger."""
        return self.ledger.open(self.channel, self.rank, value, to, label)
