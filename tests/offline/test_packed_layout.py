"""Where words of packed products stand: the formulas of `packed.layout`, place by place.

Mostly modulo X^64 + 1, where small matrices fill polynomials.
"""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spu_llm.core.prg import Prg
from spu_llm.offline.packed import layout, ring
from spu_llm.offline.packed.layout import Layout, columns_apart
from spu_llm.offline.packed.ring import N

DEGREE = 64
Polynomial = dict[int, int]  # by exponent, 0 to N - 1


def add(into: Polynomial, exponent: int, value: int) -> None:
    quotient, place = divmod(exponent, layout.N)
    into[place] = into.get(place, 0) + (-value if quotient % 2 else value)


def words_of(p: Polynomial) -> np.ndarray:
    actual = np.zeros(layout.N, np.uint64)
    for place, value in p.items():
        actual[place] = value % (1 << 64)
    return actual


def right(of: Layout, y: np.ndarray, group: int, b: int) -> Polynomial:
    """Return Y_b of a group."""
    actual: Polynomial = {}
    for s in range(of.together):
        unit = group * of.together + s
        for i in range(of.inner):
            row = b * of.inner + i
            for j in range(of.m):
                if unit < of.units and row < of.k:
                    add(actual, of.stride * j + of.inner * s - i, int(y[unit, row, j]))
    return actual


def left(of: Layout, x: np.ndarray, unit: int, r: int, b: int) -> Polynomial:
    """Return X_rb of a unit."""
    actual: Polynomial = {}
    for t in range(of.rows):
        for i in range(of.inner):
            row, column = r * of.rows + t, b * of.inner + i
            if row < of.n and column < of.k:
                add(actual, of.stride * of.m * t + i, int(x[unit, row, column]))
    return actual


def decoded(of: Layout, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return what the layout finds in sum_b X_rb Y_b, packed as `PackedProducts._pack` packs
    them.
    """
    places = layout.N * of.packed // of.stride
    wanted = np.zeros((of.answers, places), np.uint64)
    for unit in range(of.units):
        for r in range(of.pairs):
            product: Polynomial = {}
            for b in range(of.blocks):
                factor = right(of, y, unit // of.together, b)
                for e, value in left(of, x, unit, r, b).items():
                    for f, other in factor.items():
                        add(product, e + f - of.shift(unit), value * other)
            answer, p = divmod(unit * of.pairs + r, of.packed)
            wanted[answer, p :: of.packed] = words_of(product)[:: of.stride]
    return of.decoded(wanted)


def matrices(of: Layout, seed: int) -> tuple[np.ndarray, np.ndarray]:
    prg = Prg.from_seed(seed, "layout")
    return prg.words((of.units, of.n, of.k)), prg.words((of.units, of.k, of.m))


def check(of: Layout, seed: int) -> None:
    x, y = matrices(of, seed)
    rights = of.encoded_right(y)
    lefts = np.stack([[of.encoded_left(one, r) for r in range(of.pairs)] for one in x])
    assert rights.shape == (of.groups, of.blocks, layout.N)
    assert lefts.shape == (of.units, of.pairs, of.blocks, layout.N)
    for group, b in np.ndindex(of.groups, of.blocks):
        assert (rights[group, b] == words_of(right(of, y, group, b))).all()
    for unit, r, b in np.ndindex(of.units, of.pairs, of.blocks):
        assert (lefts[unit, r, b] == words_of(left(of, x, unit, r, b))).all()
    assert (decoded(of, x, y) == x @ y).all()


@settings(max_examples=100)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 70), st.integers(1, DEGREE), st.data())
def test_words_stand_where_the_formulas_say(
    units: int, n: int, k: int, m: int, data: st.DataObject
) -> None:
    assume(units * n * k * m <= 3000)
    with mock.patch.object(layout, "N", DEGREE):
        check(Layout(units, n, k, m), data.draw(st.integers(0, 1000)))


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1),
        (5, 1, 1, 64),
        (3, 1, 3, 33),
        (2, 1, 70, 2),
        (7, 3, 5, 3),
        (9, 2, 1, 5),
        (3, 1, 64, 1),
        (70, 1, 1, 1),
        (2, 4, 9, 8),
    ],
)
def test_edges(shape: tuple[int, int, int, int]) -> None:
    with mock.patch.object(layout, "N", DEGREE):
        check(Layout(*shape), 1)


def test_at_full_degree() -> None:
    check(Layout(3, 3, 5, 100), 2)


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 2048), st.integers(1, N))
def test_bounds(units: int, n: int, k: int, m: int) -> None:
    of = Layout(units, n, k, m)
    d = of.stride
    assert d & d - 1 == 0 and d * of.rows * m <= N < 2 * d * of.rows * m
    assert of.inner * of.together <= d and of.blocks * of.inner >= k > (of.blocks - 1) * of.inner
    assert of.groups * of.together >= units > (of.groups - 1) * of.together
    assert of.pairs * of.rows >= n > (of.pairs - 1) * of.rows
    count = units * of.pairs
    assert of.packed & of.packed - 1 == 0 and of.packed <= d
    assert of.answers == math.ceil(count / of.packed)
    assert of.answers == 1 or of.packed == min(d, 128)  # none is left half empty for another
    assert of.switches == [d // 2**i for i in range(int(math.log2(of.packed)))]
    assert of.is_scalar == (n == 1 and k == 1)
    assert [of.shift(u) for u in range(min(units, 3))] == [
        u % of.together * of.inner for u in range(min(units, 3))
    ]


def test_shapes_of_this_repository() -> None:
    """Tiles of 128 slots and heads of 64 and 128 words; rows of a norm."""
    collected = [
        (of.rows, of.stride, of.inner, of.together, of.groups, of.blocks, of.packed, of.answers)
        for of in (
            Layout(4, 128, 64, 128),
            Layout(4, 128, 128, 64),
            Layout(64, 1, 768, 1),
            Layout(64, 1, 1, 768),
        )
    ]
    assert collected == [
        (2, 32, 32, 1, 4, 2, 32, 8),
        (2, 64, 64, 1, 4, 2, 64, 4),
        (1, 8192, 768, 10, 7, 1, 64, 1),
        (1, 8, 1, 8, 8, 1, 8, 8),
    ]


@pytest.mark.parametrize(
    ("units", "n", "k", "m", "expected"),
    [
        (64, 1, 1, 576, [(0, 512), (512, 64)]),
        (64, 1, 1, 768, [(0, 512), (512, 256)]),
        (64, 1, 1, 512, [(0, 512)]),
        (2, 1, 1, 576, [(0, 576)]),  # two polynomials would be sent in place of one
        (64, 2, 1, 576, [(0, 576)]),
        (64, 1, 576, 3, [(0, 3)]),
    ],
)
def test_columns_stand_apart_where_that_sends_less(
    units: int, n: int, k: int, m: int, expected: list[tuple[int, int]]
) -> None:
    actual = columns_apart(units, n, k, m)
    assert [(columns.start, of.m) for columns, of in actual] == expected
    assert [columns.stop - columns.start for columns, _ in actual] == [of.m for _, of in actual]
    assert sum(of.m for _, of in actual) == m
    whole = Layout(units, n, k, m)
    sent = sum(of.ciphertext_bytes + of.answer_bytes for _, of in actual)
    assert sent <= whole.ciphertext_bytes + whole.answer_bytes


@pytest.mark.parametrize(
    ("n", "k", "m", "widths"),
    [
        (2, 1, N, [N]),
        (2, 1, 11520, [N, 11520 - N]),
        (128, 128, 1024, [1024]),  # 32 polynomials of Y's
        (128, 128, 1025, [1024, 1]),
        (128, 256, 1600, [1024, 576]),
        (1, 1, N + 512, [N, 512]),
        (1, 80000, 3, [1] * 3),
    ],
)
def test_columns_that_do_not_fit_go_apart(n: int, k: int, m: int, widths: list[int]) -> None:
    actual = columns_apart(3, n, k, m)
    assert [of.m for _, of in actual] == widths
    assert [columns.start for columns, _ in actual] == [sum(widths[:i]) for i in range(len(widths))]
    assert all(columns.stop - columns.start == of.m for columns, of in actual)
    assert all(of.blocks <= layout._BLOCKS or of.m == 1 for _, of in actual)


@pytest.mark.parametrize("m", [N + 1, 2 * N])
def test_too_many_columns(m: int) -> None:
    with pytest.raises(ValueError, match=f"{m} columns does not fit 8192"):
        Layout(1, 1, 1, m)
    assert Layout(1, 5, 2, N).rows == 1


@pytest.mark.parametrize("n, k", [(1, 2048), (1, 8192), (2, 1024), (9, 5000)])
def test_few_enough_words_are_rounded_at_once(n: int, k: int) -> None:
    of = Layout(1, n, k, 1)
    assert of.rows * of.inner * of.blocks_at_once == ring.MAX_TERMS
    assert of.blocks * of.inner >= k
