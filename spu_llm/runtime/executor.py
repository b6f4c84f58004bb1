"""Running a plan at one party: plaintext work, work on shares, SPU segments, ops side by side."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

from spu_llm.compiler.demand import Demand
from spu_llm.compiler.dry_run import DryRun
from spu_llm.compiler.linear import has_numbers_in_bits
from spu_llm.compiler.plan import OpCall, Plan, Run
from spu_llm.compiler.walker import run_local, walk_plan
from spu_llm.core.channel import Channel, CountingChannel, Traffic
from spu_llm.core.merged_rounds import run_together
from spu_llm.core.meter import Meter
from spu_llm.core.party import Party
from spu_llm.core.values import Owner, Private, Value, owner_of, public
from spu_llm.offline.preprocessing import Preprocessing
from spu_llm.runtime.spu_runtime import SpuRuntime, compile_segment

_Call = tuple[OpCall, Sequence[Value]]  # with its operands


class Executor:
    """One party's executor. `dry_run` says what a call takes, which `preprocessing` makes."""

    def __init__(
        self,
        party: Party,
        channel: CountingChannel,
        spu: SpuRuntime,
        meter: Meter,
        dry_run: DryRun,
        preprocessing: Preprocessing,
    ) -> None:
        self._party, self._channel, self._spu, self._meter = party, channel, spu, meter
        self._dry_run, self._preprocessing = dry_run, preprocessing
        self._merged = itertools.count()  # calls in merged rounds so far
        self._ready = False  # whether all that a call takes is there
        # Hears of every call of an op, with its operands and results at this party.
        self.on_op: Callable[[OpCall, Sequence[Value], Sequence[Value]], None] = lambda *call: None

    def run(self, name: str, plan: Plan, inputs: Sequence[Value], ready: bool) -> list[Value]:
        """Run a plan and return its outputs; `name` is the secure function's, for the meter.
        `ready`: whether the correlated randomness that a dry run finds for these inputs is made
        already.
        """
        self._ready = ready

        def run(step: Run, values: list[Value]) -> list[Value]:
            return self._run(name, plan, step, values)

        def ops(group: list[tuple[OpCall, list[Value]]]) -> list[list[Value]]:
            made = self._ops(name, group)
            for (call, operands), results in zip(group, made, strict=True):
                self.on_op(call, operands, results)
                for variable, result in zip(call.outputs, results, strict=True):
                    check_owner(f"result of {call.op.name}", result, plan.owner_of[variable])
            return made

        return walk_plan(plan, inputs, public, run, ops)

    def _run(self, name: str, plan: Plan, run: Run, values: Sequence[Value]) -> list[Value]:
        started = time.perf_counter()
        # Numbers in boolean shares cannot be added up; SPU may return them.
        joint = run.owner is Owner.JOINT
        if not run.local or (joint and has_numbers_in_bits(values)):
            # SPU has one log for a process, and who makes correlated randomness waits for no one
            # here.
            self._preprocessing.settle()
            results, traffic = self._spu.run(compile_segment(run, plan.owner_of), values)
            # A dry run cannot know the form that SPU chooses, nor what is then taken.
            self._ready = False
            kind, what = "segment", f"{len(run.jaxpr.jaxpr.eqns)} equations"
        else:
            results = run_local(self._party.rank, self._party.frac_bits, run, values)
            traffic, kind, what = Traffic(), "local", "shares" if joint else run.owner.value
        self._meter.record(kind, what, name, time.perf_counter() - started, traffic)
        return results

    # ---- ops

    def _ops(self, name: str, group: Sequence[_Call]) -> list[list[Value]]:
        """Run a parallel group: as many calls at once as draw on different correlations.

        Their correlated randomness is there before they start: they may ask for it in another order
        at the other party, and making takes both.
        """
        self._preprocessing.check()  # what ended it ends the call, too, and not at its end only
        if len(group) == 1 or all(call.op.non_interactive for call, _ in group):
            return [self._one(name, *call) for call in group]
        names = [self._dry_run.names(*call) for call in group]
        results: dict[int, list[Value]] = {}
        while len(results) < len(group):
            together: list[int] = []
            used: set[str] = set()
            for i in range(len(group)):
                if i not in results and not names[i] & used:
                    together.append(i)
                    used |= names[i]
            chosen = [group[i] for i in together]
            if len(chosen) == 1:
                made = [self._one(name, *chosen[0])]
            else:
                if not self._ready:
                    self._make(chosen)
                made = self._together(name, chosen)
            results.update(zip(together, made, strict=True))
        return [results[i] for i in range(len(group))]

    def _make(self, calls: Sequence[_Call]) -> None:
        """Make the correlated randomness of calls, as their dry run finds it."""
        if self._party.supply is self._preprocessing:  # and no study's own source
            requests = [one for call in calls for one in self._dry_run.takes(*call)]
            with self._meter.in_phase("offline"):
                self._preprocessing.make(Demand.of(requests))

    def _one(self, name: str, call: OpCall, values: Sequence[Value]) -> list[Value]:
        started = time.perf_counter()
        before = self._channel.traffic
        results = call.op.run(self._party, values, call.static)
        seconds = time.perf_counter() - started
        traffic = self._channel.traffic.since(before)
        self._meter.record("op", call.op.name, name, seconds, traffic, call.scope)
        return results

    def _together(self, name: str, group: Sequence[_Call]) -> list[list[Value]]:
        def task(call: OpCall, values: Sequence[Value]) -> Callable[[Channel], list[Value]]:
            # Calls may draw in another order at the other party: each has its own common stream.
            common = self._party.common.child(f"lane {next(self._merged)}")

            def run(channel: Channel) -> list[Value]:
                party = dataclasses.replace(self._party, channel=channel, common=common)
                return call.op.run(party, values, call.static)

            return run

        started = time.perf_counter()
        results, traffics = run_together(self._channel, [task(*call) for call in group])
        seconds = time.perf_counter() - started
        for i, ((call, _), traffic) in enumerate(zip(group, traffics, strict=True)):
            # They ran at once: the time of all is entered with the first.
            self._meter.record("op", call.op.name, name, 0.0 if i else seconds, traffic, call.scope)
        return results


def check_owner(where: str, value: Value, owner: Owner) -> None:
    """Raise ValueError when another party knows the value than its program says."""
    actual = owner_of(value)
    # What one party knows may stand in for a shared value; nothing may become more public.
    if actual is not owner and not (owner is Owner.JOINT and isinstance(value, Private)):
        raise ValueError(f"{where} should be {owner.value}, found {actual.value}")
