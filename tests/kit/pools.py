"""A client's pool directory on disk, filled without SPU and without a provider."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
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
