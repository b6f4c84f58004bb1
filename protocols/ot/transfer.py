"""Oblivious transfer: per row the client gets one string of N; the provider learns not which.

Ahead of time, per row and bit of the choice, a random 1-of-2 transfer: the client has a bit c and
the key k_c, the provider k_0 and k_1 (128 bits each). It is the correlation `TRANSFER`: for shares
w_client + w_provider = c * d of the client's c and the provider's d, k_0 = -w_provider and
k_1 = d - w_provider, so that w_client = k_c. Since d is uniform and the provider's own, the client
knows nothing of the other key.

Online, one message each way (Naor and Pinkas, "Computationally Secure Oblivious Transfer",
J. Cryptology 2005, 1-of-N from log N transfers of 1-of-2; with keys per half of the choice):

  1. The client sends choice ^ c, bit by bit. The provider renames its keys: K_t^v = k_t^(v ^ c_t ^
     choice_t), so that the client knows K_t^(choice_t) of every bit t, and no other key.
  2. Entries lie on a grid: entry (i, j) has the upper bits i and the lower bits j. The provider
     makes keys of lines and columns, with H from `protocols.ot.hashing` and a tweak of its own for
     every use,
         A_i = xor_t H(K_t^(bit t of i)) over the upper bits t,
         B_j = xor_t H(K_t^(bit t of j)) over the lower bits t,
     and from them pad(i, j) = block of A_i at place j ^ block of B_j at place i. It sends every
     string under its pad.
  3. The client computes A, B and the pad of its own entry, and removes it.

What the client learns. Let (i*, j*) be its choice. Every other A_i contains H(K) of a key K that it
does not know, at a tweak that occurs once; so the A_i with i != i* are uniform and independent to
it, and the B_j with j != j* as well. Of every other pad (i, j), one term is unknown: if i != i*,
the stream of the unknown A_i at place j; else j != j*, the stream of the unknown B_j at place i*.
The term at a place of a stream is used in one pad alone, hence all N - 1 other pads are uniform
and independent: the other strings are perfectly hidden but for telling H from a random function.
The provider learns nothing: every c is uniform and unknown to it.

Both parties follow the protocol, as everywhere; but whatever bits a client sends, they are some
choice, so it gets one string per row at most, if the 1-of-2 transfers give it one key each.

Costs O(sqrt N) hashes for the keys and two blocks per 16 bytes of pads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from protocols.bits.planes import bytes_for, pack, unpack
from protocols.ot.hashing import TweakedHash
from spu_llm.core.correlation import Correlation, Correlations, Form, Part
from spu_llm.core.op import Cost, View
from spu_llm.core.party import Party
from spu_llm.core.permutation import BLOCK_BYTES
from spu_llm.core.prg import Prg
from spu_llm.core.transfers import Transfers
from spu_llm.core.values import CLIENT, PROVIDER, Owner

MAX_ENTRIES = 1 << 18
_TILE = 1 << 22  # bytes of pads made at once; bounds memory beyond the message


def _made_of_transfers(source: Transfers, units: int) -> Correlations:
    """Make units of `TRANSFER` of random transfers: nothing is sent."""
    if source.rank == CLIENT:
        c, keys = source.choose(units)
        return Correlations([c, np.zeros((units, 2), np.uint64)], [keys])
    zero, one = source.offer(units)
    return Correlations([np.zeros(units, np.uint64), one - zero], [np.uint64(0) - zero])


TRANSFER = Correlation(
    name="transfer",
    masks=(Part((), Owner.CLIENT, Form.BIT), Part((2,), Owner.PROVIDER, Form.ARITH)),
    results=(Part((2,), Owner.JOINT, Form.ARITH),),
    secure=lambda c, d: [c.astype(d.dtype)[..., None] * d],
    by_transfers=_made_of_transfers,
    transfers=(1, 0),
    chunk=1 << 14,
)

# Uses of the hash; part of the tweak.
_LINE_KEY, _COLUMN_KEY, _LINE_PAD, _COLUMN_PAD = range(4)


@dataclass(frozen=True)
class Batch:
    """`rows` transfers of one out of `entries` strings of `size` bytes each."""

    rows: int
    entries: int
    size: int

    def __post_init__(self) -> None:
        if not 1 <= self.entries <= MAX_ENTRIES:
            raise ValueError(
                f"a transfer chooses among 1 to {MAX_ENTRIES} entries, found {self.entries}"
            )

    @property
    def bits(self) -> int:
        """Return how many bits a choice has; a row takes as many 1-of-2 transfers."""
        return (self.entries - 1).bit_length()

    @property
    def low(self) -> int:
        """Return how many bits a column number has; the others are a line's."""
        return (self.bits + 1) // 2

    @property
    def columns(self) -> int:
        return 1 << self.low

    @property
    def lines(self) -> int:
        return -(-self.entries // self.columns)

    @property
    def slot(self) -> int:
        """Return the bytes of a pad: `size`, rounded up so that no pad lies across two blocks."""
        if self.size > BLOCK_BYTES // 2:
            return -(-self.size // BLOCK_BYTES) * BLOCK_BYTES
        return 1 << max(0, self.size - 1).bit_length()

    @property
    def empty(self) -> bool:
        return self.rows * self.size == 0

    @property
    def choice_bytes(self) -> int:
        return 0 if self.empty else bytes_for(self.bits * self.rows)

    def cost(self) -> Cost:
        """Return the cost of `choose` and `offer`, without what is prepared."""
        if self.empty:
            return Cost()
        messages = 2 if self.bits else 1
        return Cost(messages, messages, self.choice_bytes, self.rows * self.entries * self.size)


def choose(party: Party, batch: Batch, choice: np.ndarray) -> np.ndarray:
    """Run the client's half: return the strings (uint8 [rows, size]) of choice (integers [rows]).

    Take rows * bits units of `TRANSFER`, as `offer` does. Raise ValueError, before anything is
    sent, when a choice is negative or not below `batch.entries`.
    """
    outside = np.flatnonzero((choice < 0) | (choice >= batch.entries))
    if outside.size:
        # Says where and not what: the choice is the client's secret, also in logs.
        raise ValueError(
            f"row {outside[0]} chooses an entry outside 0..{batch.entries - 1}; nothing was sent"
        )
    hashed = _fresh_hash(party.common)
    if batch.empty:
        return np.zeros((batch.rows, batch.size), np.uint8)
    units = [(u.masks[0], u.results[0]) for u in _take(party, batch)]  # c and k_c
    # 1.
    if batch.bits:
        masked = [_bit(choice, t) ^ c.astype(np.uint8) for t, (c, _) in enumerate(units)]
        party.send_bytes(pack(np.concatenate(masked)))
    # 3. The pads are made while the provider makes its own.
    pads = own_pads(hashed, batch, choice, [key for _, key in units])
    message = party.recv_bytes((batch.rows, batch.entries, batch.size))
    return message[np.arange(batch.rows), choice] ^ pads


def offer(party: Party, batch: Batch, strings: Callable[[slice, slice], np.ndarray]) -> None:
    """Run the provider's half; strings(rows, entries): that part of all (uint8 [.., .., size])."""
    hashed = _fresh_hash(party.common)
    if batch.empty:
        return
    units = [(u.masks[1], u.results[0]) for u in _take(party, batch)]  # d and w
    # 1.
    swaps = np.zeros((batch.bits, batch.rows), np.uint64)
    if batch.bits:
        swaps = unpack(party.recv_bytes((batch.choice_bytes,)), swaps.size).reshape(swaps.shape)

    def pairs(rows: slice) -> list[np.ndarray]:
        return [
            _key_pair(d[rows], w[rows], swap[rows])
            for (d, w), swap in zip(units, swaps, strict=True)
        ]

    # 2.
    message = np.empty((batch.rows, batch.entries, batch.size), np.uint8)
    for rows, entries, pads in all_pads(hashed, batch, pairs):
        np.bitwise_xor(strings(rows, entries), pads, out=message[rows, entries])
    party.send_bytes(message)


def _take(party: Party, batch: Batch) -> list[Correlations]:
    """Take a random 1-of-2 transfer per row for every bit of a choice.

    Both parties take all of them before the first message: taking may send messages of its own.
    """
    return [party.take(TRANSFER, batch.rows) for _ in range(batch.bits)]


def _key_pair(d: np.ndarray, w: np.ndarray, swap: np.ndarray) -> np.ndarray:
    """Return (K^0, K^1) = (-w, d - w), the other way round where swap is 1: uint64 [rows, 2, 2]."""
    s = swap[:, None]
    return np.stack([s * d - w, (np.uint64(1) - s) * d - w], axis=1)


def _fresh_hash(common: Prg) -> TweakedHash:
    """Return H under a key of this batch alone, which both parties get from their common stream."""
    return TweakedHash(common.words((2,)).tobytes())


def _bit(numbers: np.ndarray, t: int) -> np.ndarray:
    return ((numbers >> t) & 1).astype(np.uint8)


# ---- pads


def all_pads(
    hashed: TweakedHash, batch: Batch, pairs: Callable[[slice], list[np.ndarray]]
) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """Yield every pad of the batch, in pieces: (rows, entries, uint8 [rows, entries, size]).

    pairs(rows): the keys (K^0, K^1) of each bit, lowest first, uint64 [rows, 2, 2].
    """
    columns, lines = np.arange(batch.columns), np.arange(batch.lines)
    for rows in _slices(batch.rows, _TILE // (batch.lines * batch.columns * batch.slot)):
        number = np.arange(rows.start, rows.stop)[:, None]
        started = [hashed.start(pair) for pair in pairs(rows)]
        upper = [k[:, _bit(lines, t)] for t, k in enumerate(started[batch.low :])]
        lower = [k[:, _bit(columns, t)] for t, k in enumerate(started[: batch.low])]
        a = _combine(hashed, number, _LINE_KEY, upper, lines)
        b = _combine(hashed, number, _COLUMN_KEY, lower, columns)
        # A piece is some whole lines or, where even one is too long, a part of one.
        line_bytes, per_block = batch.columns * batch.slot, _blocks(batch)[1]
        for some_lines in _slices(batch.lines, _TILE // line_bytes, per_block):
            for some_columns in _slices(batch.columns, _TILE // batch.slot, per_block):
                i, j = lines[some_lines], columns[some_columns]
                assert len(i) == 1 or len(j) == batch.columns
                along = _stream(hashed, batch, number, _LINE_PAD, a[:, some_lines], i, j)
                across = _stream(hashed, batch, number, _COLUMN_PAD, b[:, some_columns], j, i)
                pads = np.ascontiguousarray(along ^ across.swapaxes(1, 2))
                first = int(i[0]) * batch.columns + int(j[0])
                count = min(len(i) * len(j), batch.entries - first)
                flat = pads.view(np.uint8).reshape(len(number), len(i) * len(j), batch.slot)
                if count > 0:
                    yield rows, slice(first, first + count), flat[:, :count, : batch.size]


def own_pads(
    hashed: TweakedHash, batch: Batch, choice: np.ndarray, keys: list[np.ndarray]
) -> np.ndarray:
    """Compute the pads (uint8 [rows, size]) of the entries that the client has the keys of.

    keys: K^(choice bit) of each bit, lowest first, uint64 [rows, 2].
    """
    pads = np.empty((batch.rows, batch.size), np.uint8)
    for rows in _slices(batch.rows, _TILE // (16 * batch.slot)):
        number = np.arange(rows.start, rows.stop)[:, None]
        chosen = choice[rows, None].astype(np.int64)
        i, j = chosen >> batch.low, chosen & (batch.columns - 1)
        started = [hashed.start(k[rows, None]) for k in keys]
        a = _combine(hashed, number, _LINE_KEY, started[batch.low :], i)
        b = _combine(hashed, number, _COLUMN_KEY, started[: batch.low], j)
        along = _stream(hashed, batch, number, _LINE_PAD, a, i, j)
        across = _stream(hashed, batch, number, _COLUMN_PAD, b, j, i)
        flat = np.ascontiguousarray(along ^ across).view(np.uint8)
        pads[rows] = flat.reshape(-1, batch.slot)[:, : batch.size]
    return pads


def _combine(
    hashed: TweakedHash, row: np.ndarray, use: int, started: list[np.ndarray], value: np.ndarray
) -> np.ndarray:
    """Compute the keys of lines or columns, started: pi(xor_t H(K_t)), uint64 [rows, values, 2].

    started: pi(K_t) of the bits of the values; value: [values] or [rows, values].
    """
    shape = np.broadcast_shapes(row.shape, value.shape)
    total = np.zeros((*shape, 2), np.uint64)
    for t, key in enumerate(started):
        total ^= hashed.finish(key, _tweaks(use, row, np.asarray(t), value))
    return hashed.start(total)


def _stream(
    hashed: TweakedHash,
    batch: Batch,
    row: np.ndarray,
    use: int,
    started: np.ndarray,
    key: np.ndarray,
    place: np.ndarray,
) -> np.ndarray:
    """Compute pads of the keys numbered `key` at places: [rows, keys, places, words of a slot].

    place: places [places] that all keys share, consecutive and from the start of a block, or one of
    its own for every row and key [rows, 1].
    """
    blocks, per_block = _blocks(batch)
    first = place[..., :1] * batch.slot // BLOCK_BYTES
    if place.ndim == 1:
        assert int(place[0]) * batch.slot % BLOCK_BYTES == 0
        blocks *= -(-len(place) // per_block)
    position = first[..., None] + np.arange(blocks)
    tweaks = _tweaks(use, row[..., None], key[..., None], position)
    stream = hashed.finish(started[..., None, :], tweaks)
    word = np.dtype(f"u{min(batch.slot, 8)}")
    words = stream.reshape(*stream.shape[:-2], -1).view(word)
    slots = words.reshape(*stream.shape[:-2], -1, batch.slot // word.itemsize)
    if place.ndim == 2:
        return np.take_along_axis(slots, (place % per_block)[..., None, None], axis=-2)
    return slots[..., : len(place), :]


def _blocks(batch: Batch) -> tuple[int, int]:
    """Return the blocks of a pad and the pads of a block; one of both is 1."""
    return max(1, batch.slot // BLOCK_BYTES), max(1, BLOCK_BYTES // batch.slot)


def _tweaks(use: int, row: np.ndarray, key: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return tweaks [..., 2], distinct for distinct (use, row, key, position < 2^40)."""
    upper = (row.astype(np.uint64) << np.uint64(2)) | np.uint64(use)
    lower = (key.astype(np.uint64) << np.uint64(40)) | position.astype(np.uint64)
    return np.stack(np.broadcast_arrays(upper, lower), axis=-1)


def _slices(count: int, at_once: int, multiple: int = 1) -> Iterator[slice]:
    """Yield 0..count in slices of about `at_once`, each but the last a multiple of `multiple`."""
    step = max(1, at_once // multiple) * multiple
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


# ---- simulators


def simulate_choose(
    prg: Prg, common: Prg, batch: Batch, choice: np.ndarray, strings: np.ndarray
) -> View:
    """Simulate the client's view, from its choice and the strings it gets (uint8 [rows, size]).

    Its bits and keys are uniform. The chosen entry of the message is its string under the pad of
    these keys; the others are uniform, since their pads are.
    """
    hashed = _fresh_hash(common)
    if batch.empty:
        return View([], [])
    units = [_units(prg, CLIENT, batch.rows) for _ in range(batch.bits)]
    message = _random_bytes(prg, (batch.rows, batch.entries, batch.size))
    pads = own_pads(hashed, batch, choice, [keys for _, _, keys in units])
    message[np.arange(batch.rows), choice] = strings ^ pads
    return View([words for unit in units for words in unit], [message])


def simulate_offer(prg: Prg, batch: Batch) -> View:
    """Simulate the provider's view: all of it is uniform."""
    if batch.empty:
        return View([], [])
    units = [_units(prg, PROVIDER, batch.rows) for _ in range(batch.bits)]
    bits = _random_bytes(prg, (batch.bits * batch.rows,)) & 1
    incoming = [pack(bits)] if batch.bits else []
    return View([words for unit in units for words in unit], incoming)


def _units(prg: Prg, rank: int, rows: int) -> list[np.ndarray]:
    return [*TRANSFER.draw(rank, prg, rows), prg.words((rows, 2))]


def _random_bytes(prg: Prg, shape: tuple[int, ...]) -> np.ndarray:
    count = math.prod(shape)
    words = prg.words(((count + 7) // 8,))
    return words.view(np.uint8)[:count].reshape(shape).copy()
