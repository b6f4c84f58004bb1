"""The wire format, against literal bytes and arbitrary ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spu_llm.core.errors import WireError
from spu_llm.net.frames import (
    ABORT,
    END,
    MAX_PAYLOAD,
    PREAMBLE,
    Frame,
    FrameParser,
    Kind,
    encode,
    write_data_header,
)

streams = st.integers(1, 2**32 - 1)
frames = st.one_of(
    st.builds(Frame, st.just(Kind.CONTROL), st.just(0), st.binary(max_size=300)),
    st.builds(Frame, st.just(Kind.OPEN), streams, st.sampled_from([b"\0", b"\1"])),
    st.builds(Frame, st.just(Kind.DATA), streams, st.binary(max_size=300)),
    st.builds(Frame, st.just(Kind.CLOSE), streams, st.sampled_from([END, ABORT])),
)


def greeted() -> FrameParser:
    parser = FrameParser()
    assert parser.feed(b"spullm\x00\x05") == []
    return parser


def test_bytes_of_each_kind() -> None:
    assert PREAMBLE == b"spullm\x00\x05"
    assert encode(Frame(Kind.CONTROL, 0, b"{}")) == b"\x00" + bytes(4) + b"\0\0\0\x02{}"
    assert encode(Frame(Kind.OPEN, 3, b"\1")) == b"\x01\0\0\0\x03\0\0\0\x01\x01"
    assert encode(Frame(Kind.DATA, 258, b"abc")) == b"\x02\0\0\x01\x02\0\0\0\x03abc"
    assert encode(Frame(Kind.CLOSE, 3, END)) == b"\x03\0\0\0\x03\0\0\0\x01\0"
    buffer = bytearray(b"?" * 9 + b"abc")
    write_data_header(buffer, 258, 3)
    assert bytes(buffer) == encode(Frame(Kind.DATA, 258, b"abc"))


@given(st.lists(frames, max_size=8), st.lists(st.integers(1, 40), min_size=1))
def test_round_trip_in_any_chunks(sent: list[Frame], sizes: list[int]) -> None:
    wire = PREAMBLE + b"".join(map(encode, sent))
    parser = FrameParser()
    got: list[Frame] = []
    position = turn = 0
    while position < len(wire):
        size = sizes[turn % len(sizes)]
        got += parser.feed(wire[position : position + size])
        position += size
        turn += 1
    parser.finish()
    assert got == sent


@given(st.lists(st.binary(max_size=60)), st.booleans())
def test_random_bytes_raise_nothing_but_wire_errors(chunks: list[bytes], greet: bool) -> None:
    parser = greeted() if greet else FrameParser()
    try:
        for chunk in chunks:
            parser.feed(chunk)
        parser.finish()
    except WireError as error:
        assert "\n" not in str(error)


def test_largest_frame_in_network_sized_chunks() -> None:
    frame = Frame(Kind.DATA, 1, bytes(range(256)) * (MAX_PAYLOAD // 256))
    wire = encode(frame)
    parser = greeted()
    got = [f for at in range(0, len(wire), 1448) for f in parser.feed(wire[at : at + 1448])]
    parser.finish()
    assert got == [frame]


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (b"\x04\0\0\0\x01\0\0\0\0", "unknown kind 4"),
        (b"\x02\0\0\0\x01\0\x10\0\x01", "1048577 bytes"),
        (b"\x00\0\0\0\x01\0\0\0\0", "CONTROL frame on stream 1"),
        (b"\x02\0\0\0\x00\0\0\0\0", "DATA frame on stream 0"),
        (b"\x01\0\0\0\x01\0\0\0\0", "OPEN frame without a known door"),
        (b"\x01\0\0\0\x01\0\0\0\x01\x02", "OPEN frame without a known door"),
        (b"\x03\0\0\0\x01\0\0\0\x00", "CLOSE frame"),
        (b"\x03\0\0\0\x01\0\0\0\x01\x02", "CLOSE frame"),
    ],
)
def test_bad_frames(wire: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        greeted().feed(wire)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.DATA, 0, b"x"),
        Frame(Kind.CONTROL, 2),
        Frame(Kind.DATA, 1, bytes(MAX_PAYLOAD + 1)),
        Frame(Kind.DATA, 2**32, b""),
        Frame(Kind.CLOSE, 1),
        Frame(Kind.OPEN, 1),
    ],
)
def test_encode_refuses_what_the_parser_refuses(frame: Frame) -> None:
    with pytest.raises(WireError):
        encode(frame)


def test_other_version_is_named_with_ours() -> None:
    with pytest.raises(WireError, match="wire version 7, this side speaks 5"):
        FrameParser().feed(b"spullm\x00\x07")


def test_other_protocols_are_refused_before_eight_bytes() -> None:
    with pytest.raises(WireError, match="does not speak spu-llm wire version 5; it sent b'GET'"):
        FrameParser().feed(b"GET")
    with pytest.raises(WireError, match="speaking TLS"):
        FrameParser().feed(b"\x16\x03\x01")


@pytest.mark.parametrize(
    "start", [b"", b"spul", b"spullm\0\5\x02", b"spullm\0\5\x02\0\0\0\1\0\0\0\2x"]
)
def test_input_that_ends_early(start: bytes) -> None:
    parser = FrameParser()
    parser.feed(start)
    with pytest.raises(WireError, match="connection to the peer was lost"):
        parser.finish()
