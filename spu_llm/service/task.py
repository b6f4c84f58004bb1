"""What a supervisor tells its worker: how it starts, and what it runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from spu_llm.core.errors import InputError
from spu_llm.systems.program import read


@dataclass(frozen=True)
class Start:
    """The facts that a worker is given before there is a session. `program`: the place of its
    record (`programs.place_of`); `channel`, `objects`: descriptors, the latter of the door to
    object storage (`service.store_door`) if there is any; `reads`, `writes`, `lists`: files and
    directories that it may use; `confined`: whether it gives up all others, and much else.
    """

    program: str
    channel: int
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    confined: bool = True
    objects: int | None = None

    def argument(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of(argument: str) -> Start:
        return read(Start, json.loads(argument), "the worker's start is malformed")


@dataclass(frozen=True)
class Task:
    """The task that a supervisor gives its worker, as one JSON line. `agreed`: the settings of the
    session, `own`: this party's inputs by the names of their fields (`agreeing.job_of` reads both).
    """

    role: str
    program: str
    agreed: dict[str, Any]
    own: dict[str, Any]
    timeout_ms: int  # for one message of the peer's worker
    pool_dir: str | None = None  # of the peer's correlated randomness alone
    hints_dir: str | None = None  # of this peer's hints, or of the provider's for this model alone
    link: tuple[str, ...] = ()  # HOST:PORT of SPU at both workers, as this one reaches them
    messages: int = 0  # port of the provider's worker for channels (`Channels`), likewise

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def of_line(line: str) -> Task:
        """Return the task in a line; InputError for anything but a task."""
        complaint = "the worker's task is malformed"
        try:
            return read(Task, json.loads(line), complaint)
        except json.JSONDecodeError as exc:
            raise InputError(f"{complaint}: {exc}") from None
