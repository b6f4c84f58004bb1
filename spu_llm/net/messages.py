"""Typed messages between two processes that work in the clear: objects of JSON, and arrays whose
sizes both ends know. The frames are those of `spu_llm.net.frames`.

One thread at a time uses a connection; `close` may come from any.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from spu_llm.core.errors import PeerError, WireError
from spu_llm.net.control import heard
from spu_llm.net.frames import MAX_PAYLOAD, PREAMBLE, Frame, FrameParser, Kind, encode
from spu_llm.net.identity import Certificate
from spu_llm.net.stream import ByteStream

ANSWER_S = 20.0  # for the next message, or the next part of a large one
_AT_ONCE = 256 << 10
_ARRAYS = 1  # the stream that they come on
_MAX_REASON = 2000


class TimedStream(ByteStream, Protocol):
    def recv_within(self, max_bytes: int, timeout_s: float) -> bytes:
        """Receive as `recv_some` does; PeerError when nothing comes within `timeout_s`."""
        ...

    def send_within(self, data: bytes | memoryview, timeout_s: float) -> None:
        """Send as `send_all` does; PeerError when the peer does not take it within `timeout_s`."""
        ...


class Messages:
    """A connection to `peer` ("the engine"). Every call raises PeerError, which names it, when the
    peer ends, says that it has failed, or does not come within `answer_s`.
    """

    def __init__(
        self,
        stream: TimedStream,
        peer: str,
        answer_s: float = ANSWER_S,
        certificate: Certificate | None = None,
    ) -> None:
        """Take a connection; `certificate`: of the peer, where it has one."""
        self._stream, self._peer, self.answer_s = stream, peer, answer_s
        self.certificate = certificate
        self._left_s: float | None = None  # for which this end still waits, if there is a bound
        self._parser, self._frames = FrameParser(), deque[Frame]()
        self.array_bytes = {"sent": 0, "received": 0}
        self._send(PREAMBLE)

    def allow(self, seconds: float) -> None:
        """Wait for the peer `seconds` at most in all, however much it is to send and to take, from
        here on to the next call of this.
        """
        self._left_s = seconds

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message of this kind; it may not be larger than a frame."""
        self._send(encode(Frame(Kind.CONTROL, 0, json.dumps({"type": kind, **fields}).encode())))

    def hear(self, *kinds: str) -> dict[str, Any]:
        """Return the next message, which must be of one of `kinds`."""
        frame = self._next()
        if frame.kind is not Kind.CONTROL:
            raise WireError(f"{self._peer} sent an array in place of {' or '.join(kinds)}")
        message = self._decoded(frame.payload)
        if message["type"] not in kinds:
            raise WireError(
                f"{self._peer} sent {message['type'][:80]!a} in place of {' or '.join(kinds)}"
            )
        return message

    def send(self, *arrays: np.ndarray) -> None:
        """Send arrays one after the other, as little-endian words."""
        parts = [
            np.ascontiguousarray(a, a.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
            for a in arrays
        ]
        size = sum(map(len, parts))
        self.array_bytes["sent"] += size
        if size <= MAX_PAYLOAD:  # one frame; larger ones are not copied to stand together
            parts = [memoryview(b"".join(parts))]
        for part in parts:
            for start in range(0, len(part), MAX_PAYLOAD):
                data = bytes(part[start : start + MAX_PAYLOAD])
                self._send(encode(Frame(Kind.DATA, _ARRAYS, data)))

    def take(self, *shapes: tuple[int, ...], dtype: Any = np.float32) -> list[np.ndarray]:
        """Return arrays of `shapes`, which the peer gave to one `send`."""
        kind = np.dtype(dtype).newbyteorder("<")
        flat, at = np.empty(sum(math.prod(shape) for shape in shapes), kind), 0
        data = flat.view(np.uint8).data
        while left := len(data) - at:
            frame = self._next()
            if frame.kind is Kind.CONTROL:
                message = self._decoded(frame.payload)
                raise WireError(f"{self._peer} sent {message['type'][:80]!a} in place of an array")
            if frame.kind is not Kind.DATA or not 0 < len(frame.payload) <= left:
                raise WireError(f"{self._peer} sent an array of another size")
            data[at : at + len(frame.payload)] = frame.payload
            at += len(frame.payload)
        self.array_bytes["received"] += at
        arrays, at = [], 0
        for shape in shapes:
            count = math.prod(shape)
            arrays.append(flat[at : at + count].reshape(shape).astype(dtype, copy=False))
            at += count
        return arrays

    def fail(self, reason: str) -> None:
        """Tell the peer why this end gives up, if it still reads, and close."""
        with contextlib.suppress(PeerError):
            self.say("error", reason=reason[:_MAX_REASON])
        self.close()

    def close(self) -> None:
        self._stream.close()

    def _send(self, data: bytes) -> None:
        with self._named(), self._waiting() as patience_s:
            self._stream.send_within(data, patience_s)

    def _next(self) -> Frame:
        deadline = time.monotonic() + self.answer_s
        while not self._frames:
            with self._named(), self._waiting() as patience_s:
                left_s = min(patience_s, deadline - time.monotonic())
                data = self._stream.recv_within(_AT_ONCE, left_s)
                if not data:
                    self._parser.finish()
                    raise PeerError("it has ended the connection")
                self._frames.extend(self._parser.feed(data))
        return self._frames.popleft()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[float]:
        """Yield for how many seconds to wait for the peer, and take what passes off what is left
        (`allow`).
        """
        started = time.monotonic()
        try:
            yield self.answer_s if self._left_s is None else min(self.answer_s, self._left_s)
        finally:
            if self._left_s is not None:
                self._left_s -= time.monotonic() - started

    def _decoded(self, payload: bytes) -> dict[str, Any]:
        """Return a message; PeerError when the peer says in it that it has failed."""
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError):
            raise WireError(f"{self._peer} sent a message that is not JSON") from None
        if not isinstance(message, dict) or not isinstance(message.get("type"), str):
            raise WireError(f"{self._peer} sent a message without a type")
        if message["type"] == "error":
            raise PeerError(f"{self._peer} says: {heard(str(message.get('reason')))}")
        return message

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Name the peer in a PeerError of the block."""
        try:
            yield
        except PeerError as exc:
            raise type(exc)(f"{self._peer} is lost: {exc}") from exc
