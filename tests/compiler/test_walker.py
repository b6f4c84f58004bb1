"""The walk over a plan: what its handlers are asked, in which order, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from spu_llm.compiler.plan import OpCall, Plan, Run, make_plan
from spu_llm.compiler.walker import walk_plan
from spu_llm.core._jax import digest_of, flat_jaxpr, walk
from spu_llm.core.values import Owner
from spu_llm.testing import toy_reshare

C, J, X = Owner.CLIENT, Owner.JOINT, Owner.PUBLIC
SHAPE = jax.ShapeDtypeStruct((2,), np.float32)
TABLE = np.array([1.0, 2.0], np.float32)


def planned(fn: Callable[..., list[Any]], *owners: Owner) -> Plan:
    return make_plan(fn, [SHAPE] * len(owners), owners)


def told(plan: Plan, inputs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Outputs as terms, and what was asked."""
    asked = []

    def run(step: Run, operands: list[str]) -> list[str]:
        asked.append(f"{step.owner.value}({', '.join(operands)})")
        return [f"{asked[-1]}.{i}" for i in range(len(step.outputs))]

    def ops(group: list[tuple[OpCall, list[str]]]) -> list[list[str]]:
        terms = [f"{call.op.name}({', '.join(operands)})" for call, operands in group]
        asked.append(" | ".join(terms))
        return [[term] for term in terms]

    return walk_plan(plan, inputs, lambda x: f"<{np.asarray(x).tolist()}>", run, ops), asked


def test_calls_of_a_parallel_group_are_asked_together() -> None:
    def fn(x: Any, y: Any) -> list[Any]:
        first, second = toy_reshare(x, rounds=1), toy_reshare(y, rounds=2)
        return [toy_reshare(first, rounds=1), second]

    outputs, asked = told(planned(fn, J, J), ["x", "y"])
    one, two = "toy_reshare(x)", "toy_reshare(y)"
    assert asked == [f"{one} | {two}", f"toy_reshare({one})"]
    assert outputs == [f"toy_reshare({one})", two]


def test_runs_come_one_by_one_with_what_they_need() -> None:
    outputs, asked = told(planned(lambda x, p: [x + p * 3.0, p], J, X), ["x", "p"])
    assert asked == ["public(p)", "joint(x, public(p).0)"]
    assert outputs == ["joint(x, public(p).0).0", "p"]


def test_literals_and_constants_are_read() -> None:
    outputs, asked = told(planned(lambda x: [toy_reshare(TABLE, rounds=1), x], C), ["x"])
    assert asked == ["toy_reshare(<[1.0, 2.0]>)"] and outputs[1] == "x"


def test_as_many_results_as_variables() -> None:
    plan = planned(lambda x: [toy_reshare(x, rounds=1)], J)
    with pytest.raises(ValueError):
        walk_plan(plan, [0], lambda x: 0, lambda *_: [], lambda *_: [[]])
    with pytest.raises(ValueError):
        walk_plan(plan, [], lambda x: 0, lambda *_: [], lambda *_: [[0]])


def test_equations_are_walked_in_order() -> None:
    closed = flat_jaxpr(lambda x, y: [x * y + 1.0, y - TABLE], [SHAPE, SHAPE])
    env = walk(
        closed,
        ["x", "y"],
        lambda x: f"{np.asarray(x)}",
        lambda eqn, operands: [f"{eqn.primitive.name}({', '.join(operands)})"],
    )
    assert env.read(closed.jaxpr.outvars) == ["add(mul(x, y), 1.0)", "sub(y, [1. 2.])"]
    assert digest_of(closed) == digest_of(
        flat_jaxpr(lambda a, b: [a * b + 1.0, b - TABLE.copy()], [SHAPE, SHAPE])
    )
