"""Joint work without a message: linear equations, by each party on its own words.

Additive shares add up, move and multiply with public whole numbers share by share; xor-shared bits
move. Such equations need no SPU and send nothing. Narrow shares stay narrow: the result of several
has the bits of the narrowest, and a product one more for every factor of two.

A float share times a public whole number is exact, so its fraction bits stay where they are; any
other factor needs a truncation and is left to SPU or to an op (`protocols.arithmetic.product`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from spu_llm.core._jax import ClosedJaxpr, JaxprEqn, Literal, Var, shape_of
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
    """Return slices of `size` from `starts`, moved inside `within` as JAX does."""
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


def _gather(x: Any, places: Any, dimension_numbers: Any, **_: Any) -> Any:
    (axis,) = dimension_numbers.collapsed_slice_dims
    return np.take(x, places[..., 0].astype(np.int64), axis=axis, mode="clip")


def _takes_along_an_axis(eqn: JaxprEqn) -> bool:
    """Return whether a gather is `jnp.take` along one axis, where places beyond the ends count as
    the ends.
    """
    (x, places), numbers = map(shape_of, eqn.invars), eqn.params["dimension_numbers"]
    axes, rest = numbers.collapsed_slice_dims, len(places.shape) - 1
    if len(axes) != 1 or axes != numbers.start_index_map or places.shape[-1] != 1:
        return False
    (axis,) = axes
    sizes = tuple(1 if i == axis else size for i, size in enumerate(x.shape))
    kept = tuple(i if i < axis else i + rest - 1 for i in range(len(x.shape)) if i != axis)
    whole = eqn.params["slice_sizes"] == sizes and numbers.offset_dims == kept
    return bool(whole and eqn.params["mode"] == GatherScatterMode.CLIP)


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
    "gather": _gather,
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
    "gather": slice(1, None),
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


def is_local(eqn: JaxprEqn, is_public: Callable[[Any], bool], consts: Mapping[Var, Any]) -> bool:
    """Return whether shares can go through `eqn` on their own. `is_public` tells whether an operand
    is public; `consts` holds the program's constants.
    """
    name, operands = eqn.primitive.name, eqn.invars
    plain = operands[_PLAIN[name]] if name in _PLAIN else []
    if name == "gather" and not _takes_along_an_axis(eqn):
        return False
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


class Equations:
    """Local equations, resolved once: what does not depend on values is looked up here and not at
    every call, of which a step of a model has thousands.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        """Give every variable of the program a slot, and constants their values."""
        program = closed.jaxpr
        self._slots: list[Value | None] = []
        slot_of: dict[Var, int] = {}

        def slot(atom: Var | Literal) -> int:
            if isinstance(atom, Literal):
                return self._new(public(atom.val))
            if atom not in slot_of:
                slot_of[atom] = self._new(None)
            return slot_of[atom]

        for variable, constant in zip(program.constvars, closed.consts, strict=True):
            slot_of[variable] = self._new(public(constant))
        self._inputs = [slot(v) for v in program.invars]
        self._steps = [
            (_resolved(eqn), [slot(v) for v in eqn.invars], [slot(v) for v in eqn.outvars])
            for eqn in program.eqns
        ]
        self._outputs = [slot(v) for v in program.outvars]

    def _new(self, value: Value | None) -> int:
        self._slots.append(value)
        return len(self._slots) - 1

    def evaluate(self, inputs: Sequence[Value], rank: int, frac_bits: int) -> list[Value]:
        """Return the outputs, at the party of this rank. TypeError for a float in boolean shares,
        which cannot be added up.
        """
        values: list[Any] = list(self._slots)
        for i, value in zip(self._inputs, inputs, strict=True):
            values[i] = value
        for apply, operands, results in self._steps:
            made = apply([values[i] for i in operands], rank, frac_bits)
            for i, value in zip(results, made, strict=True):
                values[i] = value
        return [values[i] for i in self._outputs]


_Apply = Callable[[list[Value], int, int], list[Value]]  # operands, rank, fraction bits of floats


def _resolved(eqn: JaxprEqn) -> _Apply:
    """Return a function that computes the results of this equation from its operands."""
    name = eqn.primitive.name
    dtypes = [np.dtype(shape_of(v).dtype) for v in eqn.outvars]
    results = [(dtype, dtype.kind == "f") for dtype in dtypes]
    if name == "mul":
        return functools.partial(_scaled, results[0])
    if name == "convert_element_type":
        return functools.partial(_converted, results[0])
    function = functools.partial(_MOVES.get(name) or _SUMS[name], **eqn.params)
    plain = range(*_PLAIN.get(name, slice(0, 0)).indices(len(eqn.invars)))
    return functools.partial(_moved if name in _MOVES else _summed, function, plain, results)


_Result = tuple[np.dtype, bool]  # and whether it is a float


def _moved(
    function: Callable[..., Any],
    plain: range,
    results: Sequence[_Result],
    operands: list[Value],
    rank: int,
    frac_bits: int,
) -> list[Value]:
    shares = [v for i, v in enumerate(operands) if i not in plain] if plain else operands
    if all(isinstance(v, Arith) for v in shares):
        return _summed(function, plain, results, operands, rank, frac_bits)
    # What one party knows of bits is its share of them as xor-shared ones.
    known_bits = all(not isinstance(v, Arith) and v.dtype == np.bool_ for v in shares)
    if not known_bits and not any(isinstance(v, Bool) for v in shares):
        return _summed(function, plain, results, operands, rank, frac_bits)
    widths = {v.bits for v in shares if isinstance(v, Bool)} or {1}
    if len(widths) != 1 or any(isinstance(v, Arith) for v in shares):
        raise TypeError("a move of shares of different forms")
    (width,) = widths
    made = function(
        *(
            _plain(v) if i in plain else _bool_words(v, rank, frac_bits)
            for i, v in enumerate(operands)
        )
    )
    return [
        Bool(m, dtype, frac_bits if is_float else 0, width)
        for m, (dtype, is_float) in zip(_listed(made), results, strict=True)
    ]


def _summed(
    function: Callable[..., Any],
    plain: range,
    results: Sequence[_Result],
    operands: list[Value],
    rank: int,
    frac_bits: int,
) -> list[Value]:
    arrays, bits = [], 64
    for i, v in enumerate(operands):
        if i in plain:
            arrays.append(_plain(v))
        elif isinstance(v, Arith):
            arrays.append(v.words)
            bits = min(bits, v.bits)
        else:
            arrays.append(arith_words(v, rank, frac_bits))
    return [
        Arith(low_bits(np.asarray(m), bits), dtype, frac_bits if is_float else 0, bits)
        for m, (dtype, is_float) in zip(_listed(function(*arrays)), results, strict=True)
    ]


def _scaled(result: _Result, operands: list[Value], rank: int, frac_bits: int) -> list[Value]:
    (factor,) = [v for v in operands if isinstance(v, Public)]
    (share,) = [v for v in operands if not isinstance(v, Public)]
    whole, bits = as_words(np.asarray(factor.value).astype(np.int64)), 64
    if isinstance(share, Arith) and share.bits < 64:
        bits = min(64, share.bits + _factors_of_two(whole))
    return _result(arith_words(share, rank, frac_bits) * whole, bits, result, frac_bits)


def _converted(result: _Result, operands: list[Value], rank: int, frac_bits: int) -> list[Value]:
    (x,) = operands
    words, bits = arith_words(x, rank, frac_bits), x.bits if isinstance(x, Arith) else 64
    shift = (frac_bits if result[1] else 0) - frac_bits_of(x.dtype, frac_bits)
    if shift:
        words, bits = words << np.uint64(shift), min(64, bits + shift)
    return _result(words, bits, result, frac_bits)


def _result(words: np.ndarray, bits: int, result: _Result, frac_bits: int) -> list[Value]:
    dtype, is_float = result
    return [Arith(low_bits(np.asarray(words), bits), dtype, frac_bits if is_float else 0, bits)]


def _listed(made: Any) -> list[np.ndarray]:
    return made if isinstance(made, list) else [made]


def _plain(value: Value) -> np.ndarray:
    assert isinstance(value, Public)
    return value.value


def _factors_of_two(factors: np.ndarray) -> int:
    """Return how many low bits are zero in every public factor: a narrow share's product has that
    many bits more.
    """
    low = int(np.bitwise_or.reduce(factors, axis=None)) or 1
    return (low & -low).bit_length() - 1


def arith_words(value: Value, rank: int, frac_bits: int) -> np.ndarray:
    """Return this party's additive share of a value that one or both parties know, or that is
    shared additively.

    Of a value that is not shared, the holder alone (the client, for a public value) has a share
    other than zero.
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
    """Return whether one of the values is a number in boolean shares, which SPU may return."""
    return any(isinstance(v, Bool) and v.dtype != np.bool_ for v in values)
