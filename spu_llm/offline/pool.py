"""The pool of correlated randomness: made in bulk, used once, kept on disk from run to run.

A batch is one chunk, made jointly. Both parties know its id without a message: a hash of a value of
the session, the correlation's name and a running number. Each keeps its half: a key from which its
masks are drawn again, or the masks themselves, and its result words. When a session starts, the
parties tell each other how far they have used which batch (`inventory`) and keep what both have,
from the larger index on (`resume`): what only one of them may have used is burnt. Batches that were
made outside a session come by the inbox (`spu_llm.offline.inbox`).

No unit is handed out twice, however a process ends. A batch is eight slices; before the first unit
of a slice leaves this module, the whole slice is recorded on disk as used. `lease` does so for all
that a call will take, before it, so that a call does not wait for the disk. `close` puts back what
was not handed out; after a crash it is lost.

What a thief learns who copies a party's directory: the masks and results of units not yet used,
hence, with a transcript of what is sent under them later, some or all of what they hide. When a
copy may have been taken, remove the directory; the next session then drops the peer's half. Of used
units there is nothing to find: the key of a slice gives way to the next one of a one-way chain, its
results are zeroed (after a crash, when the directory is opened next), and units put back are stored
as words, not as a key that would give the used ones, too. Of a used slice its SHA-256 stays until
the batch goes; of thousands of unknown bits that confirms no guess. Gone means gone for the file
system; a disk may remember more unless it is encrypted.

When one party's directory is set back to an older copy, the peer's larger index burns what was used
since, and batches that the peer used up are dropped. When both are set back together, units are
used again, and nothing here notices: do not restore a pool from a backup, nor run a copy of a
machine against a copy of its peer. A peer that lies in its inventory can waste correlated
randomness, never make this party use a unit twice.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from spu_llm.core.correlation import Correlation, Correlations, joined
from spu_llm.core.errors import PoolError, WireError
from spu_llm.core.json_values import names_once
from spu_llm.core.prg import KEY_BYTES, Prg
from spu_llm.offline import inbox
from spu_llm.offline.batch import LABEL_BYTES, Batch, Memory, bring_all, masks_of, next_key, pack
from spu_llm.offline.files import (
    BATCH_ID,
    Files,
    Label,
    PoolDirectory,
    State,
    checksum,
    slice_units,
)
from spu_llm.offline.sealed_objects import ObjectStore

INVENTORY_BYTES = 1 << 20  # enough for MAX_BATCHES
MAX_BATCHES = 20_000  # on disk


class Maker(Protocol):
    """Runs a correlation between the two parties: the peer calls its own at the same time."""

    def __call__(self, correlation: Correlation, masks: list[np.ndarray]) -> list[np.ndarray]:
        """Return the words of one chunk that are kept (`Correlation.stored`): results for these
        masks, or masks and results where there are none before.
        """


@dataclass(frozen=True)
class Made:
    """A chunk that no pool has yet: the key of its masks, if they are drawn, and the words
    [units, words] that are kept.
    """

    label: Label
    key: bytes
    results: np.ndarray


class Pool:
    """This party's half. Both parties make and take the same units in the same order.

    `make` may run in one other thread while units are leased and taken: what it gives is in no
    batch before `add`.
    """

    def __init__(
        self,
        rank: int,
        own: Prg,
        make: Maker,
        *,
        session: bytes = b"",
        directory: Path | None = None,
        room: Callable[[], int | None] = lambda: None,
        objects: ObjectStore | None = None,
        outside: bool = False,
    ) -> None:
        """Open the pool. `session`: a secret of both parties, fresh for every pool. `directory`:
        where batches outlive the process; what is there serves after `resume`. room(): by how much
        files may grow now, None: by any number; what is beyond is lost with this process, as after
        a crash: batches are kept in memory, units are not put back. PoolError when the directory is
        in use, open to others or damaged. `objects`: object storage that has results of batches,
        and gets the results of what is added, if these are to lie `outside`.
        """
        assert session or directory is None, "batches on disk are named after their session"
        self.rank, self._own, self._make, self._session = rank, own, make, session
        self._made: dict[str, int] = {}  # chunks begun since it was opened, by name
        self._batches: dict[str, list[Batch]] = {}
        self._empty: list[Batch] = []  # to be removed when nobody waits
        self._closed = False
        self.room, self._objects, self._outside = room, objects, outside and objects is not None
        self._directory = None if directory is None else PoolDirectory(directory, rank, objects)
        self._found = [Batch(*kept) for kept in self._directory.found] if self._directory else []
        self._waiting: list[Batch] = []
        try:
            self._waiting = self._in_inbox()
        except BaseException:
            self.close()
            raise

    def inventory(self) -> bytes:
        """Return for the peer how far the batches that were on disk at the start are used."""
        return _listed([*self._found, *self._waiting])

    def resume(self, inventory: bytes) -> None:
        """Keep what the peer's `inventory` has, too; burn what either party may have used. What is
        in the inbox and not there may still arrive there.

        WireError, with nothing changed, when it is no inventory of this pool's batches.
        """
        used = _read_inventory(inventory)
        _check_used(used, [*self._found, *self._waiting])
        self._serve([*self._found, *self._taken_in(used)], used)
        self._found = []

    def arrived(self) -> bytes:
        """Return for the peer what lies in the inbox, also since the start."""
        self._waiting = self._in_inbox()
        return _listed(self._waiting)

    def take_in(self, inventory: bytes) -> None:
        """Take in what the peer's inventory of its own inbox has, too; WireError as of `resume`."""
        used = _read_inventory(inventory)
        _check_used(used, self._waiting)
        self._serve(self._taken_in(used), used)

    def _serve(self, batches: Iterable[Batch], used: Mapping[str, int]) -> None:
        """Let batches serve from the unit on that neither party has used."""
        # The ids are all that both parties know of the order.
        for batch in sorted(batches, key=lambda b: b.label.id):
            # A batch that the peer lacks has been used up there, or was never whole.
            batch.burn(used.get(batch.label.id, batch.label.units))
            if batch.left:
                self._batches.setdefault(batch.label.name, []).append(batch)

    def _in_inbox(self) -> list[Batch]:
        """Return what lies in the inbox, as far as two sessions can compare it."""
        if self._directory is None:
            return []
        own = [*self._found, *(one for some in self._batches.values() for one in some)]
        known = {batch.label.id for batch in own}
        kept = inbox.waiting(self._directory.path, self.rank, known, self._objects)
        return [Batch(*one) for one in islice(kept, max(0, MAX_BATCHES - len(known)))]

    def _taken_in(self, used: Mapping[str, int]) -> Iterator[Batch]:
        """Take in what lies in the inbox and the peer's inventory `used` has, too."""
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            assert self._directory is not None and isinstance(batch.store, Files)
            if batch.label.id in used:
                batch.store = inbox.take_in(batch.store, self._directory.path)
                yield batch
            else:
                inbox.drop_if_old(batch.store)

    def available(self, correlation: Correlation) -> int:
        """Return how many units are not yet used."""
        return sum(batch.left for batch in self._batches.get(correlation.name, ()))

    def stored_bytes(self, correlation: Correlation) -> int:
        """Return the bytes of this party's files of a correlation."""
        return sum(batch.store.size() for batch in self._batches.get(correlation.name, ()))

    def growth_bytes(self, correlation: Correlation, units: int) -> int:
        """Return by how many bytes this party's files grow, at most, when `units` units are
        prepared.
        """
        missing = max(0, units - self.available(correlation))
        return math.ceil(missing / correlation.chunk) * self._batch_bytes(correlation)

    def _batch_bytes(self, correlation: Correlation) -> int:
        """Return the bytes of a batch's files, at most, if no units are put back."""
        return 8 * correlation.stored_words(self.rank) * correlation.chunk + LABEL_BYTES

    def prepare(self, correlation: Correlation, units: int) -> None:
        """Make whole chunks until `units` units are there. PoolError when those that are there are
        of another size.
        """
        self._check_open()
        batches = self._batches.setdefault(correlation.name, [])
        for label in (batch.label for batch in batches):
            words = correlation.stored_words(self.rank)
            if label.words != words:
                where = self._directory.folder(label.name) if self._directory else "it"
                raise PoolError(
                    f"correlated randomness of {label.name} has {label.words} words a unit, not "
                    f"{words}; remove {where}"
                )
        while self.available(correlation) < units:
            self._check_places()
            self.add(self.make(correlation))

    def make(self, correlation: Correlation) -> Made:
        """Make the next chunk, for `add`; what is never added is lost."""
        name, units = correlation.name, correlation.chunk
        # Counted before it is made, so that an attempt that fails leaves no number to two chunks.
        number = self._made[name] = self._made.get(name, 0) + 1
        key = self._own.words((KEY_BYTES // 8,)).tobytes()
        step = slice_units(units)
        slices = [(start, min(start + step, units)) for start in range(0, units, step)]
        masks: list[np.ndarray] = []
        if not correlation.masks_come_out:
            drawn, at = [], key
            for start, stop in slices:
                drawn.append(correlation.draw(self.rank, masks_of(at), stop - start))
                at = next_key(at)
            masks = [np.concatenate(parts) for parts in zip(*drawn, strict=True)]
        results = pack(self._make(correlation, masks), units)
        assert results.shape[1] == correlation.stored_words(self.rank)
        label = Label(
            _batch_id(self._session, name, number),
            name,
            self.rank,
            units,
            results.shape[1],
            tuple(checksum(results[start:stop]) for start, stop in slices),
        )
        return Made(label, key, results)

    def add(self, made: Made) -> None:
        """Let units of `made` serve from now on, on disk if there is room."""
        self._check_open()
        self._check_places()
        self._remove_empty()
        label, state = made.label, State(0, 0, made.key)
        store: Files | Memory
        room = None if self._directory is None else self.room()
        size = 8 * made.results.size + LABEL_BYTES
        if self._directory is None or (room is not None and room < size):
            store = Memory(label, made.results)
        else:
            store = self._directory.add(label, made.results, state, self._outside)
        self._batches.setdefault(label.name, []).append(Batch(label, state, store))

    def lease(self, correlation: Correlation, units: int) -> None:
        """Bring the next `units` units, as far as they are there, into memory, used up on disk:
        then `take` hands them out without touching it. In memory there is nothing to wait for.
        """
        self.lease_all([(correlation, units)])

    def lease_all(self, wanted: Sequence[tuple[Correlation, int]]) -> None:
        """Lease units of several correlations, as `lease` does: what object storage has of them
        comes at once.
        """
        if self._directory is None:
            return
        self._remove_empty()
        chosen = [(kind, *one) for kind, units in wanted for one in self._next(kind, units)]
        bring_all(batch for _, batch, _ in chosen)
        for kind, batch, count in chosen:
            batch.lease(kind, count)

    def take(self, correlation: Correlation, units: int) -> Correlations:
        """Return `units` units that nobody ever gets again, not even after a crash of this
        process.
        """
        self.prepare(correlation, units)
        chosen = self._next(correlation, units)
        bring_all(batch for batch, _ in chosen)
        for batch, count in chosen:
            batch.lease(correlation, count)
        # Only now that all of them are used up on disk, the first one leaves.
        taken = [batch.take(count) for batch, count in chosen]
        batches = self._batches[correlation.name]
        self._batches[correlation.name] = [batch for batch in batches if batch.left]
        self._empty += [batch for batch in batches if not batch.left]
        if self._directory is None:
            self._remove_empty()
        return joined(taken) if taken else no_units(correlation)

    def close(self) -> None:
        """Put back what was not handed out and leave the directory to the next session."""
        if self._closed:
            return
        self._closed = True
        try:
            self._remove_empty()
            for batches in self._batches.values():
                for batch in batches:
                    batch.put_back(self.room())
        finally:
            self._batches, self._found, self._waiting = {}, [], []
            if self._directory is not None:
                self._directory.close()

    def _next(self, correlation: Correlation, units: int) -> list[tuple[Batch, int]]:
        """Return the batches that the next units are in, and how many of each."""
        chosen = []
        for batch in self._batches.get(correlation.name, ()):
            if count := min(units, batch.left):
                chosen.append((batch, count))
                units -= count
        return chosen

    def _remove_empty(self) -> None:
        """Remove batches of which all is handed out; a session that dies leaves them to the next
        one.
        """
        while self._empty:
            self._empty.pop().store.remove()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError("the pool is closed")

    def _check_places(self) -> None:
        if self._directory is not None and sum(map(len, self._batches.values())) >= MAX_BATCHES:
            raise PoolError(
                f"the pool holds {MAX_BATCHES} batches, as many as two sessions can compare; "
                "prepare fewer steps at once"
            )


def _listed(batches: Sequence[Batch]) -> bytes:
    """Return an inventory of batches; PoolError where it would be refused."""
    data = json.dumps({batch.label.id: batch.used for batch in batches}).encode()
    if len(data) > INVENTORY_BYTES:
        raise PoolError(
            f"the pool holds {len(batches)} batches, more than can be compared; remove some of them"
        )
    return data


def _check_used(used: Mapping[str, int], batches: Iterable[Batch]) -> None:
    """Raise WireError where the peer's inventory has more units used than a batch has."""
    for batch in batches:
        if used.get(batch.label.id, 0) > batch.label.units:
            raise WireError(
                f"the peer's inventory has unit {used[batch.label.id]} of a batch of "
                f"{batch.label.units}"
            )


def _batch_id(session: bytes, name: str, number: int) -> str:
    parts = [hashlib.sha256(part).digest() for part in (session, name.encode(), b"%d" % number)]
    return hashlib.sha256(b"batch" + b"".join(parts)).hexdigest()[:32]


def no_units(correlation: Correlation) -> Correlations:
    """Return correlated randomness of no units, which has the shapes of some."""
    return Correlations(
        [np.empty((0, *part.shape), np.uint64) for part in correlation.masks],
        [np.empty((0, *part.shape), np.uint64) for part in correlation.results],
    )


def _read_inventory(data: bytes) -> dict[str, int]:
    """Read a peer's inventory: batch id -> units used there. WireError for anything else."""
    if len(data) > INVENTORY_BYTES:
        raise WireError(f"the peer's inventory has {len(data)} bytes, over {INVENTORY_BYTES}")
    try:
        content = json.loads(data.decode(), object_pairs_hook=names_once, parse_int=_short_int)
    except (ValueError, RecursionError):
        raise WireError("the peer's inventory is not readable") from None
    if not isinstance(content, dict):
        raise WireError("the peer's inventory is not a table")
    for key, used in content.items():
        if not BATCH_ID.fullmatch(key):
            raise WireError("the peer's inventory has a name that is no batch")
        # A bool is an int to isinstance.
        if type(used) is not int or used < 0:
            raise WireError("the peer's inventory has an index that is no number of units")
    return content


def _short_int(digits: str) -> int:
    # Python below 3.11 spends quadratic time on long ones.
    if len(digits) > 18:
        raise ValueError("a long number")
    return int(digits)
