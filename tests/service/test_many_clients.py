"""A provider with several clients: side by side, and when it is told to end."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from spu_llm.net import entrance
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Start


def asked(pair: Pair, port: int, *options: str) -> list[str]:
    return pair.generate(port, "--temperature", "0", "--max-new-tokens", "4", *options)


@pytest.mark.slow
def test_two_at_once_get_their_texts_and_may_finish(
    start: Start, pair: Pair, tmp_path: Path
) -> None:
    server = start(*pair.serve("--jobs", "1"))
    port = server.until_listening()
    files = [tmp_path / f"{i}.json" for i in range(3)]
    prompts = ["kanarie vogel", "een ander begin", "kanarie vogel"]
    commands = [
        asked(pair, port, "--prompt", prompt, "--json", str(file))
        for prompt, file in zip(prompts, files, strict=True)
    ]
    alone = start(*commands[0])
    assert alone.wait(RUN_S) == 0, alone.stderr
    both = [start(*command) for command in commands[1:]]
    for client in both:
        client.until("stderr", "[preparing")
    server.send(signal.SIGTERM)
    for client in both:
        assert client.wait(RUN_S) == 0, client.stderr
    assert server.wait(END_S) == 128 + signal.SIGTERM, server.stderr
    server.assert_gone()
    content = [json.loads(file.read_text())["token_ids"] for file in files]
    assert content[0] == content[2] and content[0] != content[1] and len(content[1]) == 4
    assert server.stderr.count("session finished") == 3


def test_whoever_is_cut_off_hears_why(start: Start, pair: Pair) -> None:
    """Each of them, and nothing is left running."""
    stub = "client:decoding:holds"
    server = start(*pair.serve(), stub=stub)
    port = server.until_listening()
    clients = [start(*pair.generate(port), stub=stub) for _ in range(2)]
    for client in clients:
        client.until_phase("decoding")
    assert len([p for p in server.processes() if p.is_worker]) == 2
    server.send(signal.SIGINT)
    for client in clients:
        client.assert_failed(1, "the provider is shutting down", within_s=END_S)
    server.assert_failed(130, "interrupted", within_s=END_S)


def test_a_provider_with_all_places_taken_is_well(start: Start, pair: Pair) -> None:
    server = start(*pair.serve("--sessions", "1"), stub="client:decoding:holds")
    port = server.until_listening()
    client = start(*pair.generate(port), stub="client:decoding:holds")
    client.until_phase("decoding")
    asked = start("doctor", "--server", f"127.0.0.1:{port}")
    assert asked.wait(RUN_S) == 0 and f"127.0.0.1:{port} takes sessions" in asked.stdout
    server.send(signal.SIGTERM)
    second = start(*pair.generate(port), stub="")
    second.assert_failed(1, "cannot reach provider", within_s=END_S)


def test_a_client_that_only_connects_takes_no_place(start: Start, pair: Pair) -> None:
    server = start(*pair.serve("--sessions", "1"), stub="client:decoding:holds")
    port = server.until_listening()
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(entrance.PLACES)]
    client = start(*pair.generate(port), stub="client:decoding:holds")
    client.until_phase("decoding")
    # Who came first made room for it.
    more = [socket.create_connection(("127.0.0.1", port)) for _ in range(entrance.PLACES)]
    idle[0].settimeout(END_S)
    assert idle[0].recv(1) == b""
    client.send(signal.SIGINT)
    assert client.wait(END_S) == 130
    for sock in (*idle, *more):
        sock.close()
