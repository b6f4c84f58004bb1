"""Keeping and ending a session."""

from __future__ import annotations

import threading
import time

import pytest

from spu_llm.core.errors import BusyError, PeerError, WireError
from spu_llm.net.control import BYE_WAIT_S, Bye, Control
from spu_llm.net.frames import PREAMBLE, Frame, Kind, encode
from spu_llm.net.shaping import NetworkShape
from tests.kit.patience import SOON_S, eventually

from .conftest import Bench, opened, read_all

TICKET = bytes(range(32))


def open_both(pair: tuple[Control, Control]) -> None:
    client, provider = pair
    client.show_ticket(TICKET)
    assert provider.take_ticket(SOON_S) == TICKET


def test_peer_that_says_nothing(bench: Bench) -> None:
    raw, control = bench.raw_peer()
    with pytest.raises(PeerError, match="showed no ticket within 0.2 s"):
        control.take_ticket(0.2)
    control.close()


@pytest.mark.parametrize("said", ["1", "null", '"0g"', '"00", "ticket": "00"'])
def test_a_ticket_that_is_none(bench: Bench, said: str) -> None:
    raw, control = bench.raw_peer()
    message = f'{{"type": "ticket", "ticket": {said}}}'.encode()
    raw.sendall(PREAMBLE + encode(Frame(Kind.CONTROL, 0, message)))
    with pytest.raises(WireError):
        control.take_ticket(SOON_S)


def test_a_ticket_is_shown_once_and_by_the_client(bench: Bench) -> None:
    pair = bench.controls()
    open_both(pair)
    pair[0].show_ticket(TICKET)
    assert pair[1].ended.wait(SOON_S)
    with pytest.raises(WireError, match="malformed or repeated"):
        pair[1].check()
    client, provider = bench.controls()
    provider.show_ticket(TICKET)
    assert client.ended.wait(SOON_S)
    with pytest.raises(WireError, match="malformed or repeated"):
        client.check()


def test_peer_that_refuses_without_a_ticket(bench: Bench) -> None:
    raw, control = bench.raw_peer()
    bye = b'{"type": "bye", "reason": "busy\\u001b[2J", "ok": false}'
    raw.sendall(PREAMBLE + encode(Frame(Kind.CONTROL, 0, bye)))
    with pytest.raises(PeerError, match=r"the peer ended the session: busy␛\[2J"):
        control.take_ticket(SOON_S)


def test_a_goodbye_for_lack_of_room_is_busy(bench: Bench) -> None:
    pair = bench.controls()
    open_both(pair)
    client, provider = pair
    provider.bye("no room", ok=False, busy=True)
    assert client.ended.wait(SOON_S)
    with pytest.raises(BusyError, match="^no room$"):
        client.check()


def test_a_goodbye_for_lack_of_room_comes_before_work(bench: Bench) -> None:
    """Later, and of a client, it is a goodbye like others."""
    pair = bench.controls()
    open_both(pair)
    client, provider = pair
    client.bye("no room", ok=False, busy=True)
    with pytest.raises(PeerError, match="the peer ended the session: no room") as told:
        assert provider.ended.wait(SOON_S)
        provider.check()
    assert not isinstance(told.value, BusyError)


def test_a_client_at_work_is_not_told_to_try_again(bench: Bench) -> None:
    pair = bench.controls()
    open_both(pair)
    client, provider = pair
    worker = bench.worker(lambda sock: None)
    opened(client.relay, worker.port)
    bench.dial(opened(provider.relay, 1)).sendall(b"of the provider's worker")
    assert eventually(lambda: client.relay.heard_worker)
    provider.bye("no room", ok=False, busy=True)
    assert client.ended.wait(SOON_S)
    with pytest.raises(PeerError, match="the peer ended the session: no room") as told:
        client.check()
    assert not isinstance(told.value, BusyError)


@pytest.mark.parametrize("more", [b'"ok": true, "busy": true', b'"ok": false, "busy": 1'])
def test_a_goodbye_is_busy_or_well(bench: Bench, more: bytes) -> None:
    raw, control = bench.raw_peer()
    bye = b'{"type": "bye", "reason": "", ' + more + b"}"
    raw.sendall(PREAMBLE + encode(Frame(Kind.CONTROL, 0, bye)))
    with pytest.raises(WireError, match="malformed"):
        control.take_ticket(SOON_S)


def test_goodbye_comes_after_the_data(bench: Bench) -> None:
    got: list[int] = []
    pair = bench.controls(NetworkShape("slow", 80e6, 0.02))
    open_both(pair)
    client, provider = pair
    worker = bench.worker(lambda sock: got.append(len(read_all(sock))))
    opened(provider.relay, worker.port)
    sock = bench.dial(opened(client.relay, 1))
    assert eventually(lambda: bool(client.relay._pipes))  # the stream is open
    sock.sendall(bytes(3_000_000))  # 0.3 s at this rate
    client.bye("done", ok=True)
    assert provider.ended.wait(SOON_S)
    provider.check()
    assert provider.peer_bye == Bye("done", True)
    assert eventually(lambda: got == [3_000_000])
    assert provider.relay.ended.wait(SOON_S) and provider.relay.failure is None


def test_goodbye_on_error_does_not_wait_for_the_data(bench: Bench) -> None:
    pair = bench.controls(NetworkShape("slow", 8e5, 0.02))
    open_both(pair)
    client, provider = pair
    opened(provider.relay, 1)
    sock = bench.dial(opened(client.relay, 1))
    sock.sendall(bytes(3_000_000))  # 30 s at this rate
    assert eventually(lambda: client.relay._uplink.taken_bytes > 0)
    started = time.monotonic()
    client.bye("out of memory", ok=False)
    assert provider.ended.wait(SOON_S)
    assert time.monotonic() - started < 10
    with pytest.raises(PeerError, match="the peer ended the session: out of memory"):
        provider.check()


def test_both_say_goodbye_at_once(bench: Bench) -> None:
    pair = bench.controls()
    open_both(pair)
    started = time.monotonic()
    thread = threading.Thread(target=pair[1].bye, args=("p", True))
    thread.start()
    pair[0].bye("c", True)
    thread.join(SOON_S)
    assert time.monotonic() - started < BYE_WAIT_S
    assert all(control.relay.failure is None for control in pair)


def test_silent_peer_is_a_stall(bench: Bench) -> None:
    raw, control = bench.raw_peer(silence_s=0.3)
    ticket = encode(Frame(Kind.CONTROL, 0, b'{"type": "ticket", "ticket": "00"}'))
    started = time.monotonic()
    raw.sendall(PREAMBLE + ticket)
    control.take_ticket(SOON_S)
    assert control.ended.wait(SOON_S)
    assert time.monotonic() - started > 0.25
    with pytest.raises(PeerError, match="peer stalled: no heartbeat for 0.3 s"):
        control.check()


def test_heartbeats_keep_an_idle_session(bench: Bench) -> None:
    pair = bench.controls(silence_s=0.3)
    open_both(pair)
    time.sleep(0.8)
    assert not any(control.ended.is_set() for control in pair)


def test_heartbeats_tell_the_peer_s_progress(bench: Bench) -> None:
    pair = bench.controls(silence_s=0.3)
    open_both(pair)
    client, provider = pair
    assert client.peer_progress == provider.peer_progress == 0
    client.progress = 7
    assert eventually(lambda: provider.peer_progress == 7)
    assert client.peer_progress == 0


def test_backlog_is_no_stall(bench: Bench) -> None:
    """Two seconds of waiting data on a slow link, with a limit of 0.3 s of silence."""
    pair = bench.controls(NetworkShape("slow", 8e6, 0.02), silence_s=0.3)
    open_both(pair)
    client, provider = pair
    worker = bench.worker(lambda sock: read_all(sock))
    opened(provider.relay, worker.port)
    sock = bench.dial(opened(client.relay, 1))
    sock.sendall(bytes(2_000_000))
    assert eventually(lambda: client.relay.snapshot().payload_bytes_sent > 700_000)
    assert not any(control.ended.is_set() for control in pair)


def test_closing_without_a_word_is_a_loss(bench: Bench) -> None:
    pair = bench.controls()
    open_both(pair)
    pair[0].close()
    assert pair[1].ended.wait(SOON_S)
    with pytest.raises(PeerError, match="connection to the peer was lost"):
        pair[1].check()
