"""Products in slots: each party's random elements of F_p times the other's, 8192 to a ciphertext.

Both parties get uniform elements of their own and shares modulo p of the products, exactly. The
*owner* encrypts, the *evaluator* multiplies; each party owns one half of what is asked for.
Polynomials, primes, Delta = q_1 q_2 q_3 and slots: `slots.ring`.

  1. Owner, once per session: s ternary. Its *key* k = a_0 s + e modulo p Delta, for a public a_0.
  2. Owner, per 8192 elements u: the ciphertext b = a s + e + Delta u, with a public a of its own
     and fresh noise e. It is zero modulo p, which says what u is: -(a s + e) / Delta, slot by slot.
     It sends b modulo Delta.
  3. Evaluator: 8192 uniform elements v, as slots of a polynomial V with coefficients below p / 2;
     c_0 = a V + a_0 s' + e_0 and c_1 = b V + k s' + e_1 + f, for ternary s', noise e_0 and e_1, and
     a *flood* f, uniform from 0 to 2^117, all fresh. For u_0 v_1 + u_1 v_0 it adds up the products
     of two ciphertexts.
  4. Evaluator: it sends c_0 / Delta, rounded to 15 bits after the point, and of c_1 / Delta the one
     bit after the point, rounded. Its share is the whole part of that, slot by slot.
  5. Owner: c_1 / Delta - s c_0 / Delta is u V but for less than a half, so the nearest integer to
     the bit less the fraction of c_0 times s, and less the mean of f, says what the two whole parts
     lack. Its share is that less s times the whole part of c_0, slot by slot.

Exact. In units of Delta, what is rounded in step 5 is off by 1/4 for the bit, 1/16 for the flood
around its mean, 2^-63 for the noise, and by a deviation of 2^-10.5 for the rounding of c_0, which s
multiplies: a half is 300 deviations away (tests/offline/test_slots_products.py measures it).

What each party learns. The evaluator sees RLWE samples under s: the key and the ciphertexts, of u
that the samples themselves make uniform. The owner sees c_0, which a_0 s' + e_0 makes an RLWE
sample under a fresh s', and a bit of c_1 for each coefficient. c_1 is s c_0 + Delta u V + f and
noise of a deviation of 2^55: the bit says of V and the noise what the flood leaves. By 2^-62 a
coefficient the noise moves the distribution of its sum with the flood, so the owner's view of an
answer of 8192 is within 2^-49 of one that depends on nothing but c_0 and s. Both shares follow
from that, and the elements of the other party stay uniform, if RLWE with ternary secrets is hard.

Conditions, each with a test (tests/offline/test_slots_conditions.py):
  - Every a comes from a string that neither party chooses, and serves for one encryption. Two
    ciphertexts under one a differ by Delta (u - u'); a_0 = 0 would show c_0, hence V.
  - s', e_0, e_1, f and v are fresh for every answer, and v is uniform: drawn by rejection.
  - No more of c_1 is sent than that bit: all of its fraction would show the noise, hence V.

Gaps, stated:
  - s lives as long as the session: a copy of a running owner's memory opens, with what its peer
    has, the elements of all units that the session made, used ones too.
  - What an answer may show adds up over a session: 2^-36 after 2^13 answers.
  - Semi-honest parties. An owner that adds a constant to its ciphertexts, of the size of Delta over
    p, gets a noisy bit of each coefficient of V into the bits of c_1, while all products are right:
    no element follows from that which we know of, but a guess of all 8192 is confirmed. One that
    sends another key reads s', hence V, from c_0 and the bits. An evaluator that sends another c_0
    puts a function of s into the owner's share.
"""

from __future__ import annotations

import numpy as np

from spu_llm.core import field
from spu_llm.core.channel import CountingChannel, recv_exactly
from spu_llm.core.errors import WireError
from spu_llm.core.field import P
from spu_llm.core.prg import Prg
from spu_llm.core.values import PROVIDER, ROLES, from_bytes, to_bytes
from spu_llm.offline import rlwe, versions
from spu_llm.offline.slots import ring
from spu_llm.offline.slots.ring import DELTA, MODULI, MODULUS_BITS, N

VERSION = versions.SLOTS
_FRACTION_BITS = 15  # of c_0 over Delta
_FLOOD_PARTS, _FLOOD_PART_BITS = 3, 39  # 2^39 is below all primes
_FLOOD_MEAN = 2.0 ** (_FLOOD_PARTS * _FLOOD_PART_BITS - 1) / DELTA

_ELEMENT_BYTES = field.BITS // 8
_RESIDUE_BYTES = MODULUS_BITS // 8
CIPHERTEXT_BYTES = len(MODULI) * _RESIDUE_BYTES * N
KEY_BYTES = CIPHERTEXT_BYTES + _ELEMENT_BYTES * N
ANSWER_BYTES = (_ELEMENT_BYTES + 2) * N


class SlotProducts:
    """This party's half, for one session (`spu_llm.core.slots.Slots`)."""

    def __init__(self, rank: int, own: Prg, common: bytes, channel: CountingChannel) -> None:
        """Take `own`, this party's secret stream, fresh; `common`, fresh, too, and equal at both
        parties.
        """
        self.rank, self._own, self._channel = rank, own, channel
        self._common = common.hex()
        self._made = [0, 0]  # ciphertexts of either party so far
        self._busy = False
        self._secret: np.ndarray | None = None  # the slots of s
        self._small = np.empty(0)  # its transform by floating point
        self._key: np.ndarray | None = None  # a_0 and the key of the peer

    def products(self, units: int) -> tuple[np.ndarray, np.ndarray]:
        """Return uniform elements u [units] of this party's, and its share of the products u_0 u_1.
        WireError when the peer's messages have other sizes or hold no residues.
        """
        own, share = self._make(units, 1)
        return own[0], share

    def crossed(self, units: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return uniform elements a, b [units] of this party's, and its share of a_0 b_1 + a_1 b_0.
        WireError as `products`.
        """
        own, share = self._make(units, 2)
        return own[0], own[1], share

    def _make(self, units: int, factors: int) -> tuple[np.ndarray, np.ndarray]:
        """Return elements [factors, units] and shares [units]; the client owns the first half."""
        if self._busy:
            raise WireError("products in slots have failed before; start another session")
        self._busy = True
        halves = [units - units // 2, units // 2]
        counts = [-(-half // N) for half in halves]  # of answers, by owner
        first = list(self._made)
        self._made = [made + factors * count for made, count in zip(first, counts, strict=True)]
        shape = (counts[self.rank], factors)
        # 1. and 2.
        self._send_key()
        public = self._public("a", self.rank, first[self.rank], shape)
        own, ciphertexts = self._encrypted(public)
        self._send(ciphertexts)
        # 3. and 4.
        self._receive_key()
        peer = 1 - self.rank
        theirs = self._received_ciphertexts((counts[peer], factors))
        public = self._public("a", peer, first[peer], (counts[peer], factors))
        v, evaluated, answers = self._evaluated(public, theirs)
        self._send(answers)
        # 5.
        owned = self._shares(self._received_answers(counts[self.rank]))
        # The factor that meets one's own first is the peer's last.
        pairs = [(own, owned), (v[:, ::-1], evaluated)]
        if self.rank == PROVIDER:
            pairs.reverse()
        elements = [
            x.swapaxes(0, 1).reshape(factors, -1)[:, :half]
            for (x, _), half in zip(pairs, halves, strict=True)
        ]
        shares = [y.reshape(-1)[:half] for (_, y), half in zip(pairs, halves, strict=True)]
        self._busy = False
        return np.concatenate(elements, axis=1), np.concatenate(shares)

    # ---- the owner

    def _send_key(self) -> None:
        if self._secret is not None:
            return
        small = rlwe.ternary(self._own, 1, N)[0]
        self._small = rlwe.transform(small)
        self._secret = ring.slots(ring.residues(small.astype(np.int64)))
        base = self._public("key", self.rank, 0, ())
        key = ring.plus_product(self._noise(), base, self._secret)
        self._channel.send(
            to_bytes(key[0], field.BITS).tobytes() + to_bytes(key[1:], MODULUS_BITS).tobytes()
        )

    def _encrypted(self, public: np.ndarray) -> tuple[np.ndarray, bytes]:
        """Return own elements [answers, factors, N] and ciphertexts as they are sent (step 2)."""
        assert self._secret is not None
        hidden = np.empty_like(public)
        for at in np.ndindex(public.shape[:2]):
            hidden[at] = ring.plus_product(self._noise(), public[at], self._secret)
        elements = field.multiplied(hidden[:, :, 0], np.array(pow(-DELTA, -1, P), np.uint64))
        return elements, to_bytes(hidden[:, :, 1:], MODULUS_BITS).tobytes()

    def _shares(self, answers: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Return this party's shares [answers, N] of what the peer evaluated (step 5)."""
        assert self._secret is not None
        whole, parts = answers
        shares = np.empty_like(whole)
        for i in range(len(whole)):
            fraction = rlwe.transform((parts[i] >> 1) * 2.0**-_FRACTION_BITS)
            rest = (parts[i] & 1) / 2.0 - rlwe.inverse(fraction * self._small) - _FLOOD_MEAN
            lacking = field.of_integers(_nearest(rest))
            taken = field.multiplied(ring.slots_modulo(P, whole[i]), self._secret[0])
            shares[i] = field.subtracted(ring.slots_modulo(P, lacking), taken)
        return shares

    # ---- the evaluator

    def _evaluated(
        self, public: np.ndarray, ciphertexts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, bytes]:
        """Return own elements v [answers, factors, N], shares [answers, N] of the sums of products
        over the factors, and what is sent of them (steps 3 and 4).
        """
        assert self._key is not None
        v = field.uniform(self._own, (*public.shape[:2], N))
        shares = np.empty((len(v), N), np.uint64)
        wholes, parts = np.empty_like(shares), np.empty(shares.shape, "<u2")
        for i in range(len(v)):
            large = [ring.lifted(one) for one in v[i]]
            secret = ring.slots(ring.residues(rlwe.ternary(self._own, 1, N)[0].astype(np.int64)))
            c = []
            for base, factors in zip(self._key, (public[i], ciphertexts[i]), strict=True):
                total = ring.plus_product(np.zeros_like(base), base, secret)
                for factor, one in zip(factors, large, strict=True):
                    total = ring.plus_product(total, factor, one)
                c.append(ring.plus(ring.polynomials(total), self._noise_polynomial()))
            flood = self._own.words((_FLOOD_PARTS, N)) >> np.uint64(64 - _FLOOD_PART_BITS)
            flooded = ring.plus(c[1], ring.wide_residues(flood, _FLOOD_PART_BITS))
            wholes[i], fraction = ring.over_delta(c[0], _FRACTION_BITS)
            share, bit = ring.over_delta(flooded, 1)
            shares[i], parts[i] = ring.slots_modulo(P, share), fraction << 1 | bit
        return v, shares, to_bytes(wholes, field.BITS).tobytes() + parts.tobytes()

    # ---- messages

    def _send(self, data: bytes) -> None:
        if data:
            self._channel.send(data)

    def _received(self, size: int) -> np.ndarray:
        """Return so many bytes; WireError when the message has another size."""
        data = recv_exactly(self._channel, size) if size else b""
        return np.frombuffer(data, np.uint8)

    def _receive_key(self) -> None:
        if self._key is not None:
            return
        data = self._received(KEY_BYTES)
        at = _ELEMENT_BYTES * N
        residues = from_bytes(data[at:], MODULUS_BITS).reshape(len(MODULI), N)
        key = np.concatenate([from_bytes(data[:at], field.BITS)[None], residues])
        self._check(key)
        self._key = np.stack([self._public("key", 1 - self.rank, 0, ()), key])

    def _received_ciphertexts(self, shape: tuple[int, int]) -> np.ndarray:
        """Return ciphertexts: residues [answers, factors, 4, N]."""
        data = self._received(CIPHERTEXT_BYTES * shape[0] * shape[1])
        theirs = from_bytes(data, MODULUS_BITS)
        ciphertexts = np.zeros((*shape, len(ring.PRIMES), N), np.uint64)
        ciphertexts[:, :, 1:] = theirs.reshape(*shape, len(MODULI), N)
        self._check(ciphertexts)
        return ciphertexts

    def _received_answers(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole parts [count, N] of c_0, and the other parts as they were sent."""
        data = self._received(ANSWER_BYTES * count)
        at = _ELEMENT_BYTES * N * count
        whole = from_bytes(data[:at], field.BITS).reshape(count, N)
        if (whole >= np.uint64(P)).any():
            raise WireError("expected elements of the field, received larger words; session ends")
        return whole, np.frombuffer(data[at:].tobytes(), "<u2").reshape(count, N).astype(np.int64)

    def _check(self, residues: np.ndarray) -> None:
        if (residues >= np.array(ring.PRIMES, np.uint64)[:, None]).any():
            raise WireError("expected residues, received larger words; session ends")

    # ---- randomness

    def _noise_polynomial(self) -> np.ndarray:
        return ring.residues(rlwe.noise(self._own, (N,)))

    def _noise(self) -> np.ndarray:
        """Draw the slots of noise: residues [4, N]."""
        return ring.slots(self._noise_polynomial())

    def _public(self, what: str, rank: int, start: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return slots number start.. that nobody chose, a_0 or an a of party `rank`: residues
        [*shape, 4, N] (`rlwe.public_stream`).
        """
        count = int(np.prod(shape))
        made = np.empty((count, len(ring.PRIMES), N), np.uint64)
        for i in range(count):
            label = f"{VERSION}: {what}, {self._common}, {ROLES[rank]},"
            stream = rlwe.public_stream(label, start + i)
            for j, prime in enumerate(ring.PRIMES):
                made[i, j] = field.uniform(stream, (N,), prime)
        return made.reshape(*shape, len(ring.PRIMES), N)


def _nearest(x: np.ndarray) -> np.ndarray:
    return np.rint(x).astype(np.int64)
