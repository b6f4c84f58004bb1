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

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spu_llm.cluster.actors import NO_ROOM, Actors
from spu_llm.cluster.bridge import Dialer
from spu_llm.cluster.connection import joined
from spu_llm.cluster.holders import Holders
from spu_llm.cluster.hosting import Hosted
from spu_llm.cluster.remote_worker import RemoteWorker
from spu_llm.cluster.shared_hints import SharedHints
from spu_llm.cluster.weights import HeldWeights
from spu_llm.core.errors import BusyError, PoolError, WorkerError
from spu_llm.net.identity import OneTime
from spu_llm.offline import inbox
from spu_llm.offline.durable import open_folder
from spu_llm.offline.inbox import Parcel
from spu_llm.offline.object_store import store_of
from spu_llm.offline.stock import Budget, room_in
from spu_llm.service import agreeing, journal, programs
from spu_llm.service.admission import Admitted
from spu_llm.service.journal import Log, Record, Session
from spu_llm.service.provider import ServeOptions
from spu_llm.service.served_models import ServedModels
from spu_llm.service.supervisor import Look, SessionWorker
from spu_llm.service.task import Task
from spu_llm.service.workers import WorkersHere

ROOM_S = 15.0  # for a machine to have room for a session
START_S = 60.0  # for a process there to start its worker
_LOOK_S = 0.2


@contextmanager
def cluster_workers(address: str, options: ServeOptions, log: Log) -> Iterator[ClusterWorkers]:
    """Yield where workers run in the cluster whose head is at `address`. InputError for a cluster
    that cannot be used (`connection.joined`).
    """
    with joined(address) as ray:
        yield ClusterWorkers(Actors(ray), options, log)


class ClusterWorkers:
    """The `Workers` of a provider whose sessions run on any machine of its cluster."""

    def __init__(self, actors: Actors, options: ServeOptions, log: Log) -> None:
        self._actors, self._log = actors, log
        self._holders = Holders(actors, options)
        self._here = WorkersHere()

    def open(self, models: ServedModels) -> None:
        """Load the models on all machines that have room for them. InputError where one has other
        models, or none has room.
        """
        machines = self._holders.open(models)
        self._log(Record(journal.MACHINES, f"sessions run on {', '.join(machines)}"))

    def start(self, session: Session, admitted: Admitted, look: Look) -> SessionWorker:
        """See `Workers.start`."""
        task = admitted.task
        writes = bool(task.pool_dir is not None or admitted.writes)
        if task.program in programs.STUDIES or (writes and not _is_beside(task)):
            return self._here.start(session, admitted, look)
        self._actors.check_closed()
        self._log(journal.waiting(session))
        placing = _Placing(self._actors, self._holders, task)
        worker = placing.result(look)
        try:
            self._log(journal.placed(session, worker.machine))
        except BaseException:  # an audit file that is full
            worker.stop()
            raise
        return worker


def _is_beside(task: Task) -> bool:
    """Return whether a session makes batches beside the one that has the pool."""
    program = programs.find(task.program)
    return program.beside(agreeing.job_of(program, task).request)


def _delivery(task: Task) -> Callable[[Parcel], None] | None:
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


class _Placing:
    """The placing of one session, on a thread of its own: who waits for it looks about."""

    def __init__(self, actors: Actors, holders: Holders, task: Task) -> None:
        self._actors, self._holders, self._task = actors, holders, task
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self._worker: RemoteWorker | None = None
        self._error: BaseException | None = None

    def result(self, look: Look) -> RemoteWorker:
        """Return the worker; raise what is wrong, or what `look` raises, and then leave nothing."""
        threading.Thread(target=self._run, name="placing", daemon=True).start()
        try:
            while not self._over.wait(_LOOK_S):
                look()
        except BaseException:
            self._abandon()
            raise
        if self._error is not None:
            raise self._error
        assert self._worker is not None
        return self._worker

    def _abandon(self) -> None:
        with self._lock:
            self._abandoned = True
        if self._worker is not None:
            self._worker.stop()

    def _run(self) -> None:
        try:
            worker = self._placed()
            with self._lock:
                self._worker = worker
            if self._abandoned:
                worker.stop()
        except BaseException as exc:
            self._error = exc
        self._over.set()

    def _placed(self) -> RemoteWorker:
        """Return the worker on the first machine that has room for the session and the model.
        BusyError when there is none within ROOM_S.
        """
        model = int(self._task.own["weights"])
        until = time.monotonic() + ROOM_S
        while True:
            host = self._actors.host(self._holders.without_room(model))
            try:
                node, machine = self._place_of(host, until)
                if (held := self._holders.for_session(node, machine, model)) is not None:
                    return self._started(host, machine, held, self._holders.hints(model))
            except BaseException:
                self._actors.kill(host)
                raise
            self._actors.kill(host)

    def _place_of(self, host: Any, until: float) -> tuple[str, str]:
        """Return the node that an actor is on, and the node's address."""
        call = host.place.remote()
        while time.monotonic() < until and not self._abandoned:
            with suppress(TimeoutError):
                node, machine = self._actors.answer(call, min(0.5, until - time.monotonic()))
                return node, machine
        raise BusyError(NO_ROOM)

    def _started(
        self, host: Any, machine: str, held: HeldWeights, hints: SharedHints
    ) -> RemoteWorker:
        own = OneTime.made()
        program = programs.place_of(self._task.program)
        pool = self._task.pool_dir
        store = None if pool is None else store_of(Path(pool))
        hosted = Hosted(
            program,
            held,
            hints.folder,
            own.certificate,
            pool is not None,
            None if store is None else (store.url, store.folder),
        )
        try:
            endpoint = self._actors.answer(host.start.remote(hosted, machine), START_S)
        except TimeoutError:
            raise WorkerError(f"machine {machine} started no worker in {START_S:g} s") from None
        return RemoteWorker(
            machine,
            Dialer(own, endpoint),
            hints.key,
            lambda: self._actors.kill(host),
            _delivery(self._task),
        )
