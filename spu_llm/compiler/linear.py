"""Joint work without a message: linear equations, by each party on its own words.

Additive shares add up, move and multiply with public whole numbers share by share; xor-shared bits
move. Such equations need no SPU and send nothing. Narrow shares stay narrow: the result of several
has the bits of the narrowest, and a product one more for every factor of two.

A float share times a public whole number is exact, so its fraction bits stay where they are; any
other factor needs a truncation and is left to SPU or to an op (`protocols.arithmetic.product`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spu_llm.core._jax import ClosedJaxpr, JaxprEqn, Literal, Var, shape_of, walk
from spu_llm.core.values import (
    CLIENT,
    Arith,
    Bool,
    Public,
    Value,
    as_words,
    encode,
    frac_bits_of,
    low_bits,
    public,
)


def _slice(x: Any, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    steps = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _corner(starts: Sequence[Any], size: Sequence[int], within: Sequence[int]) -> Any:
    """Slices of `size` from `starts`, moved inside as JAX does."""
    first = [min(max(int(s), 0), w - n) for s, n, w in zip(starts, size, within, strict=True)]
    return tuple(slice(f, f + n) for f, n in zip(first, size, strict=True))


def _update(x: Any, rows: Any, *starts: Any) -> Any:
    out = np.array(x)
    out[_corner(starts, rows.shape, x.shape)] = rows
    return out


def _broadcast(x: Any, shape: Any, broadcast_dimensions: Any) -> Any:
    aligned = [1] * len(shape)
    for size, axis in zip(x.shape, broadcast_dimensions, strict=True):
        aligned[axis] = size
    return np.broadcast_to(x.reshape(aligned), shape)


def _split(x: Any, sizes: Any, axis: int) -> list[Any]:
    return np.split(x, np.cumsum(sizes)[:-1], axis=axis)


# What moves words without looking at them. Operands from this position on are public and plain.
_MOVES: Mapping[str, Callable[..., Any]] = {
    "broadcast_in_dim": lambda x, shape, broadcast_dimensions, **_: _broadcast(
        x, shape, broadcast_dimensions
    ),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, axis=dimension),
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "dynamic_slice": lambda x, *starts, slice_sizes: x[_corner(starts, slice_sizes, x.shape)],
    "dynamic_update_slice": _update,
    "expand_dims": lambda x, dimensions: np.expand_dims(x, dimensions),
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "rev": lambda x, dimensions: np.flip(x, dimensions),
    "select_n": lambda which, *cases: (
        np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)
    ),
    "slice": _slice,
    "split": _split,
    "squeeze": lambda x, dimensions: np.squeeze(x, dimensions),
    "stop_gradient": lambda x: x,
    "transpose": lambda x, permutation: np.transpose(x, permutation),
}
_PLAIN: Mapping[str, slice] = {
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    "select_n": slice(0, 1),
}
# What computes with additive shares.
_SUMS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "cumsum": lambda x, axis, reverse: (
        np.flip(np.cumsum(np.flip(x, axis), axis), axis) if reverse else np.cumsum(x, axis)
    ),
    "neg": np.negative,
    "reduce_sum": lambda x, axes: x.sum(axis=tuple(axes), dtype=np.uint64),
    "sub": np.subtract,
}


def is_local(
    eqn: JaxprEqn, is_public: Callable[[Any], bool], consts: Mapping[Var, Any]
) -> bool:
    """Whether shares can go through `eqn` on their own. `is_public` tells of its operands; `consts`
    holds those that the program contains.
    """
    name, operands = eqn.primitive.name, eqn.invars
    plain = operands[_PLAIN[name]] if name in _PLAIN else []
    if name in _MOVES:
        return all(is_public(v) for v in plain)
    kinds = {np.dtype(shape_of(v).dtype).kind for v in operands if not isinstance(v, Literal)}
    if "b" in kinds:
        return False
    if name in _SUMS:
        return True
    if name == "convert_element_type":
        kind = np.dtype(eqn.params["new_dtype"]).kind
        return kind == "f" or (kind in "iu" and "f" not in kinds)
    if name == "mul":
        factors = [v for v in operands if is_public(v)]
        if len(factors) != 1:
            return False
        return kinds <= {"i", "u"} or _is_whole(factors[0], consts)
    return False


def _is_whole(atom: Any, consts: Mapping[Var, Any]) -> bool:
    value = atom.val if isinstance(atom, Literal) else consts.get(atom)
    if value is None:
        return False
    numbers = np.asarray(value, np.float64)
    return bool(np.all(np.abs(numbers) < 2.0**63) and np.all(numbers == np.round(numbers)))


def evaluate(
    closed: ClosedJaxpr, inputs: Sequence[Value], rank: int, frac_bits: int
) -> list[Value]:
    """The outputs of `closed`, all of whose equations are local, at the party of this rank.

    TypeError for a float in boolean shares, which cannot be added up.
    """

    def apply(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        return _apply(eqn, operands, rank, frac_bits)

    return walk(closed, inputs, public, apply).read(closed.jaxpr.outvars)


def _apply(eqn: JaxprEqn, operands: list[Value], rank: int, frac_bits: int) -> list[Value]:
    name = eqn.primitive.name
    dtypes = [np.dtype(shape_of(v).dtype) for v in eqn.outvars]
    plain = range(*_PLAIN.get(name, slice(0, 0)).indices(len(operands)))
    shares = [v for i, v in enumerate(operands) if i not in plain]

    def call(words_of: Callable[[Value, int, int], np.ndarray]) -> list[np.ndarray]:
        arrays = [
            _plain(v) if i in plain else words_of(v, rank, frac_bits)
            for i, v in enumerate(operands)
        ]
        out = (_MOVES.get(name) or _SUMS[name])(*arrays, **eqn.params)
        return out if isinstance(out, list) else [out]

    # What one party knows of bits is its share of them as xor-shared ones.
    known_bits = all(not isinstance(v, Arith) and v.dtype == np.bool_ for v in shares)
    if name in _MOVES and (known_bits or any(isinstance(v, Bool) for v in shares)):
        widths = {v.bits for v in shares if isinstance(v, Bool)} or {1}
        if len(widths) != 1 or any(isinstance(v, Arith) for v in shares):
            raise TypeError(f"`{name}` of shares of different forms")
        (width,) = widths
        return [
            Bool(m, d, frac_bits_of(d, frac_bits), width)
            for m, d in zip(call(_bool_words), dtypes, strict=True)
        ]

    bits = min((v.bits for v in shares if isinstance(v, Arith)), default=64)
    if name == "mul":
        (factor,) = [v for v in operands if isinstance(v, Public)]
        (share,) = [v for v in operands if not isinstance(v, Public)]
        whole = as_words(np.asarray(factor.value).astype(np.int64))
        made = [arith_words(share, rank, frac_bits) * whole]
        bits = min(64, bits + _factors_of_two(whole))
    elif name == "convert_element_type":
        (x,) = operands
        shift = frac_bits_of(dtypes[0], frac_bits) - frac_bits_of(x.dtype, frac_bits)
        made = [arith_words(x, rank, frac_bits) << np.uint64(shift)]
        bits = min(64, bits + shift)
    else:
        made = call(arith_words)
    return [
        Arith(low_bits(np.asarray(m), bits), d, frac_bits_of(d, frac_bits), bits)
        for m, d in zip(made, dtypes, strict=True)
    ]


def _plain(value: Value) -> np.ndarray:
    assert isinstance(value, Public)
    return value.value


def _factors_of_two(factors: np.ndarray) -> int:
    """How many low bits are zero in every public factor: a narrow share's product has that many
    bits more.
    """
    low = int(np.bitwise_or.reduce(factors, axis=None)) or 1
    return (low & -low).bit_length() - 1


def arith_words(value: Value, rank: int, frac_bits: int) -> np.ndarray:
    """This party's additive share of a value that one party knows, or both, or that is shared so.

    Only its holder (the client, for a public value) has a share other than zero.
    """
    if isinstance(value, Arith):
        return value.words
    if isinstance(value, Bool):
        raise TypeError("a number in boolean shares")
    holder = CLIENT if isinstance(value, Public) else value.owner
    if rank != holder:
        return np.zeros(value.shape, np.uint64)
    assert value.value is not None
    return encode(value.value, frac_bits_of(value.dtype, frac_bits))


def _bool_words(value: Value, rank: int, frac_bits: int) -> np.ndarray:
    return value.words if isinstance(value, Bool) else arith_words(value, rank, frac_bits)


def has_numbers_in_bits(values: Sequence[Value]) -> bool:
    """Whether one of the values is a number in boolean shares, which SPU may return."""
    return any(isinstance(v, Bool) and v.dtype != np.bool_ for v in values)


