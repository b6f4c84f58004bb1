"""Polynomials of packed products: exact where they say so, else within half of the last place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spu_llm.core.prg import Prg
from spu_llm.offline import rlwe
from spu_llm.offline.packed import ring
from spu_llm.offline.packed.ring import KEY_BITS, KEY_LIMB, LIMB, N

SEEDS = st.integers(0, 10**6)
FEW = 64  # coefficients, where there is no transform
EDGES = np.array(
    [0, 1, 2**32 - 1, 2**32, 2**33 - 1, 2**63 - 1, 2**63, 2**64 - 2**32, 2**64 - 1], np.uint64
)
KINDS = ["uniform", "zero", "top bit", "largest", "alternating", "one word", "half of every digit"]


def words(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return a third of them at an edge."""
    prg = Prg.from_seed(seed, "words")
    drawn, which = prg.words(shape), prg.words(shape)
    edges = EDGES[(which >> np.uint64(2)) % np.uint64(len(EDGES))]
    return np.where(which % np.uint64(3) == 0, edges, drawn)


def polynomial(kind: str, seed: int, shape: tuple[int, ...] = (N,)) -> np.ndarray:
    drawn, place = Prg.from_seed(seed, "words").words(shape), np.arange(shape[-1])
    top = np.uint64(1 << 63)
    halves = sum(1 << at for at in range(21, 64, 22))
    extreme = {
        "uniform": drawn,
        "zero": np.zeros(shape, np.uint64),
        "top bit": np.full(shape, top),
        "largest": np.full(shape, np.uint64(2**64 - 1)),
        "alternating": np.broadcast_to(np.where(place % 2, top, top - np.uint64(1)), shape),
        "one word": np.where(place == seed % N, drawn, np.uint64(0)),
        "half of every digit": np.full(shape, np.uint64(halves)) - (drawn & np.uint64(1)),
    }
    return extreme[kind]


def whole_numbers(x: np.ndarray) -> np.ndarray:
    """Python's, of words [..., 2, N]."""
    return x[..., 0, :].astype(object) + (x[..., 1, :].astype(object) << 64)


def signed(x: np.ndarray) -> np.ndarray:
    return x.view(np.int64).astype(object)


def weighted(sums: np.ndarray, size: int, at: int = 0) -> np.ndarray:
    """Return sum of 2^(at + size i) sums_i: Python's integers."""
    return sum(sums[..., i, :].astype(object) << at + size * i for i in range(sums.shape[-2]))  # type: ignore[return-value]


def distance(actual: np.ndarray, exact: np.ndarray, dropped: int, bits: int) -> float:
    """Return the largest, of 2^dropped `found` from `exact` modulo 2^bits, in units of
    2^dropped.
    """
    half = 1 << bits - 1
    rest = ((actual.astype(object) << dropped) - exact + half) % (1 << bits) - half
    return max(abs(int(x)) for x in rest.reshape(-1)) / 2.0**dropped


# ---- limbs


@settings(max_examples=40)
@given(
    st.sampled_from([(LIMB, 64), (LIMB, 128), (KEY_LIMB, KEY_BITS)]), st.sampled_from(KINDS), SEEDS
)
def test_limbs_are_balanced_digits(of: tuple[int, int], kind: str, seed: int) -> None:
    size, bits = of
    x = polynomial(kind, seed, (N,) if bits == 64 else (2, N))
    digits = rlwe.whole(ring.limbs(x, size, bits))
    assert digits.shape == (-(-bits // size), N)
    assert digits.min() >= -(1 << size - 1) and digits.max() < 1 << size - 1
    exact = x.astype(object) if bits == 64 else whole_numbers(x)
    assert ((weighted(digits, size) - exact) % (1 << bits) == 0).all()


# ---- sums of limbs back to words


def sums_of(seed: int, count: int, bits: int) -> np.ndarray:
    drawn = words(seed, (count, FEW)).view(np.int64)
    return drawn >> np.int64(63 - bits)


@given(SEEDS, st.integers(0, 52))
def test_wide_is_exact(seed: int, bits: int) -> None:
    sums = sums_of(seed, 6, bits)
    exact = weighted(sums, LIMB)
    actual = ring.wide(sums)
    assert actual.shape == (2, FEW) and (whole_numbers(actual) == exact % (1 << 128)).all()


@given(SEEDS, SEEDS)
def test_upper_times_is_rounded(seed: int, other: int) -> None:
    x, word = words(seed, (2, FEW)), words(other, (1,))[0]
    exact = whole_numbers(x) * int(word)
    assert distance(ring.upper_times(x, word), exact, 64, 128) <= 0.5 + 2.0**-30


@given(st.integers(1, 127), SEEDS)
def test_plus_at(at: int, seed: int) -> None:
    x, message = words(seed, (2, FEW)), words(seed + 1, (FEW,))
    actual = ring.plus_at(x, message, at)
    exact = whole_numbers(x) + (signed(message) << at)
    assert (whole_numbers(actual) == exact % (1 << 128)).all()


def test_plus_at_of_several() -> None:
    x, message = words(1, (3, 2, 2, FEW)), words(2, (3, 2, FEW))
    actual = ring.plus_at(x, message, 58)
    for i in np.ndindex(3, 2):
        assert (actual[i] == ring.plus_at(x[i], message[i], 58)).all()


# ---- products with small polynomials


def small(kind: str, seed: int) -> np.ndarray:
    last = np.zeros(N)
    last[-1] = 1
    extreme = {"ones": np.ones(N), "minus ones": -np.ones(N), "zero": np.zeros(N), "last": last}
    return extreme.get(kind, rlwe.ternary(Prg.from_seed(seed, "ternary"), 1, N)[0])


SMALL = st.sampled_from(["ternary", "ones", "minus ones", "zero", "last"])


def coefficient(a: np.ndarray, s: np.ndarray, n: int) -> int:
    """Compute the coefficient of X^n in a s modulo X^N + 1, for Python's integers a."""
    turned = np.concatenate([s[n::-1], -s[:n:-1]]).astype(int).astype(object)
    return int((a * turned).sum())


@settings(max_examples=40)
@given(st.sampled_from(KINDS), SMALL, SEEDS)
def test_products_with_small_polynomials_are_exact(kind: str, small_kind: str, seed: int) -> None:
    a, s = polynomial(kind, seed, (2, N)), small(small_kind, seed)
    noise = rlwe.noise(Prg.from_seed(seed, "noise"), (N,))
    wide = whole_numbers(ring.times_small(a, rlwe.transform(s), noise))
    words_ = ring.word_times_small(a[0], rlwe.transform(s))
    for n in (0, N // 2, N - 1, seed % N):
        exact = coefficient(whole_numbers(a), s, n) + int(noise[n])
        assert wide[n] == exact % (1 << 128)
        assert int(words_[n]) == (exact - int(noise[n])) % (1 << 64)


def test_every_row_has_its_own_factor() -> None:
    a, s = words(1, (3, N)), rlwe.transform(rlwe.ternary(Prg.from_seed(1, "rows"), 3, N))
    actual = ring.word_times_small(a, s[:, None])
    for row in range(3):
        assert (actual[row] == ring.word_times_small(a[row], s[row])).all()
    pair = ring.word_times_small(a[:2, None], s[:, None])  # as `PackedProducts` multiplies its key
    assert pair.shape == (2, 3, N)
    assert (pair[1, 2] == ring.word_times_small(a[1], s[2])).all()


# ---- X -> X^k


def substituted(x: np.ndarray, k: int) -> np.ndarray:
    actual = np.zeros(N, object)
    for i, value in enumerate(x):
        quotient, place = divmod(i * k, N)
        actual[place] += -int(value) if quotient % 2 else int(value)
    return actual % (1 << 64)


ODD = st.integers(0, N - 1).map(lambda i: 2 * i + 1)


@settings(max_examples=15)
@given(ODD, ODD, SEEDS)
def test_mapped_is_a_substitution(k: int, j: int, seed: int) -> None:
    x = words(seed, (2, N))
    actual = ring.mapped(x, k)
    for row in range(2):
        assert (actual[row].astype(object) == substituted(x[row], k)).all()
    assert (ring.mapped(actual, j) == ring.mapped(x, k * j % (2 * N))).all()
    assert (ring.mapped(actual, pow(k, -1, 2 * N)) == x).all()
    # Of a product it is the product.
    s = small("ternary", seed)
    turned = ring.mapped(s.astype(np.int64).view(np.uint64), k).view(np.int64).astype(float)
    product = ring.mapped(ring.word_times_small(x[0], rlwe.transform(s)), k)
    assert (product == ring.word_times_small(actual[0], rlwe.transform(turned))).all()


@settings(max_examples=20)
@given(st.integers(0, N - 1) | st.sampled_from([0, 1, N - 1]), SEEDS)
def test_lowered_is_divided(k: int, seed: int) -> None:
    x, power = words(seed, (2, N)), np.zeros(N)
    power[k] = 1
    divided = ring.lowered(x, k)
    assert (ring.word_times_small(divided, rlwe.transform(power)) == x).all()
    assert (divided[:, : N - k] == x[:, k:]).all()


# ---- how far sums are from a wrong integer


class Distances:
    """Distances of what is rounded from the nearest integer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest = self.deviation = 0.0
        whole = rlwe.whole

        def spy(z: np.ndarray) -> np.ndarray:
            sums = rlwe.inverse(z.copy())
            off = np.abs(sums - np.rint(sums))
            self.largest = max(self.largest, float(off.max()))
            self.deviation = max(self.deviation, float(np.sqrt((off**2).mean())))
            return whole(z)

        monkeypatch.setattr(ring, "whole", spy)


def test_small_products_are_next_to_their_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    actual, s = Distances(monkeypatch), rlwe.transform(small("ternary", 6))
    ring.times_small(words(6, (16, 2, N)), s, np.int64(0))
    assert 0 < actual.largest < 2.0**-18
    ring.times_small(polynomial("half of every digit", 6, (2, N)), s, np.int64(0))
    ring.times_small(polynomial("top bit", 6, (2, N)), rlwe.transform(np.ones(N)), np.int64(0))
    assert actual.largest < 2.0**-12


def test_public_strings_are_those_of_their_labels() -> None:
    """The number is what follows the last space; silent and packed products have other labels."""
    actual = rlwe.public("some label", 3, 2, 4)
    assert (rlwe.public("some label", 0, 5, 4)[3:] == actual).all()
    assert (rlwe.public("some", 0, 1, 4) != actual[:1]).all()
    assert (rlwe.public("some label", 3, 1, 9)[0, :4] == actual[0]).all()
