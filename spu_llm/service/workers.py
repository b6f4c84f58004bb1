"""Where a provider's sessions have their workers: on this machine, unless it is told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from spu_llm.core.errors import SpuLlmError
from spu_llm.net.entrance import Met
from spu_llm.net.identity import Certificate, Identity
from spu_llm.net.uplink import Counters
from spu_llm.offline.object_store import store_of
from spu_llm.service import programs
from spu_llm.service.admission import Admitted
from spu_llm.service.journal import Session
from spu_llm.service.served_models import ServedModels
from spu_llm.service.supervisor import Look, SessionWorker, Worker, kept_folders


class Elsewhere(Protocol):
    """A session whose connection another machine of this party has, which supervises it: `client`
    has shown the ticket `shown` there.
    """

    client: Certificate | None
    shown: bytes

    def snapshot(self) -> Counters:
        """Return the bytes of the connection, as the machine has last said."""

    def memory_bytes(self) -> int:
        """Return the memory of the session's worker, as the machine has last said."""

    def run(
        self, session: Session, admitted: Admitted, look: Look, begin: Callable[[], None]
    ) -> None:
        """Run the session to its end; raise what ended it before. look: called all the while;
        begin: before the machine gets the task. What they raise ends the session.
        """

    def refuse(self, error: SpuLlmError) -> None:
        """Have the client told why there is no session, or why it has ended."""


class Sessions(Protocol):
    """A provider's sessions, as other ways in than its own port see them. On any thread."""

    def start(self, met: Met) -> None:
        """Answer the calls of a connection that another machine passes on, on a thread."""

    def run_elsewhere(self, one: Elsewhere) -> None:
        """Run a session that another machine has the connection of, to its end."""

    def note_stranger(self, words: str) -> None:
        """Log why a stranger was refused."""


class Workers(Protocol):
    """Starts the workers of a provider's sessions, on any thread."""

    def open(self, models: ServedModels) -> None:
        """Get ready for sessions with these models. InputError when that cannot be."""

    def listen(self, sessions: Sessions) -> None:
        """Let clients in on other ways than the provider's own port, if there are any. InputError
        when that cannot be.
        """

    def renew(self, identity: Identity | None) -> None:
        """Meet clients there as `identity` from here on, whose trust may be another."""

    def start(self, session: Session, admitted: Admitted, look: Look) -> SessionWorker:
        """Return a worker for a session. BusyError when there is no room for it, WorkerError when
        it cannot start. look: called while that takes time; what it raises ends the waiting.
        """


class WorkersHere:
    """Workers as processes of this machine."""

    def open(self, models: ServedModels) -> None:
        """See `Workers.open`: the weights are in memory already."""

    def listen(self, sessions: Sessions) -> None:
        """See `Workers.listen`: there is no other way."""

    def renew(self, identity: Identity | None) -> None:
        """See `Workers.renew`: there is no other way."""

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
