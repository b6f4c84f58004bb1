"""Killed, frozen, stuck and interrupted processes: everything ends within seconds and says why.

Some cases run on a tiny model and SPU, which has its own ways to die; some on a stub in the workers
(`stub/stub_program.py`). When slow tests are asked for, all run on a model.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from spu_llm.net.frames import MAX_PAYLOAD
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S, eventually
from tests.kit.processes import Command, Process, Start
from tests.kit.tap import Tap

STALL_S = 4.0  # the deadline of a session that stands still, where a test shortens it
slow = pytest.mark.slow
PROMPT = "def read("


Cases = list[tuple[Any, ...]]


def cases(names: str, default: Cases, on_stubs: Cases, others: Cases | None = None) -> Any:
    """Return the `default` cases on a model; some on stubs, and as slow ones on a model, where the
    others run, too: each of their values stands among the cases before them.
    """
    on_model = [("model", *case) for case in default]
    stubs = [("stub", *case) for case in on_stubs]
    slow_ones = [pytest.param("model", *case, marks=slow) for case in on_stubs + (others or [])]
    return pytest.mark.parametrize(("program", *names.split()), [*on_model, *stubs, *slow_ones])


def held(program: str, phase: str) -> str | None:
    """Return what stubs do so that `phase` lasts; a model's run is long enough by itself."""
    shown = "preparing" if phase == "starting" else phase
    return f"client:{shown}:holds" if program == "stub" else None


@pytest.fixture
def demo(start: Start, pair: Pair) -> Callable[[str, str], Command]:
    """Starts a demo with this program and waits until its phase has begun, which lasts."""

    def run(program: str, phase: str) -> Command:
        options = ["--prompt", PROMPT, "--max-new-tokens", "50", "--draft-length", "1"]
        command = start(*pair.demo, *options, stub=held(program, phase))
        command.until_phase(phase)
        return command

    return run


@pytest.fixture
def both(start: Start, pair: Pair) -> Callable[[str, str], tuple[Command, Command]]:
    """Return the same for a server of one session and its client."""

    def run(program: str, phase: str) -> tuple[Command, Command]:
        stub = held(program, phase)
        server = start(*pair.serve("--once"), stub=stub)
        options = ["--prompt", PROMPT, "--standard"]
        client = start(*pair.generate(server.until_listening(), *options), stub=stub)
        client.until_phase(phase)
        return server, client

    return run


def check_streamed(command: Command, phase: str) -> None:
    """Check that what was streamed before the end stays, on a line of its own."""
    if phase == "decoding":
        assert command.stdout.startswith(PROMPT) and command.stdout.endswith("\n")
    else:
        assert command.stdout == ""


def worker_of(command: Command) -> Process:
    return next(p for p in command.processes() if p.is_worker)


@cases(
    "victim phase",
    [],
    [("all", "prefilling"), ("worker", "decoding")],
    [
        ("supervisor", "decoding"),
        ("worker", "preparing"),
        ("supervisor", "prefilling"),
        ("worker", "prefilling"),
        ("all", "decoding"),
        ("supervisor", "preparing"),
    ],
)
def test_a_killed_provider_ends_the_client(
    demo: Callable[[str, str], Command], program: str, victim: str, phase: str
) -> None:
    command = demo(program, phase)
    supervisor, worker = command.provider()
    victims = {"supervisor": [supervisor], "worker": [worker], "all": [supervisor, worker]}
    for process in victims[victim]:
        process.send(signal.SIGKILL)
    words = ["provider", "signal 9"]
    command.assert_failed(1, *words, within_s=END_S)
    check_streamed(command, phase)


@pytest.mark.slow
@cases("phase", [("prefilling",)], [("decoding",)])
def test_the_client_s_worker_killed_ends_both(
    both: Callable[[str, str], tuple[Command, Command]], program: str, phase: str
) -> None:
    server, client = both(program, phase)
    worker_of(client).send(signal.SIGKILL)
    client.assert_failed(1, "worker", "signal 9", within_s=END_S)
    check_streamed(client, phase)
    # How it died may quote secrets, so the provider hears only that it did.
    server.assert_failed(1, "peer ended the session: the client's worker failed", within_s=END_S)
    assert server.errors[0].endswith("failed")


@cases("phase", [], [("decoding",)], [("prefilling",)])
def test_a_killed_client_ends_serve_once(
    both: Callable[[str, str], tuple[Command, Command]], program: str, phase: str
) -> None:
    server, client = both(program, phase)
    client.send(signal.SIGKILL)
    server.assert_failed(1, "peer", "lost", within_s=END_S)
    client.wait(END_S)
    client.assert_gone()


@pytest.mark.slow
@cases("phase", [], [("decoding",)])
def test_a_frozen_provider_ends_the_client(
    demo: Callable[[str, str], Command], program: str, phase: str
) -> None:
    command = demo(program, phase)
    for process in command.provider():
        process.send(signal.SIGSTOP)
    command.assert_failed(1, "stalled", within_s=END_S)
    check_streamed(command, phase)


@cases("phase", [], [("decoding",)])
def test_a_frozen_client_ends_serve_once(
    both: Callable[[str, str], tuple[Command, Command]], program: str, phase: str
) -> None:
    server, client = both(program, phase)
    for process in client.processes():
        process.send(signal.SIGSTOP)
    server.assert_failed(1, "stalled", within_s=END_S)
    for process in client.processes():
        process.send(signal.SIGCONT)
    client.assert_failed(1, "peer", within_s=END_S)


@cases(
    "phase group",
    [("preparing", True)],
    [("starting", False), ("decoding", True)],
    [("preparing", False), ("prefilling", False), ("prefilling", True), ("decoding", False)],
)
def test_ctrl_c(demo: Callable[[str, str], Command], program: str, phase: str, group: bool) -> None:
    command = demo(program, phase)
    command.send(signal.SIGINT, group=group)
    command.assert_failed(130, "interrupted", within_s=END_S)
    check_streamed(command, phase)


@pytest.mark.slow
@cases(
    "phase signum",
    [("prefilling", signal.SIGKILL)],
    [("starting", signal.SIGKILL), ("decoding", signal.SIGTERM), ("decoding", signal.SIGHUP)],
    [("decoding", signal.SIGKILL)],
)
def test_a_killed_demo_leaves_nothing(
    demo: Callable[[str, str], Command], program: str, phase: str, signum: int
) -> None:
    command = demo(program, phase)
    command.send(signum)
    command.wait(END_S)
    command.assert_gone(END_S)


def test_a_demo_killed_before_its_provider_is_up_leaves_nothing(start: Start, pair: Pair) -> None:
    command = start(*pair.demo)

    def provider() -> list[Process]:
        return [p for p in command.processes() if "\0serve\0" in p.argv]

    assert eventually(lambda: bool(provider()), END_S)
    command.send(signal.SIGKILL)
    command.assert_gone(END_S)


@slow
def test_the_server_outlives_clients_that_fail(start: Start, pair: Pair) -> None:
    server = start(*pair.serve())
    port = server.until_listening()
    client = start(*pair.generate(port, "--prompt", PROMPT, "--network", "lan"))
    client.assert_failed(2, "network", within_s=END_S)
    client = start(*pair.generate(port, "--prompt", PROMPT))
    client.until_phase("preparing")
    client.send(signal.SIGINT)
    client.assert_failed(130, "interrupted", within_s=END_S)
    server.until("stderr", "interrupted")
    assert [p.pid for p in server.processes() if not p.is_worker] == [server.pid]
    client = start(*pair.generate(port, "--prompt", PROMPT))
    client.until_phase("preparing")
    os.kill(server.pid, signal.SIGINT)
    server.assert_failed(130, "interrupted", within_s=END_S)
    client.assert_failed(1, "the provider is shutting down", within_s=END_S)


def test_a_busy_provider_turns_a_client_away_and_goes_on(start: Start, pair: Pair) -> None:
    server = start(*pair.serve("--sessions", "1"), stub="client:decoding:holds")
    port = server.until_listening()
    first = start(*pair.generate(port), stub="client:decoding:holds")
    first.until_phase("decoding")
    second = start(*pair.generate(port), stub="")
    second.assert_failed(1, "busy with 1 sessions", "try again", within_s=END_S)
    server.until("stderr", "one client too many was sent away")
    seen = len(first.stdout)
    assert first.errors == [] and server.errors == []
    first.send(signal.SIGINT)
    assert seen and first.wait(END_S) == 130
    server.until("stderr", "interrupted")
    assert start(*pair.generate(port), stub="").wait(END_S) == 0


# ---- on the wire, in the middle of a session


@pytest.mark.parametrize(
    ("side", "spoil", "words"),
    [
        ("client", lambda data: b"\xff" * len(data), "frame of"),
        ("provider", lambda data: data[: len(data) // 2], "lost inside a message"),
        pytest.param("client", lambda data: b"", "lost", marks=slow),
    ],
    ids=["garbage", "cut inside a message", "cut"],
)
def test_a_spoilt_connection_ends_both(
    start: Start, pair: Pair, side: str, spoil: Callable[[bytes], bytes], words: str
) -> None:
    """From some moment on, one direction carries what `spoil` makes of it, then nothing."""
    stub = "client:decoding:holds"
    server = start(*pair.serve("--once"), stub=stub)
    with Tap(server.until_listening()) as tap:
        client = start(*pair.generate(tap.port, "--prompt", PROMPT), stub=stub)
        client.until_phase("decoding")
        tap.spoil(side, spoil)
        hears, other = (server, client) if side == "client" else (client, server)
        hears.assert_failed(1, words, within_s=END_S)
        other.assert_failed(1, "peer", within_s=END_S)


# ---- no progress


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "fault"),
    [
        ("client", "deadlocked"),
        pytest.param("provider", "stopped", marks=slow),
        pytest.param("provider", "deadlocked", marks=slow),
    ],
)
def test_a_worker_that_stands_still_ends_both(
    start: Start, pair: Pair, who: str, fault: str
) -> None:
    """Its supervisor lives and answers, and when deadlocked its own sign of life goes on, too."""
    stub = f"{who}:prefilling:deadlocks" if fault == "deadlocked" else "client:prefilling:holds"
    server = start(*pair.serve("--once"), stub=stub, SPU_LLM_STALL_S=str(STALL_S))
    options = ["--prompt", PROMPT, "--standard"]
    port = server.until_listening()
    client = start(*pair.generate(port, *options), stub=stub, SPU_LLM_STALL_S=str(STALL_S))
    client.until_phase("prefilling")
    if fault == "stopped":
        worker_of(client if who == "client" else server).send(signal.SIGSTOP)
    began = time.monotonic()
    words = f"no progress for {STALL_S:g} s: neither party's worker"
    client.assert_failed(1, words, within_s=STALL_S + END_S)
    server.assert_failed(1, words, within_s=END_S)
    assert time.monotonic() - began > STALL_S - 2.5  # not before; it had moved until a beat ago


@pytest.mark.slow
def test_a_slow_worker_is_waited_for(start: Start, pair: Pair) -> None:
    """It sends nothing for longer than the deadline, but computes."""
    stub = "provider:prefilling:computes"
    demo = start(*pair.demo, stub=stub, SPU_LLM_STALL_S=str(STALL_S))
    assert demo.wait(RUN_S) == 0, demo.stderr
    assert "decoding" in demo.stderr


@pytest.mark.slow
def test_a_peer_whose_worker_says_nothing_is_given_up(start: Start, pair: Pair) -> None:
    """It has agreed on the settings and shows life, but no byte of its worker ever comes."""
    server = start(*pair.serve("--once"), stub="", SPU_LLM_STALL_S=str(STALL_S))
    with Tap(server.until_listening()) as tap:
        tap.mute = True
        client = start(*pair.generate(tap.port), stub="", SPU_LLM_STALL_S=str(STALL_S))
        client.until_phase("connecting")
        client.assert_failed(1, "no progress", within_s=STALL_S + END_S)
        server.assert_failed(1, "no progress", within_s=END_S)


def test_the_longest_frame_is_shorter_than_a_deadline() -> None:
    """A frame counts once it has left; at 1 Mbps that takes a tenth of the deadline."""
    from spu_llm.service.watch import STALL_S as deadline_s

    assert MAX_PAYLOAD * 8 / 1e6 < deadline_s / 10
