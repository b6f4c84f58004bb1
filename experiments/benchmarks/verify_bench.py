"""Benchmark of secure verification alone between two processes: Table 2 of the POST paper for this
implementation.

Both parties make the same random logits of a step and share them under uniform masks; the client
drafts from distributions near them. From logits: everything that a step runs after its forward.
From probabilities: everything after the exponential, on shares of the exact weights exp(z - max z).
`race` (Gumbel-max) and `marked` (provider-watermarked) take only logits.

Correlated randomness is made before the clock starts and reported separately. A run lasts from a
moment that both parties agreed on until the later one of them is done; they read one clock, since a
study runs on one machine. The warm-up before the measured runs takes correlations of zeros: these
are correct, and test data need no hiding. Delays follow from the plan.

Every outcome is compared with a plaintext computation that knows all randomness
(`experiments.benchmarks.verify_data`).

For comparison, the same session runs one decoder block by SPU alone
(`experiments.spu_baseline.block`).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import verify_data, verify_report
from experiments.benchmarks.op_bench import Bench, Runs
from experiments.benchmarks.verify_data import SAMPLING, Step, shared
from experiments.common import commands
from experiments.common.measured import forget_peak, make_second_batches, opening, resident
from experiments.common.replay import cost_of
from experiments.common.two_parties import FEW_MESSAGES, run_study, session_record
from experiments.spu_baseline import block as spu_block
from experiments.spu_baseline.block import SLICES, BlockShape
from protocols.verification import post, token
from protocols.verification.variants import VARIANTS, Verifier, verifier
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.correlation import Correlation, Correlations
from spu_llm.core.errors import InputError
from spu_llm.core.integers import Factor
from spu_llm.core.op import Cost
from spu_llm.core.values import CLIENT, PROVIDER, Owner, encode
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import private_tree
from spu_llm.systems.decoding.limits import MAX_DRAFTS
from spu_llm.systems.program import Job, Nothing, Program, Send

SOURCES = ("probabilities", "logits")
NOISY = ("race", "marked")  # they add noise to logits, and take no weights

_open = opening("rows of a block (study)", Owner.JOINT, "open")


# ---- what is asked for


@dataclass(frozen=True)
class Request:
    """Public settings of the benchmark."""

    vocab: int
    draft_lengths: tuple[int, ...]
    variants: tuple[str, ...]
    sources: tuple[str, ...]
    repeat: int
    block: bool

    def check(self) -> None:
        """Raise InputError for a request that cannot be measured."""
        commands.check_range("--vocab", self.vocab, 2, 1 << 18)
        if not self.draft_lengths:
            raise InputError(f"--draft-length is empty; give numbers from 1 to {MAX_DRAFTS}")
        for count in self.draft_lengths:
            commands.check_range("--draft-length", count, 1, MAX_DRAFTS)
        _check_names("--variants", self.variants, VARIANTS)
        _check_names("--from", self.sources, SOURCES)
        commands.check_range("--repeat", self.repeat, 1)
        if not self.cells and not self.block:
            raise InputError("race and marked take logits; add --from logits or another variant")

    @property
    def cells(self) -> list[tuple[str, str]]:
        """Return the pairs of variant and source to measure: NOISY variants take only logits."""
        return [
            (variant, source)
            for variant in dict.fromkeys(self.variants)
            for source in dict.fromkeys(self.sources)
            if source == "logits" or variant not in NOISY
        ]


def _check_names(option: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise InputError(f"unknown {option} {name!r}; choose from {', '.join(known)}")


# ---- the program of both workers


PROGRAM = Program(
    "verify-bench",
    __name__,
    Request,
    check=lambda request, config: request.check(),
    keeps_hints=False,
    spu=FEW_MESSAGES,
)


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
        "memory_after_warm_up": after_warm_up,
        "blocks": blocks,
        "rows": rows,
        "learned": session.ledger.learned(),
    }


class Zeros:
    """Correlation source whose units are zeros at both parties, for a run whose outcome is not
    used: each result is the product of its masks, as it must be, but selections between words of
    few bits are right only where shares are uniform.
    """

    def take(
        self, correlation: Correlation, units: int, fixed: Factor | None = None
    ) -> Correlations:
        masks, results = (
            [np.zeros((units, *part.shape), np.uint64) for part in parts]
            for parts in (correlation.masks, correlation.results)
        )
        return Correlations(masks, results)


class VerifyBench(Bench):
    """One party's side of the measurements of a session."""

    def __init__(self, session: PartySession, request: Request) -> None:
        super().__init__(session, request.repeat)
        self._request = request

    def variant(
        self, name: str, source: str, count: int, update: Callable[[str], None]
    ) -> dict[str, Any]:
        """Measure one variant from one source with `count` drafts; return a row of the result."""
        before = self._begin()
        session, chosen = self._session, verifier(name, SAMPLING)
        logits = verify_data.step_logits(self._request.vocab, count)
        exact = source == "probabilities"
        words = np.stack([verify_data.exact_weights(row) for row in logits]) if exact else logits
        given = shared(session.rank, words, seed=count)
        del words
        runs = Runs(function_of(chosen, exact))
        mistakes: list[str] = []

        def once(number: int) -> list[Any]:
            step = session.local(CLIENT, Step.drafted, chosen, logits, exact, number)
            inputs = self._inputs(chosen, step, number, count)
            outcome = self._timed(runs, [given, *inputs], before)
            seen = jax.tree.map(session.get, outcome[0])
            if step is not None and number:
                wrong = verify_data.mistakes(step, seen)
                mistakes.extend(f"run {number}: {text}" for text in wrong)
                runs.wrong += bool(wrong)
            return [given, *inputs]

        mark = len(session.meter.entries)
        with session.supplied_by(Zeros()):
            args = once(0)
        segments = [e for e in session.meter.entries[mark:] if e.kind == "segment"]
        runs.demand, _ = session.demand(runs.function, *args)
        session.make(runs.demand)
        make_second_batches(session, runs.demand)
        for number in range(1, 1 + self._repeat):
            update(f"run {number} of {self._repeat} of {name} from {source}")
            once(number)
        needs = runs.demand.correlations.values()
        return (
            {"variant": name, "source": source, "draft_length": count}
            | runs.summary()
            | {
                "segment_messages": sum(e.traffic.messages for e in segments),
                "offline": self._ahead(runs.demand),
                "units": {n.correlation.name: n.units for n in needs},
                "stored_bytes": sum(
                    8 * n.correlation.stored_words(CLIENT) * n.units for n in needs
                ),
                "mistakes": mistakes,
            }
        )

    def block(self, count: int) -> dict[str, Any]:
        """Measure SPU's decoder block on the `count` + 1 positions of a step with `count` drafts: a
        slice of the block, its norms, and the errors of both.
        """
        before = self._begin()
        shape, positions = BlockShape().sliced(SLICES), count + 1
        rng = np.random.default_rng(positions)
        inputs = spu_block.random_inputs(shape, positions, rng)
        weights = spu_block.random_weights(shape, rng)
        given = spu_block.Inputs(
            *(
                shared(self._session.rank, encode(x, verify_data.FRAC_BITS), seed=i)
                for i, x in enumerate(inputs)
            )
        )
        held = jax.tree.map(lambda w: self._private(PROVIDER, w), weights)
        gains = [held.attention_norm, held.ffn_norm]
        plain_gains = [weights.attention_norm, weights.ffn_norm]
        # The norms warm SPU up; a slice takes too long for what a further run would tell.
        ways = {
            "norms": (spu_block.SECURE_NORMS, [gains, given.x], 2),
            "slice": (spu_block.secure_block(shape), [held, given], 1),
        }
        plain = {
            "norms": np.asarray(spu_block.norms(plain_gains, inputs.x)),
            "slice": np.asarray(spu_block.block(weights, inputs, shape)),
        }
        measured: dict[str, Any] = {"draft_length": count, "slices": SLICES}
        for name, (function, values, times) in ways.items():
            runs = Runs(function)
            for _ in range(times):
                result = self._timed(runs, values, before)
            opened = self._session.get(self._session.call(_open, result))
            error = 0.0
            if opened is not None:
                error = float(np.abs(opened - plain[name]).max() / np.std(plain[name]))
            measured[name] = runs.costs[-1] | runs.of_memory() | {"error": error}
        return measured

    def _begin(self) -> int:
        """Begin a row of the result: return the resident bytes from which its growth of memory
        counts, so that the growth includes test data and correlations.
        """
        forget_peak()
        return resident("VmRSS")

    def _inputs(
        self, chosen: Verifier, step: Step | None, number: int, count: int
    ) -> tuple[Any, Any]:
        """Return both parties' inputs to the verifier for the run `number`."""
        session, vocab = self._session, self._request.vocab
        shapes = chosen.client_shapes(count, vocab)
        return private_tree(session, CLIENT, attrgetter("client"), shapes, step), private_tree(
            session,
            PROVIDER,
            chosen.provider_input,
            chosen.provider_shapes(count, vocab),
            count,
            vocab,
            verify_data.provider_stream(number),
        )


def function_of(chosen: Verifier, exact: bool) -> SecureFunction:
    """Return the verifier of one sequence as a secure function of shared logits, or, if `exact`, of
    shared weights: its part after the exponential.
    """

    def from_weights(weights: Any, of_client: Any, of_provider: Any) -> Any:
        if chosen.name == "token":
            return token.verify(weights, of_client, of_provider)
        return post.verify(weights, of_client, SAMPLING, naive=chosen.name == "naive")

    def verify(*of_lane: Any) -> Any:
        lanes = jax.tree.map(lambda x: x[None], of_lane)
        verified = from_weights(*lanes) if exact else chosen.verify(*lanes)
        return jax.tree.map(lambda x: x[0], verified)

    owners = (Owner.JOINT, Owner.CLIENT, Owner.PROVIDER)
    source = "probabilities" if exact else "logits"
    return SecureFunction(verify, owners, f"{chosen.name} from {source}")


# ---- the command at the client


def measure_blocks(model: Path, request: Request) -> list[dict[str, Any]]:
    """Measure SPU's block alone on the local network, where only computing takes time."""
    outcome, _ = run_study(PROGRAM, model, replace(request, variants=()))
    blocks: list[dict[str, Any]] = outcome.result["blocks"]
    return blocks


def measure(
    model: Path, request: Request, network: str, local: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Run one network's session; return its result as JSON fields. `model`: any model, because a
    provider needs one to start.

    local: the result of `measure_blocks`, if the request includes the block.
    """
    request.check()
    # On the local network they need not be measured twice.
    here = replace(request, block=request.block and network != "local")
    outcome, agreed = run_study(PROGRAM, model, here, network=network)
    result = outcome.result
    blocks = [
        whole_block(block, measured)
        for block, measured in zip(local, result["blocks"] or local, strict=True)
    ]
    of_length = {block["draft_length"]: block["seconds"] for block in blocks}
    rows = [
        row
        | {"delays": cost(row["variant"], row["source"], row["draft_length"], request.vocab).rounds}
        | _ratios(row, of_length.get(row["draft_length"]))
        for row in result["rows"]
    ]
    failures = verify_report.failures(rows, blocks, network)
    return {
        "passed": not failures,
        "failures": failures,
        "network": network,
        "vocab": request.vocab,
        "repeat": request.repeat,
        "rows": rows,
        "blocks": blocks,
        "criterion": verify_report.criterion(rows),
        "memory_after_warm_up": result["memory_after_warm_up"],
        **session_record(outcome, agreed),
    }


@functools.cache
def cost(variant: str, source: str, drafts: int, vocab: int) -> Cost:
    """Return the cost of one call from the plan; its rounds are the delays: messages of which each
    waits for the one before.
    """
    chosen = verifier(variant, SAMPLING)
    args = [
        jax.ShapeDtypeStruct((drafts + 1, vocab), np.float32),
        chosen.client_shapes(drafts, vocab),
        chosen.provider_shapes(drafts, vocab),
    ]
    return cost_of(function_of(chosen, source == "probabilities"), args)


def _ratios(row: dict[str, Any], block: float | None) -> dict[str, float | None]:
    """Divide a row's seconds by a block's: online, and with the offline phase."""
    online, offline = row["seconds"], row["offline"]["seconds"]
    return {
        "ratio": online / block if block else None,
        "ratio_with_offline": (online + offline) / block if block else None,
    }


def whole_block(local: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a full block, from its slice measured on the local network (`local`)
    and on this network (`here`).

    Only the seconds on the local network are scaled. The seconds that this network adds to the
    slice, its bytes and its messages are not: a full block takes more.
    """
    part, whole = local["norms"]["seconds"], local["slice"]["seconds"]
    computing = part + local["slices"] * max(0.0, whole - part)
    added = here["slice"]["seconds"] - whole
    sent = ("client_to_provider", "provider_to_client", "messages")
    return {
        "draft_length": here["draft_length"],
        "slices": here["slices"],
        "seconds": computing + max(0.0, added),
        "seconds_local": computing,
        **{name: here["slice"][name] for name in sent},
        "measured": here,
        "measured_local": local,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_number(parser, "--vocab", 32000, "tokens of the vocabulary")
    parser.add_argument(
        "--draft-length",
        type=commands.numbers,
        default="4,8",
        metavar="N,N,...",
        help="drafts of a step (default: %(default)s)",
    )
    parser.add_argument(
        "--variants",
        type=commands.names,
        default="token,post,naive,race",
        metavar="NAME,...",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--from",
        type=commands.names,
        default="probabilities,logits",
        metavar="NAME,...",
        dest="sources",
        help="what is shared (default: %(default)s)",
    )
    commands.add_network(parser, "lan,wan", "local, lan, wan, in turn (default: %(default)s)")
    commands.add_number(parser, "--repeat", 3, "measured runs of each variant")
    parser.add_argument(
        "--no-block",
        dest="block",
        action="store_false",
        help="leave the decoder block out, which takes minutes",
    )
    commands.add_plot(parser, "draw seconds as bars")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    request = Request(
        options.vocab,
        tuple(options.draft_length),
        tuple(options.variants),
        tuple(options.sources),
        options.repeat,
        options.block,
    )
    request.check()
    model = commands.private_model(options)
    blocks = measure_blocks(model, request) if request.block else []
    commands.each_network(
        options,
        lambda network: measure(model, request, network, blocks),
        verify_report.table,
        verify_report.plot,
    )
