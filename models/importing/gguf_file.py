"""Reader of the header of a GGUF file: its fields, and the places of its tensors.

The file may come from anybody. Every count and length is checked against the rest of the file
before it is used; tensors must lie within the file and must not overlap, so that a short file
cannot describe a large model. Only the header is read here and held in memory.

Source: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from spu_llm.core.errors import InputError
from spu_llm.core.json_values import shown

_VERSIONS = (2, 3)
_ALIGNMENT = 32  # unless a field says otherwise
_MOST_FIELDS = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_DIMENSIONS = 4
_MOST_ELEMENTS = 1 << 22  # of a field: vocabularies and their merges have fewer
_LONGEST_NAME = 256  # bytes
_LONGEST_STRING = 1 << 20  # bytes

# Type numbers of fields.
_SCALARS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4"))) | {
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class TensorPlace(NamedTuple):
    """Place, shape and type of a tensor in a file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """Fields and tensors of a GGUF file."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, TensorPlace] = field(default_factory=dict)


def read_gguf(path: Path, size_of: Callable[[int, int], int | None]) -> GgufFile:
    """Read the header of a GGUF file. InputError, which names the field or the tensor, when it is
    damaged.

    size_of(kind, n): bytes of a row of n elements of a tensor type, None for an unknown type or one
    that has no rows of n elements.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise InputError(f"{path} is not a file; give a GGUF file")
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            return _Header(path, stream, size, size_of).read()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


class _Header:
    """Reader of a header, from its beginning to its end."""

    def __init__(
        self, path: Path, stream: BinaryIO, size: int, size_of: Callable[[int, int], int | None]
    ) -> None:
        self._path, self._stream, self._left = path, stream, size
        self._size, self._size_of = size, size_of
        self._what = "header"  # what is being read

    def read(self) -> GgufFile:
        if self._left < 4 or self._take(4) != b"GGUF":
            raise InputError(f"{self._path} is no GGUF file; give the model's .gguf file")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise InputError(
                f"{self._path} is of GGUF version {version}; only 2 and 3, of little-endian "
                "machines, are supported"
            )
        tensors, count = self._number("<Q"), self._number("<Q")
        if count > _MOST_FIELDS or tensors > _MOST_TENSORS:
            raise self._fault(f"counts {count} fields and {tensors} tensors")
        fields: dict[str, Any] = {}
        for i in range(count):
            self._what = f"field {i}"
            name = self._string(_LONGEST_NAME)
            self._what = f"field {shown(name)}"
            if name in fields:
                raise self._fault("is there twice")
            fields[name] = self._value(self._number("<I"))
        places = [self._place(i) for i in range(tensors)]
        alignment = fields.get("general.alignment", _ALIGNMENT)
        self._what = 'field "general.alignment"'
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise self._fault(f"is {shown(str(alignment))}")
        header = self._size - self._left
        return GgufFile(self._path, fields, self._laid(places, header, alignment))

    def _laid(
        self, places: list[TensorPlace], header: int, alignment: int
    ) -> dict[str, TensorPlace]:
        """Return the tensors with their starts in the file. InputError unless they lie within it
        and do not overlap.
        """
        begin = -(-header // alignment) * alignment
        laid: dict[str, TensorPlace] = {}
        end, before = begin, ""
        for place in sorted(places, key=lambda place: place.start):
            self._what = f"tensor {shown(place.name)}"
            if place.name in laid:
                raise self._fault("is there twice")
            if place.start % alignment:
                raise self._fault(f"starts at {place.start}, no multiple of {alignment}")
            moved = place._replace(start=begin + place.start)
            if moved.start < end:
                raise self._fault(f"lies over tensor {shown(before)}")
            end, before = moved.start + moved.size, place.name
            if end > self._size:
                raise self._fault("ends beyond the end of the file")
            laid[place.name] = moved
        return laid

    def _place(self, i: int) -> TensorPlace:
        """Read a tensor's place from the header; `start` counts from the first tensor."""
        self._what = f"tensor {i}"
        name = self._string(_LONGEST_NAME)
        self._what = f"tensor {shown(name)}"
        dimensions = self._number("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._fault(f"has {dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        kind, start = self._number("<I"), self._number("<Q")
        row = self._size_of(kind, shape[-1])
        if row is None:
            raise self._fault(
                f"has rows of {shape[-1]} numbers of type {kind}, which cannot be read"
            )
        size = row * math.prod(shape[:-1])
        if not 0 < size <= self._size:
            raise self._fault(f"has the shape {list(shape)}, more than the file holds")
        return TensorPlace(name, shape, kind, start, size)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string(_LONGEST_STRING)
        if kind == _ARRAY:
            return self._list()
        return self._numbers(kind, 1)[0].item()

    def _list(self) -> Any:
        kind, count = self._number("<I"), self._number("<Q")
        if count > _MOST_ELEMENTS:
            raise self._fault(f"has {count} elements")
        if kind == _STRING:
            return [self._string(_LONGEST_STRING) for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _SCALARS:
            raise self._fault(f"is of type {kind}, which is none")
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return values.view("u1") != 0 if kind == _BOOL else values

    def _string(self, longest: int) -> str:
        length = self._number("<Q")
        if length > longest:
            raise self._fault(f"has a text of {length} bytes")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._fault("has a text that is not UTF-8") from None

    def _number(self, kind: str) -> int:
        (value,) = struct.unpack(kind, self._take(struct.calcsize(kind)))
        return int(value)

    def _take(self, count: int) -> bytes:
        data = self._stream.read(count) if count <= self._left else b""
        if len(data) != count:
            raise InputError(f"{self._path} is truncated in {self._what}; copy it again")
        self._left -= count
        return data

    def _fault(self, what: str) -> InputError:
        return InputError(f"{self._path}: {self._what} {what}; copy it again")
