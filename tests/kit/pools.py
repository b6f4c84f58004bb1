"""Pool directories on disk: filled without SPU and without a provider, and looked into."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.offline.files import HALF, INBOX, batch_folders, load
from spu_llm.offline.peer_directories import open_directory, party_directories, peer_folders
from spu_llm.offline.pool import Pool
from tests.kit.dealing import TRIPLE, zeros

PEER = "0123456789abcdef" * 2
OTHER = PEER[::-1]


@contextmanager
def session(directory: Path, peer: str | None = None) -> Iterator[Pool]:
    """Yield the client's half of a session with a peer (the only one by default) that has all it
    has.
    """
    open_directory(directory)
    folder = directory / peer if peer is not None else peer_folders(directory)[0]
    pool = Pool(CLIENT, Prg.from_os(), zeros, session=os.urandom(16), directory=folder)
    try:
        pool.resume(pool.inventory())
        yield pool
    finally:
        pool.close()


def use_up(directory: Path, units: int) -> None:
    """Do to the client's directory what a completion does, in a pool of its own or of both
    parties.
    """
    (party,) = party_directories(directory)[:1]
    with session(party) as pool:
        pool.take(TRIPLE, units)


def batches(directory: Path, inbox: bool = False) -> dict[str, int]:
    """Return the units that are used of each batch, by its id, of all peers of a party's directory
    (a provider's: of all certificates): those in the pool, or those in the inbox.
    """
    return {
        path.name: load(path)[1].used
        for party in party_directories(directory)
        for folder in peer_folders(party)
        for place in (folder / INBOX if inbox else folder,)
        if place.is_dir()
        for path in batch_folders(place)
        if not HALF.fullmatch(path.name)
    }
