"""`serve --node-port`: producers' sessions come to a port of each machine of a cluster."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from spu_llm.cluster.door import Shown
from spu_llm.core.errors import InputError, PeerError
from spu_llm.net.identity import CERTIFICATE, load, make
from spu_llm.service.client import Server
from spu_llm.service.first_contact import model_names
from tests.cluster.machines import Machines, machines
from tests.cluster.preparing import NEW, PROMPT, REQUEST, greedy
from tests.kit.cut_wire import CutWire
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.pools import batches
from tests.kit.processes import Command, Process, Start, credentials

CLIENT, PROVIDER = "client", "provider"


@dataclass
class Parties:
    """A client and a provider with identities and pools, and the provider's machines."""

    start: Start
    pair: Pair
    folder: Path
    of: Machines

    def options(self, role: str, pool: bool = True) -> list[str]:
        other = PROVIDER if role == CLIENT else CLIENT
        options = credentials(self.folder / role / "identity", self.folder / other / "identity")
        return [*options, *(("--pool", str(self.pool(role))) if pool else ())]

    def pool(self, role: str) -> Path:
        return self.folder / role / "pool"

    def serve(self, *options: str, port: int = 0) -> Command:
        """Start the provider, with a door on each of its machines."""
        server = self.start(
            *("serve", "--model", str(self.pair.private), "--listen", "0.0.0.0:0", "--jobs", "1"),
            *(*self.options(PROVIDER), "--log-format", "json", "--ray", self.of.address),
            *("--node-port", str(port), *options),
        )
        assert eventually(lambda: "serving " in server.stdout or bool(server.errors), RUN_S)
        return server

    def prepare(self, port: int, door: int, nodes: Machines, *options: str) -> Command:
        return self.start(
            *("prepare", "--server", f"127.0.0.1:{port}", *self.options(CLIENT)),
            *("--draft-model", str(self.pair.public), "--prompt", PROMPT, *REQUEST),
            *("--steps", str(NEW - 1), "--ray", nodes.address, "--pairs", "2"),
            *("--door", f"127.0.0.1:{door}", *options),
        )

    def generate(self, port: int, *options: str, pool: bool = True) -> Command:
        return self.start(
            *("generate", "--server", f"127.0.0.1:{port}", *self.options(CLIENT, pool)),
            *("--draft-model", str(self.pair.public), "--prompt", PROMPT, *REQUEST, *options),
        )

    def doors(self) -> list[Process]:
        return [p for p in self.of.processes() if p.argv.startswith("ray::_Door")]


@pytest.fixture(scope="module")
def client_nodes() -> Iterator[Machines]:
    with machines(2) as nodes:
        yield nodes


@contextmanager
def parties(start: Start, pair: Pair, folder: Path, count: int) -> Iterator[Parties]:
    for name in (CLIENT, PROVIDER):
        make(folder / name / "identity", "127.0.0.1", 30)
    (folder / "machines").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        # What the machines keep, but for Ray's own sockets, whose names would be too long.
        patch.setenv("TMPDIR", str(folder / "machines"))
        patch.setenv("RAY_TMPDIR", "/tmp")
        with machines(count, num_cpus=2) as of:
            patch.undo()
            yield Parties(start, pair, folder, of)


def said(server: Command) -> list[str]:
    """Return what the log says of machines."""
    lines = [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]
    return [str(line["words"]) for line in lines if line["event"] == "machines"]


def port_of(server: Command) -> int:
    line = next((one for one in server.stdout.splitlines() if one.startswith("serving ")), "")
    assert line, server.stderr
    return int(line.rpartition(":")[2])


def open_doors(server: Command) -> list[int]:
    """Return the doors' ports, as the log has last said."""
    (*_, last) = [words for words in said(server) if "come also to" in words]
    return [int(port) for port in re.findall(r"[\d.]+:(\d+)", last)]


@pytest.mark.slow
def test_a_pair_meets_at_a_door(
    start: Start, pair: Pair, tmp_path: Path, client_nodes: Machines
) -> None:
    with parties(start, pair, tmp_path, 1) as both:
        server = both.serve()
        port, (door,) = port_of(server), open_doors(server)
        file = tmp_path / "made.json"
        with CutWire(door) as wire:
            client = both.prepare(port, wire.port, client_nodes, "--json", str(file))
            assert client.wait(3 * RUN_S) == 0, client.stderr
            assert wire.moved > 2_000_000
        assert "failed" not in client.stderr
        rows = json.loads(file.read_text())["correlations"]
        assert all(row["made_units"] == row["available_units"] for row in rows)
        kept, kept_there = batches(both.pool(CLIENT)), batches(both.pool(PROVIDER))
        assert kept == kept_there and kept
        # No batch stays on the machine, and no other session has a place at its port.
        assert not list((tmp_path / "machines").rglob("inbox"))
        refused = both.generate(door)
        refused.assert_failed(2, "takes sessions of producers alone", within_s=END_S)
        result = tmp_path / "text.json"
        client = both.generate(port, "--json", str(result))
        assert client.wait(RUN_S) == 0, client.stderr
        assert json.loads(result.read_text())["token_ids"] == greedy(pair)
        server.send(signal.SIGTERM)
        assert server.wait(END_S) == 128 + signal.SIGTERM, server.stderr
        assert eventually(lambda: not both.doors(), END_S)
        with pytest.raises(PeerError, match="cannot reach"):
            model_names(Server("127.0.0.1", door, "local"))


@pytest.mark.slow
def test_a_lost_machine_costs_its_pairs_alone(
    start: Start, pair: Pair, tmp_path: Path, client_nodes: Machines
) -> None:
    with parties(start, pair, tmp_path, 2) as both:
        server = both.serve()
        port, (door, _) = port_of(server), open_doors(server)
        with CutWire(door) as wire:
            client = both.prepare(port, wire.port, client_nodes)
            assert eventually(lambda: wire.moved > 2_000_000, RUN_S), client.stderr
            # Either machine may have the door that is in use.
            (which,) = [p for p in both.doors() if _has_port(p, door)]
            raylets = {n.all_processes["raylet"][0].process.pid: n for n in both.of.nodes}
            both.of.lose(raylets[which.parent])
            assert client.wait(3 * RUN_S) == 0, client.stderr
        assert "a pair of producers failed" in client.stderr
        assert eventually(lambda: "come no more to" in str(said(server)), END_S)
        kept, kept_there = batches(both.pool(CLIENT)), batches(both.pool(PROVIDER))
        assert kept == kept_there and not any(kept.values())
        result = tmp_path / "text.json"
        client = both.generate(port, "--json", str(result))
        assert client.wait(RUN_S) == 0, client.stderr
        assert json.loads(result.read_text())["token_ids"] == greedy(pair)
        used = batches(both.pool(CLIENT))
        assert used == batches(both.pool(PROVIDER)) and sum(used.values())
        # A machine that joins later opens a door.
        both.of.add()
        assert eventually(lambda: door not in open_doors(server), RUN_S)
        server.send(signal.SIGKILL)
        assert eventually(lambda: not both.doors(), END_S)


def _has_port(process: Process, port: int) -> bool:
    """Return whether a process listens on a port."""
    links = [path.readlink() for path in Path(f"/proc/{process.pid}/fd").iterdir()]
    listening = {
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    }
    return any(str(link) == f"socket:[{inode}]" for link in links for inode in listening)


@pytest.mark.slow
def test_doors_let_in_whom_the_provider_trusts(start: Start, pair: Pair, tmp_path: Path) -> None:
    with parties(start, pair, tmp_path, 1) as both:
        server = both.serve()
        (door,) = open_doors(server)
        trust = tmp_path / CLIENT / "identity" / CERTIFICATE
        own = load(tmp_path / CLIENT / "identity", tmp_path / PROVIDER / "identity" / CERTIFICATE)
        at_door = Server("127.0.0.1", door, "local", own)
        assert model_names(at_door) == []
        make(tmp_path / "other", "127.0.0.1", 30)
        shutil.copy(tmp_path / "other" / CERTIFICATE, trust)
        assert eventually(lambda: '"reloaded"' in server.stderr, END_S)

        def refused() -> bool:
            try:
                model_names(at_door)
            except PeerError as exc:
                return "does not trust this party's" in str(exc)
            return False

        assert eventually(refused, END_S)
        assert eventually(lambda: "session failed" in server.stderr, END_S), server.stderr
        server.send(signal.SIGTERM)
        assert server.wait(END_S) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_port_that_is_taken_ends_serve(start: Start, pair: Pair, tmp_path: Path) -> None:
    with parties(start, pair, tmp_path, 1) as both, CutWire(1) as taken:
        server = both.serve(port=taken.port)
        server.assert_failed(2, "is in use; choose another with --node-port", within_s=END_S)
        assert eventually(lambda: not both.doors(), END_S)


def test_a_machine_has_the_front_door_s_identity(tmp_path: Path) -> None:
    for name in ("own", "other", "peer", "stranger"):
        make(tmp_path / name, "127.0.0.1", 30)
    trust = tmp_path / "trust.pem"
    shutil.copy(tmp_path / "peer" / CERTIFICATE, trust)
    shown = Shown.of(load(tmp_path / "own", trust))
    assert shown is not None and shown.here().own.fingerprint == shown.fingerprint
    with trust.open("ab") as file:  # one more than the front door trusts
        file.write((tmp_path / "stranger" / CERTIFICATE).read_bytes())
    with pytest.raises(InputError, match="other certificates than at the front door"):
        shown.here()
    shutil.copy(tmp_path / "peer" / CERTIFICATE, trust)
    shutil.rmtree(tmp_path / "own")
    shutil.copytree(tmp_path / "other", tmp_path / "own")
    with pytest.raises(InputError, match="another certificate than the front door's"):
        shown.here()
    shutil.rmtree(tmp_path / "own")
    with pytest.raises(InputError, match="there is no"):
        shown.here()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--node-port", "9001"], "give --ray and --pool, too"),
        (["--node-port", "-1", "--ray", "127.0.0.1:1", "--pool", "p"], "must be 0 to 65535"),
    ],
)
def test_bad_ports_get_a_line(start: Start, pair: Pair, options: list[str], words: str) -> None:
    start(*pair.serve(*options)).assert_failed(2, words, within_s=END_S)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--door", "127.0.0.1:1"], "give --ray HOST:PORT, too"),
        (["--door", "here", "--ray", "127.0.0.1:1"], "--door must be HOST:PORT"),
    ],
)
def test_bad_doors_get_a_line(start: Start, tmp_path: Path, options: list[str], words: str) -> None:
    where = ["--server", "127.0.0.1:1", "--insecure", "--pool", str(tmp_path / "client")]
    client = start("prepare", *where, "--prompt", PROMPT, *options)
    client.assert_failed(2, words, within_s=END_S)
