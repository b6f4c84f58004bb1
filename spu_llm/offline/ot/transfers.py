"""Random oblivious transfers for a session: strings hashed from what extensions make.

A correlated transfer v = w ^ u delta becomes a random one (`spu_llm.core.transfers`) by the hash of
`blocks`: the strings are H(w) and H(w ^ delta), the chooser's is H(v) (Ishai, Kilian, Nissim and
Petrank, CRYPTO 2003). Each row serves once; rows of one direction that are left when the other
one's are used up serve later, up to a number.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from spu_llm.core.channel import CountingChannel, Traffic, recv_exactly
from spu_llm.core.errors import WireError
from spu_llm.core.permutation import BLOCK_WORDS
from spu_llm.core.prg import Prg
from spu_llm.core.transfers import Strings
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline.ot.base import BySpu, first_stock
from spu_llm.offline.ot.code import PARAMETERS, Parameters
from spu_llm.offline.ot.extension import Extension

LEFT_OVER = 1 << 18  # rows of a direction that are kept when the other one is extended
_1 = np.uint64(1)

EXTENSION = "transfers extended"  # how meters call it


@dataclass(frozen=True)
class Cost:
    """Cost of an extension: traffic on the channel, and SPU's own for the first one."""

    seconds: float
    channel: Traffic
    spu: Traffic


class RandomTransfers:
    """This party's transfers for one session. Both parties take the same ones in the same order."""

    def __init__(
        self,
        rank: int,
        own: Prg,
        common: Prg,
        channel: CountingChannel,
        by_spu: BySpu,
        parameters: Parameters = PARAMETERS,
    ) -> None:
        """Take own: this party's secret stream; common: a fresh stream of both."""
        self.rank, self._own, self._common, self._channel = rank, own, common, channel
        self._by_spu, self._parameters = by_spu, parameters
        self.extensions: list[Cost] = []  # of each so far
        self._extension: Extension | None = None
        self._busy = False
        # By the chooser's rank: rows that are used of the extension, and what is left of earlier.
        self._used = {CLIENT: parameters.serving, PROVIDER: parameters.serving}
        self._left: dict[int, Strings] = {}

    def choose(self, count: int) -> Strings:
        """Return bits uint64 [count] of 0 or 1, and the strings they say [count, 2 words]."""
        return self._take(self.rank, count)

    def offer(self, count: int) -> Strings:
        """Return the strings for the bit 0 and for the bit 1, each [count, 2 words]."""
        return self._take(1 - self.rank, count)

    def both(self, by_client: int, by_provider: int) -> tuple[Strings, Strings]:
        """Return what `choose` does and what `offer` does, for so many transfers in which the
        client chooses and, after them, in which the provider does.
        """
        by = [self._take(CLIENT, by_client), self._take(PROVIDER, by_provider)]
        return by[self.rank], by[1 - self.rank]

    def draw(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw secret uniform words of this party's own."""
        return self._own.words(shape)

    def swap(self, own_part: np.ndarray, peers: int) -> np.ndarray:
        """Send words or bytes, if there are any, and return the peer's `peers` bytes, if any."""
        if own_part.size:
            self._channel.send(own_part.tobytes())
        data = recv_exactly(self._channel, peers) if peers else b""
        return np.frombuffer(data, np.uint8)

    def _take(self, chooser: int, count: int) -> Strings:
        pieces = []
        if chooser in self._left:
            first, second = self._left.pop(chooser)
            pieces.append((first[:count], second[:count]))
            if len(first) > count:
                self._left[chooser] = first[count:], second[count:]
            count -= len(pieces[0][0])
        while count:
            if self._used[chooser] == self._parameters.serving:
                self._extend(keep=1 - chooser)
            start = self._used[chooser]
            stop = min(start + count, self._parameters.serving)
            pieces.append(self._rows(chooser, start, stop))
            self._used[chooser] = stop
            count -= stop - start
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return self._no_rows(chooser)
        first, second = zip(*pieces, strict=True)
        return np.concatenate(first), np.concatenate(second)

    def _rows(self, chooser: int, start: int, stop: int) -> Strings:
        """Return rows of the extension, hashed."""
        assert self._extension is not None
        if chooser == self.rank:
            blocks = self._extension.chosen(start, stop)
            return blocks[:, 0] & _1, self._extension.hash(blocks)
        blocks = self._extension.sent(start, stop)
        return self._extension.hash(blocks), self._extension.hash(blocks ^ self._extension.delta)

    def _no_rows(self, chooser: int) -> Strings:
        strings = np.empty((0, BLOCK_WORDS), np.uint64)
        return (np.empty(0, np.uint64) if chooser == self.rank else strings), strings

    def _extend(self, keep: int) -> None:
        """Make the rows of both directions anew, and keep some of those that `keep` chooses in.
        WireError after an attempt that failed: what it began with may have been used.
        """
        if self._busy:
            raise WireError("random transfers have failed before; start another session")
        self._busy = True
        started, before, spu = time.perf_counter(), self._channel.traffic, Traffic()
        if self._extension is None:
            delta, stock, spu = first_stock(
                self.rank, self._own, self._channel, self._by_spu, self._parameters.stock
            )
            self._extension = Extension(
                self._own, self._common, self._channel, delta, stock, self._parameters
            )
        else:
            start = self._used[keep]
            stop = min(self._parameters.serving, start + LEFT_OVER)
            if start < stop and keep not in self._left:
                self._left[keep] = self._rows(keep, start, stop)
        self._extension.extend()
        self._used = {CLIENT: 0, PROVIDER: 0}
        channel = self._channel.traffic.since(before)
        self.extensions.append(Cost(time.perf_counter() - started, channel, spu))
        self._busy = False
