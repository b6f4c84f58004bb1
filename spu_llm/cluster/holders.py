"""Holders of a provider's models, one for each model and machine, as its front door sees them."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from models.resident import digest
from spu_llm.cluster.actors import Actors
from spu_llm.cluster.shared_hints import SharedHints
from spu_llm.cluster.weights import HeldWeights, ServedWeights
from spu_llm.core.errors import InputError, WorkerError
from spu_llm.service.provider import ServeOptions
from spu_llm.service.served_models import ServedModel, ServedModels

MEMORY_S = 20.0  # for a machine to have memory for a model
LOAD_S = 600.0  # for it to load the model
WAIT_S = 10.0  # for it to load the model while a session waits, which goes elsewhere then
ANSWER_S = 20.0  # for a holder that has loaded it to show life
AGAIN_S = 60.0  # until a machine that had no memory for a model is asked again
BAD_S = 600.0  # the same, of one that has another model, or cannot hold it


@dataclass(frozen=True)
class _Known:
    """A holder, and what it was asked: where it is, and to hold its model."""

    holder: Any
    place: Any
    held: Any


class Holders:
    """Starts holders where there are none; models go by the front door's descriptors of their
    weights.
    """

    def __init__(self, actors: Actors, options: ServeOptions) -> None:
        self._actors, self._options = actors, options
        self._served: dict[int, ServedWeights] = {}
        self._hints: dict[int, SharedHints] = {}
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], _Known] = {}
        self._full: dict[tuple[str, int], float] = {}  # when it is asked again

    def open(self, models: ServedModels) -> list[str]:
        """Load all models on all machines that have room, and return the machines' addresses.
        InputError where one has other models, or none has room.
        """
        self._served = {model.weights: self._weights(model) for model in models.all}
        self._hints = {model.weights: SharedHints.of(model.hints) for model in models.all}
        machines = self._actors.machines()
        for node in machines:
            for model in self._served:
                self._known_at(node, model)  # all load at a time
        ready = {
            machine
            for node, machine in machines.items()
            for model in self._served
            if self.held(node, machine, model) is not None
        }
        if not ready:
            raise InputError(
                "--ray: no machine of the cluster has a core and the memory for the model; add "
                "one, or leave --ray out"
            )
        return sorted(ready)

    def hints(self, model: int) -> SharedHints:
        """Return the hints of a model, on all machines."""
        return self._hints[model]

    def without_room(self, model: int) -> list[str]:
        """Return the nodes that lately had no memory for a model, or another one."""
        now = time.monotonic()
        with self._lock:
            return [node for (node, of), until in self._full.items() if of == model and until > now]

    def for_session(self, node: str, machine: str, model: int) -> HeldWeights | None:
        """Return where a node holds a model; None when it does not, or not yet: sessions are better
        placed elsewhere for a while.
        """
        try:
            return self.held(node, machine, model, WAIT_S)
        except TimeoutError:  # a machine that has joined loads it meanwhile
            self._leave_out(node, model, WAIT_S)
        except (InputError, WorkerError):
            self._leave_out(node, model, BAD_S)
        return None

    def held(
        self, node: str, machine: str, model: int, load_s: float = LOAD_S
    ) -> HeldWeights | None:
        """Return where a node holds a model; None when it has no memory for it. InputError where it
        has another model, which names the `machine`; WorkerError when the holder is lost again;
        TimeoutError where it still loads the model after `load_s`.
        """
        for _ in range(2):
            known = self._known_at(node, model)
            try:
                self._actors.answer(known.place, MEMORY_S)
            except (TimeoutError, WorkerError):
                self._forget(node, model, known)
                self._leave_out(node, model, AGAIN_S)
                return None
            try:
                held: HeldWeights = self._actors.answer(known.held, load_s)
            except InputError as exc:
                self._forget(node, model, known)
                raise InputError(f"machine {machine} of the cluster: {exc}") from None
            except WorkerError:
                self._forget(node, model, known)
                continue
            try:
                self._actors.answer(known.holder.place.remote(), ANSWER_S)  # it is there still
                return held
            except (TimeoutError, WorkerError):
                self._forget(node, model, known)
        raise WorkerError(f"machine {machine} of the cluster does not keep the model in memory")

    def _known_at(self, node: str, model: int) -> _Known:
        with self._lock:
            if (known := self._known.get((node, model))) is None:
                served = self._served[model]
                holder = self._actors.holder(node, served.nbytes)
                known = _Known(holder, holder.place.remote(), holder.hold.remote(served))
                self._known[node, model] = known
            return known

    def _leave_out(self, node: str, model: int, seconds: float) -> None:
        """Let no session ask a node for a model for so long."""
        with self._lock:
            self._full[node, model] = time.monotonic() + seconds

    def _forget(self, node: str, model: int, known: _Known) -> None:
        """End a holder, unless another session has done so already."""
        with self._lock:
            if self._known.get((node, model)) is not known:
                return
            del self._known[node, model]
        self._actors.kill(known.holder)

    def _weights(self, model: ServedModel) -> ServedWeights:
        ranges = self._options.ranges
        return ServedWeights(
            model.directory.absolute(),
            None if ranges is None else ranges.absolute(),
            digest(model.weights),
            os.fstat(model.weights).st_size,
            self._options.system.placing(),
        )
