"""What an op, or a function made of ops, costs between two processes, beside SPU's own way to the
same result.

Both run in one session on the same shares, turn by turn, so that noise meets both. Correlated
randomness is made before the clock starts: a run has no refill in it, and refills are reported on
their own. SPU prepares nothing: what its oblivious transfer extends falls into its runs. A run
lasts from a moment that both parties agreed on until the later one of them has its share; they read
one clock, since a study runs on one machine. Every result is then opened to the client and compared
with plaintext.
"""

from __future__ import annotations

import argparse
import math
import statistics
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
from experiments.benchmarks.op_report import COUNTS, failures, notes, ratios
from experiments.common import commands
from experiments.common.memory import forget_peak, resident
from experiments.common.two_parties import FEW_MESSAGES, machine, run_study
from protocols.arithmetic.joint import joint_bits, joint_words
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.correlation import Correlation, Material
from spu_llm.core.errors import InputError
from spu_llm.core.integers import Factor
from spu_llm.core.meter import Entry
from spu_llm.core.op import Cost
from spu_llm.core.party import Source
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, ROLES, Owner, Value
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.program import Job, Nothing, Program, Send

LEAD_NS = 100_000_000  # from agreeing on a start to the start: more than a message takes

_note = SecureFunction(
    lambda x: reveal(x, to=Owner.CLIENT, label="provider's clock and memory (study)"),
    (Owner.PROVIDER,),
    "note",
)
start_together = SecureFunction(
    lambda x: reveal(x, to=Owner.PUBLIC, label="start of a run (study)"), (Owner.CLIENT,), "start"
)
_open = SecureFunction(
    lambda x: reveal(x, to=Owner.CLIENT, label="results (study)"), (Owner.JOINT,), "open"
)
_BOTH = (Owner.CLIENT, Owner.PROVIDER)
_share_words = SecureFunction(joint_words, _BOTH, "share words")
_share_bits = SecureFunction(joint_bits, _BOTH, "share bits")
_share_fixed = SecureFunction(lambda a, b: a + b, _BOTH, "share fixed-point numbers")


# ---- the program of both workers


@dataclass(frozen=True)
class Asked:
    ops: tuple[str, ...]
    sizes: tuple[int, ...]  # none: each op's own
    repeat: int

    def chosen(self) -> list[tuple[OpCase, list[int]]]:
        """The ops with their sizes; InputError for what cannot be measured."""
        chosen = choose(list(self.ops), list(self.sizes) or None)
        if self.repeat < 1:
            raise InputError(f"--repeat must be at least 1, found {self.repeat}")
        return chosen


PROGRAM = Program(
    "op-bench", __name__, Asked, check=lambda asked, config: asked.chosen(),
    keeps_hints=False, spu=FEW_MESSAGES,
)  # fmt: skip


def run(session: PartySession, job: Job[Asked, Nothing], send: Send) -> dict[str, Any]:
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
        "memory_after_warm_up": after_warm_up, "rows": rows, "learned": session.ledger.learned()
    }  # fmt: skip


@dataclass(frozen=True)
class Need:
    """Units of a correlation that one call takes, and the fixed array that they are made for."""

    correlation: Correlation
    units: int
    fixed: Factor | None


@dataclass
class Counting:
    """A supply, and what is taken from it."""

    supply: Source
    demand: dict[str, Need] = field(default_factory=dict)

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Material:
        before = self.demand[correlation.name].units if correlation.name in self.demand else 0
        self.demand[correlation.name] = Need(correlation, before + units, fixed)
        return self.supply.take(correlation, units, fixed)


@dataclass
class Runs:
    """One way to the result: what is wanted (at the client), and what its runs showed."""

    function: SecureFunction
    wanted: np.ndarray | None
    bits: int
    slack: int
    error: float = 0.0  # allowed, of an approximation
    demand: Sequence[Need] = ()
    costs: list[dict[str, Any]] = field(default_factory=list)  # the first one is the warm-up
    memory: np.ndarray = field(default_factory=lambda: np.zeros((2, 2), np.int64))
    wrong: int = 0
    largest_error: float = 0.0

    def check(self, found: np.ndarray) -> None:
        """Compare a result with what is wanted."""
        assert self.wanted is not None
        self.wrong += wrong(found, self.wanted, self.bits, self.slack, self.error)
        if self.error:
            off = np.max(np.abs(found - self.wanted), initial=0.0)
            self.largest_error = max(self.largest_error, float(off))

    def add(self, cost: dict[str, Any], *memory: Sequence[int]) -> None:
        """A run; its peak and growth (bytes) at the client and at the provider."""
        self.costs.append(cost)
        self.memory = np.maximum(self.memory, memory)

    def summary(self) -> dict[str, Any]:
        """Medians of the runs after the warm-up, and all runs; the rest is of all of them."""
        warm_up, *runs = self.costs
        medians = {name: statistics.median(cost[name] for cost in runs) for name in warm_up}
        peak, growth = ({r: int(x) for r, x in zip(ROLES, c, strict=True)} for c in self.memory.T)
        of_approximation = {"largest_error": self.largest_error} if self.error else {}
        return medians | of_approximation | {
            "warm_up": warm_up, "runs": runs, "peak_memory": peak, "memory_growth": growth,
            "wrong": self.wrong,
        }  # fmt: skip


class Bench:
    """One party's half of the measurements of a session."""

    def __init__(self, session: PartySession, repeat: int) -> None:
        self._session, self._repeat = session, repeat
        self._shares = np.random.default_rng(0)  # the same at both parties

    def measure(self, case: OpCase, size: int) -> dict[str, Any]:
        """One op at one size, as a row of the result."""
        session = self._session
        before = self.memory()
        inputs = case.inputs(np.random.default_rng(size), size)
        values = [self._give(x) for x in inputs]
        ours = self._way(case.name, case.ours, inputs, case.bits, case.slack, case.error)
        # What SPU approximates in its own way is measured, not judged.
        free = math.inf if case.error else 0.0
        stock = {
            name: self._way(name, f, inputs, error=free) for name, f in case.stock.items()
        }
        # The warm-up compiles, fills the pool, and shows what the op takes from it.
        session.party.supply = counting = Counting(session.supply)
        count = self._run_once(ours, values)
        session.party.supply = session.supply
        ours.demand = list(counting.demand.values())
        for runs in stock.values():
            self._run_once(runs, values)
        for need in ours.demand:
            self._make_second_chunk(need)
        mark = len(session.meter.entries)
        for _ in range(self._repeat):
            for runs in (ours, *stock.values()):
                self._run_once(runs, values)
        chunks = [e for e in session.meter.entries[mark:] if e.kind == "pool"]
        calls = [call.cost for call in session.demand(ours.function, *values)[0].calls]
        own = ours.summary()
        own |= {
            # Of several ops, some side by side: each round is a message each way.
            "rounds": calls[0].rounds if len(calls) == 1 else int(own["messages"]) // 2,
            "as_priced": all(_is_priced(cost, calls) for cost in ours.costs[1:]),
            "offline": self._offline(ours.demand) | {"chunks_made": self._sum(chunks)},
            "units": {n.correlation.name: n.units for n in ours.demand},
            "stored_bytes_per_value": sum(8 * n.correlation.words * n.units for n in ours.demand)
            / count,
        }
        others = [{"way": name} | runs.summary() for name, runs in stock.items()]
        return {
            "op": case.name, "does": case.does, "size": size, "unit": case.unit, "values": count,
            "ours": own,
            "stock": [other | {"ratio": ratios(own, other)} for other in others],
            "memory_before": before,
        }  # fmt: skip

    def memory(self) -> dict[str, int]:
        """Resident bytes of both workers now, at the client."""
        own = resident("VmRSS")
        return dict(zip(ROLES, (own, self._hear(own, 0)[1]), strict=True))

    def _give(self, x: Input) -> Value:
        """An input in its form. Shares are uniform, but for those of fixed-point numbers."""
        plain = x.plain
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
        self, name: str, way: Way, inputs: Sequence[Input], bits: int = 64, slack: int = 0,
        error: float = 0.0,
    ) -> Runs:  # fmt: skip
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
        """Prepare, run and check one way once; returns the number of values of its result."""
        session = self._session
        forget_peak()
        before = resident("VmRSS")
        for need in runs.demand:
            session.supply.prepare(need.correlation, need.units, need.fixed)
        self._hear(0, 0)  # now the provider is ready, too
        soon = session.private(CLIENT, lambda: [time.monotonic_ns() + LEAD_NS], (1,), np.int64)
        start = int(session.call(start_together, soon).value[0])
        mark = len(session.meter.entries)
        time.sleep(max(0, start - time.monotonic_ns()) / 1e9)
        result = session.call(runs.function, *values)
        end, peak = time.monotonic_ns(), resident("VmHWM")
        counts = self._sum(session.meter.entries[mark:])
        chunks = counts.pop("chunks")
        assert not (chunks and runs.costs), "a refill in the middle of a run"
        memory = peak, peak - before
        their_end, *peers = self._hear(*memory)
        runs.add(counts | {"seconds": (max(end, their_end) - start) / 1e9}, memory, peers)
        opened = session.get(session.call(_open, result))
        if opened is not None and runs.wanted is not None:
            runs.check(opened)
        return math.prod(result.shape)

    def _hear(self, *numbers: int) -> list[int]:
        """The provider's time (ns) and its two numbers, at the client; zeros at the provider."""
        note = self._session.private(
            PROVIDER, lambda: [time.monotonic_ns(), *numbers], (3,), np.int64
        )
        heard = self._session.get(self._session.call(_note, note))
        return heard.tolist() if heard is not None else [0, 0, 0]

    def _chunks(self, correlation: Correlation) -> list[Entry]:
        """The session's chunks of a correlation; the seconds of the first one hold compilation."""
        entries = self._session.meter.entries
        return [e for e in entries if e.kind == "pool" and e.name == correlation.name]

    def _make_second_chunk(self, need: Need) -> None:
        supply = self._session.supply
        if len(self._chunks(need.correlation)) < 2:
            there = supply.available(need.correlation)
            supply.prepare(need.correlation, there + 1, need.fixed)

    def _offline(self, demand: Sequence[Need]) -> dict[str, float]:
        """What the units of one call cost: their part of the session's chunks after the first."""
        total = dict.fromkeys(COUNTS, 0.0)
        for need in demand:
            cost = self._sum(self._chunks(need.correlation)[1:])
            part = need.units / (cost.pop("chunks") * need.correlation.chunk)
            total = {name: total[name] + part * cost[name] for name in total}
        return total

    def _sum(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Seconds, bytes by direction and sends of both parties; how many are chunks."""
        sent = sum(e.traffic.sent_bytes for e in entries)
        received = sum(e.traffic.received_bytes for e in entries)
        client = self._session.rank == CLIENT
        return {
            "seconds": sum(e.seconds for e in entries),
            "client_to_provider": sent if client else received,
            "provider_to_client": received if client else sent,
            "messages": sum(e.traffic.messages for e in entries),
            "chunks": sum(e.kind == "pool" for e in entries),
        }


def _is_priced(cost: dict[str, Any], calls: Sequence[Cost]) -> bool:
    """Whether a run took what its ops state. Ops side by side share messages."""
    stated = asdict(sum(calls, Cost()))
    messages = cost["messages"], stated["messages"]
    fewer = messages[0] < messages[1] if len(calls) > 1 else False
    return all(
        cost[name] == stated[name] or (fewer and name == "messages")
        for name in cost
        if name != "seconds"
    )


# ---- the command at the client


def measure(
    model: Path,
    ops: Sequence[str],
    sizes: Sequence[int] | None,
    repeat: int,
    network: str,
) -> dict[str, Any]:
    """One network's session, as JSON fields. `model`: any, the provider is started with it."""
    request = Asked(tuple(ops), tuple(sizes or ()), repeat)
    request.chosen()
    outcome, agreed = run_study(PROGRAM, model, request, tokenizer=model, network=network)
    result = outcome.result
    rows = result["rows"]
    found = [text for row in rows for text in failures(row, network)]
    return {
        "passed": not found,
        "failures": found,
        "notes": [text for row in rows for text in notes(row, result["memory_after_warm_up"])],
        "network": network,
        "repeat": repeat,
        "rows": rows,
        "memory_after_warm_up": result["memory_after_warm_up"],
        "wire_bytes": {
            "client_to_provider": outcome.wire_sent,
            "provider_to_client": outcome.wire_received,
        },
        "learned": result["learned"],
        "machine": asdict(machine()),
        "config": agreed,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", type=commands.names, metavar="NAME[,NAME...]",
                        help="ops, like sign,multiply, or all; an unknown name lists them")
    parser.add_argument("--size", type=commands.numbers, metavar="N,N,...",
                        help="numbers of values, rows, ... (default: each op's own)")  # fmt: skip
    commands.add_network(parser, "local")
    parser.add_argument("--repeat", type=int, default=3, metavar="N",
                        help="measured runs of each size (default: %(default)s)")  # fmt: skip
    commands.add_plot(parser, "draw seconds and bytes against size")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    model = commands.private_model(options)
    commands.each_network(
        options,
        lambda network: measure(model, options.names, options.size, options.repeat, network),
        op_report.table, op_report.plot, "the criterion does not hold",
    )  # fmt: skip
