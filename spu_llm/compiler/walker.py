"""The one walk over a plan: environment, literals, constants, parallel groups, results.

What a step does is its caller's: the executor computes values, a dry run stand-ins for them. Both
run what needs no message the same way (`run_local`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from spu_llm.compiler.plan import OpCall, Plan, Run
from spu_llm.core._jax import Environment, as_function, shape_of
from spu_llm.core.values import Owner, Private, Public, Value

T = TypeVar("T")


def walk_plan(
    plan: Plan,
    inputs: Sequence[T],
    constant: Callable[[Any], T],
    run: Callable[[Run, list[T]], Sequence[T]],
    ops: Callable[[list[tuple[OpCall, list[T]]]], Sequence[Sequence[T]]],
) -> list[T]:
    """Walk a plan from its inputs and return its outputs.

    constant(array): returns the stand-in for a literal or a constant of the program.
    run(step, operands): returns the results of a run.
    ops([(call, operands), ...]): returns the results of each call of a parallel group.
    """
    env = Environment(constant)
    env.bind(tuple(plan.consts), [constant(x) for x in plan.consts.values()])
    env.bind(plan.inputs, inputs)
    # Runs, which come one by one, or the calls of a parallel group.
    for _, members in itertools.groupby(
        plan.steps, lambda step: step.group if isinstance(step, OpCall) else None
    ):
        calls = []
        for step in members:
            if isinstance(step, Run):
                env.bind(step.outputs, run(step, env.read(step.inputs)))
            else:
                calls.append(step)
        if calls:
            made = ops([(call, env.read(call.inputs)) for call in calls])
            for call, results in zip(calls, made, strict=True):
                env.bind(call.outputs, results)
    return env.read(plan.outputs)


def run_local(rank: int, frac_bits: int, run: Run, values: Sequence[Value]) -> list[Value]:
    """Compute a local run at the party of this rank."""
    if run.owner is Owner.JOINT:
        return run.equations.evaluate(values, rank, frac_bits)
    if run.owner is not Owner.PUBLIC and run.owner.rank != rank:
        return [
            Private(run.owner.rank, s.shape, np.dtype(s.dtype), None)
            for s in map(shape_of, run.outputs)
        ]
    plain = [v.value for v in values if isinstance(v, Public | Private)]
    assert len(plain) == len(values)
    if run.digest not in _plaintext_functions:
        _plaintext_functions[run.digest] = jax.jit(as_function(run.jaxpr))
    results = [np.asarray(x) for x in _plaintext_functions[run.digest](*plain)]
    if run.owner is Owner.PUBLIC:
        return [Public(x) for x in results]
    return [Private(rank, x.shape, x.dtype, x) for x in results]


_plaintext_functions: dict[str, Any] = {}  # by the run's digest
