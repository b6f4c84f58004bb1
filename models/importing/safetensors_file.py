"""Writer of a safetensors file, tensor by tensor and piece by piece, to bound the memory it needs.

Source: the format of github.com/huggingface/safetensors: the header's length, the header, the data.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

BYTES_OF = {"F32": 4, "F16": 2, "BF16": 2}


class Stored(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterator[bytes]


def write_safetensors(path: Path, tensors: Sequence[Stored]) -> None:
    """Write the tensors in order. OSError when that fails."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + BYTES_OF[tensor.dtype] * math.prod(tensor.shape)
        described[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        for tensor in tensors:
            written = sum(map(stream.write, tensor.pieces))
            assert written == BYTES_OF[tensor.dtype] * math.prod(tensor.shape)
