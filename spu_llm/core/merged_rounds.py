"""Independent protocols side by side, in merged rounds: as many as the longest of them has.

Each task runs in a thread of its own with a channel of its own. One runs at a time, in order, until
it waits for a message; when all of them wait, what they have sent leaves as one message, and the
peer's next one is handed out. Both parties give the same tasks in the same order.

The tasks may come to their next steps in another order at the other party, so they may not draw
from one shared source: the caller sees to it that they take different correlations, and gives each
a common stream of its own.
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
_PART = struct.Struct("<HI")  # task, bytes


def pack(parts: Sequence[tuple[int, bytes]]) -> bytes:
    """Pack (number of the task, data) parts into one message."""
    heads = [_COUNT.pack(len(parts)), *(_PART.pack(task, len(data)) for task, data in parts)]
    return b"".join([*heads, *(data for _, data in parts)])


def unpack(message: bytes, tasks: int) -> list[tuple[int, bytes]]:
    """Return the parts of a message to `tasks` tasks; WireError for anything else."""
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
    for task, size in heads:
        if task >= tasks:
            raise WireError(f"a merged message is for task {task} of {tasks}")
        parts.append((task, message[at : at + size]))
        at += size
    return parts


class _Abandoned(BaseException):
    """Ends a task's thread after another task has failed."""


class _Task:
    """Work in a thread of its own that runs only while its owner waits in `resume`."""

    def __init__(self, work: Callable[[Channel], Any]) -> None:
        self.traffic = Traffic()
        self.outbox: list[bytes] = []
        self.inbox: collections.deque[bytes] = collections.deque()
        self.started = self.done = self._abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self._go, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    # As the work sees it.

    def send(self, data: bytes) -> None:
        self.traffic += Traffic(sent_bytes=len(data))
        self.outbox.append(data)

    def recv(self) -> bytes:
        if not self.inbox:
            self._stop.release()
            self._go.acquire()
            if self._abandoned:
                raise _Abandoned
        data = self.inbox.popleft()
        self.traffic += Traffic(received_bytes=len(data))
        return data

    # As its owner sees it.

    @property
    def ready(self) -> bool:
        return not self.done and (bool(self.inbox) or not self.started)

    def resume(self) -> None:
        """Let the task run until it waits for a message or has ended; raise its error."""
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
            self.result = self._work(self)
        except _Abandoned:
            return
        except BaseException as exc:
            self.error = exc
        self.done = True
        self._stop.release()


def run_together(
    channel: Channel, tasks: Sequence[Callable[[Channel], Any]]
) -> tuple[list[Any], list[Traffic]]:
    """Run the tasks side by side; return their results, and the payload of each. A merged message
    counts for its first part.

    The first error of a task is raised, and the others end.
    """
    running = [_Task(work) for work in tasks]
    try:
        while True:
            for task in running:
                while task.ready:
                    task.resume()
            for i, task in enumerate(running):
                if task.done and task.inbox:
                    raise WireError(f"a message came for task {i}, which has ended")
            parts = [(i, data) for i, task in enumerate(running) for data in task.outbox]
            if parts:
                running[parts[0][0]].traffic += Traffic(sent_messages=1)
                channel.send(pack(parts))
                for task in running:
                    task.outbox.clear()
            if all(task.done for task in running):
                return [task.result for task in running], [task.traffic for task in running]
            arrived = unpack(channel.recv(), len(running))
            running[arrived[0][0]].traffic += Traffic(received_messages=1)
            for i, data in arrived:
                running[i].inbox.append(data)
    finally:
        for task in running:
            task.abandon()
