"""The one walk over a plan: environment, literals, constants, parallel groups, results.

What a step does is its caller's: the executor computes values, a dry run stand-ins for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from spu_llm.compiler.plan import OpCall, Plan, Run, Step
from spu_llm.core._jax import Environment

T = TypeVar("T")


def walk_plan(
    plan: Plan,
    inputs: Sequence[T],
    constant: Callable[[Any], T],
    run: Callable[[Run, list[T]], Sequence[T]],
    ops: Callable[[list[OpCall], list[list[T]]], Sequence[Sequence[T]]],
) -> list[T]:
    """The plan's outputs.

    constant(array): what a literal or a constant of the program stands for.
    run(step, operands): the results of a run.
    ops(calls, operands of each): the results of each call of a parallel group.
    """
    env = Environment(constant)
    env.bind(tuple(plan.consts), [constant(x) for x in plan.consts.values()])
    env.bind(plan.inputs, inputs)
    for group in _groups(plan.steps):
        if isinstance(group, Run):
            env.bind(group.outputs, run(group, env.read(group.inputs)))
        else:
            made = ops(group, [env.read(call.inputs) for call in group])
            for call, results in zip(group, made, strict=True):
                env.bind(call.outputs, results)
    return env.read(plan.outputs)


def _groups(steps: Sequence[Step]) -> Iterator[Run | list[OpCall]]:
    """Runs one by one, and the calls of each parallel group."""
    for _, members in itertools.groupby(
        steps, lambda step: step.group if isinstance(step, OpCall) else None
    ):
        calls: list[OpCall] = []
        for step in members:
            if isinstance(step, Run):
                yield step
            else:
                calls.append(step)
        if calls:
            yield calls
