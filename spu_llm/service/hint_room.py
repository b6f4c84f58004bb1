"""The client's supervisor makes room for hints when its worker asks.

The worker has the folder of its own provider's hints alone, so it can neither read nor remove what
the cache (`offline.silent.cache`) has of others. Before it receives hints it tells their SHA-256
and sizes, and waits for the answer: whether they may be kept.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from spu_llm.core.errors import WorkerError
from spu_llm.offline.silent.cache import HintCache
from spu_llm.service.supervisor import Worker
from spu_llm.service.worker import ANSWER, HINTS_RECEIVED, HINTS_WANTED


class HintRoom:
    """Answers one worker; `close` it in the end."""

    def __init__(self, cache: HintCache, worker: Worker) -> None:
        self._cache, self._worker = cache, worker
        self._receiving = ExitStack()

    def heard(self, event: dict[str, Any]) -> bool:
        """Answer an event about hints; return whether it was one. InputError when the hints that
        the worker needs are more than the cache may hold, WorkerError when it asks for what are
        none.
        """
        if event["event"] not in (HINTS_WANTED, HINTS_RECEIVED):
            return False
        self.close()
        if event["event"] == HINTS_WANTED:
            wanted = _wanted(event.get("hints"))
            keep = self._receiving.enter_context(self._cache.receiving(wanted))
            self._worker.tell(**{ANSWER: keep})
        return True

    def close(self) -> None:
        """Let other sessions receive hints."""
        self._receiving.close()


def _wanted(told: Any) -> list[tuple[str, int]]:
    """Return the names and sizes of hints, from a worker that may be anybody's by now."""
    directories = (
        [
            (one[0], one[1])
            for one in told
            if isinstance(one, list)
            and len(one) == 2
            and isinstance(one[0], str)
            and type(one[1]) is int
            and one[1] > 0
        ]
        if isinstance(told, list)
        else []
    )
    if not directories or len(directories) != len(told):
        raise WorkerError("the worker asks for hints that are none")
    return directories
