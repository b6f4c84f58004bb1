"""A model's weights on one machine of the cluster: in memory once, for all sessions there.

A holder, which is an actor of Ray's, loads the model from the same directory as the front door,
and puts the folded weights into a sealed memory file (`models.resident`). A session's process on
that machine opens the holder's file and hands it to its worker. No weight leaves the machine.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spu_llm.core.errors import InputError, WorkerError

if TYPE_CHECKING:
    from spu_llm.systems.served import Place

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True)
class ServedWeights:
    """Weights that the front door serves. `directory`: the model's, absolute; `ranges`: of
    activations, as `serve --ranges` names them; `digest`: of the folded weights
    (`models.resident`); `nbytes`: their size; `place`: folds them.
    """

    directory: Path
    ranges: Path | None
    digest: str
    nbytes: int
    place: Place


@dataclass(frozen=True)
class HeldWeights:
    """Weights in the memory of one machine: descriptor `descriptor` of process `pid` there, of
    `nbytes` bytes.
    """

    pid: int
    descriptor: int
    nbytes: int


class Holder:
    """Holds the weights of one model on its machine, for as long as its process lives."""

    def hold(self, served: ServedWeights) -> HeldWeights:
        """Load the model, and return where its weights are. InputError where this machine has not
        the model that the front door serves.
        """
        from models.hf import load_model
        from models.resident import digest
        from spu_llm.core.jax_settings import settle

        settle()
        if not served.directory.is_dir():
            raise InputError(f"there is no {served.directory}; copy the model there")
        config, params = load_model(served.directory, served.ranges, encoders=True)
        weights = served.place(params, config)
        if digest(weights) != served.digest:
            os.close(weights)
            raise InputError(
                f"{served.directory} holds other weights than at the front door; copy the model "
                "there"
            )
        return HeldWeights(os.getpid(), weights, os.fstat(weights).st_size)


def opened(held: HeldWeights) -> int:
    """Return a descriptor of weights that another process of this user and machine holds, to read
    alone; the caller closes it. WorkerError unless they are there, whole and sealed.
    """
    try:
        descriptor = os.open(f"/proc/{held.pid}/fd/{held.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise WorkerError(f"the weights in memory cannot be opened: {exc.strerror}") from None
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        whole = os.fstat(descriptor).st_size == held.nbytes
    except OSError:  # no memory file at all
        sealed = whole = False
    if not (sealed and whole):
        os.close(descriptor)
        raise WorkerError("the weights in memory are not sealed, or not whole")
    return descriptor
