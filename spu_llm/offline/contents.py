"""Contents of a batch's files: JSON with a checksum, and arrays of words."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spu_llm.core.errors import PoolError
from spu_llm.offline.durable import opened

_JSON_BYTES = 1 << 16
# numpy reads headers with Python's parser, in which two threads disturb each other (CPython 3.11).
_parsing = threading.Lock()


def sealed(fields: dict[str, Any], owner: str = "") -> bytes:
    """Return JSON with a checksum: a flipped bit must not pass for another number."""
    text = json.dumps(fields, sort_keys=True)
    seal = hashlib.sha256((owner + text).encode()).hexdigest()
    return json.dumps({**fields, "seal": seal}, sort_keys=True).encode()


def unsealed(path: Path, owner: str = "") -> dict[str, Any]:
    with opened(path) as file:
        data = file.read(_JSON_BYTES + 1)
    try:
        fields = json.loads(data.decode())
        seal = fields.pop("seal")
        expected = json.loads(sealed(fields, owner))["seal"]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise damaged(path) from None
    if seal != expected:
        raise damaged(path)
    return fields


def header(file: BinaryIO, path: Path) -> tuple[tuple[int, ...], int]:
    """Read the shape of an array file of uint64 words, and where its words begin."""
    try:
        version = np.lib.format.read_magic(file)
        with _parsing:
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception:  # numpy raises many kinds on a bad header, some of them undocumented
        raise damaged(path) from None
    offset, size = file.tell(), os.fstat(file.fileno()).st_size
    if (
        (version, fortran, dtype, len(shape)) != ((1, 0), False, np.dtype("<u8"), 2)
        or min(shape) < 0
        or size != offset + 8 * shape[0] * shape[1]
    ):
        raise damaged(path)
    return shape, offset


def read_rows(
    path: Path, expected: tuple[int, int] | None = None, rows: tuple[int, int] | None = None
) -> np.ndarray:
    """Read rows of an array file [rows, words], all of them by default."""
    with opened(path) as file:
        shape, offset = header(file, path)
        if expected is not None and shape != expected:
            raise PoolError(f"{path} has shape {shape}, not {expected}; remove {path.parent}")
        start, stop = rows or (0, shape[0])
        file.seek(offset + 8 * shape[1] * start)
        data = file.read(8 * shape[1] * (stop - start))
    return np.frombuffer(data, np.uint64).reshape(stop - start, shape[1])


def damaged(path: Path) -> PoolError:
    return PoolError(f"{path} is damaged; remove {path.parent}")
