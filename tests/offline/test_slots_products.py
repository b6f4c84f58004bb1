"""Products in slots: shares that add up to products, what is sent for them, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.core.errors import WireError
from spu_llm.core.field import P
from spu_llm.core.values import CLIENT, PROVIDER, to_bytes
from spu_llm.offline.slots import products
from spu_llm.offline.slots.products import ANSWER_BYTES, CIPHERTEXT_BYTES, KEY_BYTES
from spu_llm.offline.slots.ring import MODULUS_BITS, N
from tests.offline.slots_pair import CIPHERTEXT, KEY, SlotsTwo


@settings(max_examples=5, deadline=None)
@given(st.sampled_from([1, 2, 3, N, 2 * N - 1, 2 * N, 2 * N + 3, 4 * N]))
def test_shares_add_up(units: int) -> None:
    two = SlotsTwo()
    assert two.wrong(units) == two.wrong(units) == 0


def test_what_is_sent() -> None:
    """The key once; a ciphertext and an answer for each 8192 units, two for crossed ones."""
    two = SlotsTwo()
    two.wrong(2 * N)
    two.wrong(4 * N)
    for wire in two.wires:
        assert [len(data) for data in wire.sent] == [
            KEY_BYTES,
            *(CIPHERTEXT_BYTES, ANSWER_BYTES),
            *(2 * CIPHERTEXT_BYTES, ANSWER_BYTES),
            *(2 * CIPHERTEXT_BYTES, 2 * ANSWER_BYTES),
            *(4 * CIPHERTEXT_BYTES, 2 * ANSWER_BYTES),
        ]
    assert CIPHERTEXT_BYTES / N == 15 and ANSWER_BYTES / N == 8


def test_rounding_is_far_from_a_wrong_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half is 5 / 16 away from what is rounded at most, and the rest is off by little: 0.1875
    would be left, and the rounding of c_0 has a deviation of 2^-10.5.
    """
    largest, nearest = [], products._nearest

    def spy(x: np.ndarray) -> np.ndarray:
        largest.append(float(np.abs(x - np.rint(x)).max()))
        return nearest(x)

    monkeypatch.setattr(products, "_nearest", spy)
    SlotsTwo().wrong(4 * N)
    assert len(largest) == 8 and 0.25 < max(largest) < 0.25 + 1 / 16 + 8 * 2.0**-10.5


# ---- what is refused


def outcome(number: int, change: Any) -> list[Any]:
    """Return what both parties end with when the provider's message is changed."""
    two = SlotsTwo()
    two.wires[PROVIDER].change = lambda at, data: change(data) if at == number else data
    return two.ends(lambda party: party.products(2 * N))


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"])
def test_messages_of_another_size_are_refused(number: int, change: Any) -> None:
    assert isinstance(outcome(number, change)[CLIENT], WireError)


def larger(data: bytes) -> bytes:
    """Return a message whose first word is no residue of any prime."""
    return b"\xff" * 6 + data[6:]


@pytest.mark.parametrize("number", range(3))
def test_larger_words_are_refused(number: int) -> None:
    (client, _) = outcome(number, larger)
    assert isinstance(client, WireError) and "received larger words" in str(client)


def test_a_key_with_a_larger_residue_is_refused() -> None:
    at = 6 * N
    too_large = to_bytes(np.array([2**40 - 1], np.uint64), MODULUS_BITS).tobytes()
    (client, _) = outcome(KEY, lambda data: data[:at] + too_large + data[at + 5 :])
    assert isinstance(client, WireError)


def test_nothing_is_made_after_a_failure() -> None:
    two = SlotsTwo()
    two.wires[PROVIDER].change = lambda at, data: data[:-1] if at == CIPHERTEXT else data
    two.ends(lambda party: party.products(1))
    with pytest.raises(WireError, match="start another session"):
        two.products[CLIENT].products(1)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2), st.binary(max_size=64), st.integers(0, 2**16))
def test_any_message_is_refused_or_computed_with(number: int, junk: bytes, at: int) -> None:
    """Whatever a peer sends, a party ends with shares or with a WireError."""
    client, _ = outcome(number, lambda data: data[:at] + junk + data[at + len(junk) :])
    if isinstance(client, tuple):
        assert all((part < P).all() for part in client)
    else:
        assert isinstance(client, WireError)
