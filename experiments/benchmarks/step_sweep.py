"""How the cost of a decode step grows with the positions it verifies.

POST's premise: a secure forward over several positions costs little more than one over a single
position. Each step here is the one that a completion runs, with real drafts and verification (the
default variant), greedy or at a temperature. The text never moves on, and all steps see a key/value
cache of one capacity, so steps differ in nothing but their positions.

What a step takes from the pool is made before its clock starts and priced on its own; the client's
drafting is timed apart, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import commands
from experiments.common.kinds import by_kind, chains
from experiments.common.measured import medians, peaks, price, summed, timed
from experiments.common.memory import forget_peak
from experiments.common.two_parties import machine, run_study
from models.draft import Drafter
from models.family import ModelConfig
from models.hf import load_config, load_model
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from protocols.verification.variants import Verifier, lanes_of, verifier
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.plan import Run
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.decoder import Decoder, Judged, JudgeInputs
from spu_llm.systems.decoding.generate import announce
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import Layout, share_weights
from spu_llm.systems.program import Job, Program, Send

NEW_TOKENS = 32  # the cache has room for a completion of this length


@dataclass(frozen=True)
class SweepRequest:
    prompt_tokens: int
    positions: tuple[int, ...]
    repeat: int
    temperature: float


@dataclass(frozen=True)
class ClientInputs:
    prompt: list[int]
    draft_dir: str  # the model that drafts


PROGRAM = Program(
    "step-sweep", __name__, SweepRequest, ClientInputs,
    check=lambda asked, config: check_positions(
        config, asked.prompt_tokens, asked.positions, asked.temperature
    ),
)  # fmt: skip


def capacity_for(prompt_tokens: int, positions: Sequence[int]) -> int:
    """Positions of the shared block in every step."""
    return prompt_tokens + NEW_TOKENS + max(positions)


def check_positions(
    config: ModelConfig, prompt_tokens: int, positions: Sequence[int], temperature: float = 1.0
) -> None:
    """InputError unless a completion could take steps of these sizes after such a prompt."""
    if not positions:
        raise InputError("--positions is empty; give numbers from 1 to 17")
    for n in positions:
        if not 1 <= n <= 17:
            raise InputError(f"--positions must be 1 to 17, found {n}")
        Request(prompt_tokens, 1, n - 1, temperature=temperature).check(config)
    if prompt_tokens + max(positions) > config.context:
        raise InputError(
            f"{prompt_tokens} prompt tokens and {max(positions)} positions exceed the model's "
            f"context of {config.context}; use a shorter prompt"
        )


# ---- the program of both workers


def run(session: PartySession, job: Job[SweepRequest, ClientInputs], send: Send) -> dict[str, Any]:
    """One prefill, then steps of each size: one to warm up, `repeat` more to measure."""
    config, repeat, positions = job.model, job.request.repeat, job.request.positions
    with session.meter.in_phase("offline"):
        sweep = _Sweep(session, job, config, positions)
        send("stage", name="compiling")
        sweep.compile()
    session.on_batch = lambda made, total: send("update", name=f"material {made} of {total}")
    forget_peak()
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
        "peak_memory": peaks(session),
        "learned": session.ledger.learned(),
    }


class _Sweep:
    """One party's half of the measurements of a session."""

    def __init__(
        self,
        session: PartySession,
        job: Job[SweepRequest, ClientInputs],
        config: ModelConfig,
        positions: Sequence[int],
    ) -> None:
        self._session = session
        self._positions = list(dict.fromkeys(positions))
        self.prompt_tokens = job.request.prompt_tokens
        self.capacity = capacity_for(self.prompt_tokens, positions)
        asked = Request(
            self.prompt_tokens, NEW_TOKENS, 0, temperature=job.request.temperature
        )
        self._verifier = verifier("token", asked.sampling)
        own = session.rank == CLIENT
        params = None if own else load_model(Path(job.provider.model_dir))[1]
        weights = share_weights(session, config, params)
        layout = Layout(config, (self.prompt_tokens,), (self.capacity,), scale=asked.logits_scale)
        self._decoder = Decoder(session, layout, self._verifier, weights)
        self._client = _Drafts(job.client, self.capacity, self._verifier) if own else None
        self._secrets = Prg.from_os()  # the provider's part of the joint randomness
        self._last = 0  # positions of the last step
        self._demand: dict[int, Demand] = {}
        self._steps_of: dict[int, Any] = {}

    def compile(self) -> None:
        """Agree with the peer on all programs, before the first secret."""
        self._decoder.prepare(self._positions)
        self._session.prepare(announce, jax.ShapeDtypeStruct((2,), np.int32))

    def prefill(self) -> dict[str, Any]:
        """The prompt into the cache; its cost."""
        session, shape = self._session, (1, self.prompt_tokens)
        prompt = session.private(CLIENT, _Drafts.prompt, shape, np.int32, self._client)
        inputs = self._inputs(0)
        cost = self._measured("prefill", lambda: self._decoder.prefill(prompt, inputs))
        session.local(CLIENT, _Drafts.start, self._client)
        return cost

    def step(self, n: int) -> dict[str, Any]:
        """The cost of one decode step of n positions."""
        session, decoder = self._session, self._decoder
        started = time.perf_counter()
        inputs = self._inputs(n - 1)
        drafting = time.perf_counter() - started
        tokens = session.private(CLIENT, _Drafts.step_tokens, (1, n), np.int32, self._client)
        mark = len(session.meter.entries)
        phase = f"step {len(session.meter.seconds)}"
        # The text never moves on.
        nothing, self._last = np.zeros((1, self._last), bool), n
        cost = self._measured(phase, lambda: decoder.step(tokens, inputs, nothing))
        assert decoder.last is not None
        decode, args = decoder.last
        if n not in self._demand:
            self._demand[n] = decoder.demand
            self._steps_of[n] = decode.plan(*args)[0].steps
        entries = [
            e
            for e in session.meter.entries[mark:]
            if e.phase == phase and e.function == decode.name and e.kind != "control"
        ]
        kinds = by_kind(entries, self._steps_of[n], session.rank)
        return cost | {"drafting": drafting, "kinds": kinds}

    def known_of(self, n: int) -> dict[str, Any]:
        """Of a step of n positions: its chain of messages by kind of layer, how many segments SPU
        runs, and what its material costs to make.
        """
        demand, steps = self._demand[n], self._steps_of[n]
        session = self._session
        material = price(session.meter.entries, demand, session.rank)
        # Bound to the provider's weights: that of the linear layers.
        bound = [n for n, need in demand.material.items() if need.correlation.fixed is not None]
        return {
            "chain": chains(demand.calls, steps),
            "segments": sum(isinstance(s, Run) and not s.local for s in steps),
            "offline": summed(material.values()),
            "offline_linear": summed(material[name] for name in bound if name in material),
            "material": material,
        }

    def _measured(self, phase: str, forward: Callable[[], Judged]) -> dict[str, Any]:
        """Make what a forward takes, then run it, resolve and announce on the clock."""
        session = self._session

        def work() -> None:
            seen = jax.tree.map(session.get, forward().outcome)
            accepted = session.local(CLIENT, _Drafts.resolve, self._client, seen)
            said = session.private(CLIENT, np.array, (2,), np.int32, [accepted, 0])
            session.call(announce, said)

        return timed(session, phase, work)[1]

    def _inputs(self, count: int) -> JudgeInputs:
        """Both parties' inputs to the verifier of `count` drafts, which the client makes here."""
        return self._decoder.inputs(
            count + 1, self._secrets, _Drafts.propose, self._client, count
        )


class _Drafts:
    """The client's plaintext half: what the next step verifies."""

    def __init__(self, inputs: ClientInputs, capacity: int, chosen: Verifier) -> None:
        self._verifier = chosen
        config, params = load_model(Path(inputs.draft_dir))
        self._drafter = Drafter(config, params, capacity)
        self._context = inputs.prompt
        self._streams = Streams(Prg.from_os(), Prg.from_os())
        self._drafts: list[int] = []
        self._q = np.zeros((0, config.vocab_size))
        self._token = 0

    def prompt(self) -> list[list[int]]:
        """Input of the prefill."""
        return [self._context]

    def start(self) -> None:
        """Append the token of the prefill to the text, which then stays as it is."""
        self._context = [*self._context, self._token]

    def propose(self, count: int) -> list[Any]:
        """Draft, and the client's input to the verifier."""
        self._drafts, self._q = self._drafter.propose(
            self._context,
            count,
            lambda logits, position: self._verifier.propose(logits, position, self._streams),
        )
        position = len(self._context)
        return [self._verifier.client_input(self._drafts, self._q, position, self._streams)]

    def step_tokens(self) -> list[list[int]]:
        """The last token of the text, not cached yet, and the drafts."""
        return [[self._context[-1], *self._drafts]]

    def resolve(self, outcome: Any) -> int:
        """Accepted drafts."""
        (of_lane,) = lanes_of(outcome)
        accepted, self._token = self._verifier.resolve(
            of_lane, self._drafts, self._q, lambda: float(self._streams.sampling.uniform(()))
        )
        return accepted


# ---- the command at the client


def measure(
    model: Path,
    draft_model: Path,
    prompt: str,
    positions: Sequence[int],
    repeat: int,
    network: str,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """One network's session, as JSON fields."""
    tokens = Tokenizer.load(draft_model).encode(prompt)
    check_positions(load_config(model), len(tokens), positions, temperature)
    if repeat < 1:
        raise InputError(f"--repeat must be at least 1, found {repeat}")
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
        "wire_bytes": {
            "client_to_provider": outcome.wire_sent,
            "provider_to_client": outcome.wire_received,
        },
        "learned": result["learned"],
        "machine": asdict(machine()),
        "config": {"model": model.name, "draft_model": draft_model.name, **agreed},
    }


def _with_median(step: dict[str, Any]) -> dict[str, Any]:
    """`step` with the median over its runs of every figure."""
    runs = step["runs"]
    return step | {"median": medians(runs)}


def table(result: dict[str, Any]) -> str:
    """One network's medians as Markdown; the ratio is to the first row."""
    prefill, again = result["prefill"], result["again"]
    lines = [
        f"network {result['network']}: prefill of {prefill['prompt_tokens']} tokens, then steps "
        f"with room for {result['capacity']} positions",
        "",
        "| positions | seconds | ratio | MB client→provider | MB provider→client | messages |",
        "|---|---|---|---|---|---|",
        _row(f"prefill {prefill['prompt_tokens']}", prefill, None),
    ]
    base = result["steps"][0]["median"]["seconds"]
    for step in result["steps"]:
        lines.append(_row(str(step["positions"]), step["median"], base))
    lines.append(_row(f"{again['positions']} (again)", again["median"], base))
    return "\n".join(lines)


def _row(name: str, cost: dict[str, Any], base: float | None) -> str:
    cells = [
        name,
        f"{cost['seconds']:.2f}",
        f"{cost['seconds'] / base:.2f}" if base else "",
        f"{cost['client_to_provider'] / 1e6:.2f}",
        f"{cost['provider_to_client'] / 1e6:.2f}",
        f"{cost['messages']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds per step against positions, one line per network; InputError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from None
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
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
    figure.savefig(path, dpi=150, metadata={"Software": ""})
    pyplot.close(figure)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--positions", type=commands.numbers, default="1,2,4,8,16",
                        metavar="N,N,...",
                        help="positions of a step (default: %(default)s)")  # fmt: skip
    commands.add_network(parser, "local")
    parser.add_argument("--repeat", type=int, default=2, metavar="N",
                        help="measured steps of each size (default: %(default)s)")  # fmt: skip
    commands.add_prompt(parser)
    commands.add_draft_model(parser)
    commands.add_plot(parser, "draw seconds against positions")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    pair, prompt = commands.pair(options), commands.prompt(options)
    commands.each_network(
        options,
        lambda network: measure(*pair, prompt, options.positions, options.repeat, network),
        table, plot,
    )  # fmt: skip
