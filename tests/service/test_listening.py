"""What a server does with those whom it has met, and what it says of those whom it has not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from spu_llm.core.errors import BusyError, PeerError
from spu_llm.net.entrance import Met
from spu_llm.net.stream import TcpStream
from spu_llm.service import listening
from spu_llm.service.listening import Callers, Strangers
from spu_llm.vault.engine import _Sessions
from tests.kit.patience import SOON_S, eventually


class Served:
    """Callers who stay until they are let go, and those who connect to them."""

    def __init__(self) -> None:
        self.callers = Callers(self._serve)
        self.ended: list[str] = []
        self.go = threading.Event()

    def _serve(self, met: Met) -> None:
        try:
            if met.origin == "settled":
                self.callers.settled(met)
                self.go.wait(SOON_S)
            else:
                met.stream.recv_some(1)
        except PeerError:
            pass
        finally:
            self.ended.append(met.origin)
            met.tcp.close()

    def start(self, origin: str) -> socket.socket:
        """Return the other end of a caller's connection."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sock = socket.create_connection(listener.getsockname())
            tcp = TcpStream(listener.accept()[0])
        self.callers.start(Met(tcp, tcp, None, None, origin))
        return sock


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(listening, "WAITING", 4)
    made = Served()
    yield made
    made.go.set()
    made.callers.join(SOON_S)
    assert not made.callers._threads


def test_of_known_callers_too_the_one_who_holds_most_makes_room(served: Served) -> None:
    socks = [served.start(origin) for origin in ("b", "a", "a", "a")]
    assert served.ended == []
    socks += [served.start("c"), served.start("d")]
    assert eventually(lambda: served.ended == ["a", "a"])
    assert len(served.callers._waiting) == 4
    for sock in socks:
        sock.close()


def test_one_who_has_what_it_came_for_is_put_out_by_nobody(served: Served) -> None:
    socks = [served.start("settled")]
    assert eventually(lambda: len(served.callers._waiting) == 0)
    socks += [served.start("a") for _ in range(9)]
    assert eventually(lambda: served.ended == ["a"] * 5)
    for sock in socks:
        sock.close()


def test_strangers_fill_no_disk_with_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    now = [1000.0]
    monkeypatch.setattr(listening, "time", SimpleNamespace(monotonic=lambda: now[0]))
    strangers = Strangers(lines.append)
    for i in range(1000):
        strangers.refused(PeerError(f"number {i}"))
    assert len(lines) == listening.LINES and lines[0] == "session failed: number 0"
    assert "no line says so" in lines[-1]
    now[0] += listening.LINES_S
    strangers.refused(PeerError("later"))
    assert lines[-1] == "session failed: later"


def test_vaults_of_one_certificate_have_their_share_of_lanes() -> None:
    class Lanes:
        """An engine with room for six texts."""

        free = 6

        def join(self) -> int:
            self.free -= 1
            return self.free

        def leave(self, lane: int) -> None:
            self.free += 1

    engine: Any = Lanes()
    model: Any = None
    sessions = _Sessions(engine, 3, model, None, lambda line: None)
    with sessions._lanes("one", 2):
        with pytest.raises(BusyError, match="room for 3 texts of one certificate"):
            sessions._lanes("one", 2).__enter__()
        with sessions._lanes("one", 1), sessions._lanes("other", 3) as lanes:
            assert engine.free == 0 and len(lanes) == 3
            with pytest.raises(BusyError, match="no room for 1 more"):
                sessions._lanes("third", 1).__enter__()
    assert engine.free == 6 and not sessions._lanes_of
    with sessions._lanes("one", 3):
        pass
