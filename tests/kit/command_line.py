"""The command line in this process: what it makes of arguments, and how it refuses them."""

from __future__ import annotations

import argparse
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import numpy.testing  # noqa: F401  (starts a process when it is imported)
import pytest

from spu_llm.app import cli
from tests.kit.processes import ERROR


def parsed(*arguments: str) -> argparse.Namespace:
    """Return a command's options."""
    return cli.command_line().parse_args(list(arguments), argparse.Namespace(started=0.0))


@contextmanager
def nothing_begins() -> Iterator[None]:
    """Make a command fail that listens or starts a process: what is refused does neither."""

    def begun(*_: object, **__: object) -> NoReturn:
        raise AssertionError("it is not refused before it listens or starts a process")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "listen", begun)
        patch.setattr(subprocess.Popen, "__init__", begun)
        yield


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line of error that a command ends with, before it listens or starts a
    process.
    """
    with nothing_begins(), pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith(ERROR)]
    assert end.value.code == 2 and len(lines) == 1 and "Traceback" not in said, said
    return lines[0]
