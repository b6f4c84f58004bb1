"""What crosses a boundary of a split model: one tensor [batch, position, width] in a message.

A header of 24 bytes, little-endian, then the values in the order of their indices:

    bytes   1  version      1  kind      1  precision      1  zero
            4  number: of the round, or of the step
            4  batch        4  positions        4  width        4  zero

Both parties know before what comes next: kind, number, shape and precision. Anything else is a
WireError, and so are values that are no finite numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import jax.numpy as jnp
import numpy as np

from spu_llm.core.channel import Channel
from spu_llm.core.errors import InputError, WireError

VERSION = 1
PRECISIONS: Mapping[str, np.dtype] = {  # in the order of their numbers on the wire, from 1 on
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(jnp.bfloat16),
}
MAX_VALUES = 1 << 26  # of a tensor, 256 MB; a message of the workers' has four times as much
_HEADER = struct.Struct("<BBBxIIIIxxxx")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """The role of a tensor that crosses the boundary."""

    UP = 1  # rows of the client's front, for the middle
    DOWN = 2  # what the middle makes of them
    GRADIENT_UP = 3  # of a loss, by the rows that came down
    GRADIENT_DOWN = 4  # of the same, by the rows that went up
    END = 5  # the client's: no rows, the text is over


@dataclass(frozen=True)
class Boundary:
    """A kind of tensor of one model at a chosen precision, up to its number and shape."""

    width: int
    precision: str

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InputError(
                f"--precision must be one of {', '.join(PRECISIONS)}, found {self.precision!r}"
            )

    @property
    def dtype(self) -> np.dtype:
        return PRECISIONS[self.precision]

    @property
    def _number(self) -> int:
        return 1 + list(PRECISIONS).index(self.precision)

    def encode(self, kind: Kind, number: int, rows: np.ndarray) -> bytes:
        """Encode `rows` float32 [batch, position, width], rounded. InputError when they are no
        finite numbers at this precision.
        """
        batch, positions, width = rows.shape
        assert width == self.width and rows.size <= MAX_VALUES
        with np.errstate(over="ignore"):  # found next
            values = np.ascontiguousarray(rows, np.float32).astype(self.dtype)
        if not _finite(values):
            raise InputError(
                f"values at the boundary of the model are no {self.precision} numbers; give a "
                "--precision with a wider range, float32 or bfloat16, and when tuning a lower "
                "--learning-rate"
            )
        header = (VERSION, kind, self._number, number, batch, positions, width)
        return _HEADER.pack(*header) + values.tobytes()

    def decode(
        self, data: bytes, kind: Kind, number: int, batch: int, positions: int
    ) -> np.ndarray:
        """Return a message's rows float32 [batch, position, width]; WireError for anything else."""
        shape = (batch, positions, self.width)
        wanted = _HEADER.pack(VERSION, kind, self._number, number, *shape)
        size = batch * positions * self.width * self.dtype.itemsize
        if len(data) != HEADER_BYTES + size:
            raise WireError(
                f"a message at the boundary has {len(data)} bytes, expected {HEADER_BYTES + size}"
            )
        if data[:HEADER_BYTES] != wanted:
            raise WireError(
                f"a message at the boundary says {_said(data)}, expected {_said(wanted)}"
            )
        values = np.frombuffer(data, self.dtype, offset=HEADER_BYTES)
        if not _finite(values):
            raise WireError("a message at the boundary has values that are no finite numbers")
        return values.astype(np.float32).reshape(shape)

    def send(self, channel: Channel, kind: Kind, number: int, rows: np.ndarray) -> None:
        """Send rows in a message; see `encode`."""
        channel.send(self.encode(kind, number, rows))

    def recv(
        self, channel: Channel, kind: Kind, number: int, batch: int, positions: int
    ) -> np.ndarray:
        """Receive the rows of a message; see `decode`."""
        return self.decode(channel.recv(), kind, number, batch, positions)

    def recv_rows(
        self, channel: Channel, number: int, batch: int, positions: int
    ) -> np.ndarray | None:
        """Receive rows that go up, or None where the client says that the text is over."""
        data = channel.recv()
        if len(data) == HEADER_BYTES:
            self.decode(data, Kind.END, number, 0, 0)
            return None
        return self.decode(data, Kind.UP, number, batch, positions)

    def send_end(self, channel: Channel, number: int) -> None:
        """Tell the peer that the text is over."""
        self.send(channel, Kind.END, number, np.zeros((0, 0, self.width), np.float32))


def _finite(values: np.ndarray) -> bool:
    # Not the sum of the values: it may be infinite where none of them is.
    return bool(np.all(np.isfinite(values)))


def _said(data: bytes) -> str:
    version, kind, precision, number, *shape = _HEADER.unpack(data[:HEADER_BYTES])
    named = kind in set(Kind) and Kind(kind).name.lower().replace("_", " ")
    return f"version {version}, {named or kind}, precision {precision}, number {number}, {shape}"
