"""Arrays between two processes in the clear: what one end sends is what the other one takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from spu_llm.core.errors import PeerError, WireError
from spu_llm.net.frames import MAX_PAYLOAD
from spu_llm.net.messages import Messages
from spu_llm.net.stream import TcpStream, accept, connect, listen

Ends = tuple[Messages, Messages]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with listen("127.0.0.1", 0) as listener:
        streams: list[TcpStream] = []
        waiting = threading.Thread(target=lambda: streams.append(accept(listener, 5.0)))
        waiting.start()
        here = connect("127.0.0.1", listener.getsockname()[1], 5.0, "there")
        waiting.join()
    one, other = Messages(here, "there", 5.0), Messages(streams[0], "here", 5.0)
    yield one, other
    one.close()
    other.close()


LARGE = MAX_PAYLOAD // 4 + 3


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 4)],
        [()],
        [(0, 4)],
        [(2, 3), (5,), (0,), (1, 1, 2)],
        [(LARGE,)],
        [(7,), (3, LARGE), (), (2, LARGE)],
    ],
    ids=str,
)
def test_arrays_arrive_as_they_were(ends: Ends, shapes: list[tuple[int, ...]]) -> None:
    """Also several that fill more than a frame, and others after them."""
    source = np.random.default_rng(len(shapes))
    arrays = [source.standard_normal(shape).astype(np.float32) for shape in shapes]
    # Neither the layout in memory nor the order of bytes is seen.
    sent = [a.T.copy().T.astype(">f4") if i % 2 else a for i, a in enumerate(arrays)]
    sender = threading.Thread(target=lambda: (ends[0].send(*sent), ends[0].say("after")))
    sender.start()
    actual = ends[1].take(*shapes)
    assert ends[1].hear("after")
    sender.join()
    for array, there in zip(arrays, actual, strict=True):
        np.testing.assert_array_equal(array, there)
        assert there.dtype == np.float32 and there.shape == array.shape
    size = sum(a.nbytes for a in arrays)
    assert ends[0].array_bytes["sent"] == ends[1].array_bytes["received"] == size


def test_an_array_of_another_size_is_refused(ends: Ends) -> None:
    ends[0].send(np.zeros(5, np.float32))
    with pytest.raises(WireError, match="here sent an array of another size"):
        ends[1].take((4,))


def test_words_in_place_of_an_array_are_refused(ends: Ends) -> None:
    ends[0].say("tokens")
    with pytest.raises(WireError, match="here sent 'tokens' in place of an array"):
        ends[1].take((4,))


def test_an_end_amid_an_array_names_the_peer(ends: Ends) -> None:
    ends[0].send(np.zeros(2, np.float32))
    ends[0].close()
    with pytest.raises(PeerError, match="here is lost"):
        ends[1].take((4,))


def test_a_peer_that_reads_nothing_holds_no_sender(ends: Ends) -> None:
    """Small messages, each of which a connection takes, fill it all the same."""
    ends[0].answer_s = 0.5
    with pytest.raises(PeerError, match="there is lost: the peer does not take what is sent"):
        for _ in range(1 << 14):
            ends[0].say("words", text="x" * 4096)


def test_a_peer_that_drips_is_waited_for_as_long_as_is_allowed(ends: Ends) -> None:
    """Each part comes in time, and all of them together do not."""
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.05):
            ends[1].send(np.zeros(1, np.float32))

    ends[0].allow(30.0)
    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        ends[0].take((2,))
        ends[0].allow(0.5)
        with pytest.raises(PeerError, match="did not answer in time"):
            ends[0].take((1000,))
    finally:
        over.set()
        dripping.join()


def test_what_is_here_already_takes_nothing_of_what_is_allowed(ends: Ends) -> None:
    ends[1].send(np.zeros(3, np.float32), np.ones(2, np.float32))
    ends[0].allow(0.2)
    ends[0].take((3,), (2,))
    time.sleep(0.3)  # at something else
    ends[1].say("after")
    assert ends[0].hear("after")
