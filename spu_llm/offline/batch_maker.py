"""A batch of what is bound to nobody's weights, by the protocol that makes its kind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from spu_llm.core.channel import CountingChannel, Traffic
from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import PoolError
from spu_llm.core.meter import Meter
from spu_llm.offline.packed.products import PackedProducts

# From a correlation and its masks: this party's result words, and what they cost.
Made = tuple[list[np.ndarray], Traffic]


class BatchMaker:
    """This party's half: packed products, and SPU for everything else, metered as offline wherever
    it falls. Used by the thread that it is made in, and by one that says so (`in_this_thread`).
    """

    def __init__(
        self,
        packed: PackedProducts,
        channel: CountingChannel,
        by_spu: Callable[[Correlation, Sequence[np.ndarray]], Made],
        meter: Meter,
    ) -> None:
        """Take `channel`, which packed products send on."""
        self._packed, self._channel, self._by_spu, self._meter = packed, channel, by_spu, meter
        self._threads = {threading.get_ident()}

    def __call__(self, correlation: Correlation, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return this party's result words for one chunk of masks; the peer calls its own at the
        same time. PoolError in a thread that may not.
        """
        if threading.get_ident() not in self._threads:
            # In merged rounds the peer may ask for it at another time, and both would wait.
            raise PoolError(f"{correlation.name}: a call takes more than its dry run found")
        with self._meter.in_phase("offline"):
            started = time.perf_counter()
            if correlation.matrices is not None:
                before = self._channel.traffic
                results = self._packed.make(correlation, masks)
                traffic = self._channel.traffic.since(before)
            else:
                results, traffic = self._by_spu(correlation, masks)
            seconds = time.perf_counter() - started
            self._meter.record("pool", correlation.name, "", seconds, traffic)
        return results

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Let this thread make batches, too, during the block."""
        own = threading.get_ident()
        self._threads.add(own)
        try:
            yield
        finally:
            self._threads.remove(own)
