"""Values of a GGUF file's tensors, dequantised in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from models.importing.gguf_file import GgufFile, TensorPlace
from models.importing.safetensors_file import Stored
from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

_PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_KINDS = {int(GGMLQuantizationType[name]): name for name in (*_PLAIN, *_QUANTISED)}
_PIECE = 1 << 20  # numbers at a time, as float32


def size_of(kind: int, count: int) -> int | None:
    """Return the bytes of a row of `count` numbers of a tensor type, as `read_gguf` needs it."""
    if kind not in _KINDS:
        return None
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return None if count % block else count // block * size


def stored(
    file: GgufFile,
    place: TensorPlace,
    name: str,
    order: Callable[[Any], Any] | None = None,
    multiple: int = 1,
) -> Stored:
    """Return a tensor for writing under `name`: with its own precision, or, if quantised, as
    float16, which is finer than any quantisation step. `order` reorders rows within each group of
    `multiple` rows.
    """
    dtype = _PLAIN.get(_KINDS[place.kind], "F16")
    return Stored(name, dtype, place.shape, _pieces(file.path, place, dtype, order, multiple))


def values(file: GgufFile, place: TensorPlace) -> np.ndarray:
    """Return all values of a small tensor, as float32."""
    with open(file.path, "rb") as stream:
        stream.seek(place.start)
        return _numbers(file.path, place, stream, place.size).reshape(place.shape)


def _pieces(
    path: Path, place: TensorPlace, dtype: str, order: Callable[[Any], Any] | None, multiple: int
) -> Iterator[bytes]:
    rows = math.prod(place.shape[:-1])
    row_bytes = place.size // rows
    step = max(1, _PIECE // place.shape[-1] // multiple) * multiple
    with open(path, "rb") as stream:
        stream.seek(place.start)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            numbers = _numbers(path, place, stream, count * row_bytes)
            numbers = numbers.reshape(count, place.shape[-1])
            yield _encoded(path, place, order(numbers) if order else numbers, dtype)


def _numbers(path: Path, place: TensorPlace, stream: BinaryIO, count: int) -> np.ndarray:
    """Read `count` bytes and return their numbers as float32; InputError unless all are finite."""
    kind = GGMLQuantizationType(place.kind)
    data = stream.read(count)
    if len(data) != count:
        raise InputError(f"{path} is truncated in tensor {shown(place.name)}; copy it again")
    with np.errstate(all="ignore"):  # of numbers that are refused below
        # One row: the library goes through rows in small groups.
        row = np.frombuffer(data, np.uint8)[None]
        numbers = np.asarray(dequantize(row, kind), np.float32)
    if not np.isfinite(numbers).all():
        raise InputError(
            f"{path} has NaN or infinite values in tensor {shown(place.name)}; copy it again"
        )
    return numbers


def _encoded(path: Path, place: TensorPlace, numbers: np.ndarray, dtype: str) -> bytes:
    if dtype == "F32":
        return np.ascontiguousarray(numbers, "<f4").tobytes()
    if dtype == "BF16":  # they were such: the lower half is zero
        return (np.ascontiguousarray(numbers).view("<u4") >> 16).astype("<u2").tobytes()
    with np.errstate(over="ignore"):
        halves = numbers.astype("<f2")
    if not np.isfinite(halves).all():
        raise InputError(
            f"{path} has values above 65504 in tensor {shown(place.name)}, beyond float16; use a "
            "file with float32 weights"
        )
    return halves.tobytes()
