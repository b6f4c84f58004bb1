"""What secure verification alone costs between two processes: Table 2 of the POST paper, for us.

Both parties make the same random logits of a step and share them under uniform masks; the client
drafts from distributions near them. From logits: what a step runs after its forward. From
probabilities: the same without the exponential, on shares of the exact weights exp(z - max z).
`race` takes logits alone.

Correlated randomness is made before the clock starts and reported on its own. A run lasts from a
moment that both parties agreed on until the later one of them is done; they read one clock, since a
study runs on one machine. The run before the measured ones, which compiles and shows what material
a call takes, has material of zeros: it is correct, and with test data there is nothing to hide.

Every outcome is compared with plaintext that knows all randomness
(`experiments.benchmarks.verify_data`).

Beside it, in the same session: one decoder block by SPU alone (`experiments.spu_baseline.block`).
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import enable_x64

from experiments.benchmarks import verify_report
from experiments.benchmarks.op_bench import (
    LEAD_NS,
    Bench,
    Counting,
    Runs,
    start_together,
)
from experiments.benchmarks.verify_data import (
    FRAC_BITS,
    SAMPLING,
    Step,
    exact_weights,
    mistakes,
    provider_stream,
    shared,
    step_logits,
)
from experiments.benchmarks.verify_report import criterion, failures
from experiments.common import commands
from experiments.common.memory import forget_peak, resident
from experiments.common.two_parties import FEW_MESSAGES, machine, run_study
from experiments.spu_baseline import block as spu_block
from experiments.spu_baseline.block import SLICES, BlockShape, extrapolated
from protocols.verification import post, token
from protocols.verification.variants import VARIANTS, Verifier, verifier
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.channel import Channel
from spu_llm.core.correlation import Correlation, Material, Part
from spu_llm.core.errors import InputError
from spu_llm.core.integers import Factor
from spu_llm.core.reveal import reveal
from spu_llm.core.values import CLIENT, PROVIDER, ROLES, Owner, encode
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.generate import private_tree
from spu_llm.systems.program import Job, Nothing, Program, Send

SOURCES = ("probabilities", "logits")

_log = SecureFunction(
    lambda x: reveal(x, to=Owner.CLIENT, label="provider's order of messages (study)"),
    (Owner.PROVIDER,),
    "order of messages",
)
_open = SecureFunction(
    lambda x: reveal(x, to=Owner.CLIENT, label="rows of a block (study)"), (Owner.JOINT,), "open"
)


# ---- what is asked for


@dataclass(frozen=True)
class Request:
    """Public settings; `variants` may be empty when only the block is measured."""

    vocab: int
    draft_lengths: tuple[int, ...]
    variants: tuple[str, ...]
    sources: tuple[str, ...]
    repeat: int
    block: bool

    def check(self) -> None:
        """InputError for what cannot be measured."""
        if not 2 <= self.vocab <= 1 << 18:
            raise InputError(f"--vocab must be 2 to {1 << 18}, found {self.vocab}")
        if not self.draft_lengths:
            raise InputError("--draft-length is empty; give numbers from 1 to 16")
        for count in self.draft_lengths:
            if not 1 <= count <= 16:
                raise InputError(f"--draft-length must be 1 to 16, found {count}")
        _check_names("--variants", self.variants, VARIANTS)
        _check_names("--from", self.sources, SOURCES)
        if self.repeat < 1:
            raise InputError(f"--repeat must be at least 1, found {self.repeat}")
        if not self.cells and not self.block:
            raise InputError("race takes logits alone; add --from logits or another variant")

    @property
    def cells(self) -> list[tuple[str, str]]:
        """The variants with each source that they have a use for."""
        return [
            (variant, source)
            for variant in dict.fromkeys(self.variants)
            for source in dict.fromkeys(self.sources)
            if (variant, source) != ("race", "probabilities")
        ]


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise InputError(f"unknown {option} {name!r}; choose from {', '.join(known)}")


# ---- the program of both workers


PROGRAM = Program(
    "verify-bench", __name__, Request, check=lambda request, config: request.check(),
    keeps_hints=False, spu=FEW_MESSAGES,
)  # fmt: skip


def run(session: PartySession, job: Job[Request, Nothing], send: Send) -> dict[str, Any]:
    """Measure the block and every variant; the client's result has all figures."""
    request = job.request
    for rank in (CLIENT, PROVIDER):
        session.ledger.declare(rank, "the inputs: random numbers of known seeds (study)")
    bench = VerifyBench(session, request)
    after_warm_up = bench.memory()
    blocks, rows = [], []
    for count in dict.fromkeys(request.draft_lengths):
        if request.block:
            send("stage", name=f"decoder block by SPU, {count + 1} positions")
            blocks.append(bench.block(count))
        for variant, source in request.cells:
            send("stage", name=f"{variant} from {source}, {count} drafts")
            rows.append(
                bench.variant(variant, source, count, lambda name: send("update", name=name))
            )
    return {
        "memory_after_warm_up": after_warm_up, "blocks": blocks, "rows": rows,
        "learned": session.ledger.learned(),
    }  # fmt: skip


class Zeros:
    """Units of zeros at both parties: correct, since every result is a product of masks."""

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Material:
        def zeros(parts: Sequence[Part]) -> list[np.ndarray]:
            return [np.zeros((units, *part.shape), np.uint64) for part in parts]

        return Material(zeros(correlation.masks), zeros(correlation.results))


@dataclass
class Ordered:
    """A channel, and which of its messages were sent (True) and received, in order."""

    inner: Channel
    order: list[bool] = field(default_factory=list)

    def send(self, data: bytes) -> None:
        self.order.append(True)
        self.inner.send(data)

    def recv(self) -> bytes:
        data = self.inner.recv()
        self.order.append(False)
        return data

    def close(self) -> None:
        self.inner.close()


def delays(orders: Sequence[Sequence[bool]]) -> int:
    """The longest chain of messages each of which waits for the one before.

    orders: what each party sent (True) and received, in its own order.
    """
    clock, at = [0, 0], [0, 0]
    under_way: list[deque[int]] = [deque(), deque()]  # to each party: its place in a chain
    while any(at[rank] < len(orders[rank]) for rank in (CLIENT, PROVIDER)):
        before = list(at)
        for rank in (CLIENT, PROVIDER):
            for sent in orders[rank][at[rank] :]:
                if sent:
                    under_way[1 - rank].append(clock[rank] + 1)
                elif under_way[rank]:
                    clock[rank] = max(clock[rank], under_way[rank].popleft())
                else:
                    break  # the peer has to send first
                at[rank] += 1
        assert at != before, "one party waits for a message that the other one never sent"
    return max(clock)


class VerifyBench(Bench):
    """One party's half of the measurements of a session."""

    def __init__(self, session: PartySession, request: Request) -> None:
        super().__init__(session, request.repeat)
        self._request = request
        self._order: list[bool] = []  # of the messages of the last run
        self._before = 0  # resident bytes at the beginning of what is measured

    def variant(
        self, name: str, source: str, count: int, update: Callable[[str], None]
    ) -> dict[str, Any]:
        """One variant from one source at a number of drafts, as a row of the result."""
        self._begin()
        session, chosen = self._session, verifier(name, SAMPLING)
        logits = step_logits(self._request.vocab, count)
        exact = source == "probabilities"
        words = np.stack([exact_weights(row) for row in logits]) if exact else logits
        given = shared(session.rank, words, seed=count)
        del words
        runs = Runs(function_of(chosen, exact), None, 64, 0)
        found: list[str] = []

        def once(number: int) -> None:
            step = None
            if session.rank == CLIENT:
                step = Step.drafted(chosen, logits, exact, number)
            outcome = self._timed(runs, [given, *self._inputs(chosen, step, number, count)])
            seen = jax.tree.map(session.get, outcome[0])
            if step is not None:
                wrong = mistakes(step, seen)
                found.extend(f"run {number}: {text}" for text in wrong)
                runs.wrong += bool(wrong)

        mark = len(session.meter.entries)
        session.party.supply = counting = Counting(Zeros())  # type: ignore[arg-type]
        once(0)
        session.party.supply = session.supply
        segments = [e for e in session.meter.entries[mark:] if e.kind == "segment"]
        chain = self._delays()
        runs.demand = list(counting.demand.values())
        for need in runs.demand:
            update(f"making {need.correlation.name} for {name} from {source}")
            session.supply.prepare(need.correlation, need.units, need.fixed)
            self._make_second_chunk(need)
        for number in range(1, 1 + self._repeat):
            update(f"run {number} of {self._repeat} of {name} from {source}")
            once(number)
        return {
            "variant": name, "source": source, "draft_length": count,
        } | runs.summary() | {
            "delays": chain,
            "segment_messages": sum(e.traffic.messages for e in segments),
            "offline": self._offline(runs.demand),
            "units": {n.correlation.name: n.units for n in runs.demand},
            "stored_bytes": sum(8 * n.correlation.words * n.units for n in runs.demand),
            "mistakes": found,
        }  # fmt: skip

    def block(self, count: int) -> dict[str, Any]:
        """SPU's decoder block at a number of drafts: a slice of it, its norms, and their errors."""
        self._begin()
        shape, positions = BlockShape().sliced(SLICES), count + 1
        rng = np.random.default_rng(positions)
        inputs = spu_block.random_inputs(shape, positions, rng)
        weights = spu_block.random_weights(shape, rng)
        given = spu_block.Inputs(
            *(
                shared(self._session.rank, encode(x, FRAC_BITS), seed=i)
                for i, x in enumerate(inputs)
            )
        )
        held = jax.tree.map(lambda w: self._private(PROVIDER, w), weights)
        gains = [held.attention_norm, held.ffn_norm]
        plain_gains = [weights.attention_norm, weights.ffn_norm]
        ways = {
            "norms": (spu_block.SECURE_NORMS, [gains, given.x]),
            "slice": (spu_block.secure_block(shape), [held, given]),
        }
        plain = {
            "norms": np.asarray(spu_block.norms(plain_gains, inputs.x)),
            "slice": np.asarray(spu_block.block(weights, inputs, shape)),
        }
        measured: dict[str, Any] = {"draft_length": count, "slices": SLICES}
        for name, (function, values) in ways.items():
            runs = Runs(function, None, 64, 0)
            # The norms warm SPU up; a slice takes too long for what a further run would tell.
            for _ in range(2 if name == "norms" else 1):
                result = self._timed(runs, values)
            opened = self._session.get(self._session.call(_open, result))
            error = 0.0
            if opened is not None:
                error = float(np.abs(opened - plain[name]).max() / np.std(plain[name]))
            peak, growth = (dict(zip(ROLES, map(int, c), strict=True)) for c in runs.memory.T)
            measured[name] = runs.costs[-1] | {
                "error": error, "peak_memory": peak, "memory_growth": growth
            }  # fmt: skip
        return measured

    def _begin(self) -> None:
        """What follows is one row: its memory grows from here, test data and material included."""
        forget_peak()
        self._before = resident("VmRSS")

    def _inputs(
        self, chosen: Verifier, step: Step | None, number: int, count: int
    ) -> tuple[Any, Any]:
        """Both parties' inputs to the verifier."""

        def of_client() -> Any:
            assert step is not None
            return step.client

        shapes = chosen.client_shapes(count, self._request.vocab)
        return private_tree(self._session, CLIENT, of_client, shapes), private_tree(
            self._session,
            PROVIDER,
            lambda: chosen.provider_input(count, provider_stream(number)),
            chosen.provider_shapes(count),
        )

    def _timed(self, runs: Runs, values: Sequence[Any]) -> Any:
        """Prepare and run one way once."""
        session = self._session
        for need in runs.demand:
            session.supply.prepare(need.correlation, need.units, need.fixed)
        session.prepare(runs.function, *values)
        channel = session.party.channel
        session.party.channel = ordered = Ordered(channel)
        start = self._agree_on_start()
        mark = len(session.meter.entries)
        ordered.order.clear()
        time.sleep(max(0, start - time.monotonic_ns()) / 1e9)
        result = session.call(runs.function, *values)
        end, peak = time.monotonic_ns(), resident("VmHWM")
        session.party.channel, self._order = channel, ordered.order
        counts = self._sum(session.meter.entries[mark:])
        chunks = counts.pop("chunks")
        assert not chunks, "a refill in the middle of a run"
        memory = peak, peak - self._before
        their_end, *peers = self._hear(*memory)
        runs.add(counts | {"seconds": (max(end, their_end) - start) / 1e9}, memory, peers)
        return result

    def _agree_on_start(self) -> int:
        """A moment (ns) soon after both parties are ready."""
        self._hear(0, 0)
        with enable_x64():  # a clock takes a whole word
            soon = self._session.private(
                CLIENT, lambda: [time.monotonic_ns() + LEAD_NS], (1,), np.int64
            )
            return int(self._session.call(start_together, soon).value[0])

    def _hear(self, *numbers: int) -> list[int]:
        with enable_x64():
            return super()._hear(*numbers)

    def _delays(self) -> int:
        """Of the last run, at the client; both parties call this."""
        own = self._order
        order = self._session.private(PROVIDER, lambda: own, (len(own),), np.bool_)
        peers = self._session.get(self._session.call(_log, order))
        return delays([own, peers.tolist()]) if peers is not None else 0


def function_of(chosen: Verifier, exact: bool) -> SecureFunction:
    """The verifier from shared logits, or what it does after its exponential."""
    owners = (Owner.JOINT, Owner.CLIENT, Owner.PROVIDER)
    if not exact:
        return SecureFunction(chosen.verify, owners, f"{chosen.name} from logits")

    def verify(weights: Any, of_client: Any, of_provider: Any) -> Any:
        if chosen.name == "token":
            return token.verify(weights, of_client, of_provider)
        return post.verify(weights, of_client, SAMPLING, naive=chosen.name == "naive")

    return SecureFunction(verify, owners, f"{chosen.name} from probabilities")


# ---- the command at the client


def measure_blocks(model: Path, request: Request) -> list[dict[str, Any]]:
    """SPU's block alone on the local network, where nothing but computing takes time."""
    alone = replace(request, variants=(), block=True)
    outcome, _ = run_study(PROGRAM, model, alone, tokenizer=model, network="local")
    blocks: list[dict[str, Any]] = outcome.result["blocks"]
    return blocks


def measure(
    model: Path, request: Request, network: str, local: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """One network's session, as JSON fields. `model`: any, the provider is started with it.

    local: the blocks of `measure_blocks`, when the request has blocks.
    """
    request.check()
    # On the local network they need not be measured twice.
    here = replace(request, block=request.block and network != "local")
    outcome, agreed = run_study(PROGRAM, model, here, tokenizer=model, network=network)
    result = outcome.result
    blocks = [
        whole_block(block, measured)
        for block, measured in zip(local, result["blocks"] or local, strict=True)
    ]
    of_length = {block["draft_length"]: block["seconds"] for block in blocks}
    rows = [row | _ratios(row, of_length.get(row["draft_length"])) for row in result["rows"]]
    found = failures(rows, blocks, network)
    return {
        "passed": not found,
        "failures": found,
        "network": network,
        "vocab": request.vocab,
        "repeat": request.repeat,
        "rows": rows,
        "blocks": blocks,
        "criterion": criterion(rows),
        "memory_after_warm_up": result["memory_after_warm_up"],
        "wire_bytes": {
            "client_to_provider": outcome.wire_sent,
            "provider_to_client": outcome.wire_received,
        },
        "learned": result["learned"],
        "machine": asdict(machine()),
        "config": agreed,
    }


def _ratios(row: dict[str, Any], block: float | None) -> dict[str, float | None]:
    """To a block's seconds: what a call takes, and that with what is made ahead."""
    online, offline = row["seconds"], row["offline"]["seconds"]
    return {
        "ratio": online / block if block else None,
        "ratio_with_offline": (online + offline) / block if block else None,
    }


def whole_block(local: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Figures of a full block from its slice on the local network and on this one.

    Only seconds on the local network are scaled. What this network adds to the slice is not, and
    neither are bytes and messages, which are the slice's: less than a full block takes.
    """
    part, whole = local["norms"]["seconds"], local["slice"]["seconds"]
    computing = extrapolated(part, whole, local["slices"])
    added = here["slice"]["seconds"] - whole
    return {
        "draft_length": here["draft_length"],
        "slices": here["slices"],
        "seconds": computing + max(0.0, added),
        "seconds_local": computing,
        "client_to_provider": here["slice"]["client_to_provider"],
        "provider_to_client": here["slice"]["provider_to_client"],
        "messages": here["slice"]["messages"],
        "measured": here,
        "measured_local": local,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocab", type=int, default=32000, metavar="N",
                        help="tokens of the vocabulary (default: %(default)s)")  # fmt: skip
    parser.add_argument("--draft-length", type=commands.numbers, default="4,8", metavar="N,N,...",
                        help="drafts of a step (default: %(default)s)")  # fmt: skip
    parser.add_argument("--variants", type=commands.names, default="token,post,naive,race",
                        metavar="NAME,...", help="default: %(default)s")  # fmt: skip
    parser.add_argument("--from", type=commands.names, default="probabilities,logits",
                        metavar="NAME,...", dest="sources",
                        help="what is shared (default: %(default)s)")  # fmt: skip
    commands.add_network(parser, "lan,wan", "local, lan, wan, in turn (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N",
                        help="measured runs of each variant (default: %(default)s)")  # fmt: skip
    parser.add_argument("--no-block", dest="block", action="store_false",
                        help="leave the decoder block out, which takes minutes")  # fmt: skip
    commands.add_plot(parser, "draw seconds as bars")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    request = Request(
        options.vocab, tuple(options.draft_length), tuple(options.variants),
        tuple(options.sources), options.repeat, options.block,
    )  # fmt: skip
    request.check()
    model = commands.private_model(options)
    blocks = measure_blocks(model, request) if request.block else []
    commands.each_network(
        options, lambda network: measure(model, request, network, blocks),
        verify_report.table, verify_report.plot,
    )  # fmt: skip
