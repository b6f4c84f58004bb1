"""`serve` and `generate` with certificates, and a wire between them that does what wires do.

Both parties end within seconds and say why; the provider serves on, its only place free again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spu_llm.net import identity
from spu_llm.service.admission import TICKET_S
from tests.kit.faulty_wire import FATAL, SIDES, Fault, FaultyWire
from tests.kit.pair import Pair
from tests.kit.patience import END_S, RUN_S
from tests.kit.processes import Command, Start, credentials

slow = pytest.mark.slow
STUB = "client:decoding:holds"
# A client's connections, once it has how text is written: for that, for calls, and for data.
TEXT, CALLS, DATA = 0, 1, 2


class Known:
    """Options of both parties, who trust each other."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for name in SIDES:
            identity.make(root / name, f"{name}.example", 30)

    def options(self, own: str) -> list[str]:
        (other,) = set(SIDES) - {own}
        return credentials(self._root / own, self._root / other)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known(tmp_path_factory.mktemp("identities"))


Ask = Callable[..., Command]


@pytest.fixture(scope="module")
def server(start_shared: Start, pair: Pair, known: Known) -> tuple[Command, int]:
    """Yield a server with one place, and stubs in its workers; clients have had how text is
    written.
    """
    command = start_shared(
        "serve",
        "--model",
        str(pair.private),
        "--listen",
        "127.0.0.1:0",
        "--sessions",
        "1",
        *known.options("provider"),
        stub=STUB,
    )
    port = command.until_listening()
    first = start_shared(*asking(port, pair, known), stub="")
    assert first.wait(END_S) == 0, first.stderr
    return command, port


def asking(port: int, pair: Pair, known: Known) -> list[str]:
    return [
        "generate",
        "--server",
        f"127.0.0.1:{port}",
        "--draft-model",
        str(pair.public),
        *known.options("client"),
    ]


@pytest.fixture
def ask(start: Start, pair: Pair, known: Known) -> Ask:
    def run(port: int, *options: str, stub: str | None = STUB) -> Command:
        return start(*asking(port, pair, known), *options, stub=stub)

    return run


def assert_both_end(
    server: tuple[Command, int], ask: Ask, fault: Fault, *, in_the_midst: bool
) -> None:
    command, port = server
    told = command.stderr.count("session failed")
    with FaultyWire(port, fault, at_once=not in_the_midst) as wire:
        client = ask(wire.port)
        if in_the_midst:
            client.until_phase("decoding")
            wire.counting.set()
        client.assert_failed(1, within_s=END_S)
        assert "peer" in client.errors[0] or "does not answer" in client.errors[0]
        assert wire.hit is not None
    if fault.connection == DATA:
        command.until_count("stderr", "session failed", told + 1)
    assert command.errors == [] and "Traceback" not in command.stderr
    # Its place is free, at once or when its ticket has expired: another client gets it.
    deadline = time.monotonic() + TICKET_S + END_S
    while (again := ask(port, stub="")).wait(END_S) != 0:
        assert "busy with 1 sessions" in again.stderr and time.monotonic() < deadline, again.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "side"),
    [
        pytest.param(deed, side, marks=[] if (i + j) % 4 == 1 else [slow])
        for i, deed in enumerate(FATAL)
        for j, side in enumerate(SIDES)
    ],
)
def test_a_fault_in_the_midst(server: tuple[Command, int], ask: Ask, deed: str, side: str) -> None:
    assert_both_end(server, ask, Fault(deed, side, 10, DATA), in_the_midst=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "side", "at", "connection"),
    [
        ("drop-before", "client", 0, CALLS),
        ("drop-before", "client", 0, DATA),
        ("truncate", "provider", 0, TEXT),
        ("truncate", "provider", 0, DATA),
        *(
            pytest.param(*fault, connection, marks=slow)
            for fault, connections in (
                (("drop-before", "client", 0), [TEXT]),
                (("truncate", "provider", 0), [CALLS]),
                (("corrupt", "client", 2), [TEXT, CALLS, DATA]),
                (("drop-after", "provider", 1), [TEXT, CALLS, DATA]),
                (("half-close", "client", 1), [TEXT, CALLS, DATA]),
                (("black-hole", "provider", 1), [TEXT, CALLS, DATA]),
            )
            for connection in connections
        ),
    ],
)
def test_a_fault_before_there_is_a_session(
    server: tuple[Command, int], ask: Ask, deed: str, side: str, at: int, connection: int
) -> None:
    assert_both_end(server, ask, Fault(deed, side, at, connection), in_the_midst=False)


def test_a_delay_is_waited_for(server: tuple[Command, int], ask: Ask) -> None:
    _, port = server
    with FaultyWire(port, Fault("delay", "provider", 12, DATA)) as wire:
        client = ask(wire.port, stub="")
        assert client.wait(END_S) == 0, client.stderr
        assert wire.hit is not None


def test_other_sessions_go_on(start: Start, pair: Pair, known: Known, ask: Ask) -> None:
    command = start(
        "serve",
        "--model",
        str(pair.private),
        "--listen",
        "127.0.0.1:0",
        *known.options("provider"),
        stub=STUB,
    )
    port = command.until_listening()
    good = ask(port)
    good.until_phase("decoding")
    with FaultyWire(port, Fault("corrupt", "client", 10, DATA), at_once=False) as wire:
        bad = ask(wire.port)
        bad.until_phase("decoding")
        wire.counting.set()
        bad.assert_failed(1, "peer", within_s=END_S)
    shown = len(good.stdout)
    command.until("stderr", "session failed")
    assert good.errors == [] and command.errors == [] and shown


@slow
@pytest.mark.parametrize("deed", ["corrupt", "half-close", "drop-after"])
def test_a_fault_in_the_midst_of_real_decoding(
    server: tuple[Command, int], start: Start, pair: Pair, known: Known, ask: Ask, deed: str
) -> None:
    command = start(
        "serve",
        "--model",
        str(pair.private),
        "--listen",
        "127.0.0.1:0",
        "--sessions",
        "1",
        *known.options("provider"),
    )
    port = command.until_listening()
    with FaultyWire(port, Fault(deed, "provider", 500, DATA)) as wire:
        client = ask(wire.port, "--max-new-tokens", "8", stub=None)
        assert client.wait(RUN_S) == 1, client.stderr
        assert wire.hit is not None and len(client.errors) == 1 and "peer" in client.errors[0]
    command.until("stderr", "session failed")
    again = ask(port, "--max-new-tokens", "2", stub=None)
    assert again.wait(RUN_S) == 0, again.stderr
