"""Residues of products in slots: exact, and slots multiply as polynomials do."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import enable_x64

from spu_llm.core import field
from spu_llm.core.field import P
from spu_llm.core.prg import Prg
from spu_llm.offline.slots import ring
from spu_llm.offline.slots.ring import DELTA, MODULI, PRIMES, N

SEEDS = st.integers(0, 10**6)
FEW = (0, 1, N // 2, N - 1)


def drawn(seed: int, prime: int, count: int = N) -> np.ndarray:
    """Draw residues, a third of them at an edge."""
    prg = Prg.from_seed(seed, "residues")
    edges = np.array([0, 1, 2, prime // 2, prime // 2 + 1, prime - 2, prime - 1], np.uint64)
    which = prg.words((count,))
    edge = edges[(which >> np.uint64(2)) % np.uint64(len(edges))]
    return np.where(which % np.uint64(3) == 0, edge, field.uniform(prg, (count,), prime))


def coefficient(x: np.ndarray, y: np.ndarray, n: int) -> int:
    """Compute the coefficient of X^n in x y modulo X^N + 1, for Python's integers."""
    return int((x * np.concatenate([y[n::-1], -y[:n:-1]])).sum())


def of_integer(x: int) -> list[int]:
    return [x % q for q in PRIMES]


def test_primes_are_as_stated() -> None:
    for q in PRIMES:
        assert q % (2 * N) == 1
        assert all(pow(a, q - 1, q) == 1 for a in (2, 3, 5, 7, 11))
    assert len(set(PRIMES)) == 4 and list(MODULI) == sorted(MODULI, reverse=True)
    assert MODULI[0] - MODULI[2] < MODULI[2]
    assert DELTA.bit_length() == 120 and (DELTA * P).bit_length() == 168


@pytest.mark.parametrize("prime", PRIMES)
def test_products_of_residues_are_exact(prime: int) -> None:
    """Also of differences, which are negative."""
    x, y = (drawn(seed, prime, 1 << 16).view(np.int64) for seed in (1, 2))
    with enable_x64():
        m = ring._modulus(prime)
        for a in (x, -x, x - y):
            actual = np.asarray(ring._product(a, y, m))
            assert (actual == a.astype(object) * y.astype(object) % prime).all()


@settings(max_examples=8)
@given(st.sampled_from(PRIMES), SEEDS)
def test_slots_multiply_as_polynomials(prime: int, seed: int) -> None:
    x, y = drawn(seed, prime), drawn(seed + 1, prime)
    a, b = (ring.slots_modulo(prime, z) for z in (x, y))
    assert (ring.polynomial_modulo(prime, a) == x).all()
    product = (a.astype(object) * b.astype(object) % prime).astype(np.uint64)
    actual = ring.polynomial_modulo(prime, product)
    for n in FEW:
        assert actual[n] == coefficient(x.astype(object), y.astype(object), n) % prime


def test_four_residues_at_once() -> None:
    x = np.stack([[drawn(i, q) for q in PRIMES] for i in range(2)])
    y = np.stack([drawn(9, q) for q in PRIMES])
    assert (ring.polynomials(ring.slots(x)) == x).all()
    assert (ring.slots(x)[1, 2] == ring.slots_modulo(PRIMES[2], x[1, 2])).all()
    a, b, c = (z.astype(object) for z in (x[0], x[1], y))
    primes = np.array(PRIMES, object)[:, None]
    assert (ring.plus_product(x[0], x[1], y) == (a + b * c) % primes).all()
    assert (ring.plus(x[0], x[1]) == (a + b) % primes).all()


@given(st.lists(st.integers(-(2**39), 2**39), min_size=1, max_size=5))
def test_residues_of_integers(values: list[int]) -> None:
    x = np.array(values, np.int64)
    assert ring.residues(x).T.tolist() == [of_integer(value) for value in values]


def test_residues_of_wide_integers() -> None:
    parts = Prg.from_seed(1, "parts").words((3, N)) >> np.uint64(64 - 39)
    actual = ring.wide_residues(parts, 39)
    for n in FEW:
        whole = sum(int(part[n]) << 39 * i for i, part in enumerate(parts))
        assert actual[:, n].tolist() == of_integer(whole)


def test_a_lift_is_small_and_has_the_slots() -> None:
    v = drawn(4, P)
    large = ring.lifted(v)
    assert (large[0] == v).all()
    polynomial = ring.polynomials(large).astype(object)
    centred = np.where(polynomial[0] > P // 2, polynomial[0] - P, polynomial[0])
    for i, q in enumerate(MODULI):
        assert (polynomial[i + 1] == centred % q).all()


@pytest.mark.parametrize("bits", [1, 15])
def test_over_delta_is_rounded(bits: int) -> None:
    """At random integers, and next to where a fraction is rounded up to a whole."""
    low = Prg.from_seed(7, "integers").words((N, 3))
    integers = [
        (int(a) << 128 | int(b) << 64 | int(c)) % (DELTA * P) for a, b, c in low.astype(object)
    ]
    unit = DELTA >> bits
    integers[:4] = [0, 1, DELTA * P - 1, DELTA * P - unit]
    integers[4:8] = [5 * DELTA - 1, 5 * DELTA, 5 * DELTA + 1, unit // 2 - 9]
    x = np.array([of_integer(n) for n in integers], np.uint64).T
    whole, fraction = ring.over_delta(np.ascontiguousarray(x), bits)
    assert fraction.min() >= 0 and fraction.max() < 1 << bits
    for n, w, f in zip(integers, whole, fraction, strict=True):
        off = (Fraction(n, DELTA) - int(w) - Fraction(int(f), 1 << bits)) % P
        off = min(off, P - off) * (1 << bits)
        assert off <= Fraction(1, 2) + Fraction(1, 1 << 20)


def test_uniform_residues_are_drawn_by_rejection() -> None:
    for q in PRIMES:
        residues = field.uniform(Prg.from_seed(1, "uniform"), (1 << 14,), q)
        assert residues.max() < q and abs(residues.mean() / q - 0.5) < 0.01
