"""Connecting, listening, and closing from another thread."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from spu_llm.core.errors import InputError, PeerError
from spu_llm.net.stream import accept, connect, listen
from tests.kit.patience import SOON_S

from .conftest import Bench


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_nobody_listens() -> None:
    port = free_port()
    with pytest.raises(PeerError, match=f"cannot reach provider at 127.0.0.1:{port}: .*refused"):
        connect("127.0.0.1", port, 1)


def test_unknown_host() -> None:
    with pytest.raises(PeerError, match="cannot reach provider at no-such-host.invalid:9000: "):
        connect("no-such-host.invalid", 9000, 1)


def test_port_in_use() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InputError) as caught:
            listen("127.0.0.1", port)
    assert str(caught.value) == (
        f"port {port} on 127.0.0.1 is in use; choose another with --listen"
    )


def test_accept_times_out() -> None:
    with listen("127.0.0.1", 0) as listener:
        with pytest.raises(TimeoutError):
            accept(listener, 0.01)


def test_bytes_and_end(bench: Bench) -> None:
    client, provider = bench.streams()
    client.send_all(memoryview(b"abc"))
    assert provider.recv_some(2) == b"ab"
    assert provider.recv_some(9) == b"c"
    client.close()
    assert provider.recv_some(9) == b""
    provider.close()


def test_close_wakes_a_blocked_receive(bench: Bench) -> None:
    client, provider = bench.streams()
    woken = threading.Event()

    def receive() -> None:
        assert client.recv_some(1) == b""
        woken.set()

    thread = threading.Thread(target=receive)
    thread.start()
    woken.wait(0.05)
    client.close()
    client.close()
    assert woken.wait(SOON_S)
    with pytest.raises(PeerError, match="closed"):
        client.recv_some(1)
    provider.close()


def test_nobody_is_listened_to_after_the_deadline(bench: Bench) -> None:
    """However much there is to hear: a peer that goes on talking holds nothing up."""
    ours, theirs = bench.streams()
    assert ours.host == "127.0.0.1"
    theirs.send_all(b"more")
    assert ours.recv_within(2, 1.0) == b"mo"
    with pytest.raises(PeerError, match="in time"):
        ours.recv_within(2, 0.0)
    talking = threading.Event()

    def talk() -> None:
        try:
            while True:
                theirs.send_all(bytes(1 << 16))
                talking.set()
        except PeerError:
            pass

    thread = threading.Thread(target=talk)
    thread.start()
    talking.wait(SOON_S)
    started = time.monotonic()
    ours.close_after(0.2)
    assert time.monotonic() - started < SOON_S
    thread.join(SOON_S)
    assert not thread.is_alive()
    theirs.close()
