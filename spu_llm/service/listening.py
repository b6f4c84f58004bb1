"""How every server listens: it meets whoever comes, and has a thread for each whom it knows."""

from __future__ import annotations

import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable

from spu_llm.core.errors import PeerError, SpuLlmError
from spu_llm.net.crowd import Crowd
from spu_llm.net.entrance import Entrance, Met

WAITING = 64  # connections to known parties that have not got yet what they came for
UNADMITTED_BYTES = 1 << 20  # of a connection for data, until there is a session
LINES = 20  # about refusals of strangers, and of each client, within so many seconds
LINES_S = 60.0
_LOOK_S = 0.25


def listen(
    entrance: Entrance,
    start: Callable[[Met], None],
    exit_with_parent: bool,
    look: Callable[[], None] = lambda: None,
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Hand each connection whose peer is known to `start`, until all is `over`. `look` is called
    periodically. PeerError when the process that started this one, and holds its standard input,
    has gone.
    """
    while not over():
        for met in entrance.wait(_LOOK_S):
            start(met)
        if exit_with_parent and select.select([0], [], [], 0)[0]:
            raise PeerError("the process that started this one has gone")
        look()


class Callers:
    """Threads, one for each connection whose peer is known, which run `serve`. Until `settled`, a
    connection takes one of `WAITING` places: a newcomer gets the place of the certificate (in the
    clear, of the address) that holds most.
    """

    def __init__(self, serve: Callable[[Met], None]) -> None:
        self._serve = serve
        self._waiting = Crowd[Met](WAITING)
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def start(self, met: Met) -> None:
        """Serve this connection, which is closed if there is no thread for it."""
        if (gone := self._waiting.enter(met, met.caller)) is not None:
            gone.tcp.close()
        thread = threading.Thread(target=self._run, args=(met,), daemon=True)
        with self._lock:
            try:
                thread.start()
            except RuntimeError:  # as many threads as this process may have
                self._waiting.leave(met)
                met.tcp.close()
                return
            self._threads.add(thread)

    def settled(self, met: Met) -> None:
        """Free the place of a connection, which has got what it came for."""
        self._waiting.leave(met)

    def join(self, seconds: float) -> None:
        """Wait for all threads, `seconds` at most."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with self._lock:
                thread = next(iter(self._threads), None)
            if thread is None:
                return
            thread.join(left)

    def _run(self, met: Met) -> None:
        try:
            self._serve(met)
        finally:
            self.settled(met)
            with self._lock:
                self._threads.discard(threading.current_thread())


class Refusals:
    """Counts refusals by who is refused, anew every `LINES_S` seconds."""

    def __init__(self) -> None:
        self._since = -LINES_S
        self._counts: Counter[Hashable] = Counter()

    def count(self, who: Hashable = None) -> int:
        """Count a refusal; return which one of `who` it is, from 1 on."""
        now = time.monotonic()
        if now - self._since >= LINES_S:
            self._since = now
            self._counts.clear()
        self._counts[who] += 1
        return self._counts[who]


class Strangers:
    """A log of why strangers are refused, bounded so that they cannot fill a disk with it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._refusals = say, Refusals()

    def refused(self, error: SpuLlmError) -> None:
        """Say why a stranger is refused, unless too many lines have said so."""
        number = self._refusals.count()
        if number < LINES:
            self._say(f"session failed: {error}")
        elif number == LINES:
            self._say(f"more strangers are refused; for {LINES_S:g} s no line says so")
