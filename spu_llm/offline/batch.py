"""A batch of a pool: its units, of which each leaves once.

A batch is eight slices. Before the first unit of a slice leaves this module, the whole slice is
recorded on disk as used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spu_llm.core.correlation import Correlation, Correlations, cut, joined, split
from spu_llm.core.errors import PoolError
from spu_llm.core.prg import Prg
from spu_llm.offline.files import Files, Label, State, bring, checksum

LABEL_BYTES = 2048  # of a batch's files, beside its words, at most


class Memory:
    """The results of a batch that only this process has, in place of `Files`."""

    def __init__(self, label: Label, results: np.ndarray) -> None:
        self._label, self._results = label, results

    def rows(self, index: int) -> np.ndarray:
        start, stop = self._label.bounds(index)
        return self._results[start:stop]

    def rest(self, state: State) -> np.ndarray:
        raise AssertionError("nothing is put back in memory")

    def advance(self, old: State, new: State) -> None:
        """Do nothing: the process forgets by itself."""

    def put_back(self, rest: np.ndarray, state: State) -> None:
        """Do nothing: nothing outlives the process."""

    def remove(self) -> None:
        self._results = np.empty((0, self._label.words), np.uint64)

    def size(self) -> int:
        return 0


@dataclass
class Batch:
    """Units of one chunk, from `used` on; those before `state.used` are in memory (`held`)."""

    label: Label
    state: State
    store: Files | Memory
    held: Correlations | None = None

    def __post_init__(self) -> None:
        self.used = self.state.used

    @property
    def left(self) -> int:
        return self.label.units - self.used

    def lease(self, correlation: Correlation, count: int) -> None:
        """Bring the next `count` units into memory, in whole slices, and what was put back as a
        whole; the store forgets them.
        """
        label, state = self.label, self.state
        end = min(-(-(self.used + count) // label.step) * label.step, label.units)
        if end <= state.used:
            return
        if state.rest is not None:
            end = max(end, label.bounds(state.index)[0])
        pieces = [] if self.held is None else [self.held]
        if state.rest is not None:
            pieces.append(self._rest(correlation, self.store.rest(state)))
        key, index = state.key, state.index
        while (start := label.bounds(index)[0]) < end:
            rows = self.store.rows(index)
            slice_ = correlation.from_stored(label.rank, rows, masks_of(key))
            pieces.append(cut(slice_, max(state.used - start, 0)))
            key, index = next_key(key), index + 1
        self._advance(State(end, index, key))
        self.held = joined(pieces)

    def take(self, count: int) -> Correlations:
        """Return the next units in memory. PoolError unless they are there: an operation must not
        go on with fewer.
        """
        held = self._in_memory(count)
        taken, self.held = cut(held, 0, count), cut(held, count)
        self.used += count
        if not self.left:
            self.held = None
        return taken

    def burn(self, used: int) -> None:
        """Burn the units before `used`; called before anything of the batch is in memory."""
        label, state = self.label, self.state
        if used <= state.used:
            return
        self.used = used
        if used == label.units:
            self.store.remove()
        elif state.rest is not None and used < label.bounds(state.index)[0]:
            self._advance(replace(state, used=used))
        else:
            bring_all([self])
            key, index = state.key, used // label.step
            for _ in range(state.index, index):
                key = next_key(key)
            self._advance(State(used, index, key))

    def put_back(self, room_bytes: int | None) -> None:
        """Put units in memory back into the store, if it may grow by so much (None: by any
        number).
        """
        if self.held is not None and self.used < self.state.used:
            count = self.state.used - self.used
            held = self._in_memory(count)
            rest = pack([*held.masks, *held.results], count)
            if room_bytes is None or rest.nbytes + LABEL_BYTES <= room_bytes:
                self.store.put_back(rest, replace(self.state, used=self.used, rest=checksum(rest)))
        self.held = None

    def _in_memory(self, count: int) -> Correlations:
        """Return the units that are used up on record and not handed out. PoolError unless all of
        them are in memory, `count` at least.
        """
        left = self.state.used - self.used
        if self.held is None or len(self.held.masks[0]) != left or left < count:
            raise PoolError(f"{self.label.name}: units in memory are not those on record")
        return self.held

    def _advance(self, state: State) -> None:
        self.store.advance(self.state, state)
        self.state = state

    def _rest(self, correlation: Correlation, rest: np.ndarray) -> Correlations:
        """Return what was put back, without what has been burnt since."""
        left = self.label.bounds(self.state.index)[0] - self.state.used
        parts = (*correlation.masks, *correlation.results)
        if len(rest) < left or rest.shape[1] != sum(part.size for part in parts):
            raise PoolError(f"{self.label.name}: what was put back is not what is on record")
        arrays = split(parts, rest[len(rest) - left :])
        masks = len(correlation.masks)
        return Correlations(arrays[:masks], arrays[masks:])


def bring_all(batches: Iterable[Batch]) -> None:
    """Bring results that object storage has to this party's disk. PoolError when that fails."""
    bring([(one.store, one.state) for one in batches if isinstance(one.store, Files)])


def masks_of(key: bytes) -> Prg:
    """Return the stream of masks of the slice with this key."""
    return Prg(hashlib.sha256(b"masks" + key).digest())


def next_key(key: bytes) -> bytes:
    """Return the following slice's key, which does not give this one."""
    return hashlib.sha256(b"next" + key).digest()


def pack(arrays: Sequence[np.ndarray], units: int) -> np.ndarray:
    """Return arrays [units, ...] side by side as words [units, words]."""
    flat = [np.asarray(x, np.uint64).reshape(units, -1) for x in arrays if x.size]
    return np.concatenate([np.empty((units, 0), np.uint64), *flat], axis=1)
