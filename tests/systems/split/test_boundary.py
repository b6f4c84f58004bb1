"""Tensors at the boundary of a split model: what is sent comes, and nothing else is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from spu_llm.core.channel import MemoryChannel
from spu_llm.core.errors import InputError, WireError
from spu_llm.systems.split.boundary import HEADER_BYTES, PRECISIONS, Boundary, Kind

WIDTH = 3
shapes = st.tuples(st.integers(0, 3), st.integers(0, 4), st.just(WIDTH))
floats = arrays.arrays(
    np.float32, shapes, elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
)
numbers = st.integers(0, 2**32 - 1)
# Half a unit in the last place of a significand.
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def test_the_bytes_of_a_message() -> None:
    message = Boundary(1, "float32").encode(Kind.UP, 258, np.array([[[1.0], [-2.0]]], np.float32))
    assert message == (
        bytes([1, 1, 1, 0])
        + b"\x02\x01\0\0"
        + b"\1\0\0\0"
        + b"\2\0\0\0"
        + b"\1\0\0\0"
        + bytes(4)
        + b"\0\0\x80\x3f"
        + b"\0\0\0\xc0"
    )
    for precision, values in (("float16", b"\0\x3c\0\xc0"), ("bfloat16", b"\x80\x3f\0\xc0")):
        tokens = Boundary(1, precision).encode(Kind.DOWN, 0, np.array([[[1], [-2]]], np.float32))
        assert tokens[HEADER_BYTES:] == values and tokens[1] == 2
        assert tokens[2] == 1 + list(PRECISIONS).index(precision)


@given(
    rows=floats,
    precision=st.sampled_from(list(PRECISIONS)),
    number=numbers,
    kind=st.sampled_from([k for k in Kind if k != Kind.END]),
)
def test_a_tensor_comes_as_it_was_rounded(
    rows: np.ndarray, precision: str, number: int, kind: Kind
) -> None:
    boundary, ends = Boundary(WIDTH, precision), MemoryChannel.pair()
    boundary.send(ends[0], kind, number, rows)
    actual = boundary.recv(ends[1], kind, number, *rows.shape[:2])
    assert actual.dtype == np.float32 and actual.shape == rows.shape
    smallest = 2.0**-25 if precision == "float16" else 0.0
    assert np.all(np.abs(actual - rows) <= np.abs(rows) * ROUNDING[precision] + smallest)
    # Once rounded, it is exact.
    again = boundary.decode(boundary.encode(kind, number, actual), kind, number, *rows.shape[:2])
    assert again.tobytes() == actual.tobytes()


@given(rows=floats, precision=st.sampled_from(list(PRECISIONS)), data=st.data())
def test_anything_else_is_refused(rows: np.ndarray, precision: str, data: st.DataObject) -> None:
    boundary = Boundary(WIDTH, precision)
    message = boundary.encode(Kind.UP, 7, rows)
    at = data.draw(st.integers(0, HEADER_BYTES - 1))
    changed = bytearray(message)
    changed[at] ^= data.draw(st.integers(1, 255))
    others = [bytes(changed), message + b"\0", message[:-1], b""]
    for other in others:
        with pytest.raises(WireError, match="a message at the boundary"):
            boundary.decode(other, Kind.UP, 7, *rows.shape[:2])
    for wanted in ((Kind.DOWN, 7), (Kind.UP, 8)):
        with pytest.raises(WireError, match="expected version 1"):
            boundary.decode(message, *wanted, *rows.shape[:2])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_neither_sent_nor_taken(precision: str, value: float) -> None:
    boundary, rows = Boundary(WIDTH, precision), np.zeros((1, 2, WIDTH), np.float32)
    message = bytearray(boundary.encode(Kind.UP, 0, rows))
    rows[0, 1, 2] = value
    with pytest.raises(InputError, match=f"are no {precision} numbers"):
        boundary.encode(Kind.UP, 0, rows)
    size = boundary.dtype.itemsize
    message[-size:] = np.array(value).astype(boundary.dtype).tobytes()
    with pytest.raises(WireError, match="no finite numbers"):
        boundary.decode(bytes(message), Kind.UP, 0, 1, 2)


def test_what_leaves_a_precision_is_not_sent() -> None:
    rows = np.full((1, 1, 1), 1e5, np.float32)
    with pytest.raises(InputError, match="no float16 numbers; give a --precision with a wider"):
        Boundary(1, "float16").encode(Kind.UP, 0, rows)
    Boundary(1, "bfloat16").encode(Kind.UP, 0, rows)
    with pytest.raises(InputError, match="--precision must be one of float32, float16, bfloat16"):
        Boundary(1, "float64")


def test_a_text_ends_by_a_message_without_rows() -> None:
    boundary, ends = Boundary(WIDTH, "float32"), MemoryChannel.pair()
    rows = np.ones((1, 1, WIDTH), np.float32)
    boundary.send(ends[0], Kind.UP, 4, rows)
    boundary.send_end(ends[0], 5)
    actual = boundary.recv_rows(ends[1], 4, 1, 1)
    assert actual is not None and np.array_equal(actual, rows)
    assert boundary.recv_rows(ends[1], 5, 1, 1) is None
    boundary.send_end(ends[0], 5)
    with pytest.raises(WireError):
        boundary.recv_rows(ends[1], 6, 1, 1)
