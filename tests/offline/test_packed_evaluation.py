"""What is computed for every pair of packed products: off by less than a product's own error, and
sums that are rounded by themselves are far from a wrong integer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import enable_x64

from spu_llm.core.prg import Prg
from spu_llm.offline import rlwe
from spu_llm.offline.packed import evaluation, ring
from spu_llm.offline.packed.layout import Layout
from spu_llm.offline.packed.ring import KEY_BITS, KEY_DROP, LIMB, N

SEEDS = st.integers(0, 10**6)
LARGEST = 2.0**8  # of switching, some 30 deviations: 2^1.9 of noise, 2^4.4 of c0's rounding
PLACES = (0, 1, N // 2, N - 1)


def words(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return Prg.from_seed(seed, "words").words(shape)


def whole_numbers(x: np.ndarray) -> np.ndarray:
    """Return Python's integers of words [..., 2, N]."""
    return x[..., 0, :].astype(object) + (x[..., 1, :].astype(object) << 64)


def times_power(x: np.ndarray, k: int) -> np.ndarray:
    """Return x X^k of integers [..., N], for k from 0 on."""
    turned = np.roll(x, k % N, axis=-1)
    turned[..., : k % N] *= -1
    return turned * (-1) ** (k // N)


def substituted(x: np.ndarray, k: int) -> np.ndarray:
    """Return x(X^k) of Python's integers [N]."""
    actual = np.zeros(N, object)
    for i, value in enumerate(x):
        quotient, place = divmod(i * k, N)
        actual[place] += -int(value) if quotient % 2 else int(value)
    return actual


def coefficient(x: np.ndarray, y: np.ndarray, n: int) -> int:
    """Compute the coefficient of X^n in x y modulo X^N + 1, for Python's integers."""
    return int((x * np.concatenate([y[n::-1], -y[:n:-1]])).sum())


def off(actual: np.ndarray, exact: list[int], dropped: int) -> np.ndarray:
    """Return how far words are from exact integers over 2^dropped, modulo 2^64."""
    modulus = 1 << 64 + dropped
    rest = [
        ((int(a) << dropped) - e + modulus // 2) % modulus - modulus // 2
        for a, e in zip(actual, exact, strict=True)
    ]
    return np.array([r / 2.0**dropped for r in rest])


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.integers(0, N - 1), SEEDS)
def test_products_are_rounded(blocks: int, at_once: int, shift: int, seed: int) -> None:
    left, right = np.zeros((blocks, N), np.uint64), words(seed, (2, blocks, 2, N))
    left[:, :100] = words(seed + 1, (blocks, 100))
    factor = evaluation.wide_factor(right)
    actual = np.asarray(evaluation.multiplied(left, factor, at_once, shift))
    for part in range(2):
        signed = left.view(np.int64).astype(object)
        exact = [
            sum(coefficient(signed[b], whole_numbers(right[part, b]), n) for b in range(blocks))
            for n in PLACES
        ]
        back = times_power(actual[part].view(np.int64).astype(object), shift)
        assert np.abs(off(back[list(PLACES)], exact, 64)).max() < 1.5 * blocks


@settings(max_examples=15, deadline=None)
@given(st.integers(0, N - 1), SEEDS)
def test_multiples_are_rounded(shift: int, seed: int) -> None:
    x, word = words(seed, (2, 2, N)), words(seed + 1, (1,))[0]
    actual = np.asarray(evaluation.scaled(evaluation.words(x), word, shift))
    assert (actual == ring.lowered(ring.upper_times(x, word), shift)).all()


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([2, 4, 64, N]), SEEDS)
def test_two_pairs_become_one(d: int, seed: int) -> None:
    """Under s, the pair is what the formula of step 4 gives."""
    s = rlwe.ternary(Prg.from_seed(seed, "s"), 1, N)[0]
    small, k = rlwe.transform(s), 1 + 2 * N // d
    a = words(seed, (3, 2, N))
    keys = ring.times_small(a, small, np.zeros((3, N), np.int64))
    turned_s = np.uint64(0) - ring.mapped(s.astype(np.int64).view(np.uint64), k)
    for limb in range(3):
        keys[limb] = ring.plus_at(keys[limb], turned_s, KEY_DROP + LIMB * limb)
    factor = evaluation.switching_factor(np.stack([a, keys]))
    first, second = words(seed + 1, (2, N)), words(seed + 2, (2, N))

    def opened(pair: np.ndarray) -> np.ndarray:
        c0, c1 = pair
        opened: np.ndarray = c1 - ring.word_times_small(c0, small)
        return opened

    actual = opened(np.asarray(evaluation.merged(first, second, factor, d)))
    x, y = (opened(pair).view(np.int64).astype(object) for pair in (first, second))
    y = times_power(y, d // 2)
    exact = x + y + substituted(x - y, k)
    error = off(actual, list(exact), 0)
    assert np.abs(error).max() < LARGEST
    two = np.uint64(2)
    wanted = (first[1] - ring.word_times_small(first[0], small))[::d]
    assert np.abs((actual[::d] - two * wanted).view(np.int64)).max() < LARGEST


def test_low_parts_add_little_to_rounding() -> None:
    """They are transformed without rounding to integers first; s multiplies what c0 is off by."""
    keys, c0 = words(1, (2, 3, 2, N)), words(2, (N,))
    factor = evaluation.switching_factor(keys)
    with enable_x64():
        actual = np.asarray(evaluation.switched(c0, factor))
    limbs, exact_limbs = ring.limbs(c0, LIMB, 64), ring.limbs(keys, ring.KEY_LIMB, KEY_BITS)
    sums = rlwe.whole(np.einsum("ln,plkn->pkn", limbs, exact_limbs))
    for part in range(2):
        total = sum(sums[part, i].astype(object) << ring.KEY_LIMB * i for i in range(sums.shape[1]))
        error = off(actual[part], list(total), KEY_DROP)
        assert error.std() < 12**-0.5 + 0.01 and np.abs(error).max() < 0.55


# ---- how far sums are from a wrong integer


class Distances:
    """Distances of what is rounded by itself from the nearest integer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.largest = self.deviation = 0.0
        whole = evaluation.whole

        def spy(z: Any) -> Any:
            sums = rlwe.inverse(np.array(z))
            sums = sums[1:] if len(sums) == 3 else sums[:, 1:]
            distance = np.abs(sums - np.rint(sums))
            self.largest = max(self.largest, float(distance.max()))
            self.deviation = max(self.deviation, float(np.sqrt((distance**2).mean())))
            return whole(z)

        monkeypatch.setattr(evaluation, "whole", spy)


def plain(compiled: Any) -> Any:
    """Return the function that was compiled."""
    return compiled.__wrapped__


@pytest.mark.parametrize(
    ("of", "largest", "deviation"),
    [
        (Layout(1, 128, 64, 128), 0.15, 0.015),  # measured: 0.08 and 0.011
        (Layout(1, 128, 128, 64), 0.20, 0.020),  # 0.09 and 0.015
        (Layout(1, 1, 1024, 1), 0.30, 0.040),  # 0.19 and 0.032
        (Layout(1, 1, 2048, 1), 0.40, 0.055),  # the most at once: 0.046
        (Layout(1, 1, 8192, 1), 0.40, 0.055),  # four sums
    ],
)
def test_sums_of_products_are_far_from_a_wrong_integer(
    of: Layout, largest: float, deviation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a tile, half is 33 standard deviations away; for the most words of one sum, 10."""
    prg = Prg.from_seed(4, "margin")
    x = prg.words((of.units, of.n, of.k))
    left = np.stack([[of.encoded_left(one, r) for r in range(of.pairs)] for one in x])
    right = evaluation.wide_factor(prg.words((2, of.blocks, 2, N)))
    actual = Distances(monkeypatch)
    with enable_x64():
        for pair in range(min(of.pairs, 4)):
            plain(evaluation._multiplied)(left[0, pair], right, of.blocks_at_once, np.int64(0))
    assert 0 < actual.largest < largest and actual.deviation < deviation


def test_switching_is_far_from_a_wrong_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half is 80 standard deviations away."""
    factor = evaluation.switching_factor(words(5, (2, 3, 2, N)))
    actual = Distances(monkeypatch)
    with enable_x64():
        for c0 in words(6, (4, N)):
            evaluation.switched(c0, factor)
    assert 0 < actual.largest < 0.08 and actual.deviation < 0.008  # measured: 0.04 and 0.006
