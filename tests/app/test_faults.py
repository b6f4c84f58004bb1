"""Killed, frozen and interrupted processes: everything ends within seconds and says why."""

from __future__ import annotations

import os
import signal

import pytest

from tests.app.conftest import Pair
from tests.app.processes import Command, Process, Start, eventually

END_S = 10.0
slow = pytest.mark.slow
PROMPT = "def read("


@pytest.fixture
def demo(start: Start, pair: Pair) -> Command:
    """A demo whose decoding lasts."""
    options = ["--prompt", PROMPT, "--max-new-tokens", "50", "--draft-length", "1"]
    return start(*pair.demo, *options)


def check_streamed(command: Command, phase: str) -> None:
    """What was streamed before the end stays, on a line of its own."""
    if phase == "decoding":
        assert command.stdout.startswith(PROMPT) and command.stdout.endswith("\n")
    else:
        assert command.stdout == ""


@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        ("supervisor", "prefilling"),
        ("worker", "decoding"),
        ("all", "prefilling"),
        pytest.param("supervisor", "decoding", marks=slow),
        pytest.param("worker", "prefilling", marks=slow),
        pytest.param("all", "decoding", marks=slow),
        pytest.param("worker", "preparing", marks=slow),
        pytest.param("supervisor", "preparing", marks=slow),
    ],
)
def test_a_killed_provider_ends_the_client(demo: Command, victim: str, phase: str) -> None:
    demo.until_phase(phase)
    supervisor, worker = demo.provider()
    victims = {"supervisor": [supervisor], "worker": [worker], "all": [supervisor, worker]}
    for process in victims[victim]:
        process.send(signal.SIGKILL)
    words = ["provider", "signal 9"]
    demo.assert_failed(1, *words, within_s=END_S)
    check_streamed(demo, phase)


@pytest.mark.parametrize("phase", ["prefilling", pytest.param("decoding", marks=slow)])
def test_the_client_s_worker_killed_ends_both(start: Start, pair: Pair, phase: str) -> None:
    server = start(*pair.serve("--once"))
    client = start(*pair.generate(server.until_listening(), "--prompt", PROMPT, "--standard"))
    client.until_phase(phase)
    next(p for p in client.processes() if p.is_worker).send(signal.SIGKILL)
    client.assert_failed(1, "worker", "signal 9", within_s=END_S)
    check_streamed(client, phase)
    # How it died may quote secrets, so the provider hears only that it did.
    server.assert_failed(1, "peer ended the session: the client's worker failed", within_s=END_S)
    assert server.errors[0].endswith("failed")


@pytest.mark.parametrize("phase", ["decoding", pytest.param("prefilling", marks=slow)])
def test_a_killed_client_ends_serve_once(start: Start, pair: Pair, phase: str) -> None:
    server = start(*pair.serve("--once"))
    client = start(*pair.generate(server.until_listening(), "--prompt", PROMPT, "--standard"))
    client.until_phase(phase)
    client.send(signal.SIGKILL)
    server.assert_failed(1, "peer", "lost", within_s=END_S)
    client.wait(1)
    client.assert_gone(2)


@pytest.mark.parametrize("phase", ["prefilling", pytest.param("decoding", marks=slow)])
def test_a_frozen_provider_ends_the_client(demo: Command, phase: str) -> None:
    demo.until_phase(phase)
    for process in demo.provider():
        process.send(signal.SIGSTOP)
    demo.assert_failed(1, "stalled", within_s=END_S + 4)
    check_streamed(demo, phase)


@slow
def test_a_frozen_client_ends_serve_once(start: Start, pair: Pair) -> None:
    server = start(*pair.serve("--once"))
    client = start(*pair.generate(server.until_listening(), "--prompt", PROMPT, "--standard"))
    client.until_phase("decoding")
    for process in client.processes():
        process.send(signal.SIGSTOP)
    server.assert_failed(1, "stalled", within_s=END_S + 4)
    for process in client.processes():
        process.send(signal.SIGCONT)
    client.assert_failed(1, "peer", within_s=END_S)


@pytest.mark.parametrize(
    ("phase", "group"),
    [
        ("preparing", True),
        ("prefilling", False),
        ("decoding", True),
        pytest.param("starting", False, marks=slow),
        pytest.param("preparing", False, marks=slow),
        pytest.param("prefilling", True, marks=slow),
        pytest.param("decoding", False, marks=slow),
    ],
)
def test_ctrl_c(demo: Command, phase: str, group: bool) -> None:
    demo.until_phase(phase)
    demo.send(signal.SIGINT, group=group)
    demo.assert_failed(130, "interrupted", within_s=5.0)
    check_streamed(demo, phase)


@pytest.mark.parametrize(
    ("phase", "signum"),
    [
        ("prefilling", signal.SIGKILL),
        pytest.param("starting", signal.SIGKILL, marks=slow),
        pytest.param("decoding", signal.SIGKILL, marks=slow),
        pytest.param("decoding", signal.SIGTERM, marks=slow),
        pytest.param("decoding", signal.SIGHUP, marks=slow),
    ],
)
def test_a_killed_demo_leaves_nothing(demo: Command, phase: str, signum: int) -> None:
    demo.until_phase(phase)
    demo.send(signum)
    demo.wait(END_S)
    demo.assert_gone(END_S)


def test_a_demo_killed_before_its_provider_is_up_leaves_nothing(demo: Command) -> None:
    def provider() -> list[Process]:
        return [p for p in demo.processes() if "\0serve\0" in p.argv]

    assert eventually(lambda: bool(provider()), END_S)
    demo.send(signal.SIGKILL)
    demo.assert_gone(END_S)


def test_the_server_outlives_clients_that_fail(start: Start, pair: Pair) -> None:
    server = start(*pair.serve())
    port = server.until_listening()
    client = start(*pair.generate(port, "--prompt", PROMPT, "--network", "lan"))
    client.assert_failed(2, "network", within_s=END_S)
    client = start(*pair.generate(port, "--prompt", PROMPT))
    client.until_phase("preparing")
    client.send(signal.SIGINT)
    client.assert_failed(130, "interrupted", within_s=5.0)
    server.until("stderr", "interrupted")
    assert [p.pid for p in server.processes() if not p.is_worker] == [server.pid]
    client = start(*pair.generate(port, "--prompt", PROMPT))
    client.until_phase("preparing")
    os.kill(server.pid, signal.SIGINT)
    server.assert_failed(130, "interrupted", within_s=5.0)
    client.assert_failed(1, "interrupted", within_s=END_S)
