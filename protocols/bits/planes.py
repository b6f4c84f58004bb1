"""Bit-sliced words: 64 values side by side in a word, one word per bit position ("plane").

A plane of `rows` bits is `ceil(rows / 64)` words; bit r % 64 of word r // 64 belongs to row r.
"""

from __future__ import annotations

import numpy as np

_ROWS_AT_ONCE = 1 << 16  # bounds the unpacked copy (64 bytes a row)


def words_for(rows: int) -> int:
    """Return how many words a plane of `rows` bits has."""
    return (rows + 63) // 64


def bytes_for(rows: int) -> int:
    """Return how many bytes a plane of `rows` bits takes in a message."""
    return (rows + 7) // 8


def to_planes(values: np.ndarray, bits: int) -> np.ndarray:
    """Return the low `bits` bits of words [rows] as planes [bits, words_for(rows)]."""
    rows = len(values)
    planes = np.zeros((bits, words_for(rows)), np.uint64)
    used = (bits + 7) // 8
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = np.ascontiguousarray(values[start : start + _ROWS_AT_ONCE], np.uint64)
        low = part.view(np.uint8).reshape(-1, 8)[:, :used]
        unpacked = np.unpackbits(low, axis=1, count=bits, bitorder="little")
        packed = np.packbits(np.ascontiguousarray(unpacked.T), axis=1, bitorder="little")
        into = planes[:, start // 64 : start // 64 + words_for(len(part))].view(np.uint8)
        into[:, : packed.shape[1]] = packed
    return planes


def from_planes(planes: np.ndarray, rows: int) -> np.ndarray:
    """Return planes [bits, words] as words [rows]; bits above are zero."""
    values = np.zeros(rows, np.uint64)
    for start in range(0, rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, rows - start)
        packed = np.ascontiguousarray(planes[:, start // 64 : start // 64 + words_for(count)])
        unpacked = np.unpackbits(packed.view(np.uint8), axis=1, count=count, bitorder="little")
        low = np.packbits(np.ascontiguousarray(unpacked.T), axis=1, bitorder="little")
        into = values[start : start + count].view(np.uint8).reshape(-1, 8)
        into[:, : low.shape[1]] = low
    return values


def pack(bits: np.ndarray) -> np.ndarray:
    """Pack numbers 0 or 1 (any shape and integer type) into bytes [bytes_for(bits.size)]."""
    return np.packbits(bits.astype(np.uint8, copy=False).reshape(-1), bitorder="little")


def unpack(data: np.ndarray, count: int) -> np.ndarray:
    """Return the first `count` bits of bytes that begin with what `pack` gave: words [count]."""
    return np.unpackbits(data, count=count, bitorder="little").astype(np.uint64)


def to_message(planes: np.ndarray, rows: int) -> np.ndarray:
    """Return planes [..., words] as bytes [planes, bytes_for(rows)]."""
    flat = np.ascontiguousarray(planes.reshape(-1, planes.shape[-1]))
    return flat.view(np.uint8)[:, : bytes_for(rows)]


def from_message(data: np.ndarray, rows: int) -> np.ndarray:
    """Return bytes [planes, bytes_for(rows)] as planes [planes, words_for(rows)]."""
    padded = np.zeros((len(data), 8 * words_for(rows)), np.uint8)
    padded[:, : data.shape[1]] = data
    return padded.view(np.uint64)
