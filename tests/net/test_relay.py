"""Streams end to end, and every way a connection can end."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

import pytest

from spu_llm.core.errors import PeerError, WireError
from spu_llm.net import relay as relay_module
from spu_llm.net.control import SILENCE_S, Control
from spu_llm.net.frames import PREAMBLE, Frame, Kind, StreamType, encode
from spu_llm.net.relay import MAX_STREAMS
from tests.kit.patience import SOON_S, eventually

from .conftest import Bench, echo, opened, read_all


def linked(bench: Bench, pair: tuple[Control, Control]) -> tuple[int, int]:
    """Give both sides an echoing worker; return the ports where each finds its peer."""
    client, provider = (opened(c.relay, bench.worker(echo).port) for c in pair)
    return client, provider


def opening(stream: int, door: StreamType = StreamType.MESSAGES) -> Frame:
    return Frame(Kind.OPEN, stream, bytes([door]))


def exchange(sock: socket.socket, data: bytes) -> bytes:
    """Send `data` while reading the answer, then half-close and read to the end."""

    def send() -> None:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    answer = read_all(sock)
    thread.join()
    return answer


def test_parallel_streams_both_ways(bench: Bench) -> None:
    pair = bench.controls()
    ports = linked(bench, pair)
    blobs = [random.Random(i).randbytes(3_000_000 + i) for i in range(6)]
    answers: dict[int, bytes] = {}

    def one(index: int) -> None:
        answers[index] = exchange(bench.dial(ports[index % 2]), blobs[index])

    threads = [threading.Thread(target=one, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert [answers[i] == blobs[i] for i in range(6)] == [True] * 6
    for side, other in (pair, pair[::-1]):
        sent, seen = side.relay.snapshot(), other.relay.snapshot()
        assert sent.payload_bytes_sent == sum(map(len, blobs))
        assert sent.wire_bytes_sent == seen.wire_bytes_received


def test_many_small_messages(bench: Bench) -> None:
    port, _ = linked(bench, bench.controls())
    sock = bench.dial(port)
    for i in range(300):
        message = i.to_bytes(4, "big") * 8
        sock.sendall(message)
        assert read_all(sock, len(message)) == message


def test_answer_after_half_close(bench: Bench) -> None:
    client, provider = bench.controls()
    port = opened(client.relay, 1)
    worker = bench.worker(lambda sock: sock.sendall(read_all(sock)[::-1]))
    opened(provider.relay, worker.port)
    assert exchange(bench.dial(port), b"abc") == b"cba"


def test_exact_bytes_on_the_wire(bench: Bench) -> None:
    raw, control = bench.raw_peer()
    port = opened(control.relay, bench.worker(echo).port)
    own = bench.dial(port)
    own.sendall(b"hi")
    assert read_all(raw, 29) == (b"spullm\0\5" + b"\1\0\0\0\2\0\0\0\1\1" + b"\2\0\0\0\2\0\0\0\2hi")
    raw.sendall(b"spullm\0\5" + b"\1\0\0\0\1\0\0\0\1\1" + b"\2\0\0\0\1\0\0\0\3abc")
    assert read_all(raw, 12) == b"\2\0\0\0\1\0\0\0\3abc"
    raw.sendall(b"\3\0\0\0\2\0\0\0\1\0" + b"\3\0\0\0\1\0\0\0\1\0")
    assert read_all(own) == b""
    assert read_all(raw, 10) == b"\3\0\0\0\1\0\0\0\1\0"
    assert control.relay.snapshot().wire_bytes_received == 8 + 10 + 12 + 10 + 10
    assert eventually(lambda: control.relay.snapshot().wire_bytes_sent == 29 + 12 + 10)
    assert control.relay.snapshot().payload_bytes_sent == 5


def test_worker_that_comes_up_late(bench: Bench) -> None:
    client, provider = bench.controls()
    port = opened(client.relay, 1)
    sock = bench.dial(port)
    sock.sendall(b"early")
    time.sleep(0.1)  # the stream is open before the provider even knows its worker
    with socket.create_server(("127.0.0.1", 0)) as server:
        worker_port = server.getsockname()[1]
    opened(provider.relay, worker_port)
    time.sleep(0.2)
    bench.worker(echo, worker_port)
    assert read_all(sock, 5) == b"early"


def test_a_stream_waits_until_the_worker_is_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "WORKER_CONNECT_S", 0.1)
    client, provider = bench.controls()
    sock = bench.dial(opened(client.relay, 1))
    sock.sendall(b"early")
    assert eventually(lambda: bool(provider.relay._pipes))
    time.sleep(0.5)  # a session's place may take longer than its worker to listen
    opened(provider.relay, bench.worker(echo).port)
    assert read_all(sock, 5) == b"early"


def test_streams_wait_until_they_are_allowed(bench: Bench) -> None:
    """Control messages do not: they say whether there is a session."""
    client, provider = bench.controls()
    provider.relay.hold_streams()
    port = opened(client.relay, 1)
    opened(provider.relay, bench.worker(echo).port)
    sock = bench.dial(port)
    sock.sendall(b"early")
    time.sleep(0.1)
    assert not provider.relay._pipes
    provider.relay.allow_streams()
    assert read_all(sock, 5) == b"early"


def test_streams_that_are_never_allowed_end_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "HOLD_S", 0.1)
    raw, control = bench.raw_peer()
    control.relay.hold_streams()
    raw.sendall(b"spullm\0\5" + b"\1\0\0\0\1\0\0\0\1\1")
    assert control.ended.wait(SOON_S)
    with pytest.raises(PeerError, match="streams before there is a session"):
        control.check()


def test_worker_that_never_comes_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "WORKER_CONNECT_S", 0.1)
    client, provider = bench.controls()
    port = opened(client.relay, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()[1]
    opened(provider.relay, nobody)
    assert read_all(bench.dial(port)) == b""
    assert not client.ended.is_set()


def test_worker_that_hangs_up(bench: Bench) -> None:
    client, provider = bench.controls()
    port = opened(client.relay, 1)
    opened(provider.relay, bench.worker(lambda sock: None).port)
    sock = bench.dial(port)
    assert sock.recv(1) == b""

    def refused() -> bool:
        try:
            sock.sendall(b"x")
        except OSError:
            return True
        return False

    assert eventually(refused)
    assert not client.ended.is_set() and not provider.ended.is_set()


def test_slow_worker_does_not_hold_up_other_streams(bench: Bench) -> None:
    client, provider = bench.controls()
    go = threading.Event()
    got: list[int] = []

    def slow_or_echo(sock: socket.socket) -> None:
        if sock.recv(1) == b"s":
            go.wait(SOON_S)
            got.append(len(read_all(sock)))
        else:
            echo(sock)

    opened(provider.relay, bench.worker(slow_or_echo).port)
    bench.cleanup.callback(go.set)
    port = opened(client.relay, 1)
    slow = bench.dial(port)
    slow.sendall(b"s" + bytes(30 << 20))
    other = bench.dial(port)
    other.sendall(b"exyz")
    assert read_all(other, 3) == b"xyz"
    slow.shutdown(socket.SHUT_WR)
    go.set()
    assert eventually(lambda: got == [30 << 20])


def test_a_worker_that_takes_nothing_holds_back_the_sender(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "HELD_BYTES", 1 << 20)
    client, provider = bench.controls(silence_s=0.15)
    stop = threading.Event()
    opened(provider.relay, bench.worker(lambda sock: stop.wait(SOON_S)).port)
    bench.cleanup.callback(stop.set)
    for control in (client, provider):
        control._start_heartbeat()
    sock = bench.dial(opened(client.relay, 1))
    sock.settimeout(0.4)
    with pytest.raises(TimeoutError):
        while True:
            sock.sendall(bytes(1 << 20))
    assert provider.relay.held_by_worker
    time.sleep(0.3)  # longer than three heartbeats
    assert not client.ended.is_set() and not provider.ended.is_set()


def test_streams_are_limited(bench: Bench) -> None:
    client, provider = bench.controls()
    opened(provider.relay, bench.worker(echo).port)
    port = opened(client.relay, 1)
    socks = [bench.dial(port) for _ in range(MAX_STREAMS + 1)]
    for sock in socks[:-1]:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
    with contextlib.suppress(ConnectionError):
        assert socks[-1].recv(1) == b""
    socks[0].close()
    assert eventually(lambda: len(provider.relay._pipes) < MAX_STREAMS)
    assert exchange(bench.dial(port), b"again") == b"again"
    assert not client.ended.is_set()


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (b"spullm\0\1", "peer speaks wire version 1, this side speaks 5"),
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak spu-llm"),
        (PREAMBLE + b"\2\0\0\0\1\xff\0\0\0", "frame of 4278190080 bytes"),
        (PREAMBLE + b"\7\0\0\0\1\0\0\0\0", "unknown kind 7"),
        (PREAMBLE + encode(opening(2)), "stream 2, an id of this side"),
        (PREAMBLE + encode(opening(3)) * 2, "stream 3 again"),
        (PREAMBLE + encode(opening(3)) + encode(opening(1)), "stream 1 again"),
        (PREAMBLE + encode(Frame(Kind.DATA, 1, b"x")), "stream 1, which is not open"),
        (PREAMBLE + encode(Frame(Kind.CLOSE, 2, b"\0")), "stream 2, which is not open"),
        (
            PREAMBLE + encode(opening(1)) + encode(Frame(Kind.CLOSE, 1, b"\0")) * 2,
            "stream 1 ended twice",
        ),
        (
            PREAMBLE
            + encode(opening(1))
            + encode(Frame(Kind.CLOSE, 1, b"\0"))
            + encode(Frame(Kind.DATA, 1, b"x")),
            "data after the end of stream 1",
        ),
        (
            PREAMBLE + b"".join(encode(opening(2 * i + 1)) for i in range(65)),
            "more than 64 streams",
        ),
        (PREAMBLE + encode(Frame(Kind.CONTROL, 0, b"\xff")), "not JSON"),
        (PREAMBLE + encode(Frame(Kind.CONTROL, 0, b"[" * 16_000)), "not JSON"),
        (PREAMBLE + encode(Frame(Kind.CONTROL, 0, b"[1]")), "not a JSON object"),
        (PREAMBLE + encode(Frame(Kind.CONTROL, 0, b'{"type":"x","type":"y"}')), "not JSON"),
        (PREAMBLE + encode(Frame(Kind.CONTROL, 0, b'{"type":"x"}')), "unknown type 'x'"),
        (PREAMBLE + encode(Frame(Kind.CONTROL, 0, b'{"type":"bye"}')), "goodbye"),
        (PREAMBLE + encode(Frame(Kind.CONTROL, 0, b'{"type":"ping"}')), "heartbeat"),
        (PREAMBLE + encode(Frame(Kind.CONTROL, 0, b'{"type":"ping","progress":true}')), "heartb"),
    ],
)
def test_broken_rules_end_the_connection(bench: Bench, wire: bytes, message: str) -> None:
    raw, control = bench.raw_peer()
    raw.sendall(wire)
    assert control.ended.wait(SOON_S)
    with pytest.raises(WireError, match=message):
        control.check()
    with contextlib.suppress(ConnectionError):
        read_all(raw)


def test_peer_dies(bench: Bench) -> None:
    raw, control = bench.raw_peer()
    own = bench.dial(opened(control.relay, bench.worker(echo).port))
    raw.sendall(PREAMBLE + encode(opening(1)) + encode(Frame(Kind.DATA, 1, b"abc")))
    own.sendall(b"x")
    died = time.monotonic()
    raw.close()
    assert control.ended.wait(SOON_S)
    assert time.monotonic() - died < SILENCE_S
    with pytest.raises(PeerError, match="connection to the peer was lost"):
        control.check()
    with contextlib.suppress(ConnectionError):
        assert own.recv(1) == b""


def test_peer_dies_inside_a_frame(bench: Bench) -> None:
    raw, control = bench.raw_peer()
    raw.sendall(PREAMBLE + b"\2\0\0")
    raw.shutdown(socket.SHUT_WR)
    assert control.ended.wait(SOON_S)
    with pytest.raises(WireError, match="lost inside a message"):
        control.check()


def test_close_with_everything_blocked(bench: Bench) -> None:
    """A peer that stopped reading, a full uplink, a worker that waits: close still returns."""
    raw, control = bench.raw_peer()
    own = bench.dial(opened(control.relay, 1))
    own.settimeout(0.3)
    with pytest.raises(TimeoutError):
        while True:
            own.sendall(bytes(1 << 20))
    started = time.monotonic()
    control.close()
    assert time.monotonic() - started < SOON_S


def test_no_worker_side_after_the_end(bench: Bench) -> None:
    raw, control = bench.raw_peer()
    raw.close()
    assert control.ended.wait(SOON_S)
    with pytest.raises(PeerError, match="connection to the peer was lost"):
        opened(control.relay, 1)
    control.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_frames_do_nothing_worse_than_end_it(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    raw, control = bench.raw_peer()
    opened(control.relay, bench.worker(echo).port)
    frames = [
        encode(opening(2 * i + 1))
        + encode(Frame(Kind.DATA, 2 * i + 1, rng.randbytes(rng.randrange(2000))))
        + encode(Frame(Kind.CLOSE, 2 * i + 1, rng.choice([b"\0", b"\1"])))
        for i in range(50)
    ]
    with contextlib.suppress(OSError):
        raw.sendall(PREAMBLE + b"".join(frames) + rng.randbytes(100) + b"\xff" * 9)
    assert control.ended.wait(SOON_S)
    with pytest.raises(WireError):
        control.check()
