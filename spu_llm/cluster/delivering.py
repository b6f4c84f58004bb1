"""Batches that a session makes on another machine come to the front door's pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from spu_llm.core.errors import PoolError
from spu_llm.offline import inbox
from spu_llm.offline.durable import open_folder
from spu_llm.offline.inbox import Parcel
from spu_llm.offline.stock import Budget, room_in
from spu_llm.service.task import Task


def delivery(task: Task) -> Callable[[Parcel], None] | None:
    """Return what stores batches of a session in the inbox of its client's folder; None where it
    makes none.
    """
    if task.pool_dir is None:
        return None
    folder = Path(task.pool_dir)
    budgets = [Budget(Path(at), limit) for at, limit in task.own["disk_bytes"].items()]

    def deliver(parcel: Parcel) -> None:
        open_folder(folder)
        room = room_in(budgets)
        if room is not None and room < parcel.nbytes:
            raise PoolError("there is no room for more correlated randomness")
        inbox.deliver(folder, parcel)

    return deliver
