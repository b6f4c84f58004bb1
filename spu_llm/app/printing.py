"""The one place where commands print. What is printed may hold words of a peer, of a model or of a
file: all of it is made harmless (`core.printable`) but generated text that goes to a file or a
pipe, where a program wants it exact.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback

from spu_llm.core.printable import Streamed, one_line, printable


def show(*lines: str) -> None:
    """Print lines to stdout at once."""
    print(*map(_line, lines), sep="\n", flush=True)


def show_table(table: str) -> None:
    """Print a text of several lines to stdout at once."""
    show(*table.split("\n"))


def tell(*lines: str) -> None:
    """Print lines to stderr at once, or nowhere, when whoever read them has gone: no work ends for
    want of a reader.
    """
    with contextlib.suppress(OSError):
        print(*map(_line, lines), sep="\n", file=sys.stderr, flush=True)


def say(words: str) -> None:
    """Print one line to stderr that says who speaks."""
    tell(f"spu-llm: {one_line(words)}")


def tell_traceback(error: BaseException) -> None:
    """Print where an error was raised, to stderr."""
    tell(*"".join(traceback.format_exception(error)).rstrip("\n").split("\n"))


def ask(words: str) -> str | None:
    """Return a line that the user writes after `words`, which a terminal alone shows; None at the
    end of standard input.
    """
    if sys.stdin is None:
        return None
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401 - edits the line

            return input(words)
        line = sys.stdin.readline()
    except EOFError:
        print()
        return None
    return line.removesuffix("\n") if line else None


class Generated:
    """Prints generated text to stdout in parts, each at once; on a terminal made harmless."""

    def __init__(self) -> None:
        self._streamed = Streamed() if sys.stdout.isatty() else None

    def write(self, part: str) -> None:
        """Print the next part."""
        self._print(part if self._streamed is None else self._streamed.push(part))

    def end_line(self) -> None:
        """Print what waited for more text, and end the line."""
        self._print(("" if self._streamed is None else self._streamed.finish()) + "\n")

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def guard() -> None:
    """Print what libraries log, and errors that end a thread, made harmless, too, unless whoever
    runs this process does something else with them.
    """
    logging.lastResort = _Log(logging.WARNING)
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _thread_failed


class _Log(logging.Handler):
    """Prints what has no other handler."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(*self.format(record).split("\n"))


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
        tell_traceback(failed.exc_value)


def _line(text: str) -> str:
    return printable(text).replace("\n", "␊")
