"""The first correlated transfers of a session, from 127 that SPU makes in each direction.

Ishai, Kilian, Nissim and Petrank (CRYPTO 2003, figure 1), for a sender with a secret delta of 128
bits, the first of which is one:

  1. For each other bit of delta, a base transfer: the receiver has two keys, the sender the one
     that the bit says.
  2. The receiver draws its bits u. For each pair of keys it sends G(key_0) ^ G(key_1) ^ u, and
     keeps T = G(key_0), a column of bits for each.
  3. The sender's column is G(key) and, where its bit is one, what was sent: Q = T ^ bit u.
  4. Row j of all columns: w_j = v_j ^ u_j delta. Bit 0, which has no column, is zero in w_j and
     u_j in v_j.

The receiver sees nothing of delta, the sender u under a stream that it does not know, once for each
column. G is AES-256 in counter mode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from spu_llm.core.channel import Channel, Traffic, recv_exactly
from spu_llm.core.correlation import Correlation, Form, Part
from spu_llm.core.permutation import BLOCK_WORDS
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, Owner

_COLUMNS = 64 * BLOCK_WORDS - 1
_1 = np.uint64(1)

# From a correlation and its masks: this party's result words as SPU makes them, and what they cost.
BySpu = Callable[[Correlation, Sequence[np.ndarray]], tuple[list[np.ndarray], Traffic]]


def _chosen_by(rank: int) -> Correlation:
    """Return a bit of party `rank` times two words of its peer's: a correlated transfer in SPU."""
    return Correlation(
        name=f"base transfer to {Owner.of_rank(rank).value}",
        masks=(
            Part((), Owner.of_rank(rank), Form.BIT),
            Part((2,), Owner.of_rank(1 - rank), Form.ARITH),
        ),
        results=(Part((2,), Owner.JOINT, Form.ARITH),),
        secure=lambda c, d: [c.astype(d.dtype)[..., None] * d],
        chunk=_COLUMNS,
    )


BASE = {rank: _chosen_by(rank) for rank in (CLIENT, PROVIDER)}


def first_stock(
    rank: int, own: Prg, channel: Channel, by_spu: BySpu, count: int
) -> tuple[np.ndarray, np.ndarray, Traffic]:
    """Make `count` correlated transfers in each direction with the peer; return this party's delta,
    rows [count, 2 blocks]: of what it sends w, of what it chooses in v;
    and what SPU sent.
    """
    delta = own.words((BLOCK_WORDS,)) | np.array([1, 0], np.uint64)
    bits = np.unpackbits(delta.view(np.uint8), bitorder="little")[1:].astype(np.uint64)
    # 1. Party 0's bits first, at both.
    keys: dict[int, np.ndarray] = {}
    spu = Traffic()
    for chooser in (CLIENT, PROVIDER):
        masks = BASE[chooser].draw(rank, own, _COLUMNS)
        if rank == chooser:
            masks[0] = bits
        (share,), cost = by_spu(BASE[chooser], masks)
        spu += cost
        # bit d = share_0 + share_1: the chooser knows share_0 = bit d - share_1.
        keys[chooser] = share if rank == chooser else np.stack([0 - share, masks[1] - share])
    chosen, pairs = keys[rank], keys[1 - rank]
    # 2.
    size = -(-count // 8)
    own_bits = np.frombuffer(own.words((-(-size // 8),)).tobytes(), np.uint8)[:size]
    zero, one = (_streams(side, size) for side in pairs)
    channel.send((zero ^ one ^ own_bits).tobytes())
    # 3.
    theirs = np.frombuffer(recv_exactly(channel, _COLUMNS * size), np.uint8).reshape(-1, size)
    columns = _streams(chosen, size) ^ theirs * bits.astype(np.uint8)[:, None]
    # 4.
    rows = np.empty((count, 2 * BLOCK_WORDS), np.uint64)
    rows[:, :BLOCK_WORDS] = _transposed(np.zeros_like(own_bits), columns, count)
    rows[:, BLOCK_WORDS:] = _transposed(own_bits, zero, count)
    return delta, rows, spu


def _streams(keys: np.ndarray, size: int) -> np.ndarray:
    """Return the stream G of each key [2 words]: bytes [keys, size]."""
    words = (-(-size // 8),)
    streams = [
        Prg(hashlib.sha256(b"base transfer" + key.tobytes()).digest()).words(words) for key in keys
    ]
    return np.stack(streams).view(np.uint8)[:, :size]


def _transposed(first: np.ndarray, columns: np.ndarray, count: int) -> np.ndarray:
    """Return blocks [count, 2] of columns of bits, packed: `first` is bit 0."""
    bits = np.unpackbits(
        np.concatenate([first[None], columns]), axis=1, count=count, bitorder="little"
    )
    packed = np.packbits(bits.T, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.uint64)
