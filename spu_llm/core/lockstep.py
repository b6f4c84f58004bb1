"""Independent protocols side by side, messages merged: as many rounds as the longest of them.

Each task runs in a lane, a channel of its own. One lane runs at a time, in order, until it waits
for a message; when all of them wait, what they have sent leaves as one message, and the peer's next
one is handed out. Both parties give the same tasks in the same order.

Lanes of the two parties need not keep the same step, so tasks may not draw from one shared source:
the caller sees to it that they take different correlations, and gives each a common stream of its
own.
"""

from __future__ import annotations

import collections
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from spu_llm.core.channel import Channel, Traffic
from spu_llm.core.errors import WireError

_COUNT = struct.Struct("<H")
_PART = struct.Struct("<HI")  # lane, bytes


def pack(parts: Sequence[tuple[int, bytes]]) -> bytes:
    """One message of (lane, data) parts."""
    heads = [_COUNT.pack(len(parts)), *(_PART.pack(lane, len(data)) for lane, data in parts)]
    return b"".join([*heads, *(data for _, data in parts)])


def unpack(message: bytes, lanes: int) -> list[tuple[int, bytes]]:
    """The parts of a message to `lanes` lanes; WireError for anything else."""
    if len(message) < _COUNT.size:
        raise WireError("a merged message has no count")
    (count,) = _COUNT.unpack_from(message)
    at = _COUNT.size + count * _PART.size
    if count == 0 or len(message) < at:
        raise WireError(f"a merged message of {len(message)} bytes cannot have {count} parts")
    heads = [_PART.unpack_from(message, _COUNT.size + i * _PART.size) for i in range(count)]
    if len(message) != at + sum(size for _, size in heads):
        raise WireError("a merged message has another size than its parts")
    parts = []
    for lane, size in heads:
        if lane >= lanes:
            raise WireError(f"a merged message is for lane {lane} of {lanes}")
        parts.append((lane, message[at : at + size]))
        at += size
    return parts


class _Abandoned(BaseException):
    """Ends a lane's thread after another lane has failed."""


class _Lane:
    """A task in a thread of its own that runs only while its owner waits in `resume`."""

    def __init__(self, task: Callable[[Channel], Any]) -> None:
        self.traffic = Traffic()
        self.outbox: list[bytes] = []
        self.inbox: collections.deque[bytes] = collections.deque()
        self.started = self.done = self._abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._task = task
        self._go, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    # As the task sees it.

    def send(self, data: bytes) -> None:
        self.traffic.sent_bytes += len(data)
        self.outbox.append(data)

    def recv(self) -> bytes:
        if not self.inbox:
            self._stop.release()
            self._go.acquire()
            if self._abandoned:
                raise _Abandoned
        data = self.inbox.popleft()
        self.traffic.received_bytes += len(data)
        return data

    def close(self) -> None:
        """The channel underneath stays open."""

    # As its owner sees it.

    @property
    def ready(self) -> bool:
        return not self.done and (bool(self.inbox) or not self.started)

    def resume(self) -> None:
        """Let the task run until it waits for a message or has ended; raises its error."""
        if self.started:
            self._go.release()
        else:
            self.started = True
            self._thread.start()
        self._stop.acquire()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        if self.started and not self.done:
            self._abandoned = True
            self._go.release()

    def _run(self) -> None:
        try:
            self.result = self._task(self)
        except _Abandoned:
            return
        except BaseException as exc:
            self.error = exc
        self.done = True
        self._stop.release()


def run_together(
    channel: Channel, tasks: Sequence[Callable[[Channel], Any]]
) -> tuple[list[Any], list[Traffic]]:
    """The tasks' results, and the payload of each; a merged message counts for its first part.

    The first error of a task is raised, and the others end.
    """
    lanes = [_Lane(task) for task in tasks]
    try:
        while True:
            for lane in lanes:
                while lane.ready:
                    lane.resume()
            for i, lane in enumerate(lanes):
                if lane.done and lane.inbox:
                    raise WireError(f"a message came for lane {i}, which has ended")
            parts = [(i, data) for i, lane in enumerate(lanes) for data in lane.outbox]
            if parts:
                lanes[parts[0][0]].traffic.sent_messages += 1
                channel.send(pack(parts))
                for lane in lanes:
                    lane.outbox.clear()
            if all(lane.done for lane in lanes):
                return [lane.result for lane in lanes], [lane.traffic for lane in lanes]
            arrived = unpack(channel.recv(), len(lanes))
            lanes[arrived[0][0]].traffic.received_messages += 1
            for i, data in arrived:
                lanes[i].inbox.append(data)
    finally:
        for lane in lanes:
            lane.abandon()
