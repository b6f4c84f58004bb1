"""What a supervisor tells its worker: one JSON line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from spu_llm.core.errors import InputError
from spu_llm.systems.program import read


@dataclass(frozen=True)
class Task:
    """`model` and `request` as both parties agreed on them, `own`: this party's inputs, each by the
    names of its fields (`agreeing.job_of` reads them).
    """

    role: str
    program: str
    model: dict[str, Any]
    request: dict[str, Any]
    own: dict[str, Any]
    timeout_ms: int  # for one message of the peer's worker
    pool_dir: str | None = None
    addresses: tuple[str, ...] = ()  # HOST:PORT of both workers, as this one reaches them

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def of_line(line: str) -> Task:
        """InputError for anything but a task."""
        complaint = "the worker's task is malformed"
        try:
            return read(Task, json.loads(line), complaint)
        except json.JSONDecodeError as exc:
            raise InputError(f"{complaint}: {exc}") from None
