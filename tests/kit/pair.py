"""A tiny model pair and commands that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit.models import make_pair
from tests.kit.processes import Command, Start


class Pair(NamedTuple):
    private: Path
    public: Path

    @property
    def demo(self) -> list[str]:
        return ["demo", "--model", str(self.private), "--draft-model", str(self.public)]

    def serve(self, *options: str) -> list[str]:
        address = ["--listen", "127.0.0.1:0", "--insecure"]
        return ["serve", "--model", str(self.private), *address, *options]

    def generate(self, port: int, *options: str) -> list[str]:
        address = ["--server", f"127.0.0.1:{port}", "--insecure"]
        return ["generate", "--draft-model", str(self.public), *address, *options]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(*make_pair(tmp_path_factory.mktemp("pair")))


def _commands(directory: Path) -> Iterator[Start]:
    commands: list[Command] = []

    def start(
        *args: str | bytes,
        stub: str | None = None,
        within: str | None = None,
        installed: bool = False,
        talks: bool = False,
        **env: str,
    ) -> Command:
        commands.append(Command(args, directory, stub, within, installed, talks, **env))
        return commands[-1]

    yield start
    for command in commands:
        command.clean_up()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `spu-llm` with the given arguments, in `tmp_path`."""
    yield from _commands(tmp_path)


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Yield the same for commands that several tests look at."""
    yield from _commands(tmp_path_factory.mktemp("shared"))
