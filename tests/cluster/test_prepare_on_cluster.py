"""`prepare --ray`: correlated randomness made on machines of a cluster serves a completion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spu_llm.cluster.connection import joined
from spu_llm.offline.object_store import keep_in
from spu_llm.offline.opener_files import RESULTS
from tests.cluster.machines import Machines, machines
from tests.cluster.preparing import NEW, PROMPT, completed, greedy, prepare
from tests.kit.command_line import refused
from tests.kit.pair import Pair
from tests.kit.patience import RUN_S, eventually
from tests.kit.processes import Start


@pytest.fixture(scope="module")
def nodes() -> Iterator[Machines]:
    with machines(2) as nodes:
        yield nodes


@pytest.fixture
def port(start: Start, pair: Pair, tmp_path: Path) -> int:
    return start(*pair.serve("--pool", str(tmp_path / "provider"))).until_listening()


@pytest.mark.slow
def test_a_completion_takes_what_pairs_made(
    start: Start, pair: Pair, port: int, nodes: Machines, tmp_path: Path
) -> None:
    pool, file = tmp_path / "client", tmp_path / "made.json"
    client = prepare(start, pair, port, pool, nodes, "--steps", str(NEW - 1), "--json", str(file))
    assert client.wait(2 * RUN_S) == 0, client.stderr
    assert "2 pairs of producers" in client.stderr
    made = json.loads(file.read_text())
    rows = made["correlations"]
    assert made["steps"] >= NEW - 1
    assert all(row["made_units"] == row["available_units"] for row in rows)
    sent = sum(made["bytes"]["offline"].values())  # also to set sessions up
    assert 0 < sum(row["bytes"] for row in rows) < sent
    result = completed(start, pair, port, pool, tmp_path / "text.json")
    assert result["token_ids"] == greedy(pair)
    # Only what every session agrees on, the products with weights, and no batch.
    offline = sum(result["bytes"]["offline"].values())
    assert offline < 0.2 * sent


@pytest.mark.slow
def test_a_lost_machine_costs_what_it_was_making(
    start: Start, pair: Pair, port: int, tmp_path: Path
) -> None:
    pool, file = tmp_path / "client", tmp_path / "made.json"
    with machines(2) as nodes:
        options = ["--steps", str(NEW - 1), "--json", str(file)]
        client = prepare(start, pair, port, pool, nodes, *options)
        client.until("stderr", " batches")  # some are made
        nodes.lose(nodes.nodes[0])
        assert client.wait(3 * RUN_S) == 0, client.stderr
    assert "a pair of producers failed" in client.stderr
    assert json.loads(file.read_text())["steps"] >= NEW - 1
    assert completed(start, pair, port, pool, tmp_path / "text.json")["token_ids"] == greedy(pair)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ray", "127.0.0.1:1"], "nobody answers there"),
        (["--ray", "here"], "--ray must be HOST:PORT"),
        (["--pairs", "2"], "give --ray HOST:PORT, too"),
        (["--ray", "127.0.0.1:1", "--pairs", "0"], "--pairs must be 1 or more"),
    ],
)
def test_bad_options_get_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], words: str
) -> None:
    where = ["--server", "127.0.0.1:1", "--insecure", "--pool", str(tmp_path / "client")]
    assert words in refused(capsys, "prepare", *where, "--prompt", PROMPT, *options)


def test_both_parties_here_need_no_cluster(
    capsys: pytest.CaptureFixture[str], pair: Pair, tmp_path: Path
) -> None:
    where = ["--model", str(pair.private), "--pool", str(tmp_path / "pool")]
    line = refused(capsys, "prepare", *where, "--prompt", PROMPT, "--ray", "127.0.0.1:1")
    assert "give --server HOST:PORT" in line


class Idle:
    """Takes a core."""

    def ready(self) -> None:
        """Return once there is one."""


@pytest.mark.slow
def test_a_pair_without_room_at_the_provider_does_not_fail(
    start: Start, pair: Pair, nodes: Machines, tmp_path: Path
) -> None:
    """It is dealt again, as one that finds no place: here to nobody."""
    with machines(1) as of_provider, joined(of_provider.address) as ray:
        serve = pair.serve("--pool", str(tmp_path / "provider"), "--ray", of_provider.address)
        server = start(*serve, "--jobs", "1")
        assert eventually(lambda: "serving " in server.stdout, RUN_S)
        line = next(one for one in server.stdout.splitlines() if one.startswith("serving "))
        idle = ray.remote(num_cpus=1)(Idle).remote()
        ray.get(idle.ready.remote())
        client = prepare(
            start, pair, int(line.rpartition(":")[2]), tmp_path / "client", nodes, "--pairs", "1"
        )
        words = "made anything: no machine of the provider has room for a session"
        client.assert_failed(1, words, within_s=RUN_S)
        assert "failed" not in client.stderr


@pytest.mark.slow
@pytest.mark.parametrize("outside", [False, True])
def test_both_parties_may_have_a_cluster(
    start: Start, pair: Pair, tmp_path: Path, outside: bool
) -> None:
    """The provider's halves run on its machine, and their batches come to its front door; results
    that lie outside go to object storage from where they are made.
    """
    pool, file, theirs = tmp_path / "client", tmp_path / "made.json", tmp_path / "provider"
    for directory in (pool, theirs) if outside else ():
        directory.mkdir(mode=0o700)
        keep_in(directory, f"file://{directory}-objects")
    with machines(2) as nodes, machines(1) as of_provider:
        serve = pair.serve("--pool", str(theirs), "--ray", of_provider.address, "--jobs", "1")
        server = start(*serve)
        assert eventually(lambda: "serving " in server.stdout, RUN_S)
        line = next(one for one in server.stdout.splitlines() if one.startswith("serving "))
        port = int(line.rpartition(":")[2])
        options = ["--steps", str(NEW - 1), "--json", str(file), "--pairs", "1"]
        client = prepare(start, pair, port, pool, nodes, *options)
        assert eventually(lambda: bool(of_provider.workers()), RUN_S)
        assert client.wait(3 * RUN_S) == 0, client.stderr
        assert "failed" not in client.stderr
        rows = json.loads(file.read_text())["correlations"]
        assert all(row["made_units"] == row["available_units"] for row in rows)
        for directory in (pool, theirs):
            inside, stored = (list(directory.rglob(name)) for name in (RESULTS, "stored-*.json"))
            assert bool(stored) == outside and bool(inside) != outside
        result = completed(start, pair, port, pool, tmp_path / "text.json")
        assert result["token_ids"] == greedy(pair)
