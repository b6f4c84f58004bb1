"""Who goes first in a client's pool directory: completions, before what is made in the background.

    <directory>/wanted   lock that completions share, from before they use it to their end
    <directory>/making   lock of the one that makes in the background, or is about to

Each takes its own lock first and then looks at the other's, so that of two that begin at once at
least one sees the other. A process that dies, however it does, loses its lock: no claim is left
behind. What belongs to whom in a peer's folder is another lock's business (spu_llm.offline.files).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spu_llm.core.errors import PoolError, WantedError
from spu_llm.offline.access import failures, is_locked, take_lock
from spu_llm.offline.files import IN_USE
from spu_llm.offline.peer_directories import open_directory

WAIT_S = 30.0  # for what is made in the background to end; it takes a few seconds
_LOOK_S = 0.1


@contextmanager
def going_first(directory: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Let nothing be made in the background in `directory`, which is made if need be, during the
    block.

    on_wait() is called if something is being made, before it is waited for; PoolError after WAIT_S.
    """
    with _held(directory, "wanted", shared=True):
        deadline = time.monotonic() + WAIT_S
        waits = False
        while _is_made(directory):
            if time.monotonic() > deadline:
                raise PoolError(
                    f"{directory} {IN_USE}, which makes correlated randomness and did not end "
                    f"within {WAIT_S:g} s"
                )
            if not waits:
                on_wait()
            waits = True
            time.sleep(_LOOK_S)
        yield


@contextmanager
def in_background(directory: Path) -> Iterator[Callable[[], None]]:
    """Yield a check, to be called several times a second, that raises WantedError when a completion
    wants `directory`. Raise it at once when one does so already, or when something else is made
    there.
    """

    def look() -> None:
        if _is_wanted(directory):
            raise WantedError("a completion wants the client's pool directory")

    with _held(directory, "making"):
        look()
        yield look


def is_claimed(directory: Path) -> bool:
    """Return whether `in_background` lets nobody in."""
    return _is_wanted(directory) or _is_made(directory)


def _is_made(directory: Path) -> bool:
    with failures(directory):
        return is_locked(directory / "making")


def _is_wanted(directory: Path) -> bool:
    with failures(directory):
        return is_locked(directory / "wanted", shared=True)


@contextmanager
def _held(directory: Path, name: str, *, shared: bool = False) -> Iterator[None]:
    open_directory(directory)
    with failures(directory):
        lock = take_lock(directory / name, shared=shared)
    if lock is None:
        raise WantedError(f"{directory} {IN_USE}")
    try:
        yield
    finally:
        os.close(lock)
