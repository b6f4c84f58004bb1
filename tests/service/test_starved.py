"""A party that its machine starves is waited for, and one that is dead is not."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.kit.pair import Pair
from tests.kit.patience import END_S
from tests.kit.processes import Command, Process, Start
from tests.service.starving import starved

SHARE = 0.05
SHORT_S = 3.0  # of silence that ends a session here; a third of what it is
MINUTE_S = 60.0
SIDES = ("client", "provider")


def sides(server: Command, client: Command) -> dict[str, Callable[[], list[Process]]]:
    return {"client": client.processes, "provider": server.processes}


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_a_starved_party_is_waited_for(start: Start, pair: Pair, side: str) -> None:
    """For two limits of silence, while its worker says nothing: its heartbeats alone tell of it."""
    stub = f"{side}:decoding:deadlocks"
    short = {"SPU_LLM_SILENCE_S": str(SHORT_S)}
    server = start(*pair.serve("--once"), stub=stub, **short)
    client = start(*pair.generate(server.until_listening()), stub=stub, **short)
    client.until_phase("decoding")
    with starved(sides(server, client)[side], SHARE, period_s=0.7):
        time.sleep(2.5 * SHORT_S)
    assert client.errors == server.errors == []
    client.send(signal.SIGINT)
    assert client.wait(END_S) == 130, client.stderr
    server.assert_failed(1, "interrupted", within_s=END_S)


@pytest.mark.slow
@pytest.mark.parametrize("period_s", [0.1, 2.0])
@pytest.mark.parametrize("side", SIDES)
def test_a_minute_of_it_in_real_decoding(
    start: Start, pair: Pair, side: str, period_s: float
) -> None:
    server = start(*pair.serve("--once"))
    options = ["--max-new-tokens", "40", "--standard"]
    client = start(*pair.generate(server.until_listening(), *options))
    client.until_phase("decoding")
    with starved(sides(server, client)[side], SHARE, period_s):
        time.sleep(MINUTE_S)
        assert client.errors == server.errors == []
    assert client.wait(10 * MINUTE_S) == 0, client.stderr
    assert server.wait(END_S) == 0, server.stderr


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_a_starved_party_whose_peer_dies_ends(start: Start, pair: Pair, side: str) -> None:
    """The peer's processes are killed at once, so nobody says goodbye."""
    stub = "client:decoding:holds"
    server = start(*pair.serve("--once"), stub=stub)
    client = start(*pair.generate(server.until_listening()), stub=stub)
    client.until_phase("decoding")
    commands = {"client": client, "provider": server}
    (other,) = set(SIDES) - {side}
    with starved(commands[side].processes, SHARE, period_s=0.1):
        for process in commands[other].processes():
            process.send(signal.SIGKILL)
        commands[side].assert_failed(1, "peer", within_s=END_S)
