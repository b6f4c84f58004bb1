"""Silent extension: hash, trees, code, and the parameters against the attacks that set them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gammaln, pdtr

from spu_llm.core.channel import MemoryChannel
from spu_llm.core.errors import WireError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.offline.ot.base import first_stock
from spu_llm.offline.ot.blocks import BlockHash
from spu_llm.offline.ot.code import (
    DENSITY,
    PARAMETERS,
    ROWS_AT_ONCE,
    Parameters,
    Places,
    sums_of_rows,
)
from spu_llm.offline.ot.extension import Extension
from spu_llm.offline.ot.trees import grow, grow_punctured
from tests.offline.ot_pair import RANKS, SMALL, TransfersOfTwo, dealers

KEY = b"sixteen bytes..."
ONE = np.uint64(1)


def blocks(count: int, label: str = "blocks") -> np.ndarray:
    return Prg.from_seed(2, label).words((count, 2))


# ---- hash and trees


@pytest.mark.parametrize("count", [0, 1, 5, (1 << 15) + 3])
def test_the_hash_is_what_it_says(count: int) -> None:
    x = blocks(count)
    hashed = BlockHash(KEY)(x)
    pi = Cipher(algorithms.AES(KEY), modes.ECB())
    for k in {0, count // 2, count - 1} if count else ():
        low, high = int(x[k, 0]), int(x[k, 1])
        sigma = high | (low ^ high) << 64
        image = pi.encryptor().update(sigma.to_bytes(16, "little"))
        wanted = int.from_bytes(image, "little") ^ sigma
        assert int(hashed[k, 0]) | int(hashed[k, 1]) << 64 == wanted
    into = np.empty_like(x)
    assert BlockHash(KEY)(x, out=into) is into
    np.testing.assert_array_equal(into, hashed)
    with pytest.raises(ValueError, match="a key has 16 bytes"):
        BlockHash(KEY[1:])


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 2**32))
def test_trees_differ_in_a_single_leaf(depth: int, trees: int, seed: int) -> None:
    """By delta, at the place that the sides say; and each level adds up to delta."""
    prg, hashed = Prg.from_seed(seed, "trees"), BlockHash(KEY)
    delta, seeds = prg.words((2,)), prg.words((trees, 2))
    sides = prg.words((depth, trees)) & ONE
    own, theirs = (np.empty((1 << depth, trees, 2), np.uint64) for _ in range(2))
    left = grow(hashed, delta, seeds, own)
    sums = left ^ sides[..., None] * delta
    place = grow_punctured(hashed, sums, sides, theirs)
    np.testing.assert_array_equal(np.bitwise_xor.reduce(own, axis=0), np.tile(delta, (trees, 1)))
    single = np.zeros((1 << depth, trees, 1), np.uint64)
    single[place, np.arange(trees)] = 1
    np.testing.assert_array_equal(theirs, own ^ single * delta)
    # The unknown node of a level is the other one of its side: a left one stands behind.
    wanted = (sides.astype(np.int64) << np.arange(depth)[:, None]).sum(axis=0)
    np.testing.assert_array_equal(place, wanted)


def test_places_of_noise_are_uniform() -> None:
    """Over 4,096 trees of 16 leaves: a false alarm in a million."""
    hashed, prg = BlockHash(KEY), Prg.from_seed(3, "places")
    sides = prg.words((4, 4096)) & ONE
    leaves = np.empty((16, 4096, 2), np.uint64)
    place = grow_punctured(hashed, prg.words((4, 4096, 2)), sides, leaves)
    counts = np.bincount(place, minlength=16)
    assert ((counts - 256) ** 2 / 256).sum() < 60  # chi-square of 15 degrees


# ---- the code


def test_sums_are_those_of_the_rows_at_the_places() -> None:
    table = Prg.from_seed(4, "table").words((64, 4))
    places = Places(KEY).rows(10, 50)
    wanted = np.bitwise_xor.reduce(table[places & np.uint32(63)], axis=1)
    np.testing.assert_array_equal(sums_of_rows(table, places), wanted)
    with pytest.raises(AssertionError, match="favour"):
        sums_of_rows(table[:63], places)


def test_places_do_not_depend_on_how_they_are_asked_for() -> None:
    whole = Places(KEY).rows(0, 200).copy()
    pieces = [
        Places(KEY).rows(start, count).copy() for start, count in ((0, 6), (6, 100), (106, 94))
    ]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    many = Places(KEY).rows(0, ROWS_AT_ONCE) & np.uint32(255)
    counts = np.bincount(many.reshape(-1), minlength=256)
    expected = many.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 400  # chi-square of 255: 1e-8
    assert (Places(KEY[::-1]).rows(0, 200) != whole).mean() > 0.99


def pooled_gauss(parameters: Parameters) -> float:
    """Return the bits of work to guess k rows without noise and to solve for the secret."""
    k, rate = parameters.secrets, parameters.trees / parameters.rows
    return -k * math.log2(1 - rate) + 2.8 * math.log2(k)


def dense_minors(parameters: Parameters, share: float) -> float:
    """Return the bits of candidates to be tried on the rows inside `share` of the columns, chosen
    so that there are as many: few errors must be in them, which are then found by meeting in the
    middle.
    """
    k = share * parameters.secrets
    mean = k * parameters.trees / parameters.rows

    def work(errors: int) -> float:
        chance = math.log2(max(pdtr(errors, mean), 1e-300))
        half = errors / 2
        pairs = (gammaln(k + 1) - gammaln(half + 1) - gammaln(k - half + 1)) / math.log(2)
        return float(pairs - chance)

    return min(work(errors) for errors in range(2, 40, 2))


def peeled_share(columns: int, rows: int, density: int = DENSITY) -> float:
    """Return the share of the columns that are left when one of least use is taken away, with all
    rows in it, until as many rows as columns are left.
    """
    prg = np.random.default_rng(5)
    places = prg.integers(0, columns, (rows, density))
    alive, there, left = np.ones(rows, bool), np.ones(columns, bool), columns
    uses = np.bincount(places.reshape(-1), minlength=columns)
    of: list[list[int]] = [[] for _ in range(columns)]
    for row, some in enumerate(places):
        for column in some:
            of[column].append(row)
    while alive.sum() > left:
        column = int(np.argmin(np.where(there, uses, 1 << 30)))
        there[column], left = False, left - 1
        for row in of[column]:
            if alive[row]:
                alive[row] = False
                np.subtract.at(uses, places[row], 1)
    return left / columns


def test_parameters_stand_against_the_attacks() -> None:
    """With minors as dense as peeling finds them in a code as long for its width."""
    columns = 1 << 10
    rows = round(columns * PARAMETERS.rows / PARAMETERS.secrets)
    share = peeled_share(columns, rows)
    assert pooled_gauss(PARAMETERS) > 128
    assert dense_minors(PARAMETERS, share) > 128
    # Published sets fall, of which this is one but for a larger k.
    published = Parameters(secrets=1 << 17, trees=1248, depth=11)
    assert published.rows == PARAMETERS.rows
    assert dense_minors(published, peeled_share(columns, rows, 10)) < 70 < pooled_gauss(published)


# ---- extensions


def extensions(two: TransfersOfTwo) -> list[Extension]:
    made = [party._extension for party in two.parties]
    assert all(made)
    return [one for one in made if one is not None]


def test_every_row_is_a_correlated_transfer() -> None:
    """Over three extensions, in both directions; one message of t h blocks each way."""
    two = TransfersOfTwo()
    for number in range(3):
        before = [channel.traffic for channel in two.channels]
        two.both(lambda rank, party: party._extend(keep=CLIENT))
        for channel, since in zip(two.channels, before, strict=True):
            traffic = channel.traffic.since(since)
            if number:
                assert (traffic.sent_bytes, traffic.sent_messages) == (16 * SMALL.choices, 1)
        ones = extensions(two)
        for sender in RANKS:
            w = ones[sender].sent(0, SMALL.serving)
            v = ones[1 - sender].chosen(0, SMALL.serving)
            u = v[:, :1] & ONE
            assert not (w[:, 0] & ONE).any()
            np.testing.assert_array_equal(v, w ^ u * ones[sender].delta)
            assert 0.35 < u.mean() < 0.65


@pytest.mark.parametrize("count", [1, 63, 130, 1000])
def test_the_first_stock(count: int) -> None:
    ends, by_spu = MemoryChannel.pair(), dealers()
    two = TransfersOfTwo()

    def make(rank: int, _: object) -> tuple[np.ndarray, np.ndarray]:
        delta, rows, _cost = first_stock(
            rank, Prg.from_seed(rank, "own"), ends[rank], by_spu[rank], count
        )
        return delta, rows

    made = two.both(make)
    for sender in (CLIENT, PROVIDER):
        delta, own = made[sender]
        v = made[1 - sender][1][:, 2:]
        assert int(delta[0]) & 1 and not (own[:, 0] & ONE).any()
        np.testing.assert_array_equal(v, own[:, :2] ^ (v[:, :1] & ONE) * delta)


def test_a_message_of_another_size_ends_it() -> None:
    two = TransfersOfTwo(change=lambda data: data[:-1])
    with pytest.raises(WireError, match="expected"):
        two.chosen(CLIENT, 4)
