"""What is recorded: for every op, small cases that look at its edges and forms."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import protocols
from protocols.arithmetic.cached import append, lengthen, times_columns, times_rows
from protocols.arithmetic.field_product import field_multiply, field_scale_rows, field_square
from protocols.arithmetic.joint import joint_bits, joint_fraction, joint_words
from protocols.arithmetic.known_factors import known_factors, times_factors
from protocols.arithmetic.known_rows import known_rows
from protocols.arithmetic.narrow import in_units, narrow, units, widen
from protocols.arithmetic.product import (
    linear,
    matmul,
    multiply,
    scale_rows,
    square,
    sum_squares,
    times_whole,
)
from protocols.arithmetic.projection import project
from protocols.arithmetic.truncate import truncate
from protocols.bits.compare import sign
from protocols.bits.convert import to_arith
from protocols.bits.logic import and_bits, prefix_or
from protocols.bits.mux import mux
from protocols.bits.thresholds import below
from protocols.dp.clip import clip
from protocols.functions.argmax import argmax
from protocols.functions.exponential import EDGE, FRAC_BITS, cut_exponential
from protocols.functions.in_range import nonzero, require
from protocols.functions.maximum import maximum
from protocols.ot.select import select
from protocols.verification.sampling import Widths, locate, reject, residual
from spu_llm.core.op import ProtocolOp
from spu_llm.core.reveal import reveal
from spu_llm.core.values import Owner
from spu_llm.testing import toy_reshare

FLOAT = np.float32


@dataclass(frozen=True)
class Given:
    """An input: plaintext and the form it is held in, "public", "client", "provider", "arith<bits>"
    or "bool<bits>" (64 when left out).
    """

    plain: np.ndarray
    form: str


@dataclass(frozen=True)
class Made:
    """An input that is the result of an earlier call of the case."""

    call: int


@dataclass(frozen=True)
class Call:
    """`error`: units that results may be off the reference; None where it cannot be compared, since
    it draws for itself. Then the op's integer model tells.
    """

    op: ProtocolOp
    inputs: tuple[Given | Made, ...]
    static: dict[str, Any] = field(default_factory=dict)
    error: int | None = 0


@dataclass(frozen=True)
class Case:
    """Calls in one session, the last one of the op that the case is about."""

    name: str
    calls: tuple[Call, ...]


@functools.cache
def all_ops() -> dict[str, ProtocolOp]:
    """Return every op of the repository, by its name."""
    names = [m.name for m in pkgutil.walk_packages(protocols.__path__, "protocols.")]
    collected: dict[str, ProtocolOp] = {}
    for name in (*names, "spu_llm.core.reveal", "spu_llm.testing.toy"):
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, ProtocolOp):
                assert collected.setdefault(value.name, value) is value, f"two ops {value.name}"
    return collected


def _one(
    name: str, op: ProtocolOp, *inputs: tuple[Any, str], error: int | None = 0, **static: Any
) -> Case:
    """Return a case of one call."""
    given = tuple(Given(np.asarray(x), form) for x, form in inputs)
    return Case(name, (Call(op, given, static, error),))


INTEGERS = np.array([3, -1, 0, 2**62, -(2**63), 7])
SMALL = np.array([0, 1, -1, 12345, -(2**20)])
NUMBERS = np.array([1.5, -2.25, 0.001, -0.0625, 7.7, 0.0], FLOAT)
SHORT = np.array([1.5, -2.25, 0.125, -0.0625, 7.75, 0.0], FLOAT)  # products are exact, too
BITS = np.array([True, False, True, True, False, False])
ROWS_70 = np.arange(70) % 3 == 0  # more rows than a word has bits
TINY, REAL = Widths(total=7, draft=4, draw=5, most_accept=3), Widths.of_weights(4)


def _edges(bits: int) -> np.ndarray:
    top = 2 ** (bits - 1)
    return np.array([-top, 1 - top, -1, 0, 1, top - 1])


def _random(shape: Sequence[int], low: int, high: int, seed: int = 0) -> np.ndarray:
    """Integers in [low, high)."""
    return np.random.default_rng(seed).integers(low, high, tuple(shape))


def _fixed(shape: Sequence[int], largest: float, seed: int = 0) -> np.ndarray:
    """Fixed-point numbers that a float32 holds exactly."""
    top = int(largest * 2**FRAC_BITS)
    return (_random(shape, -top, top, seed) / 2**FRAC_BITS).astype(FLOAT)


# ---- sequences on a cache

HEADS, POSITIONS, DEPTH, TILE = 2, 4, 2, 5


def _rows(count: int, seed: int) -> Given:
    return Given(_fixed((HEADS, count, DEPTH), 2.0, seed), "arith")


def _append(cache: Given | Made, count: int, at: int, seed: int) -> Call:
    return Call(append, (cache, _rows(count, seed), Given(np.array(at), "public")))


EMPTY = Given(np.zeros((HEADS, POSITIONS, DEPTH), FLOAT), "public")


def _decoding(op: ProtocolOp, width: int) -> Case:
    """Return three positions and one, which is then written again (a rejected draft). Each product
    opens only rows that are new since the last one.
    """

    def product(cache: int, queries: int, seed: int) -> Call:
        x = Given(_fixed((HEADS, queries, width), 2.0, seed), "arith")
        return Call(op, (x, Made(cache)), {"tile": TILE}, error=1)

    return Case(
        "rows already open",
        (
            _append(EMPTY, 3, 0, 1),
            product(0, 2, 2),
            _append(Made(0), 1, 3, 3),
            product(2, 1, 4),
            _append(Made(2), 1, 3, 5),
            product(4, 1, 6),
        ),
    )


KNOWN = Given(_fixed((HEADS, POSITIONS, DEPTH), 2.0, 1), "provider")


def _of_known_rows(op: ProtocolOp, width: int) -> Case:
    """Units of two queries: the second product uses up one and begins another, which is then in
    use.
    """

    def product(queries: int, seed: int) -> Call:
        x = Given(_fixed((HEADS, queries, width), 2.0, seed), "arith")
        return Call(op, (x, Made(0)), {"tile": 2}, error=1)

    made = Call(known_rows, (KNOWN,))
    return Case("the provider's rows", (made, product(1, 2), product(2, 3), product(1, 4)))


def _of_several(op: ProtocolOp, width: int) -> Case:
    """Return the provider's rows and a cache in one call, twice: a unit of four queries, which the
    second call uses up, and a tile of five.
    """

    def product(queries: int, seed: int) -> Call:
        x = Given(_fixed((HEADS, queries, width), 2.0, seed), "arith")
        return Call(op, (x, Made(0), Made(1)), {"tile": 4}, error=1)

    return Case(
        "the provider's rows and others",
        (Call(known_rows, (KNOWN,)), _append(EMPTY, 2, 0, 1), product(3, 2), product(2, 3)),
    )


def _of_known_factors() -> Case:
    """Return products with two matrices, of which each unit serves two: the third begins others."""

    def product(width: int, seed: int) -> Call:
        x = Given(_fixed((2, 2, width), 2.0, seed), "arith")
        return Call(times_factors, (x, Made(0)), {"uses": 2}, error=1)

    made = Call(known_factors, (FACTORS,))
    return Case("the client's factors", (made, product(3, 1), product(3, 2), product(3, 3)))


FACTORS = Given(_fixed((2, 2, 2), 2.0, 7), "client")
CACHE = _random((HEADS, 3, DEPTH), -(2**63), 2**63 - 1, 7)

# ---- the cases

EXPONENTS = np.array([0, -1, -2, 2 - EDGE, 1 - EDGE, -EDGE, -EDGE - 1, 1 - 2**25])

_CASES: dict[ProtocolOp, tuple[Case, ...]] = {
    reveal: (
        _one("words to both", reveal, (INTEGERS, "arith"), to=Owner.PUBLIC, label="words"),
        _one("fixed point to the client", reveal, (NUMBERS, "arith"), to=Owner.CLIENT, label="x"),
        _one(
            "19 bits to the provider",
            reveal,
            (np.arange(6) << 13, "bool19"),
            to=Owner.PROVIDER,
            label="xor shares",
        ),
        _one(
            "24 bits to the client",
            reveal,
            (_edges(24), "arith24"),
            to=Owner.CLIENT,
            label="narrow",
        ),
        _one("ten bits to both", reveal, (ROWS_70[:10], "bool1"), to=Owner.PUBLIC, label="bits"),
        _one("the client's bits to both", reveal, (BITS, "client"), to=Owner.PUBLIC, label="own"),
        _one(
            "the provider's floats to the client",
            reveal,
            (NUMBERS, "provider"),
            to=Owner.CLIENT,
            label="own",
        ),
    ),
    toy_reshare: (_one("three rounds", toy_reshare, (INTEGERS, "arith"), rounds=3),),
    and_bits: (
        _one("three bits", and_bits, (np.arange(8), "bool3"), (np.arange(8)[::-1], "bool3")),
        _one("70 rows", and_bits, (ROWS_70, "bool1"), (~ROWS_70[::-1], "bool1")),
        _one("private bits", and_bits, (BITS, "client"), (~BITS[::-1], "provider")),
    ),
    prefix_or: (
        _one("two groups", prefix_or, (np.eye(5, dtype=bool)[:, ::-1], "bool1")),
        _one("three groups", prefix_or, (np.eye(9, dtype=bool)[[2, 8]], "bool1")),
    ),
    to_arith: (
        _one("bits", to_arith, (BITS, "bool1")),
        _one("words", to_arith, (INTEGERS[:4], "bool64")),
        _one("private words, no message", to_arith, (INTEGERS, "provider")),
    ),
    below: (
        _one(
            "14 bits",
            below,
            (np.arange(-9, 12)[:, None], "arith"),
            thresholds=((-9, -1, 0, 4, 11),),
            bits=14,
        ),
        _one(
            "two columns of 28 bits",
            below,
            (np.array([[5, -5], [70, 3], [1 << 26, -(1 << 26)]]), "arith"),
            thresholds=((6,), (-5, 4)),
            bits=28,
        ),
    ),
    sign: (
        _one("24 bits", sign, (_edges(24), "arith"), bits=24),
        _one("fixed point", sign, (NUMBERS, "arith"), bits=26),
        _one("70 rows of five bits", sign, (np.arange(70) % 32 - 16, "arith24"), bits=5),
        _one("whole words", sign, (INTEGERS[:3], "arith"), bits=64),
        _one("one bit, no message", sign, (np.array([0, -1]), "arith"), bits=1),
    ),
    mux: (
        _one("words", mux, (BITS, "bool1"), (INTEGERS, "arith")),
        _one("narrow words", mux, (BITS, "bool1"), (_edges(20), "arith20")),
        _one("private bits", mux, (BITS, "client"), (NUMBERS, "arith")),
    ),
    truncate: (
        _one(
            "unbiased",
            truncate,
            (np.array([0, 1, -1, 2**62 - 1, 1 - 2**62, 12345 << 18]), "arith"),
            shift=18,
            how="unbiased",
            bits=64,
            error=1,
        ),
        _one(
            "unbiased, fixed point",
            truncate,
            (NUMBERS, "arith"),
            shift=3,
            how="unbiased",
            bits=64,
            error=1,
        ),
        _one("local", truncate, (_edges(24), "arith"), shift=5, how="local", bits=24, error=1),
        _one(
            "exact",
            truncate,
            (np.array([0, 31, -1, 2**62 - 1, 1 - 2**62, 33]), "arith"),
            shift=5,
            how="exact",
            bits=64,
        ),
    ),
    multiply: (
        _one("integers", multiply, (INTEGERS, "arith"), (INTEGERS[::-1], "arith")),
        _one("fixed point", multiply, (NUMBERS, "arith"), (NUMBERS[::-1], "provider"), error=1),
        _one("nothing cut", multiply, (SHORT, "client"), (SHORT[::-1], "arith"), shift=0),
    ),
    times_whole: (
        _one("integers", times_whole, (INTEGERS, "arith"), (INTEGERS[::-1], "public")),
        _one("fixed point", times_whole, (SHORT, "arith"), (np.arange(-2, 4), "public")),
    ),
    square: (
        _one("integers", square, (INTEGERS, "arith")),
        _one("fixed point", square, (NUMBERS, "arith"), error=1),
    ),
    field_multiply: (
        _one("integers", field_multiply, (SMALL, "arith"), (SMALL[::-1], "arith"), cuts=(0, 0)),
        _one(
            "nothing cut",
            field_multiply,
            (SHORT, "client"),
            (SHORT[::-1], "arith"),
            cuts=(0, 0),
            shift=0,
        ),
        _one(
            "both cut", field_multiply, (SHORT, "arith"), (SHORT, "arith"), error=100, cuts=(3, 2)
        ),
        _one("one narrow", field_multiply, (SMALL, "arith24"), (SMALL, "arith"), cuts=(0, 0)),
    ),
    field_square: (
        _one("integers", field_square, (SMALL, "arith"), cuts=(0,)),
        _one("shifted up", field_square, (SHORT, "provider"), error=2**27, cuts=(4,), shift=0),
    ),
    field_scale_rows: (
        _one(
            "fixed point",
            field_scale_rows,
            (_fixed((2, 3), 2.0), "arith"),
            (_fixed((2,), 2.0, 1), "client"),
            error=16,
            cuts=(2, 0),
        ),
    ),
    sum_squares: (
        _one("integers", sum_squares, (_random((2, 3), -(2**63), 2**63 - 1), "arith")),
        _one("fixed point", sum_squares, (_fixed((2, 3), 2.0), "arith"), error=1),
    ),
    scale_rows: (
        _one(
            "integers",
            scale_rows,
            (_random((2, 3), -(2**63), 2**63 - 1), "arith"),
            (_random((2,), -(2**63), 2**63 - 1, 1), "arith"),
        ),
        _one(
            "fixed point",
            scale_rows,
            (_fixed((2, 3), 2.0), "arith"),
            (_fixed((2,), 2.0, 1), "client"),
            error=1,
        ),
    ),
    matmul: (
        _one(
            "integers",
            matmul,
            (_random((2, 2, 3), -(2**63), 2**63 - 1), "arith"),
            (_random((2, 3, 2), -(2**63), 2**63 - 1, 1), "arith"),
        ),
        _one(
            "fixed point",
            matmul,
            (_fixed((1, 2, 3), 2.0), "arith"),
            (_fixed((1, 3, 2), 2.0, 1), "client"),
            error=1,
        ),
        _one(
            "outer products",
            matmul,
            (_random((2, 1, 1), -9, 9), "arith"),
            (_random((2, 1, 3), -9, 9, 1), "arith"),
        ),
    ),
    linear: (
        _one(
            "fixed point",
            linear,
            (_fixed((2, 3), 2.0), "arith"),
            (_fixed((3, 2), 2.0, 1), "provider"),
            label="w",
            error=1,
        ),
        _one(
            "integers",
            linear,
            (np.array([[3, -1], [2**12, 2**13 - 1]]), "client"),
            (np.array([[1, -2, 3], [2**30, 5, -(2**24)]]), "provider"),
            label="m",
        ),
    ),
    narrow: (
        _one(
            "top bits",
            narrow,
            (np.array([0, 1, -1, 12345 << 18, 2**30 - 1]), "arith"),
            drop=18,
            bits=32,
            error=1,
        ),
        _one("of fixed point", narrow, (NUMBERS, "arith"), drop=14, bits=12, error=1),
        _one("of a narrow share", narrow, (_edges(20), "arith24"), drop=0, bits=20),
    ),
    widen: (_one("24 bits", widen, (np.array([0, 1, -1, 2**22 - 1, -(2**22)]), "arith24")),),
    units: (_one("units", units, (SMALL, "arith")),),
    in_units: (
        _one("fixed point", in_units, (NUMBERS, "arith"), bits=33),
        _one("of a narrow share", in_units, (SMALL, "arith40"), bits=33),
    ),
    project: (
        _one(
            "two rows",
            project,
            (np.arange(-3, 3).reshape(2, 3) << 40, "arith"),
            factor_bits=13,
            error=None,
        ),
    ),
    joint_bits: (
        _one("bits", joint_bits, (BITS, "client"), (BITS[::-1], "provider")),
        _one(
            "nine bits", joint_bits, (INTEGERS, "client"), (INTEGERS[::-1] + 5, "provider"), bits=9
        ),
    ),
    joint_words: (_one("words", joint_words, (INTEGERS, "client"), (INTEGERS[::-1], "provider")),),
    joint_fraction: tuple(
        _one(
            f"{bits} bits",
            joint_fraction,
            (SMALL, "client"),
            (SMALL[::-1] * 77, "provider"),
            bits=bits,
        )
        for bits in (8, 18)
    ),
    append: (
        Case(
            "into a cache of plain shares",
            (
                Call(
                    append,
                    (
                        Given(_fixed((HEADS, POSITIONS, DEPTH), 2.0), "arith"),
                        _rows(2, 1),
                        Given(np.array(1), "public"),
                    ),
                ),
            ),
        ),
        Case(
            "twice, the second over the first", (_append(EMPTY, 3, 0, 1), _append(Made(0), 2, 2, 2))
        ),
    ),
    lengthen: (
        Case(
            "a cache with rows",
            (_append(EMPTY, 2, 1, 1), Call(lengthen, (Made(0),), {"positions": 6})),
        ),
    ),
    times_rows: (
        _one(
            "two tiles",
            times_rows,
            (_random((HEADS, 1, DEPTH), -(2**63), 2**63 - 1), "arith"),
            (CACHE, "arith"),
            tile=2,
        ),
        _decoding(times_rows, DEPTH),
        _of_known_rows(times_rows, DEPTH),
        _of_several(times_rows, DEPTH),
    ),
    times_columns: (
        _one(
            "two tiles",
            times_columns,
            (_random((HEADS, 1, 3), -(2**63), 2**63 - 1), "arith"),
            (CACHE, "arith"),
            tile=2,
        ),
        _decoding(times_columns, POSITIONS),
        _of_known_rows(times_columns, POSITIONS),
        _of_several(times_columns, 2 * POSITIONS),
    ),
    known_rows: (
        _one("integers", known_rows, (CACHE, "provider")),
        Case("fixed point", (Call(known_rows, (KNOWN,)),)),
    ),
    known_factors: (
        _one("integers", known_factors, (_random((2, 3), -(2**63), 2**63 - 1), "client")),
        Case("fixed point", (Call(known_factors, (FACTORS,)),)),
    ),
    times_factors: (
        _one(
            "integers",
            times_factors,
            (_random((2, 3), -(2**63), 2**63 - 1), "arith"),
            (_random((2, 2), -(2**63), 2**63 - 1, 1), "client"),
            uses=1,
        ),
        _of_known_factors(),
    ),
    select: (
        _one(
            "words",
            select,
            (_random((3, 5), -(2**63), 2**63 - 1), "arith"),
            (np.array([4, 0, 2]), "client"),
        ),
        _one(
            "three bytes in a narrow ring",
            select,
            (_random((2, 4, 3), -128, 128), "provider"),
            (np.array([1, 3]), "client"),
            bits=8,
        ),
        _one(
            "xor shares",
            select,
            (np.array([[5, 2**16 - 1], [0, 9]]), "bool16"),
            (np.array([1, 0]), "client"),
        ),
        _one(
            "one entry, one message",
            select,
            (_random((2, 1), -9, 9), "arith"),
            (np.array([0, 0]), "client"),
        ),
    ),
    nonzero: (_one("words", nonzero, (np.array([0, 1, -1, -(2**63), 2**32, 0]), "arith")),),
    require: (
        _one(
            "in range",
            require,
            (np.array(False), "public"),
            (np.array([0, 0]), "arith"),
            (INTEGERS, "arith"),
            sites=("first", "second"),
        ),
    ),
    maximum: (
        _one("ties", maximum, (np.array([[1, 1, -2], [-2, 0, 1]]), "arith"), bits=3),
        _one("two levels, fixed point", maximum, (_fixed((1, 11), 8.0), "arith"), bits=23),
        _one("narrow", maximum, (np.array([[-5, 9, 3]]), "arith20"), bits=6),
    ),
    argmax: (
        _one("ties", argmax, (np.array([[1, -1], [0, 0]]), "arith"), bits=4),
        _one("five numbers", argmax, (_random((1, 5), -(2**20), 2**20), "arith"), bits=22),
    ),
    clip: (
        _one(
            "33 bits",
            clip,
            (np.array([[-9, 3], [9, -3], [5, 1]]), "arith33"),
            (np.array([True, True, False]), "client"),
            bound=5,
        ),
        _one(
            "whole words, edges",
            clip,
            (np.array([[2**63 - 6, -(2**63) + 5, -5, 5]]), "arith"),
            (np.array([True]), "provider"),
            bound=5,
        ),
    ),
    cut_exponential: (
        _one(
            "fixed point",
            cut_exponential,
            *[(np.array([0, -0.5, -3.25, -13.4, -13.5, -20], FLOAT), "arith")] * 2,
            bits=26,
            shift=0,
            error=1 << 20,
        ),
        _one(
            "narrow shares",
            cut_exponential,
            (EXPONENTS, "arith30"),
            (EXPONENTS >> 8, "arith22"),
            bits=22,
            drop=8,
            shift=0,
            error=1 << 20,
        ),
    ),
    reject: (
        _one(
            "p near q",
            reject,
            ([24, 25], f"arith{TINY.chosen}"),
            ([100, 100], "arith"),
            ([4, 4], "client"),
            ([0, 7], "arith"),
            widths=TINY,
        ),
        _one(
            "the client's randomness",
            reject,
            ([24, 25], f"arith{TINY.chosen}"),
            ([100, 100], "arith"),
            ([4, 4], "client"),
            ([0, 7], "client"),
            widths=TINY,
        ),
        _one(
            "real widths",
            reject,
            ([2**17, 2**18, 3], f"arith{REAL.chosen}"),
            ([2**20 - 1, 2**18 + 9, 2**19], "arith"),
            ([2**15, 2**16, 1], "client"),
            ([2**15, 2**16 - 1, 0], "arith"),
            widths=REAL,
        ),
    ),
    residual: (
        _one("tiny", residual, ([[5], [2]], "arith"), ([[0], [1]], "client"), widths=TINY),
        _one(
            "real widths",
            residual,
            ([[2**18, 70_000, 1, 0]], "arith"),
            ([[30_000, 20_000, 15_000, 536]], "client"),
            widths=REAL,
        ),
    ),
    locate: (
        _one("tiny", locate, ([[3, 1], [1, 3]], "arith"), ([31, 0], "arith"), draw=5, total=4),
        _one(
            "real widths",
            locate,
            ([[2**18, 0, 70_000, 1]], "arith"),
            ([2**19], "arith"),
            draw=20,
            total=REAL.total,
        ),
    ),
}

CASES = {op.name: cases for op, cases in _CASES.items()}
