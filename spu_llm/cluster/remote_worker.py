"""The front door's side of a session's worker on another machine of the cluster."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from spu_llm.cluster.bridge import UNHEARD_S, WORDS, BridgedSide, Dialer
from spu_llm.cluster.hosting import ENDED, EVENT, OPENED, PARCEL, TASK, TELL, USAGE, decoded
from spu_llm.core.errors import PeerError, PoolError, WorkerError
from spu_llm.net.frames import StreamType
from spu_llm.offline.inbox import Parcel
from spu_llm.service.task import Task

TIDY_S = 3.0  # for a machine to remove what it keeps of a session that has ended


class RemoteWorker:
    """A `SessionWorker` on another machine. A machine that is not heard of for UNHEARD_S, or whose
    connection ends without a last word, counts as lost: the worker has ended then.
    """

    def __init__(
        self,
        machine: str,
        dialer: Dialer,
        hints_key: bytes,
        release: Callable[[], None],
        deliver: Callable[[Parcel], None] | None = None,
    ) -> None:
        """Connect to a worker that was started. machine: as errors name it. hints_key: of the
        model's hints. release: gives up the machine's resources. deliver: stores a batch that the
        worker has made; PoolError, which ends the worker, when that cannot be. WorkerError when the
        machine cannot be reached.
        """
        self.apart = True  # what the front door reaches it by is its own
        self.killed = False
        self.machine, self._dialer, self._release = machine, dialer, release
        self._hints_key, self._deliver = hints_key, deliver
        try:
            self._framed = dialer.dial(WORDS)
        except PeerError as exc:
            release()
            raise WorkerError(
                f"machine {machine} runs a session's worker, but this one cannot connect to it: "
                f"{exc}; let machines of the cluster reach each other at any TCP port"
            ) from None
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._side: BridgedSide | None = None
        self._usage: tuple[float, int] = 0.0, 0
        self._heard_at, self._storing = time.monotonic(), False
        self._last = f"the machine that ran this session's worker was lost: {machine}"
        self._ended = threading.Event()
        self._stopping = threading.Lock()
        self._stopped = False
        threading.Thread(target=self._read, name="remote-worker", daemon=True).start()

    def side(self) -> BridgedSide:
        """See `Worker.side`."""
        assert self._side is not None, "the worker is ready"
        return self._side

    def submit(self, task: Task) -> None:
        """See `Worker.submit`."""
        self._say(TASK, asdict(task), self._hints_key.hex())

    def tell(self, **said: Any) -> None:
        """See `Worker.tell`."""
        self._say(TELL, said)

    def next_event(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next event, None after `timeout_s`; WorkerError when the worker, or its
        machine, has gone.
        """
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            if not self._storing and time.monotonic() - self._heard_at > UNHEARD_S:
                self.killed = True
                self.stop()
                raise self.death() from None
            return None
        if event is None:
            self._events.put(None)
            raise self.death()
        return event

    def cpu_s(self) -> float:
        """See `Worker.cpu_s`: as its machine has last said."""
        return 0.0 if self._ended.is_set() else self._usage[0]

    def memory_bytes(self) -> int:
        """See `Worker.memory_bytes`: as its machine has last said."""
        return 0 if self._ended.is_set() else self._usage[1]

    def death(self) -> WorkerError:
        """Return how the worker ended: for this party's eyes only."""
        return WorkerError(self._last)

    def stop(self) -> None:
        """End the worker if it still runs, and give up its machine's resources."""
        with self._stopping:
            if self._stopped:
                return
            self._stopped = True
        self._framed.close()
        if self._side is not None:
            self._side.drop()
        if self._deliver is None:
            self._release()
        else:  # the machine first removes what it has not sent
            tidied = threading.Timer(TIDY_S, self._release)
            tidied.daemon = True
            tidied.start()

    def wait(self, timeout_s: float) -> None:
        """Wait for the worker to end; stop it after `timeout_s`."""
        if not self._ended.wait(timeout_s):
            self.stop()

    def _say(self, *words: Any) -> None:
        try:
            self._framed.say(*words)
        except PeerError as exc:
            self._ended.wait(1.0)  # its last word says more
            raise self.death() from exc

    def _read(self) -> None:
        try:
            while True:
                self._hear(self._framed.hear())
        except PeerError:
            self.killed = True
        except _Ended as ended:
            self._last, self.killed = f"on machine {self.machine}: {ended.words}", ended.killed
        except Exception as exc:  # nobody else would notice that nothing is heard any more
            self._last = f"machine {self.machine} says what means nothing: {exc!r:.200}"
        self._ended.set()
        self._events.put(None)

    def _hear(self, words: list[Any]) -> None:
        self._heard_at = time.monotonic()
        match words:
            case [kind, event, ports] if kind == EVENT:
                if ports:
                    by_door = {StreamType(int(door)): tuple(pair) for door, pair in ports.items()}
                    self._side = BridgedSide(by_door, self._dialer)
                self._events.put(event)
            case [kind, cpu_s, memory] if kind == USAGE:
                self._usage = cpu_s, memory
            case [kind, door, number] if kind == OPENED and self._side is not None:
                self._side.announce(StreamType(door), number)
            case [kind, name, id_, files] if kind == PARCEL and self._deliver is not None:
                self._storing = True  # which may take a while
                try:
                    self._deliver(Parcel(str(name), str(id_), decoded(files)))
                except (PoolError, OSError) as exc:
                    raise _Ended(str(exc), False) from None
                finally:
                    self._heard_at, self._storing = time.monotonic(), False
            case [kind, last, killed] if kind == ENDED:
                raise _Ended(last, killed)
            case _:
                raise PeerError("words that mean nothing")


class _Ended(Exception):
    """The worker's machine says how it ended."""

    def __init__(self, words: str, killed: bool) -> None:
        super().__init__(words)
        self.words, self.killed = words, killed
