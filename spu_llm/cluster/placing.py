"""The placing of a provider's session: an actor on a machine that has room, with a worker."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spu_llm.cluster.actors import NO_ROOM, Actors
from spu_llm.cluster.bridge import Endpoint
from spu_llm.cluster.holders import Holders
from spu_llm.cluster.hosting import Hosted
from spu_llm.cluster.shared_hints import SharedHints
from spu_llm.cluster.weights import HeldWeights
from spu_llm.core.errors import BusyError, WorkerError
from spu_llm.offline.object_store import store_of
from spu_llm.service import programs
from spu_llm.service.supervisor import Look
from spu_llm.service.task import Task

ROOM_S = 15.0  # for a machine to have room for a session
START_S = 60.0  # for a process there to start its worker
_LOOK_S = 0.2


@dataclass(frozen=True)
class Place:
    """Place of a session: the machine's address, the actor there, where it is reached, and the
    model's hints.
    """

    machine: str
    host: Any
    endpoint: Endpoint
    hints: SharedHints


class Placing:
    """The placing of one session, on a thread of its own: who waits for it looks about."""

    def __init__(
        self, actors: Actors, holders: Holders, task: Task, supervisor: str, node: str | None = None
    ) -> None:
        """Take the session's task. supervisor: the certificate, in PEM form, of who supervises it.
        node: the one that it is to run on; None: any.
        """
        self._actors, self._holders, self._task = actors, holders, task
        self._supervisor, self._node = supervisor, node
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self._place: Place | None = None
        self._error: BaseException | None = None

    def result(self, look: Look) -> Place:
        """Return the place; raise what is wrong, or what `look` raises, and then leave nothing."""
        threading.Thread(target=self._run, name="placing", daemon=True).start()
        try:
            while not self._over.wait(_LOOK_S):
                look()
        except BaseException:
            self._abandon()
            raise
        if self._error is not None:
            raise self._error
        assert self._place is not None
        return self._place

    def _abandon(self) -> None:
        with self._lock:
            self._abandoned = True
        if self._place is not None:
            self._actors.kill(self._place.host)

    def _run(self) -> None:
        try:
            place = self._placed()
            with self._lock:
                self._place = place
            if self._abandoned:
                self._actors.kill(place.host)
        except BaseException as exc:
            self._error = exc
        self._over.set()

    def _placed(self) -> Place:
        """Return the first machine's place that has room for the session and the model. BusyError
        when there is none within ROOM_S.
        """
        model = int(self._task.own["weights"])
        until = time.monotonic() + ROOM_S
        while True:
            host = self._actors.host(self._holders.without_room(model), self._node)
            try:
                node, machine = self._place_of(host, until)
                if (held := self._holders.for_session(node, machine, model)) is not None:
                    return self._started(host, machine, held, self._holders.hints(model))
                if self._node is not None:
                    raise BusyError(NO_ROOM)
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

    def _started(self, host: Any, machine: str, held: HeldWeights, hints: SharedHints) -> Place:
        program = programs.place_of(self._task.program)
        pool = self._task.pool_dir
        store = None if pool is None else store_of(Path(pool))
        hosted = Hosted(
            program,
            held,
            hints.folder,
            self._supervisor,
            pool is not None,
            None if store is None else (store.url, store.folder),
        )
        try:
            endpoint = self._actors.answer(host.start.remote(hosted, machine), START_S)
        except TimeoutError:
            raise WorkerError(f"machine {machine} started no worker in {START_S:g} s") from None
        return Place(machine, host, endpoint, hints)
