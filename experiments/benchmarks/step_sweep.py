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
from models.gpt2 import GPT2Config
from models.hf import load_config, load_model
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from protocols.verification.variants import Verifier, verifier
from spu_llm.compiler.demand import Demand
from spu_llm.compiler.plan import Run
from spu_llm.compiler.secure_function import SecureFunction
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER, public
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding import secure_model as secure_gpt2
from spu_llm.systems.decoding.generate import announce, private_tree, share_weights
from spu_llm.systems.decoding.request import Request
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
    config: GPT2Config, prompt_tokens: int, positions: Sequence[int], temperature: float = 1.0
) -> None:
    """InputError unless a completion could take steps of these sizes after such a prompt."""
    if not positions:
        raise InputError("--positions is empty; give numbers from 1 to 17")
    for n in positions:
        if not 1 <= n <= 17:
            raise InputError(f"--positions must be 1 to 17, found {n}")
        Request(prompt_tokens, 1, n - 1, temperature=temperature).check(config)
    if prompt_tokens + max(positions) > config.n_positions:
        raise InputError(
            f"{prompt_tokens} prompt tokens and {max(positions)} positions exceed the model's "
            f"context of {config.n_positions}; use a shorter prompt"
        )


# ---- the program of both workers


def run(session: PartySession, job: Job[SweepRequest, ClientInputs], send: Send) -> dict[str, Any]:
    """One prefill, then steps of each size: one to warm up, `repeat` more to measure."""
    config, repeat, positions = job.model, job.request.repeat, job.request.positions
    with session.meter.in_phase("offline"):
        sweep = _Sweep(session, job, config, positions)
        send("stage", name="compiling")
        sweep.compile(lambda name: send("update", name=name))
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
        config: GPT2Config,
        positions: Sequence[int],
    ) -> None:
        self._session, self._config = session, config
        self._positions = list(dict.fromkeys(positions))
        self.prompt_tokens = job.request.prompt_tokens
        self.capacity = capacity_for(self.prompt_tokens, positions)
        asked = Request(
            self.prompt_tokens, NEW_TOKENS, 0, temperature=job.request.temperature
        )
        self._verifier = verifier("token", asked.sampling)
        self._secure = secure_gpt2.build(
            config, self.capacity, self._verifier, asked.logits_scale
        )
        mine = session.rank == CLIENT
        params = None if mine else load_model(Path(job.provider.model_dir))[1]
        self._weights = share_weights(session, config, params)
        self._client = _Drafts(job.client, self.capacity, self._verifier) if mine else None
        self._prompt = job.client.prompt if mine else []
        self._secrets = Prg.from_os()  # the provider's part of the joint randomness
        self._shared: Any = None
        self._demand: dict[int, Demand] = {}
        self._steps_of: dict[int, Any] = {}

    def compile(self, update: Callable[[str], None]) -> None:
        """Agree with the peer on all programs, before the first secret."""
        session, shape = self._session, jax.ShapeDtypeStruct
        prompt = shape((self.prompt_tokens,), np.int32)
        prefill = (self._weights, prompt, *self._verifier_shapes(0), None)
        session.prepare(self._secure.prefill, *prefill)
        shapes = jax.tree.map(lambda v: shape(v.shape, v.dtype), prefill)
        _, _, shared = jax.eval_shape(self._secure.prefill.fn, *shapes)
        for n in self._positions:
            update(f"compiling the step of {n} positions")
            tokens, inputs = shape((n,), np.int32), self._verifier_shapes(n - 1)
            session.prepare(
                self._secure.decode, self._weights, tokens, None, *inputs, shared,
                shape((), np.int32), None,
            )  # fmt: skip
        session.prepare(announce, shape((2,), np.int32))

    def prefill(self) -> dict[str, Any]:
        """The prompt into the cache; its cost."""
        session = self._session
        prompt = session.private(CLIENT, lambda: self._prompt, (self.prompt_tokens,), np.int32)
        args = (self._weights, prompt, *self._inputs(0), None)
        _, cost = self._measured("prefill", self._secure.prefill, args)
        if self._client is not None:
            self._client.start()
        return cost

    def step(self, n: int) -> dict[str, Any]:
        """The cost of one decode step of n positions."""
        session, client = self._session, self._client
        started = time.perf_counter()
        inputs = self._inputs(n - 1)
        drafting = time.perf_counter() - started
        tokens = session.private(
            CLIENT, lambda: client.step_tokens() if client else [], (n,), np.int32
        )
        args = (
            self._weights, tokens, None, *inputs, self._shared,
            public(np.int32(self.prompt_tokens)), None,
        )  # fmt: skip
        decode = self._secure.decode
        if n not in self._demand:
            self._demand[n] = session.demand(decode, *args)[0]
            self._steps_of[n] = decode.plan(*args)[0].steps
        mark = len(session.meter.entries)
        phase, cost = self._measured(f"step {len(session.meter.seconds)}", decode, args)
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

    def _measured(
        self, phase: str, function: SecureFunction, args: tuple[Any, ...]
    ) -> tuple[str, dict[str, Any]]:
        """Make what a call takes, then call, resolve and announce on the clock."""
        session = self._session

        def work() -> None:
            session.make_ready(function, *args)
            outcome, _, self._shared = session.call(function, *args)
            seen = jax.tree.map(session.get, outcome)
            accepted = 0
            if self._client is not None:
                accepted = self._client.resolve(seen)
            session.call(announce, session.private(CLIENT, lambda: [accepted, 0], (2,), np.int32))

        return phase, timed(session, phase, work)[1]

    def _inputs(self, count: int) -> tuple[Any, Any]:
        """Both parties' inputs to the verifier of `count` drafts, which the client makes here."""

        def mine() -> Any:
            assert self._client is not None
            return self._client.propose(count)

        def theirs() -> Any:
            return self._verifier.provider_input(count, self._secrets)

        shapes = self._verifier_shapes(count)
        return (
            private_tree(self._session, CLIENT, mine, shapes[0]),
            private_tree(self._session, PROVIDER, theirs, shapes[1]),
        )

    def _verifier_shapes(self, drafts: int) -> tuple[Any, Any]:
        return (
            self._verifier.client_shapes(drafts, self._config.vocab_size),
            self._verifier.provider_shapes(drafts),
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

    def start(self) -> None:
        """Append the token of the prefill to the text, which then stays as it is."""
        self._context = [*self._context, self._token]

    def propose(self, count: int) -> Any:
        """Draft, and the client's input to the verifier."""
        self._drafts, self._q = self._drafter.propose(
            self._context,
            count,
            lambda logits, position: self._verifier.propose(logits, position, self._streams),
        )
        position = len(self._context)
        return self._verifier.client_input(self._drafts, self._q, position, self._streams)

    def step_tokens(self) -> list[int]:
        """The last token of the text, not cached yet, and the drafts."""
        return [self._context[-1], *self._drafts]

    def resolve(self, outcome: Any) -> int:
        """Accepted drafts."""
        accepted, self._token = self._verifier.resolve(
            outcome, self._drafts, self._q, lambda: float(self._streams.sampling.uniform(()))
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
