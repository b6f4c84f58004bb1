"""The only importer of JAX internals; they move between releases.

Gives the rest four things: a primitive from a plain function, a flat jaxpr of a function (calls
inlined, so that an op inside `jax.jit` is seen), a walk over a jaxpr's equations, and the digest of
a jaxpr.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.extend.core as jex
import numpy as np
from jax.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, ShapedArray, Var, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var"]

T = TypeVar("T")

# Calls whose body is inlined; anything else that holds a jaxpr (scan, while, cond) stays whole.
_INLINED = {
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


Shapes = Callable[..., Sequence[jax.ShapeDtypeStruct]]


def make_primitive(name: str, reference: Callable[..., Any], shapes: Shapes | None = None) -> Any:
    """Make a JAX primitive that means `reference(*arrays, **static)`; several results allowed.
    `shapes(*shapes, **static)`: of its results; by default the reference is traced for them.
    """
    as_list = _returning_list(reference)
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(as_list)

    @functools.lru_cache(maxsize=1 << 12)
    def results(
        avals: tuple[Any, ...], static: tuple[tuple[str, Any], ...], integers: Any
    ) -> list[Any]:
        given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals]
        if shapes is not None:
            return list(shapes(*given, **dict(static)))
        of_results: list[Any] = jax.eval_shape(lambda *xs: as_list(*xs, **dict(static)), *given)
        return of_results

    def abstract(*avals: Any, **static: Any) -> list[ShapedArray]:
        given = tuple((a.shape, a.dtype) for a in avals)
        out = results(given, tuple(static.items()), widest_integers())
        return [ShapedArray(s.shape, s.dtype) for s in out]

    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(as_list, multiple_results=True))
    return primitive


def widest_integers() -> Any:
    """Return JAX's widest integer dtype, a setting on which the results of tracing depend."""
    return jax.dtypes.canonicalize_dtype(np.int64)


def _returning_list(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    def as_list(*args: Any, **static: Any) -> list[Any]:
        out = fn(*args, **static)
        return list(out) if isinstance(out, tuple | list) else [out]

    return as_list


def make_differentiable(primitive: Any, reference: Callable[..., Any]) -> None:
    """Give a primitive the derivative and the batching of `reference`."""
    as_list = _returning_list(reference)

    def derivative(primals: Any, tangents: Any, **static: Any) -> Any:
        whole = tuple(ad.instantiate_zeros(t) for t in tangents)
        return jax.jvp(functools.partial(as_list, **static), primals, whole)

    def batched(args: Any, dims: Any, **static: Any) -> Any:
        in_axes = [None if d is batching.not_mapped else d for d in dims]
        out = jax.vmap(functools.partial(as_list, **static), in_axes)(*args)
        return out, [0] * len(out)

    ad.primitive_jvps[primitive] = derivative
    batching.primitive_batchers[primitive] = batched


def flat_jaxpr(fn: Callable[..., Any], shapes: Sequence[Any]) -> ClosedJaxpr:
    """Return the jaxpr of `fn(*arrays) -> list of arrays` with calls inlined."""
    return _inline(jax.make_jaxpr(fn)(*shapes))


def _inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    known: dict[int, ClosedJaxpr] = {}  # by the id of a body that `closed` holds

    def body_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
        if eqn.primitive.name not in _INLINED:
            return None
        body = eqn.params[_INLINED[eqn.primitive.name]]
        if id(body) not in known:
            known[id(body)] = _inline(ClosedJaxpr(body, ()) if isinstance(body, Jaxpr) else body)
        return known[id(body)]

    return expanded(closed, body_of)


def expanded(closed: ClosedJaxpr, body_of: Callable[[JaxprEqn], ClosedJaxpr | None]) -> ClosedJaxpr:
    """Return `closed` with each equation that `body_of` gives a body replaced by that body's
    equations, in the equation's name scope. Nothing is traced again.
    """
    bodies = [(eqn, body_of(eqn)) for eqn in closed.jaxpr.eqns]
    if not any(body is not None for _, body in bodies):
        return closed
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    eqns: list[JaxprEqn] = []
    stands_for: dict[Var, Var | Literal] = {}  # results of what is replaced
    for eqn, body in bodies:
        invars = _renamed(eqn.invars, stands_for)
        if body is None:
            eqns.append(eqn.replace(invars=invars))
            continue
        consts.update(zip(body.jaxpr.constvars, body.consts, strict=True))
        inside = dict(zip(body.jaxpr.invars, invars, strict=True))
        for inner in body.jaxpr.eqns:
            outvars = [Var("", v.aval) for v in inner.outvars]
            scope = eqn.source_info.name_stack + inner.source_info.name_stack
            eqns.append(
                inner.replace(
                    invars=_renamed(inner.invars, inside),
                    outvars=outvars,
                    source_info=inner.source_info.replace(name_stack=scope),
                )
            )
            inside.update(zip(inner.outvars, outvars, strict=True))
        results = _renamed(body.jaxpr.outvars, inside)
        given, wanted = ([shape_of(v) for v in atoms] for atoms in (results, eqn.outvars))
        assert given == wanted, f"{eqn.primitive.name} gives {wanted}, what replaces it {given}"
        stands_for.update(zip(eqn.outvars, results, strict=True))
    outvars = _renamed(closed.jaxpr.outvars, stands_for)
    jaxpr = Jaxpr(list(consts), closed.jaxpr.invars, outvars, eqns)
    return ClosedJaxpr(jaxpr, list(consts.values()))


def _renamed(atoms: Iterable[Any], stands_for: Mapping[Var, Var | Literal]) -> list[Any]:
    return [atom if isinstance(atom, Literal) else stands_for.get(atom, atom) for atom in atoms]


def scope_of(eqn: JaxprEqn) -> str:
    """Return the `jax.named_scope` that an equation was written in, "" for none."""
    return str(eqn.source_info.name_stack)


def shape_of(atom: Var | Literal) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a variable or a literal."""
    aval = atom.aval
    assert isinstance(aval, ShapedArray)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


class Environment(Generic[T]):
    """The values of a program's variables; `constant(array)` makes the value of a literal."""

    def __init__(self, constant: Callable[[Any], T]) -> None:
        self.values: dict[Var, T] = {}
        self._constant = constant

    def read(self, atoms: Iterable[Var | Literal]) -> list[T]:
        return [
            self._constant(atom.val) if isinstance(atom, Literal) else self.values[atom]
            for atom in atoms
        ]

    def bind(self, variables: Sequence[Var], values: Sequence[T]) -> None:
        self.values.update(zip(variables, values, strict=True))


def walk(
    closed: ClosedJaxpr,
    inputs: Sequence[T],
    constant: Callable[[Any], T],
    apply: Callable[[JaxprEqn, list[T]], Sequence[T]],
) -> Environment[T]:
    """Return the environment after the equations of `closed`, each of which gives apply(eqn,
    operands); literals and constants stand for constant(array).
    """
    env = Environment(constant)
    env.bind(closed.jaxpr.constvars, [constant(x) for x in closed.consts])
    env.bind(closed.jaxpr.invars, inputs)
    for eqn in closed.jaxpr.eqns:
        env.bind(eqn.outvars, apply(eqn, env.read(eqn.invars)))
    return env


def digest_of(closed: ClosedJaxpr) -> str:
    """Return SHA-256 (hex) of what `closed` computes, equal in every process."""
    parts: list[bytes] = []
    _enter(parts.append, closed.jaxpr)
    _enter(parts.append, closed.consts)
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _enter(put: Callable[[bytes], None], x: Any) -> None:
    """Pass `x`, which may be anything in a jaxpr, to `put` as bytes. (A jaxpr's text says as much,
    but takes ten times as long to write.)
    """
    if isinstance(x, list | tuple):
        put(b"(%d " % len(x))
        for item in x:
            _enter(put, item)
    elif isinstance(x, ClosedJaxpr):
        _enter(put, x.jaxpr)
        _enter(put, x.consts)
    elif isinstance(x, Jaxpr):
        _enter_jaxpr(put, x)
    elif isinstance(x, np.ndarray | jax.Array):
        array = np.asarray(x)
        put(f"{array.shape} {array.dtype.str} ".encode() + array.tobytes())
    else:
        put(f"{x} ".encode())


def _enter_jaxpr(put: Callable[[bytes], None], x: Jaxpr) -> None:
    # Atoms are nearly all that there is, so they are written out here: pairs of a number and a
    # type, as `_enter` would write them.
    numbers: dict[Any, int] = {}

    def atoms(some: Sequence[Var | Literal]) -> None:
        for atom in some:
            if isinstance(atom, Literal):
                put(b"(2 " + _type_of(atom.aval))
                _enter(put, atom.val)
            else:
                number = numbers.setdefault(atom, len(numbers))
                put(b"(2 %d " % number + _type_of(atom.aval))

    inputs = [*x.constvars, *x.invars]
    put(b"(%d " % len(inputs))
    atoms(inputs)
    for eqn in x.eqns:
        put(f"({2 + len(eqn.invars)} {eqn.primitive.name} ".encode())
        atoms(eqn.invars)
        _enter(put, sorted(eqn.params.items()))
        put(b"(%d " % len(eqn.outvars))
        atoms(eqn.outvars)
    put(b"(%d " % len(x.outvars))
    atoms(x.outvars)


@functools.lru_cache(maxsize=4096)
def _type_of(aval: Any) -> bytes:
    return f"{aval} ".encode()


def as_function(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Return a function of arrays that evaluates `closed`."""
    function: Callable[..., list[Any]] = jex.jaxpr_as_fun(closed)
    return function


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs inside an equation's parameters (bodies of scans, loops, branches)."""
    return list(jaxprs_in_params(eqn.params))
