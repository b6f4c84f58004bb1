"""The sending half of a connection: orders, shapes, bounds and counts what goes out."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from spu_llm.net.frames import HEADER_BYTES, MAX_PAYLOAD
from spu_llm.net.shaping import NetworkShape, Shaper
from spu_llm.net.stream import ByteStream

BACKLOG_BYTES = 64 << 20


@dataclass
class Counters:
    """Totals of one connection as this side saw them.

    `wire_bytes_*` is all the connection carried, framing and control included;
    `payload_bytes_sent` only what the own worker sent the other one.
    """

    wire_bytes_sent: int = 0
    wire_bytes_received: int = 0
    payload_bytes_sent: int = 0


@dataclass(frozen=True)
class _Item:
    due: float
    frame: bytes
    payload_bytes: int


class Uplink:
    """Queues of encoded frames in front of a stream, emptied by one thread that runs `run`.

    Frames leave in the order given, except that express ones overtake the backlog. Only
    `send_data` ever blocks its caller.
    """

    def __init__(self, stream: ByteStream, shape: NetworkShape, counters: Counters) -> None:
        """Count the bytes sent in `counters`."""
        self.taken_bytes = 0  # of DATA frames, sent or waiting
        self._counters = counters
        self._stream = stream
        self._direct = shape.direct
        self._shaper = Shaper(shape)
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)  # work for the sender
        self._room = threading.Condition(self._lock)  # space for more data
        self._express: deque[_Item] = deque()
        self._backlog: deque[_Item] = deque()
        self._backlog_bytes = 0
        self._sending = True  # until the greeting is out
        self._takes_data = True
        self._closed = False

    def send_data(self, frame: memoryview) -> bool:
        """Send a DATA frame, or queue a copy, waiting while `BACKLOG_BYTES` are queued.

        Returns False, with nothing sent, once data is no longer taken. `PeerError` from the
        connection.
        """
        payload_bytes = len(frame) - HEADER_BYTES
        with self._lock:
            while self._backlog_bytes >= BACKLOG_BYTES and self._takes_data:
                self._room.wait()
            if not self._takes_data:
                return False
            self.taken_bytes += len(frame)
            idle = not (self._sending or self._backlog or self._express)
            if not (self._direct and idle):
                self._append(bytes(frame), payload_bytes)
                return True
            # Nothing is ahead and nothing is to be waited for: save the hop to the sender.
            self._sending = True
        self._stream.send_all(frame)
        with self._lock:
            self._sent(len(frame), payload_bytes)
            if self._backlog or self._express:
                self._ready.notify()
        return True

    @property
    def full(self) -> bool:
        """Return whether `send_data` has to wait."""
        return self._backlog_bytes >= BACKLOG_BYTES

    def send(self, frame: bytes) -> None:
        """Queue a frame behind the data given before it."""
        with self._lock:
            self._append(frame, 0)

    def send_express(self, frame: bytes) -> None:
        """Queue a frame ahead of all data still waiting."""
        with self._lock:
            due = self._shaper.express(len(frame), time.monotonic())
            self._express.append(_Item(due, frame, 0))
            self._ready.notify()

    def stop_data(self, *, drop: bool) -> None:
        """Take no more data; with `drop`, also forget what is queued behind the control."""
        with self._lock:
            self._takes_data = False
            if drop:
                self._backlog.clear()
                self._backlog_bytes = 0
            self._room.notify_all()

    def close(self) -> None:
        """Drop everything and let `run` return."""
        self.stop_data(drop=True)
        with self._lock:
            self._closed = True
            self._express.clear()
            self._ready.notify()

    def run(self, greeting: bytes) -> None:
        """Send `greeting`, then frames until closed. `PeerError` from the connection."""
        self._stream.send_all(greeting)
        with self._lock:
            self._sent(len(greeting), 0)
        while True:
            with self._lock:
                items = self._wait_due()
                if items is None:
                    return
                self._sending = True
            frames = [item.frame for item in items]
            self._stream.send_all(frames[0] if len(frames) == 1 else b"".join(frames))
            with self._lock:
                self._sent(sum(map(len, frames)), sum(item.payload_bytes for item in items))

    def _append(self, frame: bytes, payload_bytes: int) -> None:
        due = self._shaper.due(len(frame), time.monotonic())
        self._backlog.append(_Item(due, frame, payload_bytes))
        self._backlog_bytes += len(frame)
        if len(self._backlog) == 1:
            self._ready.notify()

    def _sent(self, wire_bytes: int, payload_bytes: int) -> None:
        self._sending = False
        self._counters.wire_bytes_sent += wire_bytes
        self._counters.payload_bytes_sent += payload_bytes

    def _wait_due(self) -> list[_Item] | None:
        while not self._closed:
            if self._sending:
                self._ready.wait()
                continue
            now = time.monotonic()
            items = self._take_due(now)
            if items:
                return items
            heads = [queue[0].due for queue in (self._express, self._backlog) if queue]
            self._ready.wait(min(heads) - now if heads else None)
        return None

    def _take_due(self, now: float) -> list[_Item]:
        """Take what is due, joined up to a size that keeps a control message from waiting."""
        items: list[_Item] = []
        size = 0
        while self._express and self._express[0].due <= now:
            items.append(self._express.popleft())
            size += len(items[-1].frame)
        while self._backlog and self._backlog[0].due <= now and size < MAX_PAYLOAD:
            items.append(self._backlog.popleft())
            size += len(items[-1].frame)
            self._backlog_bytes -= len(items[-1].frame)
        if size:
            self._room.notify_all()
        return items
