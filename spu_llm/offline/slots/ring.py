"""Polynomials modulo X^N + 1 and p q_1 q_2 q_3, by their residues: what products in slots are made
of (`spu_llm.offline.slots.products`). Compiled by XLA.

All four primes are 1 modulo 2 N, so that X^N + 1 has N roots modulo each, and a polynomial is its
values there, its *slots*: the number-theoretic transform. Sums and products are slot by slot. The
order of the slots is the transform's own. Residues are uint64 [..., 4, N] below their primes, p's
first.

Products of residues below 2^48 are taken with the quotient of doubles, rounded, which is off by
less than 2^-3, and words that wrap around: what is left is between -q and q, exactly.

Parameters: N = 8192, log q = 168, uniform ternary secrets, centred binomial noise of standard
deviation 3.24. The homomorphic encryption standard (homomorphicencryption.org, 2018, table 1:
ternary secret, sigma = 3.2) allows N = 8192 a log q of 218 for 128 bits of classical security.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import enable_x64

from spu_llm.core.field import P

N = 8192
MODULI = (0xFFFFFDC001, 0xFFFFF4C001, 0xFFFFF3C001)  # q_1 to q_3, 40 bits each
MODULUS_BITS = 40
PRIMES = (P, *MODULI)
DELTA = MODULI[0] * MODULI[1] * MODULI[2]

_ROWS, _COLUMNS = 64, 128  # of a polynomial's coefficients: transforms along one, then the other
_PRIMES = np.array(PRIMES, np.int64)[:, None]


# ---- residues


def residues(x: np.ndarray) -> np.ndarray:
    """Return integers (int64 [N]) between minus the least prime and it modulo every prime."""
    return np.asarray(np.where(x < 0, x + _PRIMES, x)).view(np.uint64)


def wide_residues(parts: np.ndarray, bits: int) -> np.ndarray:
    """Return the sum of 2^(bits i) parts_i modulo every prime, of words parts [count, N] below
    2^bits, which are residues of all: residues [4, N].
    """
    total = np.zeros((len(PRIMES), N), np.uint64)
    for i, part in enumerate(parts):
        weights = np.array([(1 << bits * i) % q for q in PRIMES], np.uint64)[:, None]
        total = plus_product(total, *np.broadcast_arrays(part, weights))
    return total


def plus_product(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x + y z, slot by slot: residues [4, N]."""
    with enable_x64():
        return np.asarray(_plus_product(x, y, z, _modulus(_PRIMES)))


def plus(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return x + y: residues [..., 4, N]."""
    total, primes = x + y, _PRIMES.view(np.uint64)
    return np.asarray(np.minimum(total, total - primes))


class _Modulus(NamedTuple):
    """q and 1 / q, which would be divided for every product."""

    q: Any
    inverse: Any


def _modulus(q: Any) -> _Modulus:
    return _Modulus(q, 1.0 / q)


def _sum(a: Any, b: Any, m: _Modulus) -> Any:
    """Return a + b of residues, int64."""
    total = a + b
    return jnp.where(total >= m.q, total - m.q, total)


def _difference(a: Any, b: Any, m: _Modulus) -> Any:
    """Return a - b of residues, int64."""
    difference = a - b
    return jnp.where(difference < 0, difference + m.q, difference)


def _product(a: Any, b: Any, m: _Modulus) -> Any:
    """Return a b modulo q, of int64 between -q and q: what is left of the nearest multiple of q is
    half of it at most.
    """
    quotient = jnp.rint(a * 1.0 * b * m.inverse).astype(jnp.int64)
    rest = a * b - quotient * m.q
    return jnp.where(rest < 0, rest + m.q, rest)


@jax.jit
def _plus_product(x: Any, y: Any, z: Any, m: _Modulus) -> Any:
    x, y, z = (a.astype(jnp.int64) for a in (x, y, z))
    return _sum(x, _product(y, z, m), m).astype(jnp.uint64)


# ---- transforms, modulo one prime


@dataclass(frozen=True)
class _Transform:
    """Powers of a root modulo q, by which a transform multiplies, and by which it is undone: before
    it, at each step along rows and columns, and in between.
    """

    q: int
    there: tuple[Any, ...]
    back: tuple[Any, ...]


@functools.cache
def _transform(prime: int) -> _Transform:
    candidates = (pow(g, (prime - 1) // (2 * N), prime) for g in range(2, 1000))
    root = next(r for r in candidates if pow(r, N, prime) == prime - 1)

    def factors(base: int, scale: int) -> tuple[Any, ...]:
        powers = [scale]
        for _ in range(2 * N - 1):
            powers.append(powers[-1] * base % prime)
        scaled = np.array(powers, np.int64)
        plain = np.array([x * pow(scale, -1, prime) % prime for x in powers], np.int64)
        place = np.arange(N).reshape(_ROWS, _COLUMNS)
        rows = np.array([int(f"{i:0{_ROWS.bit_length() - 1}b}"[::-1], 2) for i in range(_ROWS)])
        between = plain[2 * rows[:, None] * np.arange(_COLUMNS) % (2 * N)]
        steps = [
            [plain[np.arange(half) * (N // half)] for half in _halves(size)]
            for size in (_ROWS, _COLUMNS)
        ]
        with enable_x64():
            tables: tuple[Any, ...] = jax.tree.map(
                jnp.asarray, (scaled[place], steps[0], between, steps[1])
            )
        return tables

    inverse = pow(root, -1, prime)
    return _Transform(prime, factors(root, 1), factors(inverse, pow(N, -1, prime)))


def _halves(size: int) -> list[int]:
    return [size >> i for i in range(1, size.bit_length())]


def _along(x: Any, steps: Sequence[Any], m: _Modulus, *, back: bool) -> Any:
    """Transform x [size, others] along its first axis, by halves; `back`: undo it, up to a factor
    `size`.
    """
    shape = x.shape
    for factors in reversed(steps) if back else steps:
        half = len(factors)
        x = x.reshape(shape[0] // (2 * half), 2, half, shape[1])
        a, b = x[:, 0], x[:, 1]
        w = factors[:, None]
        b = _product(b, w, m) if back else b
        other = _difference(a, b, m) if back else _product(a - b, w, m)
        # Faster than to stack them.
        x = jnp.zeros_like(x).at[:, 0].set(_sum(a, b, m)).at[:, 1].set(other).reshape(shape)
    return x


@jax.jit
def _forward(x: Any, tables: tuple[Any, ...], m: _Modulus) -> Any:
    twist, rows, between, columns = tables
    x = _product(x.astype(jnp.int64).reshape(_ROWS, _COLUMNS), twist, m)
    x = _along(x, rows, m, back=False)
    x = _along(_product(x, between, m).T, columns, m, back=False)
    return x.reshape(N).astype(jnp.uint64)


@jax.jit
def _backward(x: Any, tables: tuple[Any, ...], m: _Modulus) -> Any:
    twist, rows, between, columns = tables
    x = _along(x.astype(jnp.int64).reshape(_COLUMNS, _ROWS), columns, m, back=True).T
    x = _along(_product(x, between, m), rows, m, back=True)
    return _product(x, twist, m).reshape(N).astype(jnp.uint64)


def slots_modulo(prime: int, x: np.ndarray) -> np.ndarray:
    """Return the slots modulo a prime of a polynomial, residues [N]."""
    of = _transform(prime)
    with enable_x64():
        return np.asarray(_forward(x, of.there, _modulus(of.q)))


def polynomial_modulo(prime: int, x: np.ndarray) -> np.ndarray:
    """Return the coefficients of slots modulo a prime, residues [N]."""
    of = _transform(prime)
    with enable_x64():
        return np.asarray(_backward(x, of.back, _modulus(of.q)))


def slots(x: np.ndarray) -> np.ndarray:
    """Return the slots of polynomials, residues [..., 4, N]."""
    return _each(slots_modulo, x)


def polynomials(x: np.ndarray) -> np.ndarray:
    """Return the coefficients of slots, residues [..., 4, N]."""
    return _each(polynomial_modulo, x)


def _each(of: Callable[[int, np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    made = np.empty_like(x)
    for at in np.ndindex(x.shape[:-1]):
        made[at] = of(PRIMES[at[-1]], x[at])
    return made


def lifted(v: np.ndarray) -> np.ndarray:
    """Return the slots, residues [4, N], of the polynomial with coefficients between -p/2 and p/2
    that has slots v [N] modulo p.
    """
    coefficients = polynomial_modulo(P, v).view(np.int64)
    centred = np.where(coefficients > P // 2, coefficients - P, coefficients)
    others = [slots_modulo(q, (centred % q).view(np.uint64)) for q in MODULI]
    return np.stack([v, *others])


# ---- over Delta


def over_delta(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x / Delta of residues x [4, N], rounded to `bits` bits after the point: whole elements
    [N] modulo p, and the fraction times 2^bits, int64.
    """
    with enable_x64():
        whole, fraction = _over_delta(x, 1 << bits)
        return np.asarray(whole), np.asarray(fraction)


@jax.jit
def _over_delta(x: Any, unit: Any) -> tuple[Any, Any]:
    q_1, q_2, q_3 = MODULI
    p_, second, third = (_modulus(q) for q in (P, q_2, q_3))
    x_p, x_1, x_2, x_3 = x.astype(jnp.int64)
    # x modulo Delta is x_1 + q_1 (l_2 + q_2 l_3); q_1 > q_2 > q_3 differ by less than one of them.
    x_1_of_2, x_1_of_3 = (jnp.where(x_1 >= q, x_1 - q, x_1) for q in (q_2, q_3))
    l_2 = _product(x_2 - x_1_of_2, pow(q_1, -1, q_2), second)
    l_2_of_3 = jnp.where(l_2 >= q_3, l_2 - q_3, l_2)
    below = _sum(x_1_of_3, _product(l_2_of_3, q_1 - q_3, third), third)
    l_3 = _product(x_3 - below, pow(q_1 * q_2, -1, q_3), third)
    rest = _sum(_product(l_3, q_2, p_), l_2, p_)
    rest = _sum(_product(rest, q_1, p_), x_1, p_)
    whole = _product(x_p - rest, pow(DELTA, -1, P), p_)
    fraction = (l_3 + (l_2 + x_1 / q_1) / q_2) / q_3
    parts = jnp.rint(fraction * unit).astype(jnp.int64)
    carry = (parts == unit).astype(jnp.int64)
    return _sum(whole, carry, p_).astype(jnp.uint64), parts & (unit - 1)
