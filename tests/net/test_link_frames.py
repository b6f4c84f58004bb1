"""What passes to SPU: messages of its link, cut anywhere, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core.errors import WireError
from spu_llm.net.frames import PREAMBLE, Frame, Kind, StreamType, encode
from spu_llm.net.link_frames import MAX_BODY, LinkFrames
from spu_llm.net.worker_side import Loopback
from spu_llm.service.programs import doors
from spu_llm.systems.decoding.records import COMPLETION
from tests.kit.patience import SOON_S

from .conftest import Bench, echo, opened, read_all


def message(header: bytes, rest: bytes) -> bytes:
    sizes = (len(header) + len(rest)).to_bytes(4, "big") + len(header).to_bytes(4, "big")
    return b"PRPC" + sizes + header + rest


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.binary(max_size=200)), max_size=5),
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
)
def test_messages_pass_however_they_are_cut(
    messages: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    data, frames = b"".join(message(*parts) for parts in messages), LinkFrames()
    while data:
        size = cuts[len(data) % len(cuts)]
        frames.look(data[:size])
        data = data[size:]
    frames.look(message(b"h", b""))
    with pytest.raises(WireError):
        frames.look(b"G")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"PRI * HTTP/2.0",
        b"\0",
        b"PRPX",
        b"PRPC" + bytes(8),  # no header
        b"PRPC\0\0\0\5\0\0\0\6",  # longer than the whole
        b"PRPC" + (MAX_BODY + 1).to_bytes(4, "big") + b"\0\0\0\1",
        b"PRPC\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
)
@pytest.mark.parametrize("before", [b"", message(b"h", b"rest")])
def test_other_bytes_do_not(before: bytes, data: bytes) -> None:
    for cut in range(len(before) + 1):
        frames = LinkFrames()
        frames.look(before[:cut])
        with pytest.raises(WireError, match="of SPU's link"):
            frames.look(before[cut:] + data)


def test_a_worker_never_gets_them(bench: Bench) -> None:
    """A peer that writes something else to SPU's port ends its own connection."""
    got: list[bytes] = []
    raw, control = bench.raw_peer()
    worker = bench.worker(lambda sock: got.append(read_all(sock)))
    opened(control.relay, worker.port)
    good = message(b"h", b"abc")
    opening = Frame(Kind.OPEN, 1, bytes([StreamType.LINK]))
    wire = [opening, Frame(Kind.DATA, 1, good), Frame(Kind.DATA, 1, b"POST / HTTP")]
    raw.sendall(PREAMBLE + b"".join(map(encode, wire)))
    assert control.ended.wait(SOON_S)
    with pytest.raises(WireError, match="not a message of SPU's link: b'POST'"):
        control.check()
    control.close()
    assert b"POST" not in b"".join(got)


def test_messages_of_our_own_are_not_looked_at(bench: Bench) -> None:
    """A stream to one door never reaches what listens at the other."""
    raw, control = bench.raw_peer()
    at_link: list[bytes] = []
    link = bench.worker(lambda sock: at_link.append(read_all(sock)))
    side = Loopback({StreamType.LINK: link.port, StreamType.MESSAGES: bench.worker(echo).port})
    control.relay.open_worker_side(side)
    to = Frame(Kind.OPEN, 1, bytes([StreamType.MESSAGES]))
    raw.sendall(PREAMBLE + encode(to) + encode(Frame(Kind.DATA, 1, b"anything")))
    assert read_all(raw, len(PREAMBLE) + 9 + 8).endswith(b"anything")
    assert at_link == []


def test_a_program_without_spu_has_no_door_to_it(bench: Bench) -> None:
    raw, control = bench.raw_peer()
    control.relay.allow_streams(doors(replace(COMPLETION, spu=None)))
    opened(control.relay, bench.worker(echo).port)
    raw.sendall(PREAMBLE + encode(Frame(Kind.OPEN, 1, bytes([StreamType.LINK]))))
    assert control.ended.wait(SOON_S)
    with pytest.raises(WireError, match="a stream for LINK, which this program lacks"):
        control.check()


@pytest.mark.parametrize("door", StreamType)
def test_what_calls_at_a_door_is_led_to_the_same_one(bench: Bench, door: StreamType) -> None:
    client, provider = bench.controls()
    workers = {d: bench.worker(_saying(message(b"h", d.name.encode()))) for d in StreamType}
    side = Loopback({d: worker.port for d, worker in workers.items()})
    provider.relay.open_worker_side(side)
    sock = bench.dial(opened(client.relay, 1, door))
    assert read_all(sock) == message(b"h", door.name.encode())


def _saying(data: bytes) -> Callable[[socket.socket], None]:
    return lambda sock: sock.sendall(data)
