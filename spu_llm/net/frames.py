"""The wire format, without any I/O.

A connection starts, in each direction, with an 8-byte preamble (6 bytes of magic, a big-endian
16-bit version). Then come frames: kind (1 byte), stream (4), payload length (4), payload.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from spu_llm.core.errors import WireError

VERSION = 5
MAX_PAYLOAD = 1 << 20
MAX_STREAM = (1 << 32) - 1

_MAGIC = b"spullm"
_HEADER = struct.Struct(">BII")
HEADER_BYTES = _HEADER.size
PREAMBLE = _MAGIC + struct.pack(">H", VERSION)
CALLS_BYTE = b"P"  # first of a connection for gRPC, in the clear: HTTP/2 begins with "PRI"

# The one-byte payload of CLOSE.
END = b"\x00"  # no more bytes from this side; the other direction stays open
ABORT = b"\x01"  # the stream is gone in both directions


class Kind(enum.IntEnum):
    """The kind of a frame's content."""

    CONTROL = 0  # stream 0: a message between the supervisors
    OPEN = 1  # a `StreamType`, one byte
    DATA = 2  # bytes of one stream
    CLOSE = 3  # END or ABORT


class StreamType(enum.IntEnum):
    """Destination of a stream at both workers."""

    LINK = 0  # to SPU
    MESSAGES = 1  # to messages of our own protocols (`spu_llm.net.stream_channel`)


_KINDS = tuple(Kind)
_DATA = int(Kind.DATA)
_DOORS = tuple(bytes([door]) for door in StreamType)


class Frame(NamedTuple):
    """One unit on the wire; `payload` holds at most `MAX_PAYLOAD` bytes."""

    kind: Kind
    stream: int
    payload: bytes = b""


def encode(frame: Frame) -> bytes:
    """Return the bytes of one frame; `WireError` when no parser would accept it."""
    _check_header(frame.kind, frame.stream, len(frame.payload))
    _check_payload(frame)
    return _HEADER.pack(frame.kind, frame.stream, len(frame.payload)) + frame.payload


def write_data_header(buffer: bytearray, stream: int, payload_bytes: int) -> None:
    """Put the header of a DATA frame at the start of `buffer`, whose payload follows it."""
    _HEADER.pack_into(buffer, 0, _DATA, stream, payload_bytes)


class FrameParser:
    """Turns the bytes of one direction, in any chunks, into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._need = len(PREAMBLE)
        self._greeted = False

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes; return the frames they complete; `WireError` on a bad one."""
        rest = self._rest
        if not self._greeted:
            rest += data
            check_preamble(bytes(rest[: len(PREAMBLE)]))
            if len(rest) < len(PREAMBLE):
                return []
            self._greeted = True
            data = bytes(rest[len(PREAMBLE) :])
            rest.clear()
            self._need = HEADER_BYTES
        if rest:
            # Growing one buffer keeps a frame that comes in small chunks linear in time.
            rest += data
            if len(rest) < self._need:
                return []
            data = bytes(rest)
            rest.clear()
        frames, used, self._need = _split(data)
        rest += memoryview(data)[used:]
        return frames

    def finish(self) -> None:
        """Say that the input ended; `WireError` unless it ended between two frames."""
        if not self._greeted:
            raise WireError("connection to the peer was lost before its first message")
        if self._rest:
            raise WireError("connection to the peer was lost inside a message")


def _split(data: bytes) -> tuple[list[Frame], int, int]:
    """Return the whole frames of `data`, the bytes they take, and what the next one needs."""
    frames: list[Frame] = []
    position = 0
    while len(data) - position >= HEADER_BYTES:
        kind, stream, length = _HEADER.unpack_from(data, position)
        is_data = kind == _DATA and stream > 0 and length <= MAX_PAYLOAD  # as most are
        if not is_data:
            _check_header(kind, stream, length)
        end = position + HEADER_BYTES + length
        if len(data) < end:
            return frames, position, end - position
        frame = Frame(_KINDS[kind], stream, data[position + HEADER_BYTES : end])
        if not is_data:
            _check_payload(frame)
        frames.append(frame)
        position = end
    return frames, position, HEADER_BYTES


def _check_header(kind: int, stream: int, length: int) -> None:
    if not 0 <= kind < len(_KINDS):
        raise WireError(f"frame of unknown kind {kind}")
    if length > MAX_PAYLOAD:
        raise WireError(f"frame of {length} bytes; at most {MAX_PAYLOAD} are allowed")
    if (kind == 0) != (stream == 0) or not 0 <= stream <= MAX_STREAM:
        raise WireError(f"{Kind(kind).name} frame on stream {stream}")


def _check_payload(frame: Frame) -> None:
    if frame.kind is Kind.OPEN and frame.payload not in _DOORS:
        raise WireError("OPEN frame without a known door")
    if frame.kind is Kind.CLOSE and frame.payload not in (END, ABORT):
        raise WireError("CLOSE frame without a known mode")


def check_preamble(start: bytes) -> None:
    """Refuse a preamble as soon as a byte differs: a peer of another kind may never send eight."""
    if start[:2] in (b"\x15\x03", b"\x16\x03"):  # an alert, a handshake
        raise WireError(
            "the peer is speaking TLS; give --identity and --trust in place of --insecure"
        )
    if not _MAGIC.startswith(start[: len(_MAGIC)]):
        raise WireError(
            f"the peer does not speak spu-llm wire version {VERSION}; it sent {start!r}"
        )
    if len(start) == len(PREAMBLE) and start != PREAMBLE:
        version = int.from_bytes(start[len(_MAGIC) :], "big")
        raise WireError(f"the peer speaks wire version {version}, this side speaks {VERSION}")
