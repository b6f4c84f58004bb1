"""The inbox of a peer's folder in a pool: batches made outside the session that has the pool.

Whoever makes a batch puts it here without the pool's lock, one party as the other. A session that
begins lists, in its inventory, what lies in its inbox, too; what both parties list, it takes in
(`Pool.resume`). A batch that only this party has may still be on its way at the peer, and nobody
has used it: it stays for `PATIENCE_S`, then it is dropped.

A batch is in one place at a time: in the inbox or, renamed, in the pool, which is durable before
any unit of it is used. One that was made on another machine comes as a `Parcel`, which is forgotten
there before it is sent, and is stored once here: what is lost on the way is lost, nothing comes
twice.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spu_llm.core.errors import PoolError
from spu_llm.offline.access import check, failures
from spu_llm.offline.durable import open_folder
from spu_llm.offline.files import (
    BATCH_ID,
    HALF,
    INBOX,
    KIND,
    Files,
    Label,
    State,
    batch_folders,
    batch_of,
    contents_of,
    discard,
    store,
    store_files,
)
from spu_llm.offline.opener_files import RESULTS, STORED, object_bytes, stored_in
from spu_llm.offline.sealed_objects import ObjectStore

PATIENCE_S = 3600.0  # for the peer's half of a batch to arrive, too
_FILES = ("meta.json", "state.json")  # and the results, or how they are opened


@dataclass(frozen=True)
class Parcel:
    """A batch on its way between machines of one party: who reads it knows the units' masks and
    results. `kind`, `id`: names of its folders; `files`: contents by name.
    """

    kind: str
    id: str
    files: dict[str, bytes] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its files, and of the object that they open."""
        return sum(len(data) + object_bytes(name) for name, data in self.files.items())


def put(
    folder: Path, label: Label, key: bytes, results: np.ndarray, objects: ObjectStore | None = None
) -> None:
    """Store a batch in the inbox of a peer's folder, its results in `objects` if there are any:
    whole, or not at all. PoolError when it cannot be.
    """
    inbox = folder / INBOX
    open_folder(inbox)
    store(inbox, label, results, State(0, 0, key), objects)


def waiting(
    folder: Path, rank: int, taken_in: Collection[str], objects: ObjectStore | None = None
) -> Iterator[tuple[Label, State, Files]]:
    """Yield what lies in the inbox of a peer's folder; what a crash left half is removed in time.
    `taken_in`: ids of batches in the pool, of which a power cut may have left a copy here, which is
    removed. PoolError at anything that this party did not put there whole and unused.
    """
    for path in _paths(folder):
        if HALF.fullmatch(path.name):
            if _is_old(path):
                shutil.rmtree(path, ignore_errors=True)
            continue
        if path.name in taken_in:
            discard(path)
            continue
        label, state, files = batch_of(path, rank, objects)
        if state.used or state.index or state.rest:
            raise PoolError(f"{path} is used, and no session has taken it in; remove it")
        yield label, state, files


def take_in(files: Files, folder: Path) -> Files:
    """Move a batch from the inbox of a peer's folder into its pool; after a crash it is in one of
    them.
    """
    return files.moved(folder)


def drop_if_old(files: Files) -> None:
    """Remove a batch whose other half has not arrived at the peer in time."""
    if _is_old(files.folder):
        files.remove()


def hand_over(folder: Path) -> Iterator[Parcel]:
    """Yield what lies in the inbox of a peer's folder, each batch removed before it is yielded."""
    for path in _paths(folder):
        if HALF.fullmatch(path.name):
            continue  # being written
        with failures(path):
            check(path, folder=True)
            stored = stored_in(path)
            files = contents_of(path, (*_FILES, RESULTS if stored is None else stored.name))
            discard(path)
        yield Parcel(path.parent.name, path.name, files)


def deliver(folder: Path, parcel: Parcel) -> None:
    """Store a parcel in the inbox of a peer's folder: a session may take it in from then on.
    PoolError when it is no whole and unused batch, or cannot be stored.
    """
    names = KIND.fullmatch(parcel.kind) and BATCH_ID.fullmatch(parcel.id)
    rest = parcel.files.keys() - set(_FILES)
    whole = len(parcel.files) == len(_FILES) + 1 and len(rest) == 1
    if not names or not whole or not all(n == RESULTS or STORED.fullmatch(n) for n in rest):
        raise PoolError("what another machine of this party sends is no batch")
    inbox = folder / INBOX
    open_folder(inbox)
    store_files(inbox, parcel.kind, parcel.id, parcel.files)


def _paths(folder: Path) -> Iterator[Path]:
    inbox = folder / INBOX
    with failures(inbox):
        if os.path.lexists(inbox):
            check(inbox, folder=True)
            yield from batch_folders(inbox)


def _is_old(path: Path) -> bool:
    with failures(path), suppress(FileNotFoundError):  # whole by now, under another name
        return time.time() - path.stat().st_mtime > PATIENCE_S
    return False
