"""`serve` and `generate` with certificates: who gets in, what those hear who do not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from spu_llm.net import identity
from spu_llm.net.identity import CERTIFICATE, KEY
from tests.kit.pair import Pair
from tests.kit.patience import END_S
from tests.kit.processes import Command, Start, credentials


class Parties(NamedTuple):
    """Directories of identities; each trusts the other one, and nobody trusts the stranger."""

    client: Path
    provider: Path
    stranger: Path

    def options(self, own: str, other: str) -> list[str]:
        return credentials(getattr(self, own), getattr(self, other))


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory, start_shared: Start) -> Parties:
    root = tmp_path_factory.mktemp("identities")
    for name in Parties._fields:
        command = start_shared("keygen", "--name", f"{name}.example", "--out", str(root / name))
        assert command.wait(END_S) == 0, command.stderr
        made = identity.load(root / name, root / name / CERTIFICATE).own
        assert made.fingerprint in command.stdout
    return Parties(*(root / name for name in Parties._fields))


@pytest.fixture(scope="module")
def server(start_shared: Start, pair: Pair, parties: Parties) -> tuple[Command, int]:
    command = start_shared(
        "serve",
        "--model",
        str(pair.private),
        "--listen",
        "127.0.0.1:0",
        "--jobs",
        "1",
        *parties.options("provider", "client"),
    )
    return command, command.until_listening()


@pytest.fixture
def ask(start: Start, pair: Pair, server: tuple[Command, int]) -> Callable[..., Command]:
    def run(*options: str) -> Command:
        return start(
            "generate",
            "--server",
            f"127.0.0.1:{server[1]}",
            "--draft-model",
            str(pair.public),
            "--max-new-tokens",
            "4",
            "--temperature",
            "0",
            *options,
        )

    return run


def test_a_key_is_written_once_and_for_its_owner(start: Start, tmp_path: Path) -> None:
    assert start("keygen", "--name", "10.0.0.1", "--out", "me").wait(END_S) == 0
    key = tmp_path / "me" / KEY
    assert key.stat().st_mode & 0o777 == 0o600 and (tmp_path / "me").stat().st_mode & 0o77 == 0
    before = key.read_bytes()
    again = start("keygen", "--name", "10.0.0.1", "--out", "me")
    assert again.wait(END_S) == 2 and "is there already" in again.stderr
    assert key.read_bytes() == before
    key.chmod(0o644)
    opened = start(
        "generate", "--server", "h:1", "--identity", "me", "--trust", f"me/{CERTIFICATE}"
    )
    assert opened.wait(END_S) == 2 and "chmod 600" in opened.stderr


def test_whoever_is_not_known_is_refused_and_told(
    ask: Callable[..., Command], parties: Parties, server: tuple[Command, int]
) -> None:
    """By both sides, within seconds, with exit code 1; the provider serves on."""
    command, _ = server
    cases = [
        (parties.options("stranger", "provider"), "does not trust this party's certificate"),
        (parties.options("client", "stranger"), "the peer's certificate is refused"),
        (["--insecure"], "the peer is speaking TLS; give --identity"),
    ]
    for options, said in cases:
        started = time.monotonic()
        client = ask(*options)
        assert client.wait(END_S) == 1, client.stderr
        assert said in client.stderr and len(client.stderr.strip().splitlines()) <= 2
        assert time.monotonic() - started < END_S
    for said in ("certificate is refused", "does not trust", "the peer is not speaking TLS"):
        command.until("stderr", said)
