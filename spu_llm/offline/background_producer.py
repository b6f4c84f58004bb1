"""Correlated randomness of the next call, made in a thread while the present one waits for the
network.

Both parties start a thread for the same list of batches at the same place of their program, and
wait for it at the same place: the threads meet in messages of their own, on a channel of their own,
so that neither has to know how far the other party's call is. Until then nobody sees what the
thread makes; `settle` adds it to the supply. One thread at a time touches pool and products.

Nothing here depends on a secret: what is made follows from shapes (`spu_llm.compiler.dry_run`), and
from what both parties know of the course. How long it takes depends on masks as little as where
correlated randomness is made between calls; work whose duration is a secret has none beside it
(`paused`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from spu_llm.compiler.demand import Demand
from spu_llm.core.channel import Traffic
from spu_llm.core.meter import Meter
from spu_llm.offline import schedule
from spu_llm.offline.batch_maker import BatchMaker
from spu_llm.offline.supply import Supply

# A message to the peer's worker and its answer take so long, or nothing is made in the background.
# A step of the demo's model has some 250 rounds, of half of this each, and computes for under a
# second: from here on it is idle for about as long as it works. Over loopback (below 1 ms) it is
# never idle, and would only be slowed down.
ROUND_TRIP_S = 0.005

# The call goes first where both could run. A thread does not get its priority back: with more, on a
# busy machine, it would be starved while the session waits for it.
_NICENESS = 5
_LOOK_S = 0.1


class BackgroundProducer:
    """Producer of batches while a call runs, one party's half. All methods are for the session's
    own thread.
    """

    def __init__(
        self,
        supply: Supply,
        maker: BatchMaker,
        meter: Meter,
        on_batch: Callable[[int, int], None] = lambda made, total: None,
    ) -> None:
        """Take what makes the supply's batches. on_batch(made, total) hears of batches that are
        waited for.
        """
        self._supply, self._maker, self._meter, self._on_batch = supply, maker, meter, on_batch
        self._thread: threading.Thread | None = None
        self._total = 0
        self._made: list[Callable[[], None]] = []  # what adds them
        self._error: BaseException | None = None
        # How many batches were begun; whether the next one has to wait; the first one that is not.
        self._turn = threading.Condition()
        self._begun, self._held, self._end = 0, False, 0
        self._working = False  # between the begin of a batch and its end

    @property
    def running(self) -> bool:
        """Return whether something was started and not yet added, which both parties know."""
        return self._thread is not None

    def start(self, demand: Demand) -> None:
        """Begin to make what the supply lacks of `demand`; hints that this takes are fetched
        now.
        """
        assert self._thread is None
        lacking = self._supply.lacking(demand)
        self._total, self._made = schedule.batches(lacking), []
        self._begun, self._held, self._end = 0, False, 1 << 30
        if lacking:
            self._thread = threading.Thread(
                target=self._run,
                args=(self._supply.produce(lacking),),
                name="production",
                daemon=True,
            )
            self._thread.start()

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait for all that was started, in phase "offline", and add it to the supply; raises as
        `check`.
        """
        self.check()
        if self._thread is None:
            return
        with self._meter.in_phase("offline"):
            started = time.perf_counter()
            self._wait(self._thread)
            self._thread = None
            made, self._made = self._made, []
            for add in made:
                add()
            self._meter.record("wait", "material", "", time.perf_counter() - started, Traffic())
        self.check()

    def _wait(self, thread: threading.Thread) -> None:
        # Told only when there are more of them: who judges whether a session stands still takes an
        # event for progress.
        before, told = len(self._made), -1
        total = max(0, self._total - before)
        while thread.is_alive():
            made = min(len(self._made) - before, total)
            if made > told:
                told = made
                self._on_batch(made, total)
            thread.join(_LOOK_S)
        if told < total:
            self._on_batch(total, total)

    def stop(self, agree: Callable[[int], int]) -> None:
        """End the thread after the batches that either party has begun, and add these. agree(n)
        tells the peer a number and returns the peer's.
        """
        if self._thread is None:
            return
        with self._turn:
            self._held, begun = True, self._begun
        end = max(begun, agree(begun))
        with self._turn:
            self._held, self._end = False, end
            self._turn.notify_all()
        self.settle()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let this party's thread rest during the block, between two batches: beside work whose
        duration is a secret, how fast it gets on would tell it, and it would make that work late.
        """
        with self._turn:
            self._held = True
            self._turn.wait_for(lambda: not self._working)
        try:
            yield
        finally:
            with self._turn:
                self._held = False
                self._turn.notify_all()

    def _run(self, produced: Iterator[Callable[[], None]]) -> None:
        try:
            _be_nice()
            with self._meter.beside("offline"), self._maker.in_this_thread():
                while self._goes_on() and (add := next(produced, None)) is not None:
                    self._made.append(add)
        except BaseException as exc:
            self._error = exc
        finally:
            self._rest()

    def _goes_on(self) -> bool:
        """Return whether to begin another batch, once that is known."""
        self._rest()
        with self._turn:
            self._turn.wait_for(lambda: not self._held)
            if self._begun >= self._end:
                return False
            self._begun += 1
            self._working = True
            return True

    def _rest(self) -> None:
        with self._turn:
            self._working = False
            self._turn.notify_all()


def _be_nice() -> None:
    """Lower this thread's priority, and that of threads it starts; Linux has one for each."""
    own = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, own, max(os.getpriority(os.PRIO_PROCESS, own), _NICENESS))
