"""Where a provider's sessions have their workers: on this machine, unless it is told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from spu_llm.offline.object_store import store_of
from spu_llm.service import programs
from spu_llm.service.admission import Admitted
from spu_llm.service.journal import Session
from spu_llm.service.served_models import ServedModels
from spu_llm.service.supervisor import Look, SessionWorker, Worker, kept_folders


class Workers(Protocol):
    """Starts the workers of a provider's sessions, on any thread."""

    def open(self, models: ServedModels) -> None:
        """Get ready for sessions with these models. InputError when that cannot be."""

    def start(self, session: Session, admitted: Admitted, look: Look) -> SessionWorker:
        """Return a worker for a session. BusyError when there is no room for it, WorkerError when
        it cannot start. look: called while that takes time; what it raises ends the waiting.
        """


class WorkersHere:
    """Workers as processes of this machine."""

    def open(self, models: ServedModels) -> None:
        """See `Workers.open`: the weights are in memory already."""

    def start(self, session: Session, admitted: Admitted, look: Look) -> Worker:
        """See `Workers.start`."""
        task = admitted.task
        pool, hints = task.pool_dir, task.hints_dir
        assert hints is not None
        return Worker(
            programs.place_of(task.program),
            [task.own["weights"]],  # of the one model that the client asked for
            writes=[
                *kept_folders(Path(hints), None if pool is None else Path(pool)),
                *admitted.writes,
            ],
            # To see how large it is.
            lists=[*map(Path, task.own.get("disk_bytes", ()))],
            confined=task.program not in programs.STUDIES,
            objects=None if pool is None else store_of(Path(pool)),
        )
