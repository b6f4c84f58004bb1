"""Packed products: products of matrices of masks, from ciphertexts that hold many words each.

Of units X [n, k], Y [k, m], both additively shared modulo 2^64, the parties get shares of X Y. Each
party's share of X times the other's share of Y is made like this; the *owner* encrypts its Y, the
*evaluator* multiplies with its X. Polynomials, Y_b, X_rb and the stride D: `packed.layout`.

  1. Owner, once per session: s ternary. Its *key* p s + e modulo 2^64 for a public p, and for every
     stride d that is asked for and every limb l of a word the *switching key*
     a s + e - 2^(26 + 22 l) s(X^(1 + 2N/d)) modulo 2^90, with public a of its own.
  2. Owner, per group of units: for every b the ciphertext b_b = a_b s + e + 2^(64 - g) Y_b modulo
     2^128, with public a_b of its own. 2^g pairs become one in step 4.
  3. Evaluator: for every r of every unit c0 = sum_b a_b X_rb and c1 = sum_b b_b X_rb, over 2^64 and
     rounded; divided by the unit's power of X.
  4. Evaluator: 2^g such pairs become one (Chen, Dai, Kim and Song, ACNS'21, section 3.2), two by
     two: of A and B, whose coefficients at multiples of d are wanted (d = D at first),
         A + X^(d/2) B  +  (A - X^(d/2) B)(X^(1 + 2N/d))
     has twice those of A at multiples of d, twice those of B half-way between them, and nothing
     else at multiples of d/2. The second summand is one under s(X^(1 + 2N/d)); the switching key
     of d brings it under s.
  5. Evaluator: adds p s' + e' to c0 and (p s + e) s' to c1, for ternary s' and noise e', both
     fresh. It sends c0. Its share is c1.
  6. Owner: -c0 s is its share.

Error. Step 4 multiplies by 2^g, which is why the message stands at 2^(64 - g). In units of a
share's last place the standard deviation of the error of one direction is, for g = 6 and 256 words
of X in sum_b X_rb,

    e X_rb            2^62.2 * 3.24 * 2^4, over 2^64, times 2^g                  2^9.9
    rounding of c0    2^-1.8 * (2 N / 3)^(1/2), times 2^g (4/3)^(1/2)            2^10.6
    switching         2^20.2 * 3.24 * (2 N)^(1/2) / 2^26, times 2^g / 3^(1/2)    2^8.1
    e s' and e' s     3.24 * (4 N / 3)^(1/2)                                     2^8.4

or 2^10.9 in all, 2^11.4 when both parties encrypt. A product of fixed-point words, of which 18 bits
are truncated, is off by 2^-6.6 of its last place. Of 128 units at once, where g = 7, it is 2^12.2
for sums of 768 squares (encrypted by one party) and for scaled rows (by both).

What each party learns. The evaluator sees RLWE samples under s: ciphertexts, the key, and switching
keys. The owner sees c0 under an RLWE sample of the evaluator's, a fresh s' each. If RLWE with
ternary secrets is hard (`packed.ring` has the parameters), all of this is uniform to who sees it;
c0 is so whatever the owner has sent. Either share follows from what its party saw and drew, and the
other one is the product less it, with the error above: as if a dealer had let a party that looks
choose its share. So whatever hides a result hides it by the other party's share, which a party
knows as little of as of the other one's mask.

Conditions, each with a test (tests/offline/test_packed_conditions.py):
  - p and every a come from strings that neither party chooses, one of its own for everything that
    is encrypted: two ciphertexts under one a differ by what they hold, and p = 0 would show c0.
  - s' is fresh for every answer.
  - Nobody opens a product before its last bits are truncated, 18 of them, nor too many: its error
    depends on e, s and X, and who knows the product from elsewhere finds s from some 2^28 that are
    opened where g = 6, or 2^26 where g = 7.

Gaps, stated:
  - Circular: switching keys encrypt s(X^d) under s, as in all libraries of homomorphic encryption.
    Results depend on e and s by their error, so later messages, whose masks are encrypted under s,
    depend on it. No attack is known.
  - s lives as long as the session: a copy of a running owner's memory opens, with what its peer
    has, the masks of all units that the session made, used ones too.
  - Semi-honest parties. An evaluator that sends another c0 puts a function of s into the owner's
    share. An owner that encrypts anything else gets a wrong product; one that sends another key
    gets a function of s', hence X, into it. Either sees only what is opened to it in the end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spu_llm.core.channel import CountingChannel, recv_exactly
from spu_llm.core.correlation import Correlation
from spu_llm.core.errors import WireError
from spu_llm.core.parallel import for_each
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, ROLES
from spu_llm.offline import rlwe, versions
from spu_llm.offline.packed import evaluation, ring
from spu_llm.offline.packed.layout import Layout, columns_apart
from spu_llm.offline.packed.ring import KEY_BITS, KEY_DROP, LIMB, N

VERSION = versions.PACKED
_WORD_LIMBS = ring.limbs_of(64)
_WORKED = 4  # polynomials encrypted together: they fit the cache


def owners(correlation: Correlation) -> list[int]:
    """Return the parties that encrypt: a party with words of Y while its peer has some of X."""
    x, y = correlation.masks
    return [r for r in (CLIENT, PROVIDER) if y.is_held_by(r) and x.is_held_by(1 - r)]


class PackedProducts:
    """This party's half, for one session. Both parties make the same units at the same time."""

    def __init__(
        self, rank: int, own: Prg, common: bytes, channel: CountingChannel, jobs: int = 1
    ) -> None:
        """Take `own`, this party's secret stream, fresh; `common`, fresh, too, and equal at both
        parties; `jobs`, cores.
        """
        self._jobs = jobs
        self.rank, self._own, self._channel = rank, own, channel
        self._common = common.hex()
        self._made = 0  # ciphertexts so far, each party's
        self._busy = False
        self._secret: np.ndarray | None = None  # s
        self._small = np.empty(0)  # its transform
        # Of the peer: words [2, N] of p and the key; by stride what `merged` takes of the switching
        # keys.
        self._key: np.ndarray | None = None
        self._switching: dict[int, Any] = {}
        self._sent: set[int] = set()  # strides of own switching keys

    def make(self, correlation: Correlation, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return this party's shares of the products of a chunk; called at both parties at the same
        time. WireError when the peer's messages have other sizes, and after an attempt that failed.
        """
        assert correlation.matrices is not None
        if self._busy:
            raise WireError("packed products have failed before; start another session")
        self._busy = True
        encrypt = owners(correlation)
        x, y = correlation.matrices(*masks)
        if all(part.is_held_by(self.rank) for part in correlation.masks):
            product = x @ y
        else:  # one of them is zero here
            product = np.zeros((len(x), x.shape[1], y.shape[2]), np.uint64)
        parts = []
        for columns, layout in columns_apart(len(x), x.shape[1], x.shape[2], y.shape[2]):
            parts.append((columns, layout, self._made))
            self._made += layout.groups * layout.blocks
        # 1. and 2.
        if self.rank in encrypt:
            for columns, layout, first in parts:
                self._send_keys(layout.switches)
                self._channel.send(self._encrypted(layout, y[..., columns], first).tobytes())
        # 3. to 5.
        if 1 - self.rank in encrypt:
            for columns, layout, first in parts:
                self._receive_keys(layout.switches)
                theirs = self._received((layout.groups, layout.blocks, 2, N))
                c0, share = self._answer(layout, x, theirs, first)
                self._channel.send(c0.tobytes())
                product[..., columns] += layout.decoded(share)
        # 6.
        if self.rank in encrypt:
            for columns, layout, _ in parts:
                c0 = self._received((layout.answers, N))
                share = np.uint64(0) - ring.word_times_small(c0, self._small)[:, :: layout.apart]
                product[..., columns] += layout.decoded(share)
        self._busy = False
        return [product]

    # ---- the owner

    def _send_keys(self, strides: Sequence[int]) -> None:
        """Send the key and the switching keys of `strides`, as far as they are not sent (step
        1).
        """
        if self._secret is None:
            self._secret = rlwe.ternary(self._own, 1, N)[0]
            self._small = rlwe.transform(self._secret)
            key = ring.word_times_small(self._key_base(self.rank), self._small)
            key += rlwe.noise(self._own, (N,)).view(np.uint64)
            self._channel.send(key.tobytes())
        words = self._secret.astype(np.int64).view(np.uint64)
        for d in strides:
            if d in self._sent:
                continue
            self._sent.add(d)
            noise = rlwe.noise(self._own, (_WORD_LIMBS, N))
            keys = ring.times_small(self._switching_base(self.rank, d), self._small, noise)
            turned = np.uint64(0) - ring.mapped(words, 1 + 2 * N // d)
            for limb in range(_WORD_LIMBS):
                keys[limb] = ring.plus_at(keys[limb], turned, KEY_DROP + LIMB * limb)
            self._channel.send(_key_bytes(keys))

    def _encrypted(self, layout: Layout, y: np.ndarray, first: int) -> np.ndarray:
        """Return the ciphertexts b_b of y (step 2): words [groups, blocks, 2, N], numbered from
        `first`.
        """
        messages = layout.encoded_right(y)
        flat = messages.reshape(-1, N)
        ciphertexts = np.empty((len(flat), 2, N), np.uint64)
        at = 64 - len(layout.switches)

        def encrypt(drawn: tuple[slice, np.ndarray]) -> None:
            rows, noise = drawn
            a = self._public("a", self.rank, first + rows.start, len(noise))
            ciphertexts[rows] = ring.plus_at(
                ring.times_small(a, self._small, noise), flat[rows], at
            )

        rows_and_noise = (
            (rows, rlwe.noise(self._own, flat[rows].shape)) for rows in _slices(len(flat))
        )
        for_each(self._jobs, encrypt, rows_and_noise)
        return ciphertexts.reshape(*messages.shape[:2], 2, N)

    # ---- the evaluator

    def _receive_keys(self, strides: Sequence[int]) -> None:
        peer = 1 - self.rank
        if self._key is None:
            self._key = np.stack([self._key_base(peer), self._received((N,))])
        for d in strides:
            if d not in self._switching:
                theirs = _from_key_bytes(recv_exactly(self._channel, 12 * _WORD_LIMBS * N))
                pair = np.stack([self._switching_base(peer, d), theirs])
                self._switching[d] = evaluation.switching_factor(pair)

    def _answer(
        self, layout: Layout, x: np.ndarray, theirs: np.ndarray, first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return c0 [answers, N] and this party's share [answers, N packed / D] (steps 3 to 5)."""
        pairs: list[Any] = [None] * (layout.answers * layout.packed)
        for group in range(layout.groups):
            a = self._public("a", 1 - self.rank, first + group * layout.blocks, layout.blocks)
            right = np.stack([a, theirs[group]])
            factor = (
                evaluation.words(right[:, 0]) if layout.is_scalar else evaluation.wide_factor(right)
            )

            def multiply(at: tuple[int, int], factor: Any = factor) -> None:
                (unit, pair), shift = at, layout.shift(at[0])
                pairs[unit * layout.pairs + pair] = (
                    evaluation.scaled(factor, x[unit, 0, 0], shift)
                    if layout.is_scalar
                    else evaluation.multiplied(
                        layout.encoded_left(x[unit], pair), factor, layout.blocks_at_once, shift
                    )
                )

            units = layout.units_of(group)
            for_each(self._jobs, multiply, itertools.product(units, range(layout.pairs)))
        c = np.stack(self._pack(pairs, layout), axis=1)
        # 5.
        assert self._key is not None
        secret = rlwe.transform(rlwe.ternary(self._own, layout.answers, N))
        c0, c1 = c + ring.word_times_small(self._key[:, None], secret[:, None])
        c0 += rlwe.noise(self._own, c0.shape).view(np.uint64)
        return c0, c1[:, :: layout.apart]

    def _pack(self, pairs: list[Any], layout: Layout) -> list[Any]:
        """Pack pairs, words [2, N] or None for zero, into one for each answer (step 4)."""
        by_answer = [pairs[i : i + layout.packed] for i in range(0, len(pairs), layout.packed)]
        for d in layout.switches:
            keys, half = self._switching[d], len(by_answer[0]) // 2
            packed: list[list[Any]] = [[None] * half for _ in by_answer]

            def merge(
                at: tuple[int, int],
                before: list[list[Any]] = by_answer,
                after: list[list[Any]] = packed,
                keys: Any = keys,
                d: int = d,
            ) -> None:
                answer, i = at
                first, second = before[answer][i], before[answer][i + len(after[answer])]
                if first is not None:
                    after[answer][i] = evaluation.merged(first, second, keys, d)

            for_each(self._jobs, merge, itertools.product(range(len(packed)), range(half)))
            by_answer = packed
        return [one for (one,) in by_answer]

    # ---- what both know

    def _public(self, what: str, rank: int, start: int, count: int) -> np.ndarray:
        """Return public wide polynomials [count, 2, N] number start..: p, or an a, of party
        `rank`.
        """
        label = f"{VERSION}: {what}, {self._common}, {ROLES[rank]},"
        return rlwe.public(label, start, count, 2 * N).reshape(count, 2, N)

    def _key_base(self, rank: int) -> np.ndarray:
        """Return p of the key of `rank`: words [N]."""
        return self._public("p", rank, 0, 1)[0, 0]

    def _switching_base(self, rank: int, d: int) -> np.ndarray:
        """Return the a of switching keys of one stride: [word limbs, 2, N]."""
        return self._public(f"switching {d}", rank, 0, _WORD_LIMBS)

    def _received(self, shape: tuple[int, ...]) -> np.ndarray:
        data = recv_exactly(self._channel, 8 * math.prod(shape))
        return np.frombuffer(data, np.uint64).reshape(shape)


def _slices(count: int) -> Iterator[slice]:
    """Return slices of rows that are worked on together."""
    return (slice(i, i + _WORKED) for i in range(0, count, _WORKED))


def _key_bytes(keys: np.ndarray) -> bytes:
    """Return the bytes of words [word limbs, 2, N], modulo 2^90: twelve a coefficient."""
    high = keys[:, 1] & np.uint64((1 << KEY_BITS - 64) - 1)
    return keys[:, 0].tobytes() + high.astype(np.uint32).tobytes()


def _from_key_bytes(data: bytes) -> np.ndarray:
    count = _WORD_LIMBS * N
    low = np.frombuffer(data, np.uint64, count)
    high = np.frombuffer(data, np.uint32, count, offset=8 * count).astype(np.uint64)
    return np.stack([low.reshape(-1, N), high.reshape(-1, N)], axis=1)
