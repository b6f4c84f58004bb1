"""`serve --ray`: sessions on any machine of a provider's cluster."""

from __future__ import annotations

import ctypes
import json
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from tests.cluster.machines import Machines, machines
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import Command, Start

HOLDS = "client:decoding:holds"


def serving(start: Start, pair: Pair, of: Machines, *options: str) -> tuple[Command, int]:
    server = start(*pair.serve("--ray", of.address, "--log-format", "json", *options))
    assert eventually(lambda: "serving " in server.stdout or bool(server.errors), RUN_S)
    line = next((one for one in server.stdout.splitlines() if one.startswith("serving ")), "")
    assert line, server.stderr
    return server, int(line.rpartition(":")[2])


def events(server: Command, name: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


def stop(server: Command) -> None:
    server.send(signal.SIGTERM)
    assert server.wait(END_S) == 128 + signal.SIGTERM, server.stderr
    server.assert_gone()


def test_a_session_runs_on_a_machine(start: Start, pair: Pair) -> None:
    with machines(1, stub=HOLDS) as of:
        server, port = serving(start, pair, of)
        client = start(*pair.generate(port), stub=HOLDS)
        client.until_phase("decoding")
        (worker,) = of.workers()
        assert of.node_of(worker) is of.nodes[0]
        assert not [p for p in server.processes() if p.is_worker]
        client.send(signal.SIGINT)
        assert client.wait(END_S) == 130
        assert eventually(lambda: not of.workers(), END_S)
        (placed,) = events(server, "session_placed")
        assert placed["machine"] == of.nodes[0].node_ip_address
        stop(server)


@pytest.mark.slow
def test_the_text_is_that_of_one_machine(start: Start, pair: Pair, tmp_path: Path) -> None:
    asked = ["--temperature", "0", "--max-new-tokens", "4", "--prompt", "kanarie vogel"]
    texts = []
    with machines(1) as of:
        remote, port = serving(start, pair, of)
        local = start(*pair.serve())
        for at in (port, local.until_listening()):
            file = tmp_path / f"{at}.json"
            client = start(*pair.generate(at, *asked, "--json", str(file)))
            if at == port:
                assert eventually(lambda: bool(of.workers()), RUN_S)
            assert client.wait(RUN_S) == 0, client.stderr
            texts.append(json.loads(file.read_text())["token_ids"])
        assert texts[0] == texts[1] and len(texts[0]) == 4
        stop(remote)


@pytest.mark.slow
def test_a_client_has_hints_for_all_machines(start: Start, pair: Pair, tmp_path: Path) -> None:
    asked = ["--temperature", "0", "--max-new-tokens", "2", "--prompt", "kanarie vogel"]
    with machines(0) as of:
        of.add_with_cache(tmp_path / "one")
        server, port = serving(start, pair, of)
        for machine in ("one", "other"):
            client = start(*pair.generate(port, *asked), XDG_CACHE_HOME=str(tmp_path / "client"))
            assert client.wait(RUN_S) == 0, client.stderr
            kept = sorted(path.name for path in (tmp_path / machine).rglob("*.hint"))
            assert kept, machine
            fetched = sorted(path.name for path in (tmp_path / "client").rglob("*.hint"))
            assert len(fetched) == len(kept)
            if machine == "one":
                first = fetched
                of.add_with_cache(tmp_path / "other")
                of.lose(of.nodes[0])
        assert fetched == first
        sent = [int(str(line["wire_bytes_sent"])) for line in events(server, "session_finished")]
        assert sent[1] < sent[0] - 1_000_000, sent
        stop(server)


@pytest.mark.slow
def test_a_worker_on_a_machine_is_confined(start: Start, pair: Pair, tmp_path: Path) -> None:
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:
        pytest.skip("this kernel has no Landlock")
    secret = tmp_path / "secret"
    secret.write_bytes(b"12345")
    stub = f"provider:prefilling:tries {secret} and to write {tmp_path / 'new'}"
    with machines(1, stub=stub) as of:
        server, port = serving(start, pair, of)
        client = start(*pair.generate(port), stub=stub)
        client.assert_failed(1, "the provider's worker failed", within_s=END_S)
        (failed,) = events(server, "session_failed")
        assert str(failed["words"]).count("cannot read: Permission denied") == 2, failed
        stop(server)


@pytest.mark.slow
def test_what_writes_here_runs_here(start: Start, pair: Pair, tmp_path: Path) -> None:
    with machines(1, stub=HOLDS) as of:
        server, port = serving(start, pair, of, "--pool", str(tmp_path / "provider"))
        pool = ["--pool", str(tmp_path / "client")]
        client = start(*pair.generate(port, *pool), stub="client:decoding:computes")
        client.until_phase("decoding")
        assert [p.parent for p in server.processes() if p.is_worker] == [server.pid]
        assert not of.workers()
        assert client.wait(RUN_S) == 0, client.stderr
        assert not events(server, "session_waiting")
        # A client that keeps nothing goes to a machine.
        other = start(*pair.generate(port), stub="")
        assert other.wait(RUN_S) == 0, other.stderr
        assert len(events(server, "session_placed")) == 1
        stop(server)


def test_a_cluster_that_does_not_answer_is_refused(start: Start, pair: Pair) -> None:
    pytest.importorskip("ray")
    server = start(*pair.serve("--ray", "127.0.0.1:1"))
    server.assert_failed(2, "--ray 127.0.0.1:1: nobody answers there", within_s=END_S)


@pytest.mark.slow
def test_a_session_without_room_is_told_busy(start: Start, pair: Pair, tmp_path: Path) -> None:
    with machines(2, stub=HOLDS) as of:
        options = ["--metrics", "127.0.0.1:18765"]
        server, port = serving(start, pair, of, *options)

        def counts() -> str:
            with urllib.request.urlopen("http://127.0.0.1:18765/metrics") as answer:
                return str(answer.read().decode())

        clients = [start(*pair.generate(port), stub=HOLDS) for _ in range(2)]
        for client in clients:
            client.until_phase("decoding")
        assert {id(of.node_of(worker)) for worker in of.workers()} == {id(n) for n in of.nodes}
        third = start(*pair.generate(port), stub=HOLDS)
        waits = "spu_llm_provider_waiting_sessions 1.0"
        assert eventually(lambda: waits in counts(), END_S)
        third.assert_failed(1, "no machine of the provider has room", within_s=END_S)
        assert "spu_llm_provider_waiting_sessions 0.0" in counts()
        assert 'spu_llm_provider_refusals_total{error="BusyError"} 1.0' in counts()
        # Nothing is left that waits: a place that is free is the next client's.
        clients[0].send(signal.SIGINT)
        assert clients[0].wait(END_S) == 130
        fourth = start(*pair.generate(port), stub=HOLDS)
        fourth.until_phase("decoding")
        server.send(signal.SIGINT)
        for client in (clients[1], fourth):
            client.assert_failed(1, "the provider is shutting down", within_s=END_S)
        server.assert_failed(130, "interrupted", within_s=END_S)
        assert eventually(lambda: not of.workers(), END_S)


@pytest.mark.slow
def test_a_lost_machine_ends_its_sessions_alone(start: Start, pair: Pair) -> None:
    with machines(2, stub=HOLDS) as of:
        server, port = serving(start, pair, of)
        lost = start(*pair.generate(port), stub=HOLDS)
        lost.until_phase("decoding")
        (worker,) = of.workers()
        kept = start(*pair.generate(port), stub="client:decoding:computes")
        kept.until_phase("decoding")
        of.lose(of.node_of(worker))
        lost.assert_failed(1, "the provider's worker failed", within_s=END_S)
        (failed,) = events(server, "session_failed")
        address = of.nodes[0].node_ip_address
        # Its processes die one after another: its last word may be that the worker has.
        was_lost = f"the machine that ran this session's worker was lost: {address}"
        last_word = f"on machine {address}: the worker process ended early (signal 9)"
        assert was_lost in str(failed["words"]) or last_word in str(failed["words"])
        assert kept.wait(RUN_S) == 0, kept.stderr
        assert kept.stdout.count("x") == 3
        of.add()
        other = start(*pair.generate(port), stub="")
        assert other.wait(RUN_S) == 0, other.stderr
        stop(server)


@pytest.mark.slow
def test_a_provider_outlives_the_head_of_its_cluster(start: Start, pair: Pair) -> None:
    with machines(1, stub=HOLDS) as of:
        server, port = serving(start, pair, of)
        client = start(*pair.generate(port), stub="client:decoding:computes")
        client.until_phase("decoding")
        of.lose_head()
        assert client.wait(RUN_S) == 0, client.stderr
        time.sleep(75)  # Ray's own patience with a head is 60 s
        other = start(*pair.generate(port), stub="")
        other.assert_failed(1, "no machine of the provider has room", within_s=END_S)
        assert server.processes()
        stop(server)


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["worker", "actor", "holder"])
def test_a_killed_process_ends_its_session_alone(start: Start, pair: Pair, whose: str) -> None:
    with machines(1, stub=HOLDS) as of:
        server, port = serving(start, pair, of)
        client = start(*pair.generate(port), stub=HOLDS)
        client.until_phase("decoding")
        (worker,) = of.workers()
        actors = {p.pid: p for p in of.processes() if p.argv.startswith("ray::")}
        if whose == "holder":
            (holder,) = (p for p in actors.values() if "_Holder" in p.argv)
            holder.send(signal.SIGKILL)
            # The session has its own descriptor of the weights.
            assert eventually(lambda: holder.pid not in {p.pid for p in of.processes()}, END_S)
            client.send(signal.SIGINT)
            assert client.wait(END_S) == 130
        else:
            (worker if whose == "worker" else actors[worker.parent]).send(signal.SIGKILL)
            client.assert_failed(1, "the provider's worker failed", within_s=END_S)
        assert eventually(lambda: not of.workers(), END_S)
        other = start(*pair.generate(port), stub="")
        assert other.wait(RUN_S) == 0, other.stderr
        stop(server)


@pytest.mark.slow
def test_a_killed_front_door_leaves_no_worker(start: Start, pair: Pair) -> None:
    with machines(1, stub=HOLDS) as of:
        server, port = serving(start, pair, of)
        client = start(*pair.generate(port), stub=HOLDS)
        client.until_phase("decoding")
        server.send(signal.SIGKILL)
        assert eventually(lambda: not of.workers(), END_S)

        def actors() -> list[str]:
            return [p.argv for p in of.processes() if "_Holder" in p.argv or "_Host" in p.argv]

        assert eventually(lambda: not actors(), END_S), actors()
        assert client.wait(END_S) == 1
