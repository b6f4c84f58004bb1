"""Engines and vaults as processes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.kit.processes import Command, Start


class Engine(NamedTuple):
    command: Command
    port: int


def engine(start: Start, model: Path, *options: str, port: int = 0) -> Engine:
    address = f"127.0.0.1:{port}"
    command = start("vault", "serve", "--model", str(model), "--listen", address, *options)
    return Engine(command, command.until_listening())


def vault(start: Start, port: int, *options: str) -> Engine:
    there, here = f"127.0.0.1:{port}", "127.0.0.1:0"
    command = start("vault", "open", "--server", there, "--listen", here, *options)
    return Engine(command, command.until_listening())
