"""What a person sees while two parties work: stages with elapsed time and traffic, on stderr."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable

from spu_llm.core.printable import one_line
from spu_llm.core.units import mb

QUIET_INTERVAL_S = 10.0

# Terminal control: make room for a line below, go there and back; erase from here to the end.
_BELOW = "\x1bD\x1bM\x1b7\x1bD\r\x1b[K{}\x1b8"
_ERASE_BELOW = "\x1b[J"
_ERASE_LINE = "\r\x1b[K"


class Progress:
    """A line that says what is going on; it never shares a terminal line with streamed text.

    With `below` set, text stands on the cursor's line of this terminal: the line goes below it.
    Where there is no terminal, every look at it is a line, or with `lines` unset none. `traffic`:
    wire bytes so far, or None where nothing is connected.
    """

    def __init__(
        self, traffic: Callable[[], int | None] = lambda: None, *, lines: bool = True
    ) -> None:
        self._traffic = traffic
        self.below = False
        self._tty = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._silent = not (self._tty or lines)
        self._stage = ""
        self._started = time.monotonic()
        self._shown_at = 0.0
        self._visible = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._tick, daemon=True).start()

    def stage(self, name: str) -> None:
        """Begin a stage, which is shown at once."""
        with self._lock:
            self._clear()
            self._stage, self._started = one_line(name), time.monotonic()
            self._show()

    def update(self, name: str) -> None:
        """Note that the current stage has got further, which is shown at the next tick."""
        with self._lock:
            if not self._stage:
                self._started = time.monotonic()
            self._stage = one_line(name)

    def pause(self) -> None:
        """Take the line away, before text is printed."""
        with self._lock:
            self._clear()
            self._stage = ""

    def close(self) -> None:
        self._stop.set()
        self.pause()

    def _tick(self) -> None:
        while not self._stop.wait(0.5):
            with self._lock:
                due = self._tty or time.monotonic() - self._shown_at >= QUIET_INTERVAL_S
                if self._stage and due:
                    self._clear()
                    self._show()

    def _show(self) -> None:
        if self._silent:
            return
        elapsed = time.monotonic() - self._started
        count = self._traffic()
        traffic = "" if count is None else f", {mb(count)} on the wire"
        line = f"[{self._stage}: {elapsed:.0f} s{traffic}]"
        # A line that wrapped could not be taken away again.
        width = shutil.get_terminal_size().columns - 1
        if not self._tty:
            sys.stderr.write(line + "\n")
        else:
            sys.stderr.write(_BELOW.format(line[:width]) if self.below else line[:width])
        sys.stderr.flush()
        self._visible, self._shown_at = self._tty, time.monotonic()

    def _clear(self) -> None:
        if self._visible:
            sys.stderr.write(_ERASE_BELOW if self.below else _ERASE_LINE)
            sys.stderr.flush()
            self._visible = False
