"""The only importer of JAX internals; they move between releases.

Gives the rest four things: a primitive from a plain function, a flat jaxpr of a function (calls
inlined, so that an op inside `jax.jit` is seen), a walk over a jaxpr's equations, and the digest of
a jaxpr.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import source_info_util
from jax.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, ShapedArray, Var, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

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


def make_primitive(name: str, reference: Callable[..., Any]) -> Any:
    """A JAX primitive that means `reference(*arrays, **static)`; several results allowed."""
    as_list = _returning_list(reference)
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(as_list)

    @functools.lru_cache(maxsize=1 << 12)
    def results(avals: tuple[Any, ...], static: tuple[tuple[str, Any], ...]) -> list[Any]:
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals]
        return jax.eval_shape(lambda *xs: as_list(*xs, **dict(static)), *shapes)

    def abstract(*avals: Any, **static: Any) -> list[ShapedArray]:
        # A program is traced again for every form that an approximation of it is given.
        out = results(tuple((a.shape, a.dtype) for a in avals), tuple(static.items()))
        return [ShapedArray(s.shape, s.dtype) for s in out]

    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(as_list, multiple_results=True))
    return primitive


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


def flat_jaxpr(fn: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> ClosedJaxpr:
    """The jaxpr of `fn(*arrays) -> list of arrays` with calls inlined."""
    return _inline(jax.make_jaxpr(fn)(*shapes))


def _inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    def body_of(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        if eqn.primitive.name not in _INLINED:
            return None
        body = eqn.params[_INLINED[eqn.primitive.name]]
        return as_function(_inline(ClosedJaxpr(body, ()) if isinstance(body, Jaxpr) else body))

    return expanded(closed, body_of)


def expanded(
    closed: ClosedJaxpr, form_of: Callable[[JaxprEqn], Callable[..., Any] | None]
) -> ClosedJaxpr:
    """`closed` with equations replaced by functions of their operands, where `form_of` gives one,
    and calls inside these inlined.
    """
    forms = {id(e): form for e in closed.jaxpr.eqns if (form := form_of(e)) is not None}
    if not forms:
        return closed

    def bind(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        with _same_scope(eqn):
            if id(eqn) in forms:
                return _returning_list(forms[id(eqn)])(*values)
            sub, params = eqn.primitive.get_bind_params(eqn.params)
            out = eqn.primitive.bind(*sub, *values, **params)
            return out if eqn.primitive.multiple_results else [out]

    def replay(*args: Any) -> list[Any]:
        return walk(closed, args, lambda x: x, bind).read(closed.jaxpr.outvars)

    return _inline(jax.make_jaxpr(replay)(*[shape_of(v) for v in closed.jaxpr.invars]))


def _same_scope(eqn: JaxprEqn) -> Any:
    """Equations traced inside get the name scope of `eqn` within the current one."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


def scope_of(eqn: JaxprEqn) -> str:
    """The `jax.named_scope` that an equation was written in, "" for none."""
    return str(eqn.source_info.name_stack)


def shape_of(atom: Var) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a variable."""
    aval = atom.aval
    assert isinstance(aval, ShapedArray)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


class Environment(Generic[T]):
    """What the variables of a program stand for; `constant(array)` is what literals do."""

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
    """The environment after the equations of `closed`, each of which gives apply(eqn, operands);
    literals and constants stand for constant(array).
    """
    env = Environment(constant)
    env.bind(closed.jaxpr.constvars, [constant(x) for x in closed.consts])
    env.bind(closed.jaxpr.invars, inputs)
    for eqn in closed.jaxpr.eqns:
        env.bind(eqn.outvars, apply(eqn, env.read(eqn.invars)))
    return env


def digest_of(closed: ClosedJaxpr) -> str:
    """SHA-256 (hex) of what `closed` computes, the same in every process."""
    content = hashlib.sha256()
    _enter(content.update, closed.jaxpr)
    _enter(content.update, closed.consts)
    return content.hexdigest()


def _enter(update: Callable[[bytes], None], x: Any) -> None:
    """Whatever stands in a jaxpr. (Its text says as much, but takes ten times as long to write.)"""
    if isinstance(x, ClosedJaxpr):
        _enter(update, x.jaxpr)
        _enter(update, x.consts)
    elif isinstance(x, Jaxpr):
        numbers: dict[Any, int] = {}

        def atom(v: Var | Literal) -> Any:
            if isinstance(v, Literal):
                return str(v.aval), v.val
            return numbers.setdefault(v, len(numbers)), str(v.aval)

        _enter(update, [atom(v) for v in (*x.constvars, *x.invars)])
        for eqn in x.eqns:
            _enter(update, [eqn.primitive.name, *map(atom, eqn.invars), sorted(eqn.params.items())])
            _enter(update, [atom(v) for v in eqn.outvars])
        _enter(update, [atom(v) for v in x.outvars])
    elif isinstance(x, np.ndarray | jax.Array):
        array = np.asarray(x)
        update(f"{array.shape} {array.dtype.str} ".encode() + array.tobytes())
    elif isinstance(x, list | tuple):
        update(b"(%d " % len(x))
        for item in x:
            _enter(update, item)
    else:
        update(f"{x} ".encode())


def as_function(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """A function of arrays that evaluates `closed`."""
    return jex.jaxpr_as_fun(closed)


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs inside an equation's parameters (bodies of scans, loops, branches)."""
    return list(jaxprs_in_params(eqn.params))
