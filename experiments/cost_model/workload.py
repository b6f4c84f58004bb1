"""Workload of a completion by a model of some shape: its messages, its correlations and its
computing, from plans alone.

Both parties' dry runs (`spu_llm.compiler.demand`) go through the programs with shapes in place of
weights. Blocks before the last one with equal ranges have equal workloads, so the workload of any
number of them follows from a model with and a model without such a block (`of_steps`); models of at
most two blocks, and split models, whose middle opens its rows, are run whole.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from experiments.common.kinds import kind_of
from experiments.common.replay import ROUNDS, Replay, dry_parties
from models.family import ModelConfig
from protocols.arithmetic.known_factors import NAME as FACTORS
from protocols.arithmetic.known_factors import factor_products
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.plan import Plan, Run
from spu_llm.core._jax import shape_of
from spu_llm.core.correlation import Correlation
from spu_llm.core.values import CLIENT, PROVIDER, Owner
from spu_llm.net.shaping import NetworkShape
from spu_llm.offline.silent.products import matrix_of
from spu_llm.runtime.dry_session import Noted
from spu_llm.systems.decoding.generate import Completion, announce, announce_end
from spu_llm.systems.decoding.preparation import dry_course
from spu_llm.systems.decoding.request import GenerationRequest
from spu_llm.systems.program import SystemPromptShape


@dataclass(frozen=True)
class Workload:
    """Workload of one step. All fields are linear: workloads add up."""

    counts: dict[str, float]
    units: dict[str, float]
    correlations: dict[str, Correlation]
    bytes_of: dict[str, float]

    def combined(self, other: Workload, a: float, b: float) -> Workload:
        """Return `a` times this workload plus `b` times the other."""

        def mixed(x: dict[str, float], y: dict[str, float]) -> dict[str, float]:
            return {k: a * x.get(k, 0.0) + b * y.get(k, 0.0) for k in {**x, **y}}

        return Workload(
            mixed(self.counts, other.counts),
            mixed(self.units, other.units),
            {**self.correlations, **other.correlations},
            mixed(self.bytes_of, other.bytes_of),
        )


# What computing takes time for: calls (what does not grow with the model), messages, words of
# shares and correlated randomness that are handled, and multiplications of words with weights.
# Those of shared matrices with each other are few.
COMPUTE = ("calls", "messages", "words", "weight_products")
_FEW_TOKENS = 64


def of_completion(
    config: ModelConfig,
    request: GenerationRequest,
    networks: Sequence[NetworkShape],
    steps: int = 1,
    before: SystemPromptShape = SystemPromptShape(),
) -> list[Workload]:
    """Return the workloads of the prefill and of the mean of the first `steps` decode steps, whose
    drafts are all accepted. Steps differ in the correlations that they take for the cache, whose
    masks serve some positions and are then replaced.
    """
    prefill, *some = of_steps(config, request, networks, [request.draft_length] * steps, before)
    whole = together(some)
    return [prefill, whole.combined(whole, 1.0 / steps, 0.0)]


def of_steps(
    config: ModelConfig,
    request: GenerationRequest,
    networks: Sequence[NetworkShape],
    accepted: Sequence[int],
    before: SystemPromptShape = SystemPromptShape(),
) -> list[Workload]:
    """Return the workloads of the prefill and of each decode step, given the number of drafts
    `accepted` in each step.
    """
    if config.layers <= 2 or request.part.opens_rows:
        return _whole(config, request, networks, accepted, before)
    # Blocks differ in their ranges alone, but the last one of a prefill has less to do: what each
    # kind of block adds before the last one is traced once.
    last = config.layers - 1
    kinds = Counter(config.with_blocks([i, last]) for i in range(last))

    def of(model: ModelConfig, asked: GenerationRequest) -> list[Workload]:
        return _whole(model, asked, networks, accepted, before)

    total = one = of(config.with_blocks([last]), request)
    asked = request
    if len(kinds) > 1:
        # What a block takes does not depend on the vocabulary, whose traces take most of the time.
        asked = replace(request, public_prefix=(0,) * len(request.public_prefix))
        few = {"vocab_size": min(config.vocab_size, _FEW_TOKENS)}
        kinds = Counter({replace(kind, **few): count for kind, count in kinds.items()})
        one = of(replace(config.with_blocks([last]), **few), asked)
    two = one
    for kind, count in kinds.items():
        two = of(kind, asked)
        total = [
            _present(so_far.combined(b.combined(a, 1.0, -1.0), 1.0, float(count)))
            for so_far, a, b in zip(total, one, two, strict=True)
        ]
    return [_lasting(*works, config.layers) for works in zip(total, one, two, strict=True)]


def _lasting(work: Workload, one: Workload, two: Workload, layers: int) -> Workload:
    """Return the workload with units that serve all `layers` blocks: as many as one block takes,
    with columns for each block. Models of one and of two blocks take other kinds of them.
    """
    units, correlations = dict(work.units), dict(work.correlations)
    changing = {name for name in one.units.keys() ^ two.units.keys() if _is_of_factors(name)}
    for name in changing & units.keys():
        del units[name], correlations[name]
    for name in changing & one.units.keys():
        (n, k), (_, columns) = (part.shape for part in one.correlations[name].masks)
        whole = factor_products(n, k, layers * columns)
        units[whole.name], correlations[whole.name] = one.units[name], whole
    return replace(work, units=units, correlations=correlations)


def _is_of_factors(name: str) -> bool:
    return name.startswith(f"{FACTORS} ")


def _present(work: Workload) -> Workload:
    """Return the workload without the correlations whose units cancelled out: matrices of another
    vocabulary.
    """
    gone = [name for name, count in work.units.items() if not count]
    units, correlations = dict(work.units), dict(work.correlations)
    for name in gone:
        del units[name], correlations[name]
    return replace(work, units=units, correlations=correlations)


def together(works: Sequence[Workload]) -> Workload:
    """Add up workloads."""
    return functools.reduce(lambda a, b: a.combined(b, 1.0, 1.0), works)


def of_layers(one: Workload, two: Workload, layers: int) -> Workload:
    """Return the workload of `layers` blocks from the workloads of one and of two blocks."""
    return two.combined(one, layers - 1, 2 - layers)


def _whole(
    config: ModelConfig,
    request: GenerationRequest,
    networks: Sequence[NetworkShape],
    accepted: Sequence[int],
    before: SystemPromptShape,
) -> list[Workload]:
    completion, weights = Completion.of(config, request, before), request.part.shapes(config)
    parties = dry_parties()
    announcement = announce_end if request.hide_progress else announce
    said = jax.ShapeDtypeStruct(completion.announced, np.int32)
    courses = [
        dry_course(party, completion, weights, accepted, completion.text(party))
        for party in parties
    ]
    works = []
    for _ in zip(*courses, strict=True):
        for party in parties:
            party.call(announcement, said)
        *others, step, told = zip(*(party.taken() for party in parties), strict=True)
        calls = [[step, told], *([call] for call in others)]
        works.append(together([_of_calls(some, networks) for some in calls]))
    return works


def _of_calls(calls: Sequence[tuple[Noted, Noted]], networks: Sequence[NetworkShape]) -> Workload:
    """Return the workload of the first call, with the messages of all calls, at both parties."""
    replays = {shape.name: Replay(shape) for shape in (ROUNDS, *networks)}
    for client, provider in calls:
        for replay in replays.values():
            replay.play(client.plan.steps, client.demand.calls, provider.demand.calls)
    rounds = replays.pop("rounds")
    sent = {
        "messages": float(sum(rounds.messages)),
        "rounds": round(rounds.seconds),
        "client_to_provider": float(rounds.sent[CLIENT]),
        "provider_to_client": float(rounds.sent[PROVIDER]),
        **{f"seconds {name}": replay.seconds for name, replay in replays.items()},
    }
    client, _ = calls[0]
    return _of_plan(client.plan, client.demand, sent)


def _of_plan(plan: Plan, demand: Demand, sent: dict[str, float]) -> Workload:
    """Return the workload of a call: correlations and computing from its plan and its demand, and
    the counts in `sent`.
    """
    units: dict[str, float] = defaultdict(float)
    correlations: dict[str, Correlation] = {}
    bytes_of: dict[str, float] = defaultdict(float)
    words = float(_local_words(plan))
    counts = {"calls": 1.0, "words": words, "weight_products": 0.0, "hint_bytes": 0.0}
    matrices = set()
    for call in demand.calls:
        kind = kind_of(call.scope, call.op)
        size = call.cost.client_to_provider + call.cost.provider_to_client
        bytes_of[kind] += size
        counts["words"] += size / 8
        for need in call.taken:
            correlation, name = need.correlation, common_name(need.correlation.name)
            units[name] += need.units
            correlations[name] = correlation
            parts = (*correlation.masks, *correlation.results)
            counts["words"] += need.units * sum(part.size for part in parts)
            if correlation.fixed is not None:
                counts["weight_products"] += need.units * correlation.fixed.size
                matrices.add(matrix_of(correlation))
    counts["hint_bytes"] = float(sum(matrix.hint_bytes for matrix in matrices))
    return Workload(counts | sent, units, correlations, bytes_of)


def common_name(name: str) -> str:
    """Replace a block's number in a correlation's name by *: one name for all blocks."""
    return re.sub(r"\bh\.\d+\.", "h.*.", name)


def matrix_sizes(correlation: Correlation) -> tuple[int, int, int] | None:
    """Return m, k, n of a product of shared matrices [m, k] and [k, n], or [m, k] and [n, k]
    transposed; None for other correlations.
    """
    masks, results = correlation.masks, correlation.results
    if [len(p.shape) for p in (*masks, *results)] != [2, 2, 2]:
        return None
    m, k = masks[0].shape
    return m, k, results[0].shape[1]


def _local_words(plan: Plan) -> int:
    """Count the words that a plan's `Run` steps on shares write."""
    return sum(
        math.prod(shape_of(v).shape)
        for step in plan.steps
        if isinstance(step, Run) and step.owner is Owner.JOINT
        for eqn in step.jaxpr.jaxpr.eqns
        for v in eqn.outvars
    )
