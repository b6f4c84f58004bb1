"""Benchmark of ops, and of functions made of ops, between two processes, against SPU's own way to
the same result.

Both ways run in one session on the same shares, in turn, so that noise affects both. Correlated
randomness is made before the clock starts: a run contains no refill, and the correlations that it
takes are priced separately. SPU prepares nothing: extensions of its oblivious transfers fall into
its runs. A run lasts from a moment that both parties agreed on until the later one of them has its
share; they read one clock, since a study runs on one machine. Every result is then opened to the
client and compared with plaintext.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import enable_x64

from experiments.benchmarks import op_report
from experiments.benchmarks.op_cases import Input, OpCase, Way, choose, wrong
from experiments.common import commands, measured
from experiments.common.replay import cost_of
from experiments.common.two_parties import FEW_MESSAGES, run_study, session_record
from protocols.arithmetic.joint import joint_bits, joint_words
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.values import CLIENT, PROVIDER, ROLES, Owner, Value, public
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.program import Job, Nothing, Program, Send

LEAD_NS = 100_000_000  # from agreeing on a start to the start: more than a message takes

_note = measured.opening("provider's clock and memory (study)", Owner.PROVIDER, "note")
_start_together = measured.opening("start of a run (study)", Owner.CLIENT, "start", Owner.PUBLIC)
_open = measured.opening("results (study)", Owner.JOINT, "open")
_BOTH = (Owner.CLIENT, Owner.PROVIDER)
_share_words = SecureFunction(joint_words, _BOTH, "share words")
_share_bits = SecureFunction(joint_bits, _BOTH, "share bits")
_share_fixed = SecureFunction(lambda a, b: a + b, _BOTH, "share fixed-point numbers")


# ---- the program of both workers


@dataclass(frozen=True)
class OpBenchRequest:
    ops: tuple[str, ...]
    sizes: tuple[int, ...]  # none: each op's own
    repeat: int

    def chosen(self) -> list[tuple[OpCase, list[int]]]:
        """Return the ops with their sizes; InputError for a request that cannot be measured."""
        chosen = choose(self.ops, self.sizes)
        commands.check_range("--repeat", self.repeat, 1)
        return chosen


PROGRAM = Program(
    "op-bench",
    __name__,
    OpBenchRequest,
    check=lambda asked, config: asked.chosen(),
    keeps_hints=False,
    spu=FEW_MESSAGES,
)


def run(session: PartySession, job: Job[OpBenchRequest, Nothing], send: Send) -> dict[str, Any]:
    """Measure every op at every size; the client's result has all figures.

    The inputs are random numbers that both parties make from one seed and then share.
    """
    chosen, repeat = job.request.chosen(), job.request.repeat
    for rank in (CLIENT, PROVIDER):
        session.ledger.declare(rank, "the inputs: random numbers of a known seed (study)")
    rows = []
    with enable_x64():  # whole ring words
        bench = Bench(session, repeat)
        after_warm_up = bench.memory()
        for case, sizes in chosen:
            for size in sizes:
                send("stage", name=f"{case.name}, {size} {case.unit}")
                rows.append(bench.measure(case, size))
    return {
        "memory_after_warm_up": after_warm_up,
        "rows": rows,
        "learned": session.ledger.learned(),
    }


@dataclass
class Runs:
    """Runs of one way to a result."""

    function: SecureFunction
    wanted: np.ndarray | None = None
    bits: int = 64
    slack: int = 0
    error: float = 0.0  # allowed, of an approximation
    demand: Demand = Demand()  # taken by a run after the warm-up
    costs: list[dict[str, Any]] = field(default_factory=list)  # the first one is the warm-up
    memory: np.ndarray = field(default_factory=lambda: np.zeros((2, 2), np.int64))
    wrong: int = 0
    largest_error: float = 0.0

    def check(self, result: np.ndarray) -> None:
        """Compare a run's result with the right one."""
        assert self.wanted is not None
        self.wrong += wrong(result, self.wanted, self.bits, self.slack, self.error)
        if self.error:
            off = np.max(np.abs(result - self.wanted), initial=0.0)
            self.largest_error = max(self.largest_error, float(off))

    def add(self, cost: dict[str, Any], *memory: Sequence[int]) -> None:
        """Add a run: its cost, and its peak and growth of memory (bytes) at the client and at the
        provider.
        """
        self.costs.append(cost)
        self.memory = np.maximum(self.memory, memory)

    def summary(self) -> dict[str, Any]:
        """Return the medians of the runs after the warm-up, and the seconds of each; memory, errors
        and wrong values are of all runs.
        """
        runs = self.costs[1:]
        of_approximation = {"largest_error": self.largest_error} if self.error else {}
        return (
            measured.medians(runs)
            | of_approximation
            | self.of_memory()
            | {"runs": [run["seconds"] for run in runs], "wrong": self.wrong}
        )

    def of_memory(self) -> dict[str, dict[str, int]]:
        """Return the largest peak and growth of memory (bytes) of each party."""
        peak, growth = (dict(zip(ROLES, map(int, c), strict=True)) for c in self.memory.T)
        return {"peak_memory": peak, "memory_growth": growth}


class Bench:
    """One party's side of the measurements of a session."""

    def __init__(self, session: PartySession, repeat: int) -> None:
        self._session, self._repeat = session, repeat
        self._shares = np.random.default_rng(0)  # the same at both parties

    def measure(self, case: OpCase, size: int) -> dict[str, Any]:
        """Measure one op at one size; return a row of the result."""
        session = self._session
        inputs = case.inputs(np.random.default_rng(size), size)
        values = [self._give(x) for x in inputs]
        ours = self._way(case.name, case.ours, inputs, case.bits, case.slack, case.error)
        # What SPU approximates in its own way is measured, not judged.
        free = math.inf if case.error else 0.0
        stock = {name: self._way(name, f, inputs, error=free) for name, f in case.stock.items()}
        # The warm-up compiles and fills the pool.
        count = self._run_once(ours, values)
        ours.demand, _ = session.demand(ours.function, *values)
        for runs in stock.values():
            self._run_once(runs, values)
        measured.make_second_batches(session, ours.demand)
        for _ in range(self._repeat):
            for runs in (ours, *stock.values()):
                self._run_once(runs, values)
        stated = asdict(cost_of(ours.function, values))
        needs = ours.demand.correlations.values()
        own = ours.summary()
        own |= {
            "rounds": stated.pop("rounds"),
            "as_priced": all(stated.items() <= cost.items() for cost in ours.costs[1:]),
            "offline": self._ahead(ours.demand),
            "units": {n.correlation.name: n.units for n in needs},
            "stored_bytes_per_value": sum(
                8 * n.correlation.stored_words(CLIENT) * n.units for n in needs
            )
            / count,
        }
        others = [{"way": name} | runs.summary() for name, runs in stock.items()]
        return {
            "op": case.name,
            "does": case.does,
            "size": size,
            "unit": case.unit,
            "values": count,
            "ours": own,
            "stock": [other | {"ratio": op_report.ratios(own, other)} for other in others],
        }

    def memory(self) -> dict[str, int]:
        """Return the present resident bytes of both workers, by role; valid at the client only."""
        own = measured.resident("VmRSS")
        return dict(zip(ROLES, (own, self._hear(own, 0)[1]), strict=True))

    def _give(self, x: Input) -> Value:
        """Give an input to the session in its form. Shares are uniform, except shares of
        fixed-point numbers.
        """
        plain = x.plain
        if x.owner is Owner.PUBLIC:
            return public(plain)
        if x.owner is not Owner.JOINT:
            return self._private(x.owner.rank, plain)
        if plain.dtype == np.bool_:
            mask = self._shares.integers(0, 2, plain.shape).astype(np.bool_)
        elif plain.dtype == np.int64:
            mask = self._shares.integers(0, 1 << 64, plain.shape, np.uint64).view(np.int64)
        else:
            mask = self._shares.integers(-8, 8, plain.shape).astype(plain.dtype)
        boolean = x.boolean or plain.dtype == np.bool_
        function = _share_bits if boolean else _share_words
        if plain.dtype == np.float32:
            function = _share_fixed
        other = plain ^ mask if boolean else plain - mask
        return self._session.call(
            function, self._private(CLIENT, mask), self._private(PROVIDER, other)
        )

    def _private(self, owner: int, plain: np.ndarray) -> Value:
        return self._session.private(owner, lambda: plain, plain.shape, plain.dtype)

    def _way(
        self,
        name: str,
        way: Way,
        inputs: Sequence[Input],
        bits: int = 64,
        slack: int = 0,
        error: float = 0.0,
    ) -> Runs:
        wanted = None
        if self._session.rank == CLIENT:
            # Floats with 64 bits: sums of the test data are then exact.
            plain = [
                x.plain.astype(np.float64) if x.plain.dtype == np.float32 else x.plain
                for x in inputs
            ]
            wanted = np.asarray(jax.jit(way)(*plain))
        function = SecureFunction(way, tuple(x.owner for x in inputs), name)
        return Runs(function, wanted, bits, slack, error)

    def _run_once(self, runs: Runs, values: Sequence[Value]) -> int:
        """Run and check one way once; return the number of values of its result."""
        measured.forget_peak()
        result = self._timed(runs, values, measured.resident("VmRSS"))
        opened = self._session.get(self._session.call(_open, result))
        if opened is not None:
            runs.check(opened)
        return math.prod(result.shape)

    def _timed(self, runs: Runs, values: Sequence[Any], before: int) -> Any:
        """Make the correlations that a way takes, then run it once on the clock; return its result.
        The growth of memory counts from `before` resident bytes.
        """
        session = self._session
        session.make(runs.demand)
        session.prepare(runs.function, *values)
        start = self._agree_on_start()
        mark = len(session.meter.entries)
        time.sleep(max(0, start - time.monotonic_ns()) / 1e9)
        result = session.call(runs.function, *values)
        end, peak = time.monotonic_ns(), measured.resident("VmHWM")
        entries = session.meter.entries[mark:]
        refill = any(e.kind == "pool" for e in entries)
        assert not (refill and runs.costs), "a refill in the middle of a run"
        memory = peak, peak - before
        peer_end, *peers = self._hear(*memory)
        seconds = (max(end, peer_end) - start) / 1e9
        runs.add(measured.total(entries, session.rank) | {"seconds": seconds}, memory, peers)
        return result

    def _agree_on_start(self) -> int:
        """Agree with the peer on a moment (ns) soon after both parties are ready; return it."""
        self._hear(0, 0)  # now the provider is
        with enable_x64():  # a clock takes a whole word
            soon = self._session.private(
                CLIENT, lambda: [time.monotonic_ns() + LEAD_NS], (1,), np.int64
            )
            return int(self._session.call(_start_together, soon).value[0])

    def _hear(self, *numbers: int) -> list[int]:
        """Open the provider's time (ns) and numbers to the client; return them, zeros at the
        provider.
        """
        return measured.hear(self._session, _note, time.monotonic_ns(), *numbers)

    def _ahead(self, demand: Demand) -> dict[str, Any]:
        """Return the total cost of making the correlations of `demand`."""
        session = self._session
        material = measured.price(session.meter.entries, demand, session.rank)
        return measured.summed(material.values())


# ---- the command at the client


def measure(
    model: Path, ops: Sequence[str], sizes: Sequence[int] | None, repeat: int, network: str
) -> dict[str, Any]:
    """Run one network's session; return its result as JSON fields. `model`: any model, because a
    provider needs one to start.
    """
    request = OpBenchRequest(tuple(ops), tuple(sizes or ()), repeat)
    request.chosen()
    outcome, agreed = run_study(PROGRAM, model, request, network=network)
    rows, first = (outcome.result[name] for name in ("rows", "memory_after_warm_up"))
    failures = [text for row in rows for text in op_report.failures(row, network)]
    return {
        "passed": not failures,
        "failures": failures,
        "notes": [text for row in rows for text in op_report.notes(row, first)],
        "network": network,
        "repeat": repeat,
        "rows": rows,
        "memory_after_warm_up": first,
        **session_record(outcome, agreed),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        type=commands.names,
        metavar="NAME[,NAME...]",
        help="ops, like sign,multiply, or all; an unknown name lists them",
    )
    parser.add_argument(
        "--size",
        type=commands.numbers,
        metavar="N,N,...",
        help="numbers of values, rows, ... (default: each op's own)",
    )
    commands.add_network(parser, "local")
    commands.add_number(parser, "--repeat", 3, "measured runs of each size")
    commands.add_plot(parser, "draw seconds and bytes against size")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    model = commands.private_model(options)
    commands.each_network(
        options,
        lambda network: measure(model, options.names, options.size, options.repeat, network),
        op_report.table,
        op_report.plot,
        "the criterion does not hold",
    )
