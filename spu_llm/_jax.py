"""The only importer of JAX internals; they move between releases.

Gives the rest three things: a primitive from a plain function, a flat jaxpr of a function (calls
inlined, so that an op inside `jax.jit` is seen), and evaluation of a piece of a jaxpr.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, ShapedArray, Var, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

__all__ = [
    "ClosedJaxpr",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Var",
    "as_function",
    "flat_jaxpr",
    "make_differentiable",
    "make_primitive",
    "shape_of",
    "sub_jaxprs",
]

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


# The platform that SPU's compiler lowers for.
_SPU_PLATFORM = "interpreter"


def make_primitive(
    name: str, reference: Callable[..., Any], spu_form: Callable[..., Any] | None = None
) -> Any:
    """A JAX primitive that means `reference(*arrays, **static)`; several results allowed.

    With `spu_form` it means that function instead when SPU compiles it.
    """

    as_list = _returning_list(reference)
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(as_list)

    def abstract(*avals: Any, **static: Any) -> list[ShapedArray]:
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        out = jax.eval_shape(lambda *xs: as_list(*xs, **static), *shapes)
        return [ShapedArray(s.shape, s.dtype) for s in out]

    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(as_list, multiple_results=True))
    if spu_form is not None:
        rule = mlir.lower_fun(_returning_list(spu_form), multiple_results=True)
        # `register_lowering` knows no platform that JAX has no backend for.
        mlir._platform_specific_lowerings[_SPU_PLATFORM][primitive] = rule
    return primitive


def _returning_list(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    def as_list(*args: Any, **static: Any) -> list[Any]:
        out = fn(*args, **static)
        return list(out) if isinstance(out, tuple | list) else [out]

    return as_list


def make_differentiable(primitive: Any, reference: Callable[..., Any]) -> None:
    """Give a one-result elementwise primitive the derivative and batching of `reference`."""
    ad.primitive_jvps[primitive] = lambda primals, tangents, **static: _list_of_pairs(
        jax.jvp(functools.partial(reference, **static), primals, _materialise(primals, tangents))
    )
    batching.primitive_batchers[primitive] = lambda args, dims, **static: (
        primitive.bind(*args, **static),
        dims,
    )


def _list_of_pairs(pair: tuple[Any, Any]) -> tuple[list[Any], list[Any]]:
    return [pair[0]], [pair[1]]


def _materialise(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(ad.instantiate_zeros(t) for _, t in zip(primals, tangents, strict=True))


def flat_jaxpr(fn: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> ClosedJaxpr:
    """The jaxpr of `fn(*arrays) -> list of arrays` with calls inlined."""
    return _inline(jax.make_jaxpr(fn)(*shapes))


def _inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    if not any(e.primitive.name in _INLINED for e in closed.jaxpr.eqns):
        return closed

    def replay(*args: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        env: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Var | Literal) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            values = [read(v) for v in eqn.invars]
            if eqn.primitive.name in _INLINED:
                body = eqn.params[_INLINED[eqn.primitive.name]]
                if isinstance(body, Jaxpr):
                    body = ClosedJaxpr(body, ())
                out = as_function(_inline(body))(*values)
            else:
                sub, params = eqn.primitive.get_bind_params(eqn.params)
                out = eqn.primitive.bind(*sub, *values, **params)
                if not eqn.primitive.multiple_results:
                    out = [out]
            env.update(zip(eqn.outvars, out, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return jax.make_jaxpr(replay)(*[shape_of(v) for v in closed.jaxpr.invars])


def shape_of(atom: Var) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a variable."""
    aval = atom.aval
    assert isinstance(aval, ShapedArray)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def as_function(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """A function of arrays that evaluates `closed`."""
    return jex.jaxpr_as_fun(closed)


def sub_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs inside an equation's parameters (bodies of scans, loops, branches)."""
    return [j.jaxpr if isinstance(j, ClosedJaxpr) else j for j in jaxprs_in_params(eqn.params)]
