"""Hash, random transfers from real SPU, and pads: what one party knows of the other's keys."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.ot import transfer
from protocols.ot.hashing import TweakedHash
from protocols.ot.transfer import MAX_ENTRIES, TRANSFER, Batch, all_pads, own_pads
from spu_llm.core.correlation import deal
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.simulation import Simulation

KEY = bytes(range(16))


def words(block: bytes) -> np.ndarray:
    return np.frombuffer(block, np.uint64)


# ---- hash


def slow_pi(block: bytes) -> bytes:
    """Encrypt one block by AES-128, by itself."""
    encryptor = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
    return encryptor.update(block) + encryptor.finalize()


def xor(a: bytes, b: bytes) -> bytes:
    return (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).to_bytes(len(a), "big")


def slow_hash(x: bytes, tweak: bytes) -> bytes:
    """H(x, t) = pi(pi(x) ^ t) ^ pi(x), block by block, from the definition."""
    return xor(slow_pi(xor(slow_pi(x), tweak)), slow_pi(x))


def test_permutation_is_aes() -> None:
    """FIPS 197, appendix C.1."""
    plain = bytes.fromhex("00112233445566778899aabbccddeeff")
    cipher = TweakedHash(KEY).start(words(plain)).tobytes()
    assert cipher.hex() == "69c4e0d86a7b0430d8cdb78070b4c55a"


@given(st.integers(0, 5), st.integers(0, 4), st.integers())
def test_hash_of_an_array_is_the_hash_of_each_block(n: int, m: int, seed: int) -> None:
    prg, hashed = Prg.from_seed(seed, "blocks"), TweakedHash(KEY)
    x, tweaks = prg.words((n, 1, 2)), prg.words((m, 2))
    actual = hashed.finish(hashed.start(x), tweaks)
    assert actual.shape == (n, m, 2)
    for i, j in itertools.product(range(n), range(m)):
        assert actual[i, j].tobytes() == slow_hash(x[i, 0].tobytes(), tweaks[j].tobytes())


def test_recorded_vector() -> None:
    hashed = TweakedHash(KEY)
    x = words(bytes.fromhex("00112233445566778899aabbccddeeff"))
    tweak = np.array([1, 2], np.uint64)
    actual = hashed.finish(hashed.start(x), tweak)
    assert actual.tobytes().hex() == "afa702538f394c5597b5f6da19edb3a8"
    with pytest.raises(ValueError, match="16 bytes"):
        TweakedHash(KEY + b"x")


# ---- random 1-of-2 transfers


def test_keys_of_transfers(simulation: Simulation) -> None:
    """The correlation, keys that look random, and no byte sent for them."""
    count = 1000

    def program(session: Any) -> Any:
        correlations = session.preprocessing.take(TRANSFER, count)
        session.preprocessing.take(TRANSFER, 3 * TRANSFER.chunk)
        made = [e for e in session.meter.entries if e.kind == "pool" and e.name == "transfer"]
        return correlations, made

    (client, entries), (provider, _) = simulation.run(program)
    c, w_client = client.masks[0], client.results[0]
    d, w_provider = provider.masks[1], provider.results[0]
    k0, k1 = np.uint64(0) - w_provider, d - w_provider
    np.testing.assert_array_equal(w_client, np.where(c[:, None] == 1, k1, k0))
    assert 400 < c.sum() < 600 and not client.masks[1].any() and not provider.masks[0].any()
    for lane in (k0, k1):
        assert len(np.unique(lane)) == lane.size
        bits = np.unpackbits(np.ascontiguousarray(lane).view(np.uint8))
        assert abs(bits.mean() - 0.5) < 0.02
    # Both lanes of a key are independent.
    assert abs(np.unpackbits((k0[:, 0] ^ k0[:, 1]).view(np.uint8)).mean() - 0.5) < 0.03
    assert all(entry.phase == "offline" for entry in entries)
    assert not any(entry.traffic.bytes for entry in entries)


# ---- pads


def dealt(batch: Batch, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keys of every bit: the provider's pairs [rows, 2, 2], and what the client's choice gives."""
    prg = Prg.from_seed(seed, "keys")
    pairs = [prg.words((batch.rows, 2, 2)) for _ in range(batch.bits)]
    return pairs, [prg.words((batch.rows, 2)) for _ in range(batch.bits)]


def every_pad(batch: Batch, pairs: list[np.ndarray]) -> np.ndarray:
    pads = np.zeros((batch.rows, batch.entries, batch.size), np.uint8)
    covered = np.zeros((batch.rows, batch.entries), int)
    for rows, entries, some in all_pads(TweakedHash(KEY), batch, lambda r: [p[r] for p in pairs]):
        pads[rows, entries] = some
        covered[rows, entries] += 1
    assert (covered == 1).all()
    return pads


def chosen_keys(pairs: list[np.ndarray], choice: np.ndarray) -> list[np.ndarray]:
    return [p[np.arange(len(p)), (choice >> t) & 1] for t, p in enumerate(pairs)]


BATCHES = st.builds(Batch, st.integers(1, 5), st.integers(1, 40), st.integers(1, 40))


@given(BATCHES, st.data())
def test_client_has_the_pad_of_its_entry_and_of_no_other(batch: Batch, data: Any) -> None:
    choice = np.array(
        data.draw(
            st.lists(st.integers(0, batch.entries - 1), min_size=batch.rows, max_size=batch.rows)
        )
    )
    pairs, _ = dealt(batch)
    pads = every_pad(batch, pairs)
    own = own_pads(TweakedHash(KEY), batch, choice, chosen_keys(pairs, choice))
    same = (pads == own[:, None]).all(axis=2)
    assert same[np.arange(batch.rows), choice].all()
    if batch.size >= 8:  # shorter strings may agree by chance
        np.testing.assert_array_equal(same.sum(axis=1), 1)


def slow_pad(batch: Batch, pairs: list[np.ndarray], row: int, entry: int) -> bytes:
    """Compute a pad from the definition in the module docstring, block by block."""

    def tweak(use: int, key: int, position: int) -> bytes:
        return (row << 2 | use).to_bytes(8, "little") + (key << 40 | position).to_bytes(8, "little")

    low = (batch.bits + 1) // 2
    i, j = entry >> low, entry % (1 << low)

    def stream(bits: range, number: int, uses: tuple[int, int], place: int) -> bytes:
        key = bytes(16)
        for t, bit in enumerate(bits):
            k = pairs[bit][row, number >> t & 1].tobytes()
            key = xor(key, slow_hash(k, tweak(uses[0], t, number)))
        start = place * batch.slot
        blocks = range(start // 16, -(-(start + batch.slot) // 16))
        data = b"".join(slow_hash(key, tweak(uses[1], number, b)) for b in blocks)
        return data[start % 16 :][: batch.size]

    return xor(stream(range(low, batch.bits), i, (0, 2), j), stream(range(low), j, (1, 3), i))


@pytest.mark.parametrize(
    "batch",
    [Batch(2, 1, 5), Batch(2, 2, 8), Batch(2, 5, 3), Batch(2, 16, 20), Batch(1, 23, 16)],
    ids=str,
)
def test_pads_are_as_defined(batch: Batch) -> None:
    pairs, _ = dealt(batch)
    pads = every_pad(batch, pairs)
    for row, entry in np.ndindex(batch.rows, batch.entries):
        assert pads[row, entry].tobytes() == slow_pad(batch, pairs, row, entry)


@pytest.mark.parametrize("batch", [Batch(64, 64, 8), Batch(64, 33, 3), Batch(8, 100, 48)], ids=str)
def test_no_combination_of_pads_vanishes(batch: Batch) -> None:
    """Pads are N independent strings, although made of 2 sqrt N keys: no xor of any of them is
    zero, in any set of entries (full rank over F_2). A pad A_i ^ B_j without places would fail:
    any four corners of a rectangle cancel.
    """
    pads = every_pad(batch, dealt(batch)[0])
    assert rank_of(pads.swapaxes(0, 1).reshape(batch.entries, -1)) == batch.entries
    rows = every_pad(batch, dealt(batch)[0]).reshape(batch.rows, -1)
    assert rank_of(rows) == batch.rows
    rectangle = np.stack(
        [
            pads[:, 0],
            pads[:, 1],
            pads[:, batch.columns],
            pads[:, 0] ^ pads[:, 1] ^ pads[:, batch.columns],
        ]
    )
    assert rank_of(rectangle.reshape(4, -1)) == 3, "the check itself sees a dependence"


def rank_of(data: np.ndarray) -> int:
    """Rank over F_2 of rows of bytes."""
    rows = [int.from_bytes(row.tobytes(), "big") for row in data]
    rank = 0
    while rows:
        pivot = rows.pop()
        if pivot:
            rank += 1
            top = pivot.bit_length() - 1
            rows = [r ^ pivot if r >> top & 1 else r for r in rows]
    return rank


@settings(max_examples=30)
@given(BATCHES, st.sampled_from([0, 300, 1000]))
def test_pieces_do_not_change_the_pads(batch: Batch, tile: int) -> None:
    pairs, _ = dealt(batch)
    choice = np.arange(batch.rows) % batch.entries
    before = transfer._TILE
    whole = every_pad(batch, pairs)
    own = own_pads(TweakedHash(KEY), batch, choice, chosen_keys(pairs, choice))
    try:
        # A line of short pads is never cut: it is far below the real size of a piece.
        transfer._TILE = max(tile, batch.columns * 16 if batch.slot < 16 else 0)
        np.testing.assert_array_equal(every_pad(batch, pairs), whole)
        actual = own_pads(TweakedHash(KEY), batch, choice, chosen_keys(pairs, choice))
        np.testing.assert_array_equal(actual, own)
    finally:
        transfer._TILE = before


@pytest.mark.parametrize(
    "batch", [Batch(200_000, 16, 8), Batch(2, MAX_ENTRIES, 8), Batch(3, 5, 1 << 22)], ids=str
)
def test_memory_does_not_grow_with_the_message(batch: Batch) -> None:
    pairs, keys = dealt(batch)
    tracemalloc.start()
    seen = 0
    for _, _, some in all_pads(TweakedHash(KEY), batch, lambda r: [p[r] for p in pairs]):
        seen += some.size
    own_pads(TweakedHash(KEY), batch, np.zeros(batch.rows, int), keys)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == batch.rows * batch.entries * batch.size
    assert peak - batch.rows * batch.size < 16 * transfer._TILE


def test_other_pads_need_the_other_keys() -> None:
    """Who knows every d besides the client's keys has all pads, so this test could see it; with a
    wrong guess of each d, be it by one bit, the client has no pad but its own.
    """
    batch = Batch(4, 16, 8)  # all bits of a choice are free, as the client's are here
    masks = [
        [TRANSFER.draw(r, Prg.from_os(), batch.rows) for r in (0, 1)] for _ in range(batch.bits)
    ]
    shares = [deal(TRANSFER, both, Prg.from_os()) for both in masks]
    pairs = []
    for both, results in zip(masks, shares, strict=True):
        k0 = np.uint64(0) - results[PROVIDER][0]
        pairs.append(np.stack([k0, both[PROVIDER][1] + k0], axis=1))
    pads = every_pad(batch, pairs)

    def attack(guesses: list[np.ndarray]) -> int:
        """Return how many pads the client's keys and a guess of every d give."""
        known = []
        for both, results, d in zip(masks, shares, guesses, strict=True):
            c, key = both[CLIENT][0][:, None], results[CLIENT][0]
            known.append(np.stack([key - c * d, key - c * d + d], axis=1))
        return int((every_pad(batch, known) == pads).all(axis=2).sum())

    right = [both[PROVIDER][1] for both in masks]
    assert attack(right) == batch.rows * batch.entries
    assert attack([d ^ np.uint64(1) for d in right]) == batch.rows  # its own choice, no more
    one_bit_unknown = [right[0] ^ np.uint64(1), *right[1:]]
    assert attack(one_bit_unknown) < batch.rows * batch.entries * 0.6


def test_too_many_entries() -> None:
    for entries in (0, MAX_ENTRIES + 1):
        with pytest.raises(ValueError, match="entries"):
            Batch(1, entries, 8)
