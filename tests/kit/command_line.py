"""The command line in this process: what it makes of arguments, and how it refuses them."""

from __future__ import annotations

import argparse

import pytest

from spu_llm.app import cli
from tests.kit.processes import ERROR


def parsed(*arguments: str) -> argparse.Namespace:
    """Return a command's options."""
    return cli.command_line().parse_args(list(arguments), argparse.Namespace(started=0.0))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line of error that a command ends with."""
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith(ERROR)]
    assert end.value.code == 2 and len(lines) == 1 and "Traceback" not in said, said
    return lines[0]
