"""A door's own end of clients' connections, with a front door that is a script."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from spu_llm.cluster import door as door_module
from spu_llm.cluster.bridge import Dialer, Port
from spu_llm.cluster.door import Door, DoorPlan
from spu_llm.cluster.door_words import ADMITTED, CALLS, ENDED, GO, RENEW, STOP
from spu_llm.cluster.framed import Framed
from spu_llm.core.errors import BusyError, PeerError
from spu_llm.net import relay as relay_module
from spu_llm.net.control import Control
from spu_llm.net.entrance import Met
from spu_llm.net.frames import Frame, Kind, StreamType, encode
from spu_llm.net.identity import OneTime
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import shape_of
from spu_llm.net.stream import TcpStream
from spu_llm.service.listening import Callers
from tests.kit.patience import SOON_S, eventually


@dataclass
class AtDoor:
    """A door that listens nowhere, and what reaches the front door of it."""

    door: Door = field(default_factory=Door)
    reached: queue.Queue[tuple[Framed, list[Any]]] = field(default_factory=queue.Queue)
    life: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = OneTime.made()
        self.port = Port(
            "127.0.0.1", own, self.door.certificate(), lambda *said: self.reached.put(said)
        )
        door: Any = self.door
        door._network, door._callers = "local", Callers(door._run)
        door._dialer = Dialer(door._own, self.port.endpoint)
        door._refused = lambda error: self.life.append(str(error))

    def comes(self, calls: bool) -> TcpStream:
        """Have a client's connection come to the door, and return the client's end."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = TcpStream(socket.create_connection(listener.getsockname()))
            met = TcpStream(listener.accept()[0])
        self.door._callers.start(Met(met, met, None, None, "", "a door" if calls else ""))
        return client


@pytest.fixture
def at() -> Iterator[AtDoor]:
    made = AtDoor()
    with closing(made.port):
        yield made


def test_a_session_that_waits_for_its_place(at: AtDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose worker is ready earlier is heard all the while."""
    monkeypatch.setattr(relay_module, "HOLD_S", 0.2)
    relay = Relay(at.comes(calls=False), shape_of("local"), "client")
    with closing(Control(relay, silence_s=2.0)) as control:
        control.show_ticket(b"ticket")
        framed, said = at.reached.get(timeout=SOON_S)
        assert said[1] == b"ticket".hex()
        framed.say(ADMITTED, "preparation")
        relay._uplink.send(encode(Frame(Kind.OPEN, 1, bytes([StreamType.LINK]))))
        assert not control.ended.wait(1.0)
        framed.say(STOP, "BusyError", "no machine has room")
        assert control.ended.wait(SOON_S)
        with pytest.raises(BusyError, match="no machine has room"):
            control.check()
        framed.close()


@pytest.mark.parametrize("goes", [False, True])
def test_calls_end_where_the_front_door_stalls(
    at: AtDoor, monkeypatch: pytest.MonkeyPatch, goes: bool
) -> None:
    monkeypatch.setattr(door_module, "GO_S", SOON_S if goes else 0.2)
    monkeypatch.setattr(door_module, "CALLS_S", 0.2 if goes else SOON_S)
    client = at.comes(calls=True)
    framed, said = at.reached.get(timeout=SOON_S)
    assert said[0] == CALLS
    if goes:
        framed.say(GO)
    assert client.recv_within(1, SOON_S / 2) == b""
    assert framed.stream().recv_some(1) == b""
    assert eventually(lambda: not at.door._callers._threads)


@pytest.mark.parametrize("calls", [False, True])
def test_a_front_door_that_cannot_be_reached(at: AtDoor, calls: bool) -> None:
    """The client of a session hears so, and the front door, of the door's life."""
    at.port.close()
    client = at.comes(calls)
    if calls:
        assert client.recv_within(1, SOON_S) == b""
    else:
        with closing(Control(Relay(client, shape_of("local"), "client"))) as control:
            control.show_ticket(b"ticket")
            assert control.ended.wait(SOON_S)
            with pytest.raises(PeerError, match=door_module.NO_ANSWER):
                control.check()
    assert eventually(lambda: len(at.life) == 1)
    assert "does not reach the front door: cannot reach the machine" in at.life[0]


def test_a_door_that_ends_has_closed_its_port_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(door_module, "os", SimpleNamespace(_exit=ended.put))
    own, door = OneTime.made(), Door()
    met: queue.Queue[Framed] = queue.Queue()
    with closing(
        Port("127.0.0.1", own, door.certificate(), lambda framed, said: met.put(framed))
    ) as front_door:
        port = door.open(DoorPlan(front_door.endpoint, "127.0.0.1", 0, "local", None))
        life = met.get(timeout=SOON_S)
        life.say(RENEW, "/nowhere", "/nobody", "a fingerprint", "anchors")
        try:
            kind, why = life.hear()
            assert kind == ENDED and "/nowhere" in why
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
        finally:
            assert ended.get(timeout=SOON_S) == 1
            life.close()
