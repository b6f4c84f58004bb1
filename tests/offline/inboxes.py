"""Batches in the inboxes of two pools, from sessions other than those that have these."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spu_llm.core.channel import MemoryChannel
from spu_llm.core.prg import Prg
from spu_llm.offline import inbox
from spu_llm.offline.pool import Pool
from spu_llm.offline.sealed_objects import ObjectStore
from tests.kit.dealing import TRIPLE, dealer
from tests.offline.parties import RANKS, Parties


def folder(parties: Parties, rank: int) -> Path:
    directory = parties.directories[rank]
    assert directory is not None
    return directory


def put(
    parties: Parties,
    *ranks: int,
    session: bytes = b"beside",
    objects: Sequence[ObjectStore | None] = (None, None),
) -> None:
    """Make a batch beside the parties' pools; the parties in `ranks` put theirs into the inbox,
    with the results in `objects` if there are any.
    """
    ends = MemoryChannel.pair()
    beside = [
        Pool(rank, Prg.from_os(), dealer(rank, ends[rank], parties.made), session=session)
        for rank in RANKS
    ]
    made = [parties.threads.submit(beside[rank].make, TRIPLE) for rank in RANKS]
    for rank in RANKS:
        batch = made[rank].result()
        if rank in ranks:
            inbox.put(folder(parties, rank), batch.label, batch.key, batch.results, objects[rank])
