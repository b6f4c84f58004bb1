"""Cases of `bench op`: ops, and functions made of ops, each with test data of any size, our way and
SPU's own ways to the result.

A way is a JAX function of the inputs; evaluated in plaintext, it gives the result to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from protocols.arithmetic.field_product import field_multiply
from protocols.arithmetic.joint import joint_bits, joint_fraction, joint_words
from protocols.arithmetic.product import linear, matmul, multiply, square
from protocols.arithmetic.truncate import How, truncate
from protocols.bits.compare import sign
from protocols.bits.convert import to_arith
from protocols.bits.logic import and_bits, prefix_or
from protocols.bits.mux import mux
from protocols.functions import activations, norms, reciprocals, softmax
from protocols.functions.argmax import argmax
from protocols.functions.maximum import maximum
from protocols.functions.rotary import rotate
from protocols.ot.select import select
from spu_llm.core.errors import InputError
from spu_llm.core.settings import SpuConfig
from spu_llm.core.values import Owner

Way = Callable[..., Any]
Make = Callable[[np.random.Generator, int], np.ndarray]  # test data of a size

FRAC_BITS = SpuConfig().frac_bits
ELEMENTWISE = 1_000_000  # the largest size of an op on single values
_SIZES = (1, 1000, 10_000)
_MORE_SIZES = (*_SIZES, 100_000)
_M, _K, _N = 8, 64, 64  # of one matrix product
WIDTH = 256  # of the provider's matrix
TABLES = 8  # rows of a selection
PREFIX = 8  # bits of a prefix-or
FRACTION_BITS = 16  # of a random fraction; SPU takes a constant below 2^-16 for zero
_ROW_BITS = 24  # of numbers whose largest is looked for
_SHIFT = 18  # the fraction bits of a fixed-point product
_EPSILON = 1e-5  # of norms
_SCORES = 64  # a row of a softmax
_HEADS, _HEAD = 4, 64  # of a row that is turned, and the width of each
_RANGE = 2.0**-4, 2.0**6  # of reciprocals
_NOISE = 128  # units that masks' noise may add to a product with columns of length 16
_EXACT_BITS = 10  # fraction bits of test data: products of two fit the ring exactly


@dataclass(frozen=True)
class Input:
    """Test data that both parties know, and the form in which the op takes it."""

    plain: np.ndarray
    owner: Owner = Owner.JOINT
    boolean: bool = False


Inputs = Callable[[np.random.Generator, int], Sequence[Input]]


@dataclass(frozen=True)
class OpCase:
    """One op to measure.

    bits, slack: integers may differ from plaintext by `slack` mod 2^bits; floats by `slack` units,
        and two more for rounding.
    error: for an approximation, floats may differ by this much (relative to the value where it is
        larger than one), and SPU's by any amount; the largest differences are reported. 0: the op
        is no approximation.
    """

    name: str
    does: str
    unit: str
    inputs: Inputs
    ours: Way
    stock: Mapping[str, Way]
    sizes: tuple[int, ...] = _SIZES
    largest: int = ELEMENTWISE
    bits: int = 64
    slack: int = 0
    error: float = 0.0


# ---- test data


def integers(rng: np.random.Generator, bits: int, *shape: int) -> np.ndarray:
    """Draw int64 in [-2^(bits-1), 2^(bits-1)); where there is room, both ends, -1, 0 and 1 are
    among them.
    """
    half = 1 << (bits - 1)
    x = rng.integers(-half, half - 1, shape, np.int64, endpoint=True)
    edges = np.array([-half, half - 1, 0, -1, 1], np.int64)
    if x.size > 2 * len(edges):
        x.reshape(-1)[: len(edges)] = edges
    return x


def fixed(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draw float32 of standard deviation 1; a product of any two of them is exact in the ring."""
    scale = 2.0**_EXACT_BITS
    return (np.round(rng.normal(size=shape) * scale) / scale).astype(np.float32)


def _words(bits: int) -> Make:
    return lambda rng, size: integers(rng, bits, size)


def _bits(*shape: int) -> Make:
    return lambda rng, size: rng.integers(0, 2, (size, *shape)).astype(np.bool_)


def _fixed(*shape: int, scale: float = 1) -> Make:
    return lambda rng, size: scale * fixed(rng, size, *shape)


def _positive(rng: np.random.Generator, size: int) -> np.ndarray:
    low, high = np.log2(_RANGE)
    x = 2.0 ** rng.uniform(low, high, size)
    scale = 2.0**FRAC_BITS / 64
    return (np.ceil(x * scale) / scale).clip(max=_RANGE[1] * 0.999).astype(np.float32)


def _shared(*parts: Make, boolean: bool = False) -> Inputs:
    """Return the inputs of an op that takes shared arrays, one made by each of `parts`."""
    return lambda rng, size: [Input(make(rng, size), boolean=boolean) for make in parts]


_ACTIVATIONS = _shared(_fixed(scale=3))


def _secrets(make: Make) -> Inputs:
    """Return the inputs of an op that takes one secret array of each party, both made by `make`."""
    owners = Owner.CLIENT, Owner.PROVIDER
    return lambda rng, size: [Input(make(rng, size), owner) for owner in owners]


def _rows(rng: np.random.Generator, size: int) -> Sequence[Input]:
    return [Input(integers(rng, _ROW_BITS, TABLES, size))]


def _tables(rng: np.random.Generator, size: int) -> Sequence[Input]:
    index = rng.integers(0, size, TABLES, np.int64)
    return Input(integers(rng, 64, TABLES, size)), Input(index, Owner.CLIENT)


def _layer(rng: np.random.Generator, size: int) -> Sequence[Input]:
    # One matrix for all sizes: its prepared masks serve them all.
    w = fixed(np.random.default_rng(0), WIDTH, WIDTH)
    return Input(fixed(rng, size, WIDTH)), Input(w, Owner.PROVIDER)


# ---- SPU's own ways


def _chosen(table: Any, index: Any) -> Any:
    places = jnp.arange(table.shape[1], dtype=index.dtype)
    one_hot = (index[:, None] == places).astype(table.dtype)  # the client's plaintext work
    return (one_hot * table).sum(axis=1)


def _log_or(x: Any) -> Any:
    """Compute the prefix-or along the last axis in log2 n steps."""
    n, step = x.shape[-1], 1
    while step < n:
        before = jnp.zeros_like(x[..., :step])
        x = x | jnp.concatenate([before, x[..., :-step]], axis=-1)
        step *= 2
    return x


def _largest_so_far(x: Any) -> Any:
    # With 64 bits, differences from the smallest integer would overflow SPU's comparison.
    return jax.lax.cummax(x.astype(jnp.int32), axis=x.ndim - 1)


def _fraction(client: Any, provider: Any) -> Any:
    low = (client ^ provider) & ((1 << FRACTION_BITS) - 1)
    return low.astype(jnp.float32) * 2.0**-FRACTION_BITS


def _normed(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + _EPSILON)


def _turned(x: Any, turns: Any) -> Any:
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = turns[:, None, :, 0, 0], turns[:, None, :, 1, 0]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


# ---- the table


def _sign(bits: int, sizes: tuple[int, ...] = _SIZES) -> OpCase:
    return OpCase(
        f"sign-{bits}",
        f"x < 0 of {bits} bits",
        "values",
        _shared(_words(bits)),
        lambda x: sign(x, bits=bits),
        {"x < 0": lambda x: x < 0},
        sizes,
    )


def _truncation(how: How, bits: int, slack: int) -> OpCase:
    return OpCase(
        f"truncate-{how}",
        f"x / 2^{_SHIFT} of {bits} bits",
        "values",
        _shared(_words(bits), _fixed()),
        lambda x, f: truncate(x, shift=_SHIFT, how=how, bits=bits),
        {
            # The sum makes additive shares of the bits that a shift leaves behind.
            f"x >> {_SHIFT}, as a summand": lambda x, f: (x >> _SHIFT) + x,
            "of a fixed-point product": lambda x, f: f * np.float32(1.375),
        },
        slack=slack,
    )


def _selection(name: str, bits: int) -> OpCase:
    return OpCase(
        name,
        f"one of N words of {bits} bits, {TABLES} times",
        "entries",
        _tables,
        lambda table, index: select(table, index, bits=bits),
        {"one-hot product": _chosen},
        sizes=(16, 256, 4096),
        largest=1 << 18,
        bits=bits,
    )


def _of_rows(name: str, does: str, ours: Way, stock: Mapping[str, Way]) -> OpCase:
    return OpCase(
        name,
        f"{does} of N numbers of {_ROW_BITS} bits, {TABLES} times",
        "entries",
        _rows,
        ours,
        stock,
        sizes=(16, 256, 4096),
        largest=1 << 17,
    )


def _function(
    name: str,
    does: str,
    ours: Way,
    stock: Way,
    error: float,
    inputs: Inputs = _ACTIVATIONS,
    unit: str = "values",
    sizes: tuple[int, ...] = (64, 1024),
    largest: int = 1 << 16,
) -> OpCase:
    return OpCase(name, does, unit, inputs, ours, {"default": stock}, sizes, largest, error=error)


def _of_row(name: str, does: str, ours: Way, stock: Way, error: float, inputs: Inputs) -> OpCase:
    return _function(name, does, ours, stock, error, inputs, "rows", (1, 8, 64), 1 << 10)


def _rotation(name: str, owner: Owner, whose: str) -> OpCase:

    def inputs(rng: np.random.Generator, size: int) -> Sequence[Input]:
        angles = rng.uniform(-np.pi, np.pi, (size, _HEAD // 2))
        turns = np.stack([np.cos(angles), np.sin(angles)], axis=-1)[..., None]
        turns = turns.astype(np.float32)
        return [Input(fixed(rng, size, _HEADS, _HEAD)), Input(turns, owner)]

    def ours(x: Any, turns: Any) -> Any:
        return rotate(x, turns, hidden=owner is not Owner.PUBLIC)

    does = f"{_HEADS} heads of {_HEAD} turned by {whose} angles"
    return _of_row(name, does, ours, _turned, 4e-5, inputs)


_LOW, _HIGH = _RANGE
_CASES = [
    _sign(12),
    _sign(16),
    _sign(24, _MORE_SIZES),
    _sign(32),
    _sign(64),
    OpCase(
        "to-arith",
        "a bit as additive shares",
        "bits",
        _shared(_bits()),
        to_arith,
        # A bit stays one in SPU until arithmetic asks for more.
        {"3 * x": lambda x: 3 * x.astype(jnp.int64)},
        _MORE_SIZES,
    ),
    _truncation("unbiased", 62, slack=1),
    _truncation("local", 24, slack=1),
    _truncation("exact", 62, slack=0),
    OpCase(
        "multiply",
        "x * y mod 2^64",
        "values",
        _shared(_words(64), _words(64)),
        multiply,
        {"x * y": lambda x, y: x * y},
        _MORE_SIZES,
    ),
    OpCase(
        "square",
        "x * x mod 2^64",
        "values",
        _shared(_words(64)),
        square,
        {"x * x": lambda x: x * x},
        _MORE_SIZES,
    ),
    OpCase(
        "times",
        "x * y, fixed point",
        "values",
        _shared(_fixed(), _fixed()),
        partial(field_multiply, cuts=(4, 4)),
        {"x * y": lambda x, y: x * y},
    ),
    OpCase(
        "matmul",
        f"[{_M}, {_K}] @ [{_K}, {_N}], fixed point",
        "matrices",
        _shared(_fixed(_M, _K), _fixed(_K, _N)),
        matmul,
        {"x @ y": jnp.matmul},
        sizes=(1, 4, 16),
        largest=1 << 9,
    ),
    OpCase(
        "linear",
        f"[rows, {WIDTH}] @ the provider's [{WIDTH}, {WIDTH}], fixed point",
        "rows",
        _layer,
        lambda x, w: linear(x, w, label="bench"),
        {"x @ w": jnp.matmul},
        sizes=(1, 8, 64),
        largest=1 << 12,
        slack=_NOISE,
    ),
    _selection("select", 64),
    _selection("select-narrow", 24),
    OpCase(
        "mux",
        "a bit times a word",
        "values",
        _shared(_bits(), _words(62)),
        mux,
        {"where(b, x, 0)": lambda b, x: jnp.where(b, x, 0), "b * x": lambda b, x: b * x},
    ),
    _of_rows(
        "maximum",
        "the largest",
        lambda x: maximum(x, bits=_ROW_BITS + 1),
        {"max": lambda x: jnp.max(x, axis=-1)},
    ),
    _of_rows(
        "argmax",
        "the index of the largest",
        lambda x: argmax(x, bits=_ROW_BITS + 1),
        {"argmax": lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32)},
    ),
    OpCase(
        "and-bits",
        "x & y of bits",
        "bits",
        _shared(_bits(), _bits()),
        and_bits,
        {"x & y": lambda x, y: x & y},
    ),
    OpCase(
        "and-words",
        "x & y of 64 bits",
        "words",
        _shared(_words(64), _words(64), boolean=True),
        and_bits,
        {"x & y": lambda x, y: x & y},
    ),
    OpCase(
        "prefix-or",
        f"x_0 | .. | x_i of {PREFIX} bits",
        "rows",
        _shared(_bits(PREFIX)),
        prefix_or,
        {"doubling steps": _log_or, "cummax": _largest_so_far},
    ),
    OpCase(
        "joint-bits",
        "random bits that neither party knows",
        "bits",
        _secrets(_bits()),
        joint_bits,
        {"x ^ y": lambda x, y: x ^ y},
    ),
    OpCase(
        "joint-words",
        "random words that neither party knows",
        "words",
        _secrets(_words(64)),
        joint_words,
        {"x + y": lambda x, y: x + y},
    ),
    OpCase(
        "joint-fraction",
        "random fractions that neither party knows",
        "values",
        _secrets(_words(63)),
        lambda x, y: joint_fraction(x, y, bits=FRACTION_BITS),
        {"low bits of x ^ y": _fraction},
    ),
    _function("relu", "ReLU", activations.relu, lambda x: jax.nn.relu(x), 1e-3),
    _function("gelu", "GELU (tanh form)", activations.gelu, lambda x: jax.nn.gelu(x), 3e-3),
    _function("silu", "SiLU", activations.silu, lambda x: jax.nn.silu(x), 1.1e-2),
    _function(
        "reciprocal",
        f"1 / x, {_LOW:g} <= x < {_HIGH:g}",
        lambda x: reciprocals.reciprocal(x, low=_LOW, high=_HIGH)[0],
        lambda x: 1 / x,
        3e-4,
        _shared(_positive),
        sizes=(1, 16, 256),
        largest=1 << 12,
    ),
    _function(
        "rsqrt",
        f"1 / sqrt(x), {_LOW:g} <= x < {_HIGH:g}",
        lambda x: reciprocals.rsqrt(x, low=_LOW, high=_HIGH)[0],
        lambda x: jax.lax.rsqrt(x),
        2e-4,
        _shared(_positive),
        sizes=(1, 16, 256),
        largest=1 << 12,
    ),
    _of_row(
        "rms-norm",
        f"x / sqrt(mean(x^2)), {WIDTH} wide",
        lambda x: norms.rms_norm(x, epsilon=_EPSILON)[0],
        _normed,
        1e-3,
        _shared(_fixed(WIDTH, scale=2)),
    ),
    _of_row(
        "softmax",
        f"softmax over {_SCORES}",
        lambda x: softmax.softmax_of_product(x * 2.0**FRAC_BITS),
        lambda x: jax.nn.softmax(x),
        4e-4,
        _shared(_fixed(_SCORES, scale=3)),
    ),
    _rotation("rotate", Owner.PUBLIC, "public"),
    _rotation("rotate-hidden", Owner.CLIENT, "the client's"),
]
OPS = {case.name: case for case in _CASES}
ALIASES = {"sign": "sign-24"}


def choose(names: Sequence[str], sizes: Sequence[int] | None) -> list[tuple[OpCase, list[int]]]:
    """Return the ops named by `names` ("all": all ops), each with its sizes.

    `sizes` None or empty: the sizes of each op's case. InputError for an unknown name, and for a
    size out of an op's range.
    """
    wanted = list(OPS) if list(names) == ["all"] else [ALIASES.get(name, name) for name in names]
    if unknown := [name for name in wanted if name not in OPS]:
        known = ", ".join([*OPS, *ALIASES])
        raise InputError(f"unknown op {unknown[0]!r}; choose from {known}, or all")
    chosen = []
    for case in (OPS[name] for name in dict.fromkeys(wanted)):
        for size in sizes or ():
            if not 1 <= size <= case.largest:
                raise InputError(
                    f"--size of {case.name} must be 1 to {case.largest} {case.unit}, found {size}"
                )
        chosen.append((case, list(dict.fromkeys(sizes or case.sizes))))
    return chosen


def wrong(result: np.ndarray, wanted: np.ndarray, bits: int, slack: int, error: float = 0.0) -> int:
    """Count the values of `found` that differ from `wanted` by more than is allowed.

    Integers may differ by `slack` mod 2^bits; fixed-point numbers by `slack` and two units of the
    ring, the rounding of a float32, and `error` as in `OpCase`.
    """
    if result.shape != wanted.shape:
        return wanted.size
    if result.dtype == np.bool_:
        return int(np.sum(result != wanted))
    if np.issubdtype(result.dtype, np.floating):
        allowed = (2 + slack) * 2.0**-FRAC_BITS + np.abs(wanted) * 2.0**-23
        allowed += error * np.maximum(1, np.abs(wanted)) if error else 0
        return int(np.sum(~(np.abs(result.astype(np.float64) - wanted) <= allowed)))
    difference = result.astype(np.int64).view(np.uint64) - wanted.astype(np.int64).view(np.uint64)
    spare = np.uint64(64 - bits)
    signed = (difference << spare).view(np.int64) >> spare.astype(np.int64)
    return int(np.sum(np.abs(signed) > slack))
