"""A server's options, read again while it runs: on SIGHUP, and when one of their files has changed.

What holds is replaced as a whole, and only by what could be read to its end, so a certificate that
is just being written, or a file with a mistake in it, leaves all as it was and is tried again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from spu_llm.core.errors import SpuLlmError

T = TypeVar("T")

LOOK_S = 2.0  # between two looks at the files
CERTIFICATE = "certificate"  # what is said of the own one

# Of a file: None when there is none. A link is followed, since whole folders are exchanged by one.
Seen = Mapping[Path, tuple[int, ...] | None]


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """Options as they were read. `seen`: their files, looked at before. `said`: what is printed of
    them, by name, `certificate` always. `fixed`: options that differ from the ones at the start,
    and need a restart.
    """

    options: T
    seen: Seen
    said: Mapping[str, str]
    fixed: Sequence[str] = ()


class Renewal(Generic[T]):
    """Reads options again. `again` loads them, or raises why it cannot. Until one is made, SIGHUP
    ends the process as it ends others.
    """

    def __init__(
        self, first: Loaded[T], again: Callable[[], Loaded[T]], say: Callable[[str], None]
    ) -> None:
        self._held, self._again, self._say = first, again, say
        self._asked = False
        self._failed = ""  # why, the last time
        self._next = 0.0
        signal.signal(signal.SIGHUP, self._ask)

    def look(self, use: Callable[[T], None]) -> None:
        """Load the options again if there is a reason to, and hand them to `use`, which replaces
        those that hold, or raises InputError and replaces none.
        """
        now = time.monotonic()
        if now < self._next and not self._asked:
            return
        self._next, asked, self._asked = now + LOOK_S, self._asked, False
        if not asked and look_at(self._held.seen) == self._held.seen:
            return
        try:
            loaded = self._again()
            use(loaded.options)
        except Exception as exc:  # also one of this program's own: sessions go on
            why = str(exc) if isinstance(exc, SpuLlmError) else f"{type(exc).__name__}: {exc}"
            if asked or why != self._failed:
                self._say(f"not reloaded, all stays as it was: {why}")
            self._failed = why
            return
        before, self._held, self._failed = self._held, loaded, ""
        self._say(_words(before, loaded))

    def _ask(self, signum: int, frame: Any) -> None:
        self._asked = True


def look_at(paths: Iterable[Path]) -> Seen:
    """Return the state of each file, by which a change of it is noticed."""
    return {path: _state(path) for path in paths}


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _words(before: Loaded[Any], after: Loaded[Any]) -> str:
    changed = [name for name, text in after.said.items() if before.said.get(name) != text]
    told = {*changed, CERTIFICATE}
    shown = [f"{name} {text}" for name, text in after.said.items() if name in told]
    line = f"reloaded for new sessions: {'; '.join(shown)}" if shown else "reloaded"
    if not changed:
        line += "; nothing has changed"
    if after.fixed:
        line += f"; only a restart changes {', '.join(after.fixed)}"
    return line
