"""Sessions of a provider on any machine of its party's own cluster (`serve --ray`).

The front door, which is the process `serve`, keeps everything but the worker: its clients'
connections, tickets, limits and records. A session's worker runs where Ray finds room for it: cores
and memory of its own, and on each machine the memory of its model once.

What writes to the front door's disk runs at the front door, as without a cluster: a session that
has the correlated randomness in `--pool`, one with folders of the served system's own, and studies.
One that makes batches for the inbox of `--pool` runs anywhere: the front door stores them.

A cluster that grows by itself (Ray's autoscaler) sees sessions that wait as demand, since each is
an actor that waits for resources; for other tools, `--metrics` says how many wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spu_llm.cluster.actors import Actors
from spu_llm.cluster.bridge import Dialer
from spu_llm.cluster.connection import joined
from spu_llm.cluster.delivering import delivery
from spu_llm.cluster.doors import Doors
from spu_llm.cluster.holders import Holders
from spu_llm.cluster.placing import Placing
from spu_llm.cluster.remote_worker import RemoteWorker
from spu_llm.net.identity import Identity, OneTime
from spu_llm.service import agreeing, journal, programs
from spu_llm.service.admission import Admitted
from spu_llm.service.journal import Log, Record, Session
from spu_llm.service.provider import ServeOptions
from spu_llm.service.served_models import ServedModels
from spu_llm.service.supervisor import Look, SessionWorker
from spu_llm.service.workers import Sessions, WorkersHere


@contextmanager
def cluster_workers(
    address: str, options: ServeOptions, log: Log, node_port: int | None = None
) -> Iterator[ClusterWorkers]:
    """Yield where workers run in the cluster whose head is at `address`. node_port: of the doors on
    its other machines; None: there are none. InputError for a cluster that cannot be used
    (`connection.joined`).
    """
    with joined(address) as ray:
        yield ClusterWorkers(Actors(ray), options, log, node_port)


class ClusterWorkers:
    """The `Workers` of a provider whose sessions run on any machine of its cluster."""

    def __init__(
        self, actors: Actors, options: ServeOptions, log: Log, node_port: int | None = None
    ) -> None:
        self._actors, self._log = actors, log
        self._holders = Holders(actors, options)
        self._here = WorkersHere()
        self._doors: Doors | None = None
        if node_port is not None:
            self._doors = Doors(actors, self._holders, options, node_port, log)

    def open(self, models: ServedModels) -> None:
        """Load the models on all machines that have room for them. InputError where one has other
        models, or none has room.
        """
        machines = self._holders.open(models)
        self._log(Record(journal.MACHINES, f"sessions run on {', '.join(machines)}"))

    def listen(self, sessions: Sessions) -> None:
        """Open a door on each other machine, if there are to be any; see `Workers.listen`."""
        if self._doors is not None:
            self._doors.listen(sessions)

    def renew(self, identity: Identity | None) -> None:
        """See `Workers.renew`."""
        if self._doors is not None:
            self._doors.renew(identity)

    def start(self, session: Session, admitted: Admitted, look: Look) -> SessionWorker:
        """See `Workers.start`."""
        task = admitted.task
        writes = bool(task.pool_dir is not None or admitted.writes)
        if task.program in programs.STUDIES or (writes and not agreeing.makes_beside(task)):
            return self._here.start(session, admitted, look)
        self._actors.check_closed()
        self._log(journal.waiting(session))
        own = OneTime.made()
        place = Placing(self._actors, self._holders, task, own.certificate).result(look)
        worker = RemoteWorker(
            place.machine,
            Dialer(own, place.endpoint),
            place.hints.key,
            lambda: self._actors.kill(place.host),
            delivery(task),
        )
        try:
            self._log(journal.placed(session, worker.machine))
        except BaseException:  # an audit file that is full
            worker.stop()
            raise
        return worker
