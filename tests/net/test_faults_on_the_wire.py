"""A toy program between two relays under TLS, and whatever may happen to what they send.

Whatever a side receives was sent in this order, each byte once; and a connection that lost anything
is given up by both sides, with a reason, within seconds of when that can be known.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spu_llm.core.errors import PeerError
from spu_llm.net import identity as identities
from spu_llm.net import tls
from spu_llm.net.control import SILENCE_S, Control
from spu_llm.net.identity import CERTIFICATE, Identity
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import NETWORKS
from spu_llm.net.stream import accept, connect, listen
from tests.kit.faulty_wire import DEEDS, DELAY_S, FATAL, SIDES, Fault, FaultyWire
from tests.kit.patience import eventually

from .conftest import Worker, as_server, opened

SHORT_S = 1.5  # of silence that ends a session, where a test waits for that
KNOWN_S = 30.0  # from a fault until both have ended, on a machine however slow


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Identity, Identity]:
    """Return the client's and the provider's identities."""
    root: Path = tmp_path_factory.mktemp("identities")
    for name in SIDES:
        identities.make(root / name, f"{name}.example", 30)
    client, provider = (root / name for name in SIDES)
    return (
        identities.load(client, provider / CERTIFICATE),
        identities.load(provider, client / CERTIFICATE),
    )


class Toy:
    """A session in one process: the client's worker sends numbers, the provider's sends each back.

    `sent` and `echoed` count them; `wrong` is what no network may do.
    """

    def __init__(
        self, known: tuple[Identity, Identity], fault: Fault | None, silence_s: float
    ) -> None:
        self.sent = self.echoed = 0
        self.wrong: list[str] = []
        self.errors: dict[str, PeerError] = {}
        self._stack = contextlib.ExitStack()
        self._stop = threading.Event()
        listener = self._stack.enter_context(listen("127.0.0.1", 0))
        self.wire = self._stack.enter_context(FaultyWire(listener.getsockname()[1], fault))
        self.controls: dict[str, Control] = {}
        meeting = [
            threading.Thread(target=self._meet, args=(side, known, listener, silence_s))
            for side in SIDES
        ]
        for thread in meeting:
            thread.start()
        for thread in meeting:
            thread.join()
        if not self.errors:
            self._work()

    def _meet(
        self, side: str, known: tuple[Identity, Identity], listener: socket.socket, beat_s: float
    ) -> None:
        try:
            if side == "client":
                tcp = connect("127.0.0.1", self.wire.port, 5)
                stream = tls.as_client(tcp, known[0], "provider.example", timeout_s=KNOWN_S)
            else:
                context = tls.server_context(known[1])
                stream = as_server(accept(listener, 5), context, timeout_s=KNOWN_S)
        except PeerError as error:
            self.errors[side] = error
            return
        role = "client" if side == "client" else "provider"
        control = Control(Relay(stream, NETWORKS["local"], role), beat_s)  # type: ignore[arg-type]
        self.controls[side] = control
        self._stack.callback(control.close)
        try:
            if side == "client":
                control.show_ticket(bytes(32))
            else:
                control.take_ticket(KNOWN_S)
        except PeerError as error:
            self.errors[side] = error

    def _work(self) -> None:
        worker = Worker(self._echo)
        self._stack.callback(worker.close)
        try:
            opened(self.controls["provider"].relay, worker.port)
            port = opened(self.controls["client"].relay, 1)
        except PeerError:
            return  # it is over, as `reasons` says
        sock = socket.create_connection(("127.0.0.1", port), 5)
        self._stack.callback(sock.close)
        thread = threading.Thread(target=self._send, args=(sock,))
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(sock.shutdown, socket.SHUT_RDWR)
        self._stack.callback(self._stop.set)

    def _send(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not self._stop.wait(0.002):
                sock.sendall(self.sent.to_bytes(8, "big"))
                self.sent += 1
                back = _read(sock)
                if back is None:
                    return
                if back != self.echoed:
                    self.wrong.append(f"{back} came back in place of {self.echoed}")
                self.echoed += 1

    def _echo(self, sock: socket.socket) -> None:
        expected = 0
        while (number := _read(sock)) is not None:
            if number != expected:
                self.wrong.append(f"{number} came in place of {expected}")
            expected += 1
            sock.sendall(number.to_bytes(8, "big"))

    @property
    def over(self) -> bool:
        """Return whether both sides have given it up."""
        return len(self.errors) == len(SIDES) or all(
            side in self.errors or self.controls[side].ended.is_set() for side in SIDES
        )

    def reasons(self) -> list[str]:
        """Return both sides' errors; a side that has none is missing."""
        for side, control in self.controls.items():
            try:
                control.check()
            except PeerError as error:
                self.errors.setdefault(side, error)
        return [str(error) for error in self.errors.values()]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._stack.close()


def _read(sock: socket.socket) -> int | None:
    data = b""
    while len(data) < 8:
        try:
            more = sock.recv(8 - len(data))
        except OSError:
            return None
        if not more:
            return None
        data += more
    return int.from_bytes(data, "big")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("deed", FATAL)
def test_a_fault_ends_both_sides(known: tuple[Identity, Identity], deed: str, side: str) -> None:
    toy = Toy(known, Fault(deed, side, 40, connection=0), SHORT_S)
    with contextlib.closing(toy):
        assert eventually(lambda: toy.wire.hit is not None)
        assert eventually(lambda: toy.over, KNOWN_S)
        assert len(toy.reasons()) == 2
    assert toy.echoed > 0 and not toy.wrong


def test_a_delay_ends_nothing(known: tuple[Identity, Identity]) -> None:
    toy = Toy(known, Fault("delay", "provider", 40, connection=0), SILENCE_S)
    with contextlib.closing(toy):
        assert eventually(lambda: toy.wire.hit is not None)
        before = toy.echoed
        assert eventually(lambda: toy.echoed > before + 50, DELAY_S + KNOWN_S)
        assert not toy.over and not toy.reasons()
    assert not toy.wrong


class Sessions(RuleBasedStateMachine):
    """Sessions one after the other and side by side, with faults anywhere, from the first byte
    on.
    """

    identities: tuple[Identity, Identity]

    @initialize()
    def begin(self) -> None:
        self.running: list[tuple[Toy, Fault | None]] = []

    @rule(
        fault=st.none()
        | st.builds(
            Fault, st.sampled_from(DEEDS), st.sampled_from(SIDES), st.integers(0, 30), st.just(0)
        )
    )
    def open(self, fault: Fault | None) -> None:
        note(f"{fault}")
        if len(self.running) < 3:
            self.running.append((Toy(self.identities, fault, SILENCE_S), fault))

    @rule(seconds=st.floats(0.0, 0.3))
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    @rule()
    def end(self) -> None:
        """Check that a session comes to its end: with the fault that it met, or as it should."""
        if not self.running:
            return
        toy, fault = self.running.pop(0)
        with contextlib.closing(toy):
            fatal = fault is not None and fault.deed in FATAL
            hit = fatal and eventually(lambda: toy.wire.hit is not None or toy.over, 4.0)
            # TLS means nothing by its change of ciphers, the second record, and takes two of it.
            harmless = fatal and fault is not None and fault.at <= 1 and not toy.errors
            if hit and toy.wire.hit is not None and not harmless:
                assert eventually(lambda: toy.over, KNOWN_S), fault
                assert len(toy.reasons()) == 2, fault
            elif not toy.errors:
                before = toy.echoed
                assert eventually(lambda: toy.echoed > before + 5, DELAY_S + KNOWN_S), fault
        assert not toy.wrong

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert not [toy.wrong for toy, _ in getattr(self, "running", []) if toy.wrong]

    def teardown(self) -> None:
        while getattr(self, "running", []):
            self.end()


@pytest.mark.slow
def test_faults_in_any_order(known: tuple[Identity, Identity]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("OfThese", (Sessions,), {"identities": known})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink takes too long
        ),
    )
