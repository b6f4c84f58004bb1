"""Benchmark of a decode step against the number of positions that it verifies.

POST's premise: a secure forward over several positions costs little more than one over a single
position. Each step is a step of a completion, with real drafts and verification (the default
variant), greedy or at a temperature. The text does not grow, and all steps see a key/value cache of
one capacity, so steps differ only in their positions.

The correlations that a step takes are made before its clock starts and priced separately; the
client's drafting is also timed separately.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import commands, measured, report
from experiments.common.kinds import by_kind, chains
from experiments.common.two_parties import run_study, session_record
from models.draft import Drafter
from models.family import ModelConfig
from models.hf import load_config, load_model
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from protocols.verification.variants import Verifier, verifier
from spu_llm.compiler.plan import Run
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.completion import held_weights
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs, VerificationResult
from spu_llm.systems.decoding.generate import announce
from spu_llm.systems.decoding.limits import MAX_DRAFTS
from spu_llm.systems.decoding.records import ClientInputs
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.session_shape import SessionShape
from spu_llm.systems.program import Job, Program, Send

NEW_TOKENS = 32  # the cache has room for a completion of this length


@dataclass(frozen=True)
class SweepRequest:
    prompt_tokens: int
    positions: tuple[int, ...]
    repeat: int
    temperature: float


PROGRAM = Program(
    "step-sweep",
    __name__,
    SweepRequest,
    ClientInputs,
    check=lambda asked, config: check_positions(
        config, asked.prompt_tokens, asked.positions, asked.temperature
    ),
)


def capacity_for(prompt_tokens: int, positions: Sequence[int]) -> int:
    """Return the positions of the shared block, which are the same for all steps."""
    return prompt_tokens + NEW_TOKENS + max(positions)


def check_positions(
    config: ModelConfig, prompt_tokens: int, positions: Sequence[int], temperature: float = 1.0
) -> None:
    """Raise InputError unless a completion with such a prompt can have steps of each size in
    `positions`.
    """
    if not positions:
        raise InputError(f"--positions is empty; give numbers from 1 to {MAX_DRAFTS + 1}")
    for n in positions:
        commands.check_range("--positions", n, 1, MAX_DRAFTS + 1)
        Request(prompt_tokens, 1, n - 1, temperature=temperature).check(config)
    if prompt_tokens + max(positions) > config.context:
        raise InputError(
            f"{prompt_tokens} prompt tokens and {max(positions)} positions exceed the model's "
            f"context of {config.context}; use a shorter prompt"
        )


# ---- the program of both workers


def run(session: PartySession, job: Job[SweepRequest, ClientInputs], send: Send) -> dict[str, Any]:
    """Run one prefill, then steps of each size: one to warm up, and `repeat` measured ones."""
    repeat, positions = job.request.repeat, job.request.positions
    with session.meter.in_phase("offline"):
        sweep = _Sweep(session, job)
        send("stage", name="compiling")
        sweep.compile(positions)
    measured.forget_peak()
    send("stage", name=f"prefilling {sweep.prompt_tokens} tokens")
    prefill = sweep.prefill()

    def of_size(n: int) -> dict[str, Any]:
        send("stage", name=f"steps of {n} positions")
        warm_up = sweep.step(n)
        runs: list[dict[str, Any]] = []
        for i in range(repeat):
            last = (runs[-1] if runs else warm_up)["seconds"]
            send("update", name=f"step {i + 1} of {repeat}, {n} positions; last took {last:.1f} s")
            runs.append(sweep.step(n))
        return {"positions": n, "warm_up": warm_up, "runs": runs}

    steps = [of_size(n) for n in positions]
    # Once more at the end: whether the session got slower or faster meanwhile.
    again = of_size(positions[0])
    return {
        "prefill": prefill,
        "capacity": sweep.capacity,
        "steps": [step | sweep.known_of(step["positions"]) for step in steps],
        "again": again,
        "peak_memory": measured.peaks(session),
        "learned": session.ledger.learned(),
    }


class _Sweep:
    """One party's side of the measurements of a session."""

    def __init__(self, session: PartySession, job: Job[SweepRequest, ClientInputs]) -> None:
        self._session, asked = session, job.request
        self.prompt_tokens = asked.prompt_tokens
        self.capacity = capacity_for(self.prompt_tokens, asked.positions)
        request = Request(self.prompt_tokens, NEW_TOKENS, 0, temperature=asked.temperature)
        self._verifier = verifier("token", request.sampling)
        weights = held_weights(session, job.model, job)
        layout = SessionShape(
            job.model, (self.prompt_tokens,), (self.capacity,), scale=request.logits_scale
        )
        self._decoder = Decoder(session, layout, self._verifier, weights)
        self._client = session.local(
            CLIENT, lambda: _client_side(job.client, self.capacity, self._verifier)
        )
        self._secrets = Prg.from_os()  # the provider's part of the joint randomness
        self._last = 0  # positions of the last step
        self._first: dict[int, measured.Forward] = {}  # step of each size

    def compile(self, positions: Sequence[int]) -> None:
        """Compile all programs and agree on them with the peer, before the first secret."""
        self._decoder.prepare(list(dict.fromkeys(positions)))
        self._session.prepare(announce, jax.ShapeDtypeStruct((2,), np.int32))

    def prefill(self) -> dict[str, Any]:
        """Prefill the prompt; return the cost."""
        session, shape = self._session, (1, self.prompt_tokens)
        prompt = session.private(CLIENT, ClientSide.prefill_input, shape, np.int32, self._client)
        inputs = self._inputs(0)
        return self._measured("prefill", lambda: self._decoder.prefill(prompt, inputs)).cost

    def step(self, n: int) -> dict[str, Any]:
        """Run one decode step of n positions; return its cost."""
        session = self._session
        started = time.perf_counter()
        inputs = self._inputs(n - 1)
        drafting = time.perf_counter() - started
        tokens = session.private(CLIENT, ClientSide.step_input, (1, n), np.int32, self._client)
        # The text never moves on.
        nothing, self._last = np.zeros((1, self._last), bool), n
        done = self._measured(
            f"step {len(session.meter.seconds)}",
            lambda: self._decoder.step(tokens, inputs, nothing),
        )
        self._first.setdefault(n, done)
        kinds = by_kind(done.entries, done.steps, session.rank)
        return done.cost | {"drafting": drafting, "kinds": kinds}

    def known_of(self, n: int) -> dict[str, Any]:
        """Return, for a step of n positions: its chain of messages by kind of layer, the number of
        SPU segments, and the cost of making its correlations.
        """
        step, session = self._first[n], self._session
        demand = step.demand
        material = measured.price(session.meter.entries, demand, session.rank)
        # Bound to the provider's weights: that of the linear layers.
        bound = [n for n, need in demand.correlations.items() if need.correlation.fixed is not None]
        return {
            "chain": chains(demand.calls, step.steps),
            "segments": sum(isinstance(s, Run) and not s.local for s in step.steps),
            "offline": measured.summed(material.values()),
            "offline_linear": measured.summed(material[name] for name in bound if name in material),
            "material": material,
        }

    def _measured(self, phase: str, run: Callable[[], VerificationResult]) -> measured.Forward:
        return measured.forward(self._session, self._decoder, phase, run, _resolve, self._client)

    def _inputs(self, count: int) -> JudgeInputs:
        """Draft `count` tokens at the client; return both parties' inputs to their verification."""
        self._session.local(CLIENT, ClientSide.propose, self._client, count)
        return self._decoder.inputs(
            count + 1, self._secrets, ClientSide.verifier_inputs, self._client
        )


def _client_side(inputs: ClientInputs, capacity: int, chosen: Verifier) -> ClientSide:
    """Return the client's plaintext side, with a drafter for the drafts that steps verify."""
    directory = Path(inputs.text_format)
    drafter = Drafter(*load_model(directory), capacity)
    streams = Streams(Prg.from_os(), Prg.from_os())
    return ClientSide(inputs.prompt, Tokenizer.load(directory), drafter, chosen, streams)


def _resolve(client: ClientSide, outcome: Any) -> int:
    """Return the number of accepted drafts; cut the client's text back to the prefill's token."""
    retained = client.resolve([outcome], NEW_TOKENS)
    del client.tokens[1:]
    return int(retained.sum()) - 1


# ---- the command at the client


def check(
    model: Path,
    draft_model: Path,
    prompt: str,
    positions: Sequence[int],
    repeat: int,
    temperature: float,
) -> list[int]:
    """Return the prompt's tokens; InputError for a sweep that cannot be measured."""
    tokens = Tokenizer.load(draft_model).encode(prompt)
    check_positions(load_config(model), len(tokens), positions, temperature)
    commands.check_range("--repeat", repeat, 1)
    return tokens


def measure(
    model: Path,
    draft_model: Path,
    prompt: str,
    positions: Sequence[int],
    repeat: int,
    network: str,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Run one network's session; return its result as JSON fields."""
    tokens = check(model, draft_model, prompt, positions, repeat, temperature)
    outcome, agreed = run_study(
        PROGRAM,
        model,
        SweepRequest(len(tokens), tuple(positions), repeat, temperature),
        ClientInputs(tokens, str(draft_model)),
        tokenizer=draft_model,
        network=network,
    )
    result = outcome.result
    return {
        "network": network,
        "prefill": {"prompt_tokens": len(tokens), **result["prefill"]},
        "capacity": result["capacity"],
        "temperature": temperature,
        "steps": [_with_median(step) for step in result["steps"]],
        "again": _with_median(result["again"]),
        "peak_memory": result["peak_memory"],
        **session_record(outcome, agreed, model=model.name, draft_model=draft_model.name),
    }


def _with_median(step: dict[str, Any]) -> dict[str, Any]:
    """Return `step` with the medians of all figures over its runs."""
    return step | {"median": measured.medians(step["runs"])}


def table(result: dict[str, Any]) -> str:
    """Format one network's medians as Markdown; ratios are to the first step's seconds."""
    prefill, again = result["prefill"], result["again"]
    base = result["steps"][0]["median"]["seconds"]
    heads = "positions", "seconds", "ratio", "MB client→provider", "MB provider→client", "messages"
    rows = [
        _row(f"prefill {prefill['prompt_tokens']}", prefill, None),
        *(_row(str(step["positions"]), step["median"], base) for step in result["steps"]),
        _row(f"{again['positions']} (again)", again["median"], base),
    ]
    return "\n".join(
        [
            f"network {result['network']}: prefill of {prefill['prompt_tokens']} tokens, then "
            f"steps with room for {result['capacity']} positions",
            "",
            *report.table(heads, rows),
        ]
    )


def _row(name: str, cost: dict[str, Any], base: float | None) -> list[str]:
    return [
        name,
        f"{cost['seconds']:.2f}",
        f"{cost['seconds'] / base:.2f}" if base else "",
        f"{cost['client_to_provider'] / 1e6:.2f}",
        f"{cost['provider_to_client'] / 1e6:.2f}",
        f"{cost['messages']:.0f}",
    ]


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw seconds per step against positions, one line per network; InputError without
    matplotlib.
    """
    figure = report.figure(6, 4)
    axes = figure.subplots()
    for result in results:
        steps = sorted(result["steps"], key=lambda step: int(step["positions"]))
        xs = [step["positions"] for step in steps]
        axes.plot(xs, [s["median"]["seconds"] for s in steps], "o-", label=result["network"])
    axes.set_xticks(sorted({int(s["positions"]) for r in results for s in r["steps"]}))
    axes.set_xlabel("positions in one decode step")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(title="network", loc="best")
    report.save(figure, path, dpi=150)


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_network(parser, "local")
    add_sweep(parser, "draw seconds against positions")


def add_sweep(parser: argparse.ArgumentParser, drawn: str) -> None:
    """Add the options that all studies of steps against positions share; `asked` reads them."""
    parser.add_argument(
        "--positions",
        type=commands.numbers,
        default="1,2,4,8,16",
        metavar="N,N,...",
        help="positions of a step (default: %(default)s)",
    )
    commands.add_number(parser, "--repeat", 2, "measured steps of each size")
    commands.add_prompt(parser)
    commands.add_draft_model(parser)
    commands.add_plot(parser, drawn)
    commands.add_common(parser)


def asked(options: argparse.Namespace) -> tuple[Path, Path, str, list[int], int]:
    """Return models, prompt, positions and repetitions from the options: the first arguments of
    `measure`.
    """
    return (*commands.pair(options), commands.prompt(options), options.positions, options.repeat)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    given = asked(options)
    commands.each_network(options, lambda network: measure(*given, network), table, plot)
