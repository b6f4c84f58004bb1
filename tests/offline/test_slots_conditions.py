"""Conditions that products in slots rest on (`spu_llm.offline.slots.products`), each with a twin
that breaks it and is noticed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from spu_llm.core import field
from spu_llm.core.field import P
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, from_bytes
from spu_llm.offline import rlwe
from spu_llm.offline.slots import products, ring
from spu_llm.offline.slots.products import SlotProducts
from spu_llm.offline.slots.ring import DELTA, MODULI, PRIMES, N
from tests.offline.silent_pair import forbid_numpys_randomness, looks_uniform
from tests.offline.slots_pair import CIPHERTEXT, SlotsTwo

NOISE = 21  # the largest


class Answers:
    """Answers of the client: its elements v, the ciphertexts' public a, c_0 and c_1. The provider
    owns, and evaluates nothing.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: int = 1) -> None:
        self.two = SlotsTwo()
        client, provider = self.two.products
        self.v: list[np.ndarray] = []
        self.public: list[np.ndarray] = []
        self.c: list[tuple[np.ndarray, np.ndarray]] = []
        evaluated, over_delta = client._evaluated, ring.over_delta

        def kept(public: np.ndarray, ciphertexts: np.ndarray) -> Any:
            divided: list[np.ndarray] = []

            def spy(x: np.ndarray, bits: int) -> Any:
                divided.append(x)
                return over_delta(x, bits)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ring, "over_delta", spy)
                made = evaluated(public, ciphertexts)
            self.c += list(zip(divided[::2], divided[1::2], strict=True))
            self.v += [one[0] for one in made[0]]
            self.public += [one[0] for one in public]
            return made

        monkeypatch.setattr(client, "_evaluated", kept)
        monkeypatch.setattr(provider, "_evaluated", lambda public, theirs: _nothing(public))
        for _ in range(calls):
            self.two.call(lambda party: party.products(4 * N))

    def wholes(self) -> list[np.ndarray]:
        """Return the whole parts of c_0 that were sent."""
        sent = []
        for data in self.two.wires[CLIENT].sent[2::2]:
            raw = np.frombuffer(data, np.uint8)
            count = len(raw) // (8 * N)
            sent += list(from_bytes(raw[: 6 * N * count], field.BITS).reshape(count, N))
        return sent

    def plain(self, i: int) -> np.ndarray:
        """Return what c_0 would be of answer i without s' and noise: V a over Delta."""
        large = ring.lifted(self.v[i])
        product = ring.plus_product(np.zeros_like(large), self.public[i], large)
        return ring.over_delta(ring.polynomials(product), 15)[0]


def _nothing(public: np.ndarray) -> Any:
    """Stand in for an evaluator whose answers do not matter."""
    v = np.zeros((*public.shape[:2], N), np.uint64)
    return v, v[:, 0], bytes(products.ANSWER_BYTES * len(v))


def near(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether elements differ by one at most."""
    return bool((field.added(field.subtracted(x, y), np.full_like(x, 1)) <= 2).all())


# ---- a


def test_every_ciphertext_has_its_own_a() -> None:
    """Else the difference of two is noise modulo Delta, and tells that of their elements."""

    def small(set_back: bool) -> bool:
        two = SlotsTwo()
        for _ in range(2):
            two.call(lambda p: p.products(2 * N))
            if set_back:
                for party in two.products:
                    party._made = [0, 0]
        one, other = two.ciphertext(CIPHERTEXT), two.ciphertext(CIPHERTEXT + 2)
        q = np.array(MODULI, np.uint64)[:, None]
        rest = ring.polynomial_modulo(MODULI[0], ((one + (q - other)) % q)[0]).view(np.int64)
        return bool((np.minimum(rest, MODULI[0] - rest) <= 2 * NOISE).all())

    assert not small(set_back=False) and small(set_back=True)


def test_every_public_string_is_for_one_encryption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys, ciphertexts, parties and sessions."""
    asked: Counter[bytes] = Counter()
    make = Prg.__init__

    def counted(self: Prg, key: bytes) -> None:
        asked[key] += 1
        make(self, key)

    for session in (b"one", b"two"):
        two = SlotsTwo(common=session)
        with monkeypatch.context() as patch:
            patch.setattr(Prg, "__init__", counted)
            for _ in range(2):
                two.call(lambda p: p.crossed(2 * N))
                two.call(lambda p: p.products(4 * N))
    # The owner encrypts with each once, the evaluator multiplies with it once: of two sessions and
    # parties the key, and twice two and two ciphertexts.
    assert set(asked.values()) == {2} and len(asked) == 2 * 2 * (1 + 2 * 4)


def test_public_strings_are_nobodys_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """They look uniform; a base of zeros for the key would show what c_0 is made of."""
    drawn = SlotsTwo().products[CLIENT]._public("key", PROVIDER, 0, ())
    for residues, q in zip(drawn, PRIMES, strict=True):
        assert abs(residues.mean() / q - 0.5) < 0.02
    assert not near(Answers(monkeypatch).wholes()[0], Answers(monkeypatch).plain(0))
    public = SlotProducts._public

    def zero(self: SlotProducts, what: str, *of: Any) -> np.ndarray:
        made = public(self, what, *of)
        return np.zeros_like(made) if what == "key" else made

    monkeypatch.setattr(SlotProducts, "_public", zero)
    actual = Answers(monkeypatch)
    assert near(actual.wholes()[0], actual.plain(0))


# ---- s'


def test_every_answer_has_its_own_small_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one call and of two; else the owner has the difference of two answers without s'."""

    def alike(actual: Answers) -> list[bool]:
        sent = actual.wholes()
        return [
            near(
                field.added(field.subtracted(sent[i], sent[j]), actual.plain(j)),
                field.added(actual.plain(i), np.zeros(N, np.uint64)),
            )
            for i, j in ((0, 1), (0, 2), (1, 3))
        ]

    assert alike(Answers(monkeypatch, calls=2)) == [False, False, False]
    ternary = rlwe.ternary
    kept: dict[int, np.ndarray] = {}

    def same(prg: Prg, count: int, n: int) -> np.ndarray:
        return kept.setdefault(id(prg), ternary(prg, count, n)).copy()

    monkeypatch.setattr(rlwe, "ternary", same)
    assert alike(Answers(monkeypatch, calls=2)) == [True, True, True]


# ---- c_1


def floods(actual: Answers) -> list[float]:
    """Return what c_1 is off s c_0 + Delta u V, over 2^117, for some coefficients."""
    owner = actual.two.products[PROVIDER]
    minus_s = np.array(PRIMES, np.uint64)[:, None] - owner._secret
    collected = []
    for c_0, c_1 in actual.c:
        rest = ring.plus(
            c_1, ring.polynomials(ring.plus_product(0 * c_0, ring.slots(c_0), minus_s))
        )
        for i in range(0, N, 8):
            below = _integer([int(r) for r in rest[1:, i]])
            collected.append(below / 2.0**117)
    return collected


def _integer(residues: list[int]) -> int:
    """Return the integer between -Delta / 2 and Delta / 2 with these residues modulo Delta."""
    total = sum(
        r * (DELTA // q) * pow(DELTA // q, -1, q) for r, q in zip(residues, MODULI, strict=True)
    )
    return (total + DELTA // 2) % DELTA - DELTA // 2


def test_a_flood_covers_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modulo Delta, c_1 - s c_0 is the flood and noise, which has a deviation of 2^-62 of it;
    without the flood, the noise stands open, and with it V. False alarms: 1,024 floods' mean has
    a deviation of 0.009, so fewer than one run in ten million.
    """
    covered = np.array(floods(Answers(monkeypatch)))
    assert covered.min() > -1e-9 and covered.max() < 1 + 1e-9
    assert abs(covered.mean() - 0.5) < 0.05 and abs(covered.std() - 12**-0.5) < 0.03
    monkeypatch.setattr(ring, "wide_residues", lambda parts, bits: np.zeros((4, N), np.uint64))
    open_noise = np.array(floods(Answers(monkeypatch)))
    assert 0 < np.abs(open_noise).max() < 2.0**-58 and open_noise.std() < 2.0**-61.5


def test_a_bit_of_c_1_is_sent_and_its_whole_part_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that had it, too, would have the product, hence v."""
    actual = Answers(monkeypatch)
    sent = actual.wholes()
    for c_0, c_1 in actual.c:
        whole, bit = ring.over_delta(c_1, 1)
        assert any((ring.over_delta(c_0, 15)[0] == one).all() for one in sent)
        assert not any((whole == one).all() for one in sent)
        assert set(np.unique(bit)) == {0, 1}


# ---- what deviating reaches


def residuals(monkeypatch: pytest.MonkeyPatch, shift: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return what the bits of c_1 tell an owner whose noise is `shift` larger, the coefficients of
    V over p, and whether all products are right.
    """
    rests: list[np.ndarray] = []
    nearest = products._nearest
    added = np.array([shift % q for q in PRIMES], np.uint64)[:, None]
    moduli = np.array(PRIMES, np.uint64)[:, None]

    def spied(x: np.ndarray) -> np.ndarray:
        rests.append(x - np.rint(x))
        return nearest(x)

    with monkeypatch.context() as patch:
        actual = Answers(patch, calls=0)
        client, provider = actual.two.products
        encrypted, noise = provider._encrypted, provider._noise

        def shifted(public: np.ndarray) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(provider, "_noise", lambda: (noise() + added) % moduli)
                return encrypted(public)

        patch.setattr(client, "_shares", lambda answers: np.zeros_like(answers[0]))
        patch.setattr(products, "_nearest", spied)
        patch.setattr(provider, "_encrypted", shifted)
        (u, x), (v, y) = actual.two.call(lambda party: party.products(4 * N))
    # The client owns the first half, so what it evaluated is the second.
    right = field.added(x, y)[2 * N :] == field.multiplied(u, v)[2 * N :]
    coefficients = [ring.polynomials(ring.lifted(one))[0] for one in actual.v]
    signed = [np.where(one > P // 2, one - np.float64(P), one) / P for one in coefficients]
    return np.concatenate(rests), np.concatenate(signed), bool(right.all())


def test_a_shifted_ciphertext_tells_a_noisy_bit_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stated gap: an owner that deviates learns this much, by products that are all right."""
    told, coefficients, right = residuals(monkeypatch, DELTA // (4 * P))
    assert right and np.corrcoef(told, coefficients)[0, 1] > 0.35  # 0.43, with a deviation of 0.007
    told, coefficients, right = residuals(monkeypatch, 0)
    # 2 N pairs: six deviations, beyond which two runs in a billion are.
    assert right and abs(np.corrcoef(told, coefficients)[0, 1]) < 6 / len(told) ** 0.5


# ---- randomness


def test_elements_and_messages_look_uniform() -> None:
    """Of so many elements of 48 bits two are equal once in 500,000 times, more once in 10^11."""
    two = SlotsTwo()
    (u, x), (v, y) = two.call(lambda p: p.products(4 * N))
    for drawn in (u, v, x, y):
        assert drawn.max() < P and abs(drawn.mean() / P - 0.5) < 0.02
        assert len(np.unique(drawn)) >= len(drawn) - 1
    for wire in two.wires:
        for data in wire.sent:
            assert looks_uniform(np.frombuffer(data, np.uint8))


def test_nothing_on_the_wire_is_seen_twice() -> None:
    """In one session or two; it would be if both had the same streams."""

    def words(**of: Any) -> np.ndarray:
        two = SlotsTwo(**of)
        for _ in range(2):
            two.call(lambda p: p.products(2 * N))
        sent = two.all_sent()
        return np.frombuffer(sent[: len(sent) // 8 * 8], np.uint64)

    several = np.concatenate([words(), words(), words(common=b"other")])
    assert len(np.unique(several)) == len(several)
    assert (words(seed=1) == words(seed=1)).all()
    assert not np.isin(words(seed=1, common=b"other"), words(seed=1)).any()


def test_no_other_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is drawn comes from keyed streams; so it repeats when those do."""
    forbid_numpys_randomness(monkeypatch)
    runs = []
    for _ in range(2):
        two = SlotsTwo(seed=3)
        made = two.call(lambda p: p.crossed(2 * N))
        runs.append((two.all_sent(), [part.tobytes() for mine in made for part in mine]))
    assert runs[0] == runs[1]
