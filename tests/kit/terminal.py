"""A terminal that is not one."""

from __future__ import annotations

import io
import sys

import pytest


class Terminal(io.StringIO):
    """Both streams of one terminal."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Open a terminal in the test's own body: pytest sets the streams anew after fixtures have
    run.
    """
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    return screen
