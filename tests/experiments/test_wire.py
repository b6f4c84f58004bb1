"""Parsing of recorded brpc messages, on bytes taken from a real session."""

from __future__ import annotations

import pytest

from experiments.common.wire import Message, Push, Recorder, RequestParser, SizeParser, Transcript
from spu_llm.core.errors import WireError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.net.frames import PREAMBLE, Frame, Kind, StreamType, encode

# The provider's first request, its fifth, and the response to one of the client's.
SERVICE = b"\n0\n(org.interconnection.link.ReceiverService\x12\x04Push"
CONNECT = (
    b"PRPC\x00\x00\x00J\x00\x00\x00:" + SERVICE + b"\x18\x00 \x82\x80\x80\x80 "
    b"\x08\x01\x12\x0cconnect_1\x01\x020"
)
GATHER = (
    b"PRPC\x00\x00\x00X\x00\x00\x00;" + SERVICE + b"\x18\x00 \x82\x80\x80\x80\x90 "
    b"\x08\x01\x12\x13root:1:ALLGATHER\x01\x021\x1a\x04\x01\x00\x00\x00"
)
ACK = (
    b"PRPC\x00\x00\x00G\x00\x00\x00;" + SERVICE + b"\x18\x00 \x87\x80\x80\x80\x90 "
    b"\x08\x01\x12\x05ACK\x01\x02\x1a\x011"
)
RESPONSE = b"PRPC\x00\x00\x00\x0e\x00\x00\x00\x0c\x12\x02\x08\x00\x18\x00 \x82\x80\x80\x80 \n\x00"


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_requests_come_out_of_any_chunks(chunk: int) -> None:
    parser, actual = RequestParser(), []
    data = CONNECT + RESPONSE + GATHER + ACK
    for at in range(0, len(data), chunk):
        actual += parser.feed(data[at : at + chunk])
    assert actual == [
        Push(b"connect_1\x01\x020", 0),
        Push(b"root:1:ALLGATHER\x01\x021", 4),
        Push(b"ACK\x01\x02", 1),
    ]


def test_a_message_in_pieces_counts_once() -> None:
    transcript = Transcript()
    for size in (1 << 20, 1 << 20, 34311):
        transcript.add(PROVIDER, Push(b"root:P2P-9:1->0\x01\x0247", size))
    transcript.add(PROVIDER, Push(b"ACK\x01\x02", 1))
    transcript.add(CLIENT, Push(b"root:1:ALLGATHER\x01\x021", 4))
    assert transcript.messages() == [
        Message(CLIENT, "root:1:ALLGATHER", 1, 4),
        Message(PROVIDER, "root:P2P-9:1->0", 47, 2131463),
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"POST / HTTP/1.1\r\n",
        b"PRPC\x00\x00\x00\x02\x00\x00\x00\x03ab",  # meta longer than the body
        b"PRPC\x00\x00\x00\x02\x00\x00\x00\x02\x0a\x7f",  # a field longer than the meta
        b"PRPC\x00\x00\x00\x01\x00\x00\x00\x01\x80",  # an unfinished number
        b"PRPC\x00\x00\x00\x01\x00\x00\x00\x01\x0d",  # a wire type that brpc does not use
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        RequestParser().feed(data)


def test_a_key_of_another_form_is_refused() -> None:
    transcript = Transcript()
    transcript.add(CLIENT, Push(b"root:1:ALLGATHER", 4))
    with pytest.raises(WireError, match="key"):
        transcript.messages()


class Scripted:
    """A stream that gives `data` to whoever receives, and takes everything."""

    def __init__(self, data: bytes) -> None:
        self.data, self.sent, self.closed = data, b"", False

    def recv_some(self, max_bytes: int) -> bytes:
        taken, self.data = self.data[:max_bytes], self.data[max_bytes:]
        return taken

    def send_all(self, data: bytes | memoryview) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_sizes_come_out_of_any_chunks(chunk: int) -> None:
    parser, actual = SizeParser(), []
    sizes = [0, 3, 0, 70_000, 9]
    data = bytes(8) + b"".join(size.to_bytes(8, "little") + b"\7" * size for size in sizes)
    for at in range(0, len(data), chunk):
        actual += parser.feed(data[at : at + chunk])
    assert actual == sizes


def test_the_recorder_lists_both_directions_and_changes_nothing() -> None:
    link, own = (bytes([door]) for door in (StreamType.LINK, StreamType.MESSAGES))
    ours = PREAMBLE + encode(Frame(Kind.OPEN, 1, link)) + encode(Frame(Kind.OPEN, 3, own))
    ours += encode(Frame(Kind.DATA, 1, GATHER + ACK))
    ours += encode(Frame(Kind.DATA, 3, bytes(8) + b"\2" + bytes(9)))
    peers = PREAMBLE + encode(Frame(Kind.OPEN, 2, link))
    peers += encode(Frame(Kind.DATA, 2, GATHER[:30])) + encode(Frame(Kind.DATA, 1, RESPONSE))
    peers += encode(Frame(Kind.CONTROL, 0, b"beat")) + encode(Frame(Kind.DATA, 2, GATHER[30:]))
    peers += encode(Frame(Kind.DATA, 3, bytes(8) + b"\5")) + encode(Frame(Kind.DATA, 3, bytes(12)))
    inner = Scripted(peers)
    recorder = Recorder(inner)
    recorder.send_all(memoryview(ours))
    received = b""
    while data := recorder.recv_some(25):
        received += data
    recorder.close()
    assert (received, inner.sent, inner.closed) == (peers, ours, True)
    assert recorder.transcript.messages() == [
        Message(CLIENT, "channel 3:0", 0, 2),
        Message(CLIENT, "root:1:ALLGATHER", 1, 4),
        Message(PROVIDER, "channel 3:0", 0, 5),
        Message(PROVIDER, "root:1:ALLGATHER", 1, 4),
    ]
