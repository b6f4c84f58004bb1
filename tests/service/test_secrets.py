"""The parties' secrets in bytes: what crosses the wire, and what each party's processes hold.

Controls: the same search finds each secret with its owner, and, of a program that sends them in
clear, on the wire and with the other party.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Command, Start
from tests.kit.tap import Tap
from tests.service.secrets import Needles, memory, prompt_needles, search, weight_needles

PROMPT = "Xq7#vLw2@Zk9!rTb4$Jm"


@pytest.fixture(scope="module")
def prompt(pair: Pair) -> Needles:
    return prompt_needles(PROMPT, pair.private)


@pytest.fixture(scope="module")
def weights(pair: Pair) -> Needles:
    return weight_needles(pair.private)


def on_wire(tap: Tap) -> list[bytes]:
    """Return all bytes of both directions, whole again where frames had cut them."""
    return [bytes(tap.calls[side]) for side in tap.calls] + [
        data for side in tap.wire for data in tap.streams(side)
    ]


def held_by(command: Command) -> list[bytes]:
    """Return the memory of a party's supervisor and worker, whose work stands still meanwhile."""
    processes = command.processes()
    assert sorted(p.is_worker for p in processes) == [False, True]
    for process in processes:
        if process.is_worker:
            process.send(signal.SIGSTOP)
    held = [memory(process.pid) for process in processes]
    for process in processes:
        process.send(signal.SIGCONT)
    return held


@dataclass
class Seen:
    """A run's secrets found, by place."""

    wire: set[str]
    wire_bytes: dict[str, int]
    provider: set[str]
    client: set[str]
    result: dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def seen(
    start_shared: Start,
    pair: Pair,
    prompt: Needles,
    weights: Needles,
    tmp_path_factory: pytest.TempPathFactory,
) -> Seen:
    secrets = prompt | weights
    file = tmp_path_factory.mktemp("json") / "result.json"
    server = start_shared(*pair.serve())
    with Tap(server.until_listening()) as tap:
        options = ["--prompt", PROMPT, "--max-new-tokens", "8", "--draft-length", "2"]
        client = start_shared(*pair.generate(tap.port, *options, "--json", str(file)))
        client.until_phase("decoding")
        provider, held = held_by(server), held_by(client)
        assert client.wait(RUN_S) == 0, client.stderr
        server.until("stderr", "session finished")
        server.send(signal.SIGTERM)
        server.wait(END_S)
        wire = search(secrets, on_wire(tap))
        sizes = {side: len(data) for side, data in tap.wire.items()}
    return Seen(
        wire, sizes, search(secrets, provider), search(secrets, held), json.loads(file.read_text())
    )


@pytest.mark.slow
def test_no_secret_crosses_the_wire(seen: Seen) -> None:
    assert seen.wire == set()


@pytest.mark.slow
def test_every_byte_was_looked_at(seen: Seen) -> None:
    counters = seen.result["wire_bytes"]
    for side, name in (("client", "client_to_provider"), ("provider", "provider_to_client")):
        counted = counters[name]
        assert 0 <= seen.wire_bytes[side] - counted < 1000  # a goodbye and its answer come after


@pytest.mark.slow
def test_the_provider_never_holds_the_prompt(seen: Seen, prompt: Needles) -> None:
    assert seen.provider & prompt.keys() == set()


@pytest.mark.slow
def test_the_client_never_holds_the_weights(seen: Seen, weights: Needles) -> None:
    assert seen.client & weights.keys() == set()


@pytest.mark.slow
def test_the_search_finds_secrets_with_their_owners(seen: Seen) -> None:
    assert {"text", "JSON", "ids as int32"} <= seen.client
    assert {"folded ['wte'] row as float32", "folded ['head']['weight'] row as float32"} <= (
        seen.provider
    )


@pytest.mark.parametrize("owner", ["client", "provider"])
def test_the_search_finds_what_is_sent_in_clear(
    start: Start, pair: Pair, tmp_path: Path, prompt: Needles, weights: Needles, owner: str
) -> None:
    needles = prompt if owner == "client" else weights
    file = tmp_path / "secrets"
    file.write_bytes(b"".join(needles.values()))
    stub = f"{owner}:prefilling:sends {file}"
    server = start(*pair.serve("--once"), stub=stub)
    with Tap(server.until_listening()) as tap:
        client = start(*pair.generate(tap.port), stub=stub)
        client.until_phase("prefilling")
        assert search(needles, held_by(server if owner == "client" else client)) == needles.keys()
        assert search(needles, on_wire(tap)) == needles.keys()
