"""A batch of what is bound to nobody's weights, by the protocol that makes its kind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from spu_llm.core.channel import CountingChannel
from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import PoolError
from spu_llm.core.meter import Meter
from spu_llm.offline.ot.base import BySpu
from spu_llm.offline.ot.transfers import EXTENSION, RandomTransfers
from spu_llm.offline.packed.products import PackedProducts
from spu_llm.offline.slots.products import SlotProducts


class BatchMaker:
    """This party's half: packed products, products in slots, random transfers, and SPU for what is
    left, metered as offline wherever it falls. Used by the thread that it is made in, and by one
    that says so (`in_this_thread`).
    """

    def __init__(
        self,
        packed: PackedProducts,
        transfers: RandomTransfers,
        slots: SlotProducts,
        channel: CountingChannel,
        by_spu: BySpu,
        meter: Meter,
    ) -> None:
        """Take `channel`, which all but SPU sends on."""
        self._packed, self._transfers, self._slots = packed, transfers, slots
        self._channel, self._by_spu, self._meter = channel, by_spu, meter
        self._threads = {threading.get_ident()}

    def __call__(self, correlation: Correlation, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return what this party keeps of one chunk (`Correlation.stored`), for masks if they are
        drawn first; the peer calls its own at the same time. PoolError in a thread that may not.
        """
        if threading.get_ident() not in self._threads:
            # In merged rounds the peer may ask for it at another time, and both would wait.
            raise PoolError(f"{correlation.name}: a call takes more than its dry run found")
        with self._meter.in_phase("offline"):
            before, extensions = self._channel.traffic, len(self._transfers.extensions)
            started = time.perf_counter()
            if correlation.by_transfers is not None:
                made = correlation.by_transfers(self._transfers, correlation.chunk)
                kept = correlation.stored(self._transfers.rank, made)
                traffic = self._channel.traffic.since(before)
            elif correlation.by_slots is not None:
                made = correlation.by_slots(self._slots, correlation.chunk)
                kept = correlation.stored(self._slots.rank, made)
                traffic = self._channel.traffic.since(before)
            elif correlation.matrices is not None:
                kept = self._packed.make(correlation, masks)
                traffic = self._channel.traffic.since(before)
            else:
                kept, traffic = self._by_spu(correlation, masks)
            seconds = time.perf_counter() - started
            for one in self._transfers.extensions[extensions:]:
                # Other correlations take of it, too.
                self._meter.record("pool", EXTENSION, "", one.seconds, one.channel + one.spu)
                seconds, traffic = seconds - one.seconds, traffic.since(one.channel)
            self._meter.record("pool", correlation.name, "", seconds, traffic)
        return kept

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Let this thread make batches, too, during the block."""
        own = threading.get_ident()
        self._threads.add(own)
        try:
            yield
        finally:
            self._threads.remove(own)
