"""Channels from worker to worker: whole messages, whatever both ends do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core.channel import SealedChannel
from spu_llm.core.errors import PeerError, WireError, WorkerError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.net import identity as identities
from spu_llm.net import loopback, stream_channel, tls
from spu_llm.net.frames import StreamType
from spu_llm.net.identity import CERTIFICATE
from spu_llm.net.relay import Relay
from spu_llm.net.shaping import NETWORKS
from spu_llm.net.stream import ByteStream
from spu_llm.net.stream_channel import MAX_MESSAGE, NUMBER_BYTES, Channels, StreamChannel
from spu_llm.net.worker_side import Loopback
from tests.kit.patience import SOON_S, eventually

from .conftest import Bench, as_server

TIMEOUT_S = 60.0


@pytest.fixture
def owned() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(owned: ExitStack, timeout_s: float = TIMEOUT_S) -> tuple[StreamChannel, StreamChannel]:
    with socket.create_server((loopback.HOST, 0)) as listener:
        near = loopback.connect(listener.getsockname()[1])
        far = listener.accept()[0]
    channels = StreamChannel(near, timeout_s), StreamChannel(far, timeout_s)
    for channel in channels:
        owned.callback(channel.close, 0.0)
    return channels


def by_hand(owned: ExitStack, timeout_s: float = TIMEOUT_S) -> tuple[socket.socket, StreamChannel]:
    """Return a channel, and the socket of a peer that the test plays."""
    with socket.create_server((loopback.HOST, 0)) as listener:
        raw = owned.enter_context(loopback.connect(listener.getsockname()[1]))
        channel = StreamChannel(listener.accept()[0], timeout_s)
    owned.callback(channel.close, 0.0)
    return raw, channel


def size(count: int) -> bytes:
    return count.to_bytes(NUMBER_BYTES, "little")


def both_send(one: StreamChannel, other: StreamChannel, blobs: list[bytes]) -> None:
    """Let each side send its blob before it reads the other's."""

    def party(rank: int) -> bytes:
        channel = (one, other)[rank]
        channel.send(blobs[rank])
        channel.send(b"behind")
        heard = channel.recv()
        assert channel.recv() == b"behind"
        return heard

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(party, range(2))) == blobs[::-1]


@given(
    st.lists(st.binary(max_size=300), max_size=6),
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
)
def test_messages_arrive_whole_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(size(len(message)) + message for message in messages)
    with ExitStack() as owned:
        raw, channel = by_hand(owned)
        at = turn = 0
        while at < len(wire):
            raw.sendall(wire[at : at + cuts[turn % len(cuts)]])
            at, turn = at + cuts[turn % len(cuts)], turn + 1
        assert [channel.recv() for _ in messages] == messages
        for message in messages:
            channel.send(message)
        channel.close()
        assert b"".join(iter(lambda: raw.recv(1 << 16), b"")) == wire


def test_both_send_64_mb_before_either_reads(owned: ExitStack) -> None:
    both_send(*pair(owned), [bytes([rank + 1]) * (64 << 20) for rank in range(2)])


def test_many_small_messages_to_one_that_does_not_read(owned: ExitStack) -> None:
    one, other = pair(owned)
    messages = [b"%d" % i * (i % 700) for i in range(40_000)]
    for message in messages:
        one.send(message)
    assert all(other.recv() == message for message in messages)


def test_what_is_kept_is_bounded(owned: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_channel, "MAX_WAITING", 1 << 20)
    one, other = pair(owned, 0.5)
    with pytest.raises(PeerError, match="takes no messages"):
        for _ in range(100):
            one.send(bytes(1 << 20))
    assert one._waiting_bytes < 3 << 20
    assert other.recv() == bytes(1 << 20)
    assert eventually(lambda: one._waiting_bytes < 1 << 20)
    one.send(b"goes on")


@pytest.mark.parametrize("announced", [MAX_MESSAGE + 1, 1 << 40, 2**64 - 1])
def test_huge_lengths_are_refused(owned: ExitStack, announced: int) -> None:
    raw, channel = by_hand(owned)
    raw.sendall(size(announced) + b"x")
    with pytest.raises(WireError, match=f"a message of {announced} bytes"):
        channel.recv()


@pytest.mark.parametrize("cut", [0, 3, NUMBER_BYTES, NUMBER_BYTES + 5])
def test_a_peer_that_closes_in_the_middle_of_a_message(owned: ExitStack, cut: int) -> None:
    raw, channel = by_hand(owned)
    raw.sendall((size(100) + bytes(100))[:cut])
    raw.close()
    with pytest.raises(PeerError, match="no message from the other party"):
        channel.recv()


def test_a_large_announcement_takes_no_memory(owned: ExitStack) -> None:
    raw, channel = by_hand(owned)
    before = _resident()
    thread = threading.Thread(target=lambda: pytest.raises(PeerError, channel.recv))
    thread.start()
    raw.sendall(size(MAX_MESSAGE) + bytes(1000))
    time.sleep(0.2)
    assert _resident() - before < 100 << 20
    raw.close()
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_a_silent_peer_is_not_waited_for_for_ever(owned: ExitStack) -> None:
    raw, channel = by_hand(owned, 0.3)
    started = time.monotonic()
    with pytest.raises(PeerError, match="no message from the other party"):
        channel.recv()
    raw.sendall(size(10) + b"half")
    with pytest.raises(PeerError, match="no message from the other party"):
        channel.recv()
    assert 0.5 < time.monotonic() - started < SOON_S


def test_sending_to_a_peer_that_has_gone(owned: ExitStack) -> None:
    raw, channel = by_hand(owned)
    raw.close()

    def send() -> None:
        for _ in range(100):
            channel.send(bytes(1 << 20))
            time.sleep(0.01)

    with pytest.raises(PeerError, match="connection to the other party was lost"):
        send()


def test_close_sends_what_waits(owned: ExitStack) -> None:
    one, other = pair(owned)
    blob = bytes(range(256)) * (1 << 16)
    with ThreadPoolExecutor() as pool:
        heard = pool.submit(lambda: [other.recv() for _ in range(3)])
        for _ in range(3):
            one.send(blob)
        one.close()
        assert heard.result(10) == [blob] * 3
    with pytest.raises(PeerError):
        other.recv()
    with pytest.raises(PeerError):
        one.send(b"more")
    with pytest.raises(PeerError):
        one.recv()


# ---- opening them


def _free() -> int:
    with socket.create_server((loopback.HOST, 0)) as free:
        return int(free.getsockname()[1])


def at_both(port: int, use: Callable[[Channels, int], object]) -> list[object]:
    def party(rank: int) -> object:
        with Channels(rank, port, TIMEOUT_S) as channels:
            return use(channels, rank)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(party, range(2)))


def test_channels_are_met_in_order_and_used_on_several_threads() -> None:
    def use(channels: Channels, rank: int) -> list[bytes]:
        first = channels.open()
        first.send(b"first of %d" % rank)

        def beside() -> bytes:
            second = channels.open()
            second.send(b"second of %d" % rank)
            return second.recv()

        with ThreadPoolExecutor() as pool:
            second = pool.submit(beside)
            return [first.recv(), second.result(10)]

    assert at_both(_free(), use) == [
        [b"first of %d" % rank, b"second of %d" % rank] for rank in (1, 0)
    ]


def test_whoever_does_not_say_which_channel_is_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor another user of the machine."""
    monkeypatch.setattr(stream_channel, "_HELLO_S", 2.0)
    port = _free()
    with ThreadPoolExecutor() as pool, Channels(PROVIDER, port, TIMEOUT_S) as channels:
        opening = pool.submit(channels.open)
        with loopback.connect(port), loopback.connect(port) as gone:
            gone.close()
            with monkeypatch.context() as other, loopback.connect(port) as stranger:
                other.setattr(loopback, "owner_of", lambda *ports: 1)
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
            with Channels(CLIENT, port, TIMEOUT_S) as callers:
                called = callers.open()
                called.send(b"hello")
                assert opening.result(SOON_S).recv() == b"hello"


def test_another_channel_than_the_next_is_refused() -> None:
    port = _free()
    with ThreadPoolExecutor() as pool, Channels(PROVIDER, port, TIMEOUT_S) as channels:
        opening = pool.submit(channels.open)
        with loopback.connect(port) as raw:
            raw.sendall(size(7))
            with pytest.raises(WireError, match="opens another channel"):
                opening.result(SOON_S)


def test_nobody_comes() -> None:
    for rank in (CLIENT, PROVIDER):
        with Channels(rank, _free(), 0.2) as channels, pytest.MonkeyPatch.context() as patch:
            patch.setattr(stream_channel, "_HELLO_S", 0.1)
            with pytest.raises(PeerError, match="did not come"):
                channels.open()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server((loopback.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WorkerError, match=f"cannot listen on port {port}"):
            Channels(PROVIDER, port, 1.0)


# ---- through relays


def _relays(bench: Bench, streams: tuple[ByteStream, ByteStream]) -> tuple[int, int]:
    """Return the port of the provider's worker, as the client's and as the provider's reach it."""
    ports = []
    roles = ("client", "provider")
    for i, stream in enumerate(streams):
        relay = Relay(stream, NETWORKS["local"], roles[i])  # type: ignore[arg-type]
        relay.start(lambda payload: None, lambda: None)
        bench.cleanup.callback(relay.close)
        side = Loopback()
        relay.open_worker_side(side)
        ports.append(side.ports[StreamType.MESSAGES])
    return ports[0][1], ports[1][0]


def _tls(bench: Bench, root: Path) -> tuple[ByteStream, ByteStream]:
    for name in ("client", "provider"):
        identities.make(root / name, f"{name}.example", 30)
    known = [
        identities.load(root / a, root / b / CERTIFICATE)
        for a, b in (("client", "provider"), ("provider", "client"))
    ]
    client, provider = bench.streams()
    with ThreadPoolExecutor() as pool:
        server = pool.submit(as_server, provider, tls.server_context(known[1]))
        return tls.as_client(client, known[0], "provider.example"), server.result(10)


@pytest.mark.parametrize("secured", [False, True])
def test_sealed_messages_through_relays(bench: Bench, secured: bool, tmp_path: Path) -> None:
    """Large ones both ways at once, and an end at which nothing is lost."""
    ports = _relays(bench, _tls(bench, tmp_path) if secured else bench.streams())
    blobs = [bytes([rank + 1]) * (16 << 20) for rank in range(2)]

    def party(rank: int) -> bytes:
        with Channels(rank, ports[rank], TIMEOUT_S) as channels:
            channel = SealedChannel(channels.open(), bytes(32), rank)
            for _ in range(100):
                channel.send(b"small")
                assert channel.recv() == b"small"
            channel.send(blobs[rank])
            heard = channel.recv()
            channel.send(b"end")
            assert channel.recv() == b"end"
            return heard

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(party, range(2))) == blobs[::-1]


def test_a_worker_that_dies_ends_the_other_s_channel(bench: Bench) -> None:
    ports = _relays(bench, bench.streams())
    with ThreadPoolExecutor() as pool, Channels(PROVIDER, ports[1], TIMEOUT_S) as channels:
        opening = pool.submit(channels.open)
        with Channels(CLIENT, ports[0], TIMEOUT_S) as callers:
            callers.open().send(b"last")
        channel = opening.result(SOON_S)
        assert channel.recv() == b"last"
        started = time.monotonic()
        with pytest.raises(PeerError, match="no message from the other party"):
            channel.recv()
        assert time.monotonic() - started < TIMEOUT_S


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
