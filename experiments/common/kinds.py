"""Kinds of layers: classification of the steps of a secure program by their name scopes.

A scope comes from the model (`jax.named_scope` in `models/family.py` and
`spu_llm/systems/decoding/secure_model.py`) or is the name of an approximation
(`spu_llm.core.approx`), which its equations get on shares:

    embedding                 embedding
    .. rms_norm               norm
    .. dense                  linear
    .. attention              attention products, where the op is one of them; softmax
    .. rotate                 attention products
    .. gelu, silu, relu       GELU; of a gate with its product (gelu_gated, silu_gated)
    head                      head
    verification              verification (argmax, comparisons, the token)
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from experiments.common.measured import grouped, total
from spu_llm.compiler.demand import Call
from spu_llm.compiler.plan import OpCall, Run, Step
from spu_llm.core._jax import scope_of
from spu_llm.core.meter import Entry

KINDS = (
    "embedding",
    "norm",
    "linear",
    "attention products",
    "softmax",
    "GELU",
    "head",
    "verification",
    "other",
)
_PRODUCTS = ("matmul", "times_rows", "times_columns")
_WHOLE = ("embedding", "head", "verification")  # whatever stands inside


def kind_of(scope: str, op: str) -> str:
    """Return the kind of a step with this scope; `op`: the op's name, "" for steps without op."""
    parts = scope.split("/")
    for kind in _WHOLE:
        if kind in parts:
            return kind
    last = parts[-1]
    if last.endswith("_norm"):
        return "norm"
    if last.startswith(("gelu", "silu", "relu")):
        return "GELU"
    if last == "dense":
        return "linear"
    if last == "rotate":
        return "attention products"
    if "attention" in parts[1:]:
        return "attention products" if op in _PRODUCTS else "softmax"
    return "other"


def by_kind(entries: Sequence[Entry], steps: Sequence[Step], rank: int) -> dict[str, Any]:
    """Return, per kind, seconds, bytes by direction and sends of both parties, from the meter
    entries at party `rank` of one call of a plan with these steps.

    The entry of an op has its scope; the entries of other steps come in the order of the plan.
    """
    works = iter([step for step in steps if isinstance(step, Run)])

    def kind(entry: Entry) -> str:
        if entry.kind == "op":
            return kind_of(entry.scope, entry.name)
        return kind_of(_scope_of_run(next(works)), "")

    groups = grouped(entries, kind)
    assert next(works, None) is None, "an entry for each step of the plan"
    return {kind: total(groups[kind], rank) for kind in KINDS if kind in groups}


def _scope_of_run(run: Run) -> str:
    scopes = map(scope_of, run.jaxpr.jaxpr.eqns)
    return next((scope for scope in scopes if scope), "")


def chains(calls: Sequence[Call], steps: Sequence[Step]) -> dict[str, int]:
    """Return, per kind, its part of a call's longest chain of messages that wait for each other.

    Ops of a parallel group run side by side: the group is as long as its longest op and counts for
    the kind of that op. SPU segments are left out, because SPU does not report their chains.
    """
    groups = [step.group for step in steps if isinstance(step, OpCall)]
    counts: dict[str, int] = defaultdict(int)
    for _, pairs in itertools.groupby(zip(groups, calls, strict=True), lambda pair: pair[0]):
        longest = max((call for _, call in pairs), key=lambda call: call.cost.rounds)
        counts[kind_of(longest.scope, longest.op)] += longest.cost.rounds
    return counts
