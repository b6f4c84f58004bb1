"""Transcript of the messages between the workers, as an observer of the relay's connection could
list them.

Messages of this project's channels are listed by stream and by their place in it
(`spu_llm.net.stream_channel`).

SPU's link (yacl) speaks brpc's `baidu_std`: "PRPC", body size and meta size (big-endian 32 bit),
then the body, of which the first part is the meta. Each party sends its messages as requests on the
connection that it opened; the peer's empty responses come back on the same connection. A request's
payload is a protobuf (`PushRequest`) with the sender's rank, the message's key, its bytes and, when
a message was cut into pieces of 1 MiB, the place of the piece. The key names the sub-channel,
counts within it, and ends in a number that counts all messages of the sender, so messages of two
runs can be paired. Every message is also acknowledged by one with the key "ACK".
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from spu_llm.core.errors import WireError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.net.frames import FrameParser, Kind, StreamType
from spu_llm.net.stream import ByteStream
from spu_llm.net.stream_channel import NUMBER_BYTES

_HEADER = struct.Struct(">4sII")
_MAGIC = b"PRPC"
_ACK = b"ACK\x01\x02"
_KEY_END = b"\x01\x02"  # between the name of a message and its number


@dataclass(frozen=True)
class Message:
    """One message of a worker."""

    sender: int
    name: str  # sub-channel, count within it, kind of operation
    number: int  # among all of the sender's on SPU's link, or in a channel of ours
    size: int


@dataclass(frozen=True)
class Push:
    """One request on the wire: a message or a piece of one."""

    key: bytes
    size: int


class RequestParser:
    """Parser of the requests in one direction of a brpc connection, fed in any chunks."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Push]:
        """Take the next bytes; return the requests that they complete. WireError for bytes that are
        not brpc.
        """
        self._rest += data
        requests, position = [], 0
        while len(self._rest) - position >= _HEADER.size:
            magic, body, meta = _HEADER.unpack_from(self._rest, position)
            if magic != _MAGIC or meta > body:
                raise WireError(f"the workers do not speak baidu_std; found {magic!r}")
            start = position + _HEADER.size
            if len(self._rest) < start + body:
                break
            content = bytes(self._rest[start : start + body])
            if any(number == 1 for number, _ in _fields(content[:meta])):
                requests.append(_push(content[meta:]))
            position = start + body
        del self._rest[:position]
        return requests


class SizeParser:
    """Parser of the messages' sizes in one direction of a channel of this project, fed in any
    chunks.
    """

    def __init__(self) -> None:
        self._left = NUMBER_BYTES  # to pass over: of the channel's number, or a message
        self._size = b""

    def feed(self, data: bytes) -> list[int]:
        """Take the next bytes; return the sizes of the messages that begin in them."""
        sizes, at = [], 0
        while at < len(data):
            if self._left:
                passed = min(self._left, len(data) - at)
                self._left -= passed
                at += passed
                continue
            part = data[at : at + NUMBER_BYTES - len(self._size)]
            self._size += part
            at += len(part)
            if len(self._size) == NUMBER_BYTES:
                self._left, self._size = int.from_bytes(self._size, "little"), b""
                sizes.append(self._left)
        return sizes


def _push(payload: bytes) -> Push:
    key, size = b"", 0
    for number, value in _fields(payload):
        if number == 2 and isinstance(value, bytes):
            key = value
        elif number == 3 and isinstance(value, bytes):
            size = len(value)
    return Push(key, size)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protobuf message: (number, integer or bytes)."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        if tag & 7 == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
        elif tag & 7 == 2:
            length, position = _varint(data, position)
            if position + length > len(data):
                raise WireError("a worker's message is cut off")
            yield tag >> 3, data[position : position + length]
            position += length
        else:
            raise WireError(f"a worker's message has a field of wire type {tag & 7}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data):
        byte = data[position]
        value, shift, position = value | (byte & 127) << shift, shift + 7, position + 1
        if byte < 128:
            return value, position
    raise WireError("a worker's message is cut off")


class Transcript:
    """All messages that the two workers sent each other, without acknowledgements. The messages of
    one sender are ordered by `number`.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, bytes], int] = defaultdict(int)
        self._own: dict[tuple[int, int], list[int]] = defaultdict(list)

    def add(self, sender: int, push: Push) -> None:
        """Add a request of SPU's link."""
        if not push.key.startswith(_ACK):
            self._sizes[sender, push.key] += push.size

    def add_own(self, sender: int, stream: int, sizes: list[int]) -> None:
        """Add messages of a channel of this project, by their sizes."""
        self._own[sender, stream] += sizes

    def messages(self) -> list[Message]:
        """Return the messages, the client's first, each party's in the order of sending."""
        messages = []
        for (sender, key), size in self._sizes.items():
            name, end, number = key.partition(_KEY_END)
            if not end or not number.isdigit():
                raise WireError(f"a worker's message has the key {key!r}")
            messages.append(Message(sender, name.decode("ascii"), int(number), size))
        for (sender, stream), sizes in self._own.items():
            messages += [
                Message(sender, f"channel {stream}:{i}", i, size) for i, size in enumerate(sizes)
            ]
        return sorted(messages, key=lambda m: (m.sender, m.number))


class Recorder:
    """A `ByteStream` that records what the workers send through it, at the client's end.

    It stores only names and sizes, so hours of traffic fit into memory.
    """

    def __init__(self, inner: ByteStream) -> None:
        self.transcript = Transcript()
        self._inner = inner
        # By direction: one thread sends and another one receives. They share which door a stream
        # leads to, which its first frame says.
        self._frames = {CLIENT: FrameParser(), PROVIDER: FrameParser()}
        self._doors: dict[int, bytes] = {}
        self._requests: dict[tuple[int, int], RequestParser] = {}
        self._sizes: dict[tuple[int, int], SizeParser] = {}

    def recv_some(self, max_bytes: int) -> bytes:
        data = self._inner.recv_some(max_bytes)
        self._record(PROVIDER, data)
        return data

    def send_all(self, data: bytes | memoryview) -> None:
        self._record(CLIENT, bytes(data))
        self._inner.send_all(data)

    def close(self) -> None:
        self._inner.close()

    def _record(self, sender: int, data: bytes) -> None:
        for frame in self._frames[sender].feed(data):
            at = sender, frame.stream
            if frame.kind == Kind.OPEN:
                self._doors[frame.stream] = frame.payload
            elif frame.kind == Kind.DATA and self._doors[frame.stream][0] == StreamType.LINK:
                for push in self._requests.setdefault(at, RequestParser()).feed(frame.payload):
                    self.transcript.add(sender, push)
            elif frame.kind == Kind.DATA:
                sizes = self._sizes.setdefault(at, SizeParser()).feed(frame.payload)
                self.transcript.add_own(*at, sizes)
