"""`serve --node-port`: producers' sessions come to a port of each machine of a provider's cluster."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from spu_llm.net.identity import make
from spu_llm.offline.files import INBOX
from tests.cluster.machines import Machines, machines
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import Command, Start, credentials

STEPS = ["--steps", "2", "--max-new-tokens", "3", "--standard", "--temperature", "0"]
PROMPT = ["--prompt", "def read("]


@dataclass
class Party:
    """One party's machines, its identity, and its pool."""

    of: Machines
    identity: Path
    pool: Path


@dataclass
class Parties:
    client: Party
    provider: Party
    pair: Pair
    start: Start

    def serve(self, *options: str) -> Command:
        """Start the provider, with a door on each of its machines."""
        own = self.provider
        server = self.start(
            *("serve", "--model", str(self.pair.private), "--listen", "127.0.0.1:0"),
            *credentials(own.identity, self.client.identity),
            *("--pool", str(own.pool), "--jobs", "1", "--log-format", "json"),
            *("--ray", own.of.address, "--node-port", "0", *options),
        )
        assert eventually(lambda: "serving " in server.stdout or bool(server.errors), RUN_S)
        return server

    def prepare(self, port: int, doors: list[str], *options: str) -> Command:
        own = self.client
        return self.start(
            *("prepare", "--server", f"127.0.0.1:{port}", "--pool", str(own.pool)),
            *credentials(own.identity, self.provider.identity),
            *("--draft-model", str(self.pair.public), *PROMPT, *STEPS, "--ray", own.of.address),
            *(word for door in doors for word in ("--door", door)),
            *options,
        )

    def generate(self, port: int, *options: str, pool: bool = True) -> Command:
        own = self.client
        with_pool = ["--pool", str(own.pool)] if pool else []
        return self.start(
            *("generate", "--server", f"127.0.0.1:{port}", *with_pool),
            *credentials(own.identity, self.provider.identity),
            *("--draft-model", str(self.pair.public), *PROMPT, *STEPS[2:], *options),
        )


def events(server: Command, name: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


def port_of(server: Command) -> int:
    line = next((one for one in server.stdout.splitlines() if one.startswith("serving ")), "")
    assert line, server.stderr
    return int(line.rpartition(":")[2])


def doors_of(server: Command) -> list[str]:
    """Return where doors are open, as the log has last said."""
    said = [str(one["words"]) for one in events(server, "machines")]
    (*_, last) = [words for words in said if "come also to" in words]
    return re.findall(r"[\d.]+:\d+", last)


@pytest.fixture
def parties(start: Start, pair: Pair, tmp_path: Path) -> Iterator[Parties]:
    for name in ("client", "provider"):
        make(tmp_path / name / "identity", "127.0.0.1", 30)
    with machines(2) as of_client, machines(2) as of_provider:
        own = Party(of_client, tmp_path / "client" / "identity", tmp_path / "client" / "pool")
        theirs = Party(
            of_provider, tmp_path / "provider" / "identity", tmp_path / "provider" / "pool"
        )
        yield Parties(own, theirs, pair, start)


@pytest.mark.slow
def test_pairs_meet_at_doors(parties: Parties, tmp_path: Path) -> None:
    server = parties.serve()
    port, doors = port_of(server), doors_of(server)
    assert len(doors) == 2
    file = tmp_path / "made.json"
    client = parties.prepare(port, doors[:1], "--pairs", "2", "--json", str(file))
    assert client.wait(3 * RUN_S) == 0, client.stderr
    assert "failed" not in client.stderr
    rows = json.loads(file.read_text())["correlations"]
    assert all(row["made_units"] == row["available_units"] > 0 for row in rows)
    print(server.stderr)
