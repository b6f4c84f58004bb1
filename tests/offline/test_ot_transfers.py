"""Random transfers: each comes once, in step at both parties; and the conditions they rest on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.core.errors import WireError
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.net.relay import HELD_BYTES
from spu_llm.offline.ot import transfers
from spu_llm.offline.ot.code import PARAMETERS
from spu_llm.offline.ot.extension import Extension
from spu_llm.offline.ot.transfers import RandomTransfers
from tests.offline.ot_pair import SMALL, TransfersOfTwo, fulfilled

ONE = np.uint64(1)
TAKEN = st.lists(
    st.tuples(st.sampled_from(["client", "provider", "both"]), st.integers(0, 300)), max_size=8
)


@settings(max_examples=25, deadline=None)
@given(TAKEN, st.sampled_from([0, 7, 1 << 18]))
def test_each_transfer_comes_once(actions: list[tuple[str, int]], left_over: int) -> None:
    """Whatever is taken, across extensions, and however many rows are kept of the other side."""
    two = TransfersOfTwo()
    strings: list[np.ndarray] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "LEFT_OVER", left_over)
        for who, count in actions:
            if who == "both":
                (own, peers), (peers_own, own_peers) = two.both(
                    lambda rank, party, n=count: party.both(n, n // 2)
                )
                taken = [(*own, *own_peers), (*peers_own, *peers)]
            else:
                chooser = CLIENT if who == "client" else PROVIDER
                taken = [two.chosen(chooser, count)]
            for bits, chosen, zero, one in taken:
                assert fulfilled(bits, chosen, zero, one)
                strings += [zero, one]
    every = np.concatenate([np.empty((0, 2), np.uint64), *strings])
    assert len(np.unique(every, axis=0)) == len(every)
    costs = [[(c.channel.bytes, c.spu) for c in party.extensions] for party in two.parties]
    assert costs[CLIENT] == costs[PROVIDER]


def test_strings_and_choices_look_random() -> None:
    """A false alarm in a million, each."""
    bits, _, zero, one = TransfersOfTwo().chosen(PROVIDER, 400)
    assert abs(bits.mean() - 0.5) < 0.125
    for words in (zero, one, zero ^ one):
        each = np.unpackbits(words.view(np.uint8))
        assert abs(each.mean() - 0.5) < 2.5 / np.sqrt(each.size)


def test_a_seed_gives_the_same_again() -> None:
    """Audits replay what a party drew."""
    first, again, other = (TransfersOfTwo(seed=s).chosen(CLIENT, 100) for s in (1, 1, 2))
    for a, b, c in zip(first, again, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()


# ---- conditions


def rows_that_serve_and_stock(two: TransfersOfTwo) -> int:
    """Return how many of the rows that a party's peer sees hashed are in its next stock, too."""
    extension = two.parties[CLIENT]._extension
    assert extension is not None
    served = extension.chosen(0, SMALL.serving).copy()
    extension._encode(SMALL.stock)
    stock = extension._chosen[: SMALL.stock]
    return len(served) + len(stock) - len(np.unique(np.concatenate([served, stock]), axis=0))


def test_what_is_stock_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    two = TransfersOfTwo()
    two.chosen(CLIENT, 1)
    assert rows_that_serve_and_stock(two) == 0

    def from_the_first(self: Extension, blocks: np.ndarray, start: int, stop: int) -> np.ndarray:
        self._encode(stop)
        return blocks[start:stop]

    monkeypatch.setattr(Extension, "_serving", from_the_first)
    twin = TransfersOfTwo()
    twin.chosen(CLIENT, 1)
    assert rows_that_serve_and_stock(twin) > 0


def test_an_even_delta_gives_wrong_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    two = TransfersOfTwo()
    assert fulfilled(*two.chosen(CLIENT, 50))
    for party in two.parties:
        assert party._extension is not None
        party._extension.delta = party._extension.delta & ~ONE
    assert not fulfilled(*two.chosen(CLIENT, 50))


def test_deltas_and_matrices_are_fresh() -> None:
    """One delta for each party and session, one matrix and hash for each extension: of two noisy
    words under one matrix and one secret, the sum has no secret.
    """
    two, places = TransfersOfTwo(), []
    for _ in range(3):
        two.both(lambda rank, party: party._extend(keep=CLIENT))
        ones = [party._extension for party in two.parties]
        assert all(ones)
        made = [one._places.rows(0, 20).copy() for one in ones if one is not None]
        np.testing.assert_array_equal(*made)  # both have it
        places.append(made[0])
    assert (places[0] != places[1]).mean() > 0.9 and (places[1] != places[2]).mean() > 0.9
    deltas = [
        party._extension.delta
        for some in (two, TransfersOfTwo(seed=5))
        for party in some.parties
        if party._extension is not None or some.chosen(CLIENT, 1)
        if party._extension is not None
    ]
    assert len({delta.tobytes() for delta in deltas}) == len(deltas) >= 3


def test_what_has_failed_is_not_tried_again() -> None:
    two = TransfersOfTwo(change=lambda data: data[:-1])

    def attempts(rank: int, party: RandomTransfers) -> list[str]:
        said = []
        for _ in range(2):
            with pytest.raises(WireError) as error:
                party.choose(1) if rank == CLIENT else party.offer(1)
            said.append(str(error.value))
        return said

    for first, second in two.both(attempts):
        assert "expected" in first and "start another session" in second


def test_noise_lies_elsewhere_each_time() -> None:
    """Its places follow from choices that served for nothing else."""
    two, noisy = TransfersOfTwo(), []
    for _ in range(4):
        two.both(lambda rank, party: party._extend(keep=CLIENT))
        extension = two.parties[CLIENT]._extension
        assert extension is not None
        noisy.append(np.flatnonzero(extension._chosen[:, 0] & ONE))
        assert len(noisy[-1]) == SMALL.trees  # one in each, before it is encoded
    assert len({places.tobytes() for places in noisy}) == 4


def test_sums_go_under_keys() -> None:
    """What the sender sends is uniform."""
    two = TransfersOfTwo()
    two.chosen(CLIENT, 1)
    sent = np.frombuffer(two.wires[PROVIDER].sent[-1], np.uint64)
    assert sent.nbytes == 16 * SMALL.choices
    used = np.unpackbits(sent.view(np.uint8))
    assert abs(used.mean() - 0.5) < 2.5 / np.sqrt(used.size)


def test_what_one_party_sends_alone_fits_what_relays_hold() -> None:
    """Bits times whole words are sent by the provider alone, 8 bytes a transfer, until the next
    extension, for which it waits: a client that reads another channel meanwhile must not stop both.
    """
    assert 8 * PARAMETERS.serving < HELD_BYTES / 2
