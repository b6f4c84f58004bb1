"""Correlated oblivious transfers in bulk, in both directions at once, from a few of them.

Ferret (Yang, Weng, Lan, Zhang and Wang, CCS 2020, figure 7) with half-trees in place of GGM trees.
A party has as a sender a secret delta, and blocks w; its peer as a receiver bits u and blocks
v = w ^ u delta. Bit 0 of delta is set, and of every w clear, so that bit 0 of v is u.

An extension, for each direction, from k + t h such transfers:

  1. t h of them choose, bit by bit, where each of t trees has its single one
     (`spu_llm.offline.ot.trees`): the sender sends the sum of one side of each level under w, one
     message for all; the receiver takes its own under v.
  2. The k others are multiplied with a public matrix, and the leaves added
     (`spu_llm.offline.ot.code`): v = w ^ u delta holds for each row, since it does for the table
     and for the leaves.
  3. The first k + t h rows are the stock of the next extension; the others serve.

Both directions share the matrix, which depends on neither; keys of matrix, trees and hash are of
each extension alone, from a stream that both parties know. Rows are encoded when they are asked
for.

What each party learns. Of each level the receiver gets the sum of the side that it chose; that of
the other side differs by delta, which it does not know. The sender sees nothing at all. What serves
is as good as uniform to the other party if learning parity with noise is hard (`code`) and the hash
is what `blocks` says.

Conditions, each with a test (tests/offline/test_ot_transfers.py):
  - A row that chose a place of noise, or is in a table, serves for nothing else.
  - Bit 0 of delta is set, and of all w clear; the parties' deltas are their own.
  - The matrix is another one for each extension.

Semi-honest; no consistency check is made. A sender that sends wrong sums learns, from what goes
wrong, where the noise is. A receiver that sends wrong columns for the base (`base`) makes rows that
are right or wrong by bits of delta: whoever sees which strings are right has all of delta, and with
it both strings of every transfer of the session. A wrong correction gives a result that is wrong if
its peer's choice bit is set, and reads that bit from a failure that shows.
"""

from __future__ import annotations

import numpy as np

from spu_llm.core.channel import Channel, recv_exactly
from spu_llm.core.permutation import BLOCK_WORDS
from spu_llm.core.prg import Prg
from spu_llm.offline.ot.blocks import BlockHash
from spu_llm.offline.ot.code import ROWS_AT_ONCE, Parameters, Places, sums_of_rows
from spu_llm.offline.ot.trees import grow, grow_punctured

_TREES_AT_ONCE = 64  # their leaves stay in the cache
_1 = np.uint64(1)


class Extension:
    """This party's rows: transfers that it sends and, beside them, transfers that it chooses in.

    One object serves a session, extended again and again: fresh memory would cost more than what is
    written to it.
    """

    def __init__(
        self,
        own: Prg,
        common: Prg,
        channel: Channel,
        delta: np.ndarray,
        stock: np.ndarray,
        parameters: Parameters,
    ) -> None:
        """Take own: this party's secret stream; common: one of both. stock: rows
        [k + t h, 2 blocks], used for nothing else.
        """
        assert len(stock) == parameters.stock and int(delta[0]) & 1
        self.parameters, self.delta = parameters, delta
        self._own, self._common, self._channel = own, common, channel
        # The blocks w of what this party sends, and v of what it chooses in.
        self._sent = np.empty((parameters.rows, BLOCK_WORDS), np.uint64)
        self._chosen = np.empty_like(self._sent)
        self._stock = stock
        self._is_used = False  # the stock: for an extension
        self._encoded = 0

    def extend(self) -> None:
        """Make the rows anew, with the peer, which makes its own at the same time."""
        if self._is_used:
            count = self.parameters.stock
            self._encode(count)
            self._stock = np.concatenate([self._sent[:count], self._chosen[:count]], axis=1)
        self._is_used = True
        keys = [key.tobytes() for key in self._common.words((3, BLOCK_WORDS))]
        self._places, self.hash = Places(keys[1]), BlockHash(keys[2])
        self._grow(BlockHash(keys[0]), self._stock[self.parameters.secrets :])
        self._encoded = 0

    def sent(self, start: int, stop: int) -> np.ndarray:
        """Return blocks w [stop - start, 2], counted from the first row that serves."""
        return self._serving(self._sent, start, stop)

    def chosen(self, start: int, stop: int) -> np.ndarray:
        """Return blocks v [stop - start, 2], counted from the first row that serves; their bits 0
        are the choices.
        """
        return self._serving(self._chosen, start, stop)

    def _serving(self, blocks: np.ndarray, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.parameters.serving
        first = self.parameters.stock
        self._encode(first + stop)
        return blocks[first + start : first + stop]

    def _encode(self, stop: int) -> None:
        """Encode the rows up to `stop` at least (step 2)."""
        table = self._stock[: self.parameters.secrets]
        while self._encoded < stop:
            some = slice(self._encoded, min(self._encoded + ROWS_AT_ONCE, len(self._sent)))
            sums = sums_of_rows(table, self._places.rows(some.start, some.stop - some.start))
            for word in range(BLOCK_WORDS):  # one by one: NumPy is slow on short rows
                self._sent[some, word] ^= sums[:, word]
                self._chosen[some, word] ^= sums[:, BLOCK_WORDS + word]
            self._encoded = some.stop

    def _grow(self, hashed: BlockHash, used: np.ndarray) -> None:
        """Put the leaves of all trees where the rows will be (step 1)."""
        trees, depth = self.parameters.trees, self.parameters.depth
        used = used.reshape(depth, trees, 2, BLOCK_WORDS)
        keys, macs = used[:, :, 0], used[:, :, 1]
        groups = [slice(i, min(i + _TREES_AT_ONCE, trees)) for i in range(0, trees, _TREES_AT_ONCE)]

        def leaves(blocks: np.ndarray, some: slice) -> np.ndarray:
            rows = blocks[some.start << depth : some.stop << depth]
            return rows.reshape(1 << depth, some.stop - some.start, BLOCK_WORDS)

        seeds, message = self._own.words((trees, BLOCK_WORDS)), keys.copy()
        for some in groups:
            message[:, some] ^= grow(hashed, self.delta, seeds[some], leaves(self._sent, some))
        self._sent[:, 0] &= ~_1
        self._channel.send(message.tobytes())
        theirs = np.frombuffer(recv_exactly(self._channel, message.nbytes), np.uint64)
        sums, sides = theirs.reshape(message.shape) ^ macs, macs[..., 0] & _1
        for some in groups:
            there = leaves(self._chosen, some)
            place = grow_punctured(hashed, sums[:, some], sides[:, some], there)
            there[..., 0] &= ~_1
            there[place, np.arange(len(place)), 0] |= _1
