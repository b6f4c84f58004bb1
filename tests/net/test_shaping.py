"""What an emulated network promises, and what it really gives."""

from __future__ import annotations

import socket
import statistics
import time

import pytest

from spu_llm.net.shaping import NETWORKS, NetworkShape, Shaper

from .conftest import Bench, opened, read_all


def test_due_times() -> None:
    shaper = Shaper(NetworkShape("x", 8000.0, 0.5))  # 1000 bytes a second
    assert shaper.due(100, 10.0) == pytest.approx(10.6)
    assert shaper.due(100, 10.0) == pytest.approx(10.7)  # behind the first
    assert shaper.express(10, 10.0) == pytest.approx(10.51)  # ahead of both
    assert shaper.due(100, 10.0) == pytest.approx(10.81)
    assert shaper.due(100, 20.0) == pytest.approx(20.6)  # idle time is not saved up


def test_networks() -> None:
    assert NETWORKS["local"].direct
    assert (NETWORKS["lan"].bits_per_s, NETWORKS["lan"].delay_s) == (1e9, 0.010)
    assert (NETWORKS["wan"].bits_per_s, NETWORKS["wan"].delay_s) == (400e6, 0.040)


def link(bench: Bench, shape: NetworkShape) -> tuple[socket.socket, socket.socket]:
    """Two sockets joined through both relays."""
    client, provider = bench.controls(shape)
    server = socket.create_server(("127.0.0.1", 0))
    bench.cleanup.callback(server.close)
    opened(provider.relay, server.getsockname()[1])
    near = bench.dial(opened(client.relay, 1))
    far, _ = server.accept()
    bench.cleanup.callback(far.close)
    return near, far


@pytest.mark.parametrize("name", ["lan", "wan"])
def test_one_way_delay(bench: Bench, name: str) -> None:
    shape = NETWORKS[name]
    near, far = link(bench, shape)
    delays = []
    for a, b in [(near, far), (far, near)] * 10:
        started = time.monotonic()
        a.sendall(b"x" * 64)
        assert read_all(b, 64)
        delays.append(time.monotonic() - started)
    assert shape.delay_s <= min(delays)
    assert statistics.median(delays) < shape.delay_s + 0.003


@pytest.mark.parametrize("name", ["lan", "wan"])
def test_rate(bench: Bench, name: str) -> None:
    shape = NETWORKS[name]
    assert shape.bits_per_s is not None
    near, far = link(bench, shape)
    nbytes = 16_000_000
    nominal_s = nbytes * 8 / shape.bits_per_s + shape.delay_s
    took_s: list[float] = []
    while not took_s or (min(took_s) > nominal_s * 1.10 and len(took_s) < 5):  # a busy machine
        started = time.monotonic()
        near.sendall(bytes(nbytes))
        assert len(read_all(far, nbytes)) == nbytes
        took_s.append(time.monotonic() - started)
    assert nominal_s * 0.999 < min(took_s) < nominal_s * 1.10


def test_streams_share_the_rate(bench: Bench) -> None:
    shape = NetworkShape("x", 80e6, 0.0)
    client, provider = bench.controls(shape)
    got: list[float] = []
    started = time.monotonic()

    def sink(sock: socket.socket) -> None:
        read_all(sock)
        got.append(time.monotonic() - started)

    opened(provider.relay, bench.worker(sink).port)
    port = opened(client.relay, 1)
    socks = [bench.dial(port) for _ in range(4)]
    for sock in socks:
        sock.sendall(bytes(1_000_000))
        sock.shutdown(socket.SHUT_WR)
    while len(got) < 4 and time.monotonic() - started < 5:
        time.sleep(0.01)
    assert 0.39 < max(got) < 0.80  # 4 MB at 10 MB/s
