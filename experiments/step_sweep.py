"""How the cost of a decode step grows with the positions it verifies.

POST's premise: a secure forward over several positions costs little more than one over a single
position. Each step here is the one that a completion runs, with real drafts and verification (the
default variant) at temperature 1; only drafting itself is left out of the time. The text never
moves on, and all steps see a key/value cache of one capacity, so steps differ in nothing but their
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.local import machine, run_study
from experiments.measured import medians, timed
from models import secure_gpt2
from models.draft import Drafter
from models.generate import announce, private_tree, share_weights
from models.gpt2 import GPT2Config
from models.hf import load_config, load_model
from models.request import Request
from models.tokenizer import Tokenizer
from protocols.distribution import Sampling, Streams
from protocols.verification import verifier
from spu_llm.errors import InputError
from spu_llm.prg import Prg
from spu_llm.secure import PartySession, public
from spu_llm.values import CLIENT, PROVIDER

PROGRAM = "step-sweep"
NEW_TOKENS = 32  # the cache has room for a completion of this length
VERIFIER = verifier("token", Sampling(1.0))


def capacity_for(prompt_tokens: int, positions: Sequence[int]) -> int:
    """Positions of the shared block in every step."""
    return prompt_tokens + NEW_TOKENS + max(positions)


def check_positions(config: GPT2Config, prompt_tokens: int, positions: Sequence[int]) -> None:
    """InputError unless a completion could take steps of these sizes after such a prompt."""
    if not positions:
        raise InputError("--positions is empty; give numbers from 1 to 17")
    for n in positions:
        if not 1 <= n <= 17:
            raise InputError(f"--positions must be 1 to 17, found {n}")
        Request(prompt_tokens, 1, n - 1, temperature=1.0).check(config)
    if prompt_tokens + max(positions) > config.n_positions:
        raise InputError(
            f"{prompt_tokens} prompt tokens and {max(positions)} positions exceed the model's "
            f"context of {config.n_positions}; use a shorter prompt"
        )


# ---- the program of both workers


def run(session: PartySession, job: dict[str, Any], send: Callable[..., None]) -> dict[str, Any]:
    """One prefill, then steps of each size: one to warm up, `repeat` more to measure.

    Public settings: `prompt_tokens`, `positions` (a comma list) and `repeat`. The client's own:
    `prompt`, and `draft_dir` with the model that drafts.
    """
    config = GPT2Config(**job["model"])
    prompt_tokens, repeat = int(job["request"]["prompt_tokens"]), int(job["request"]["repeat"])
    positions = [int(n) for n in str(job["request"]["positions"]).split(",")]
    check_positions(config, prompt_tokens, positions)
    capacity = capacity_for(prompt_tokens, positions)
    secure = secure_gpt2.build(config, capacity, VERIFIER)
    length = public(np.int32(prompt_tokens))

    with session.meter.in_phase("offline"):
        params = load_model(Path(job["model_dir"]))[1] if session.rank != CLIENT else None
        weights = share_weights(session, config, params)
        prompt_shape = jax.ShapeDtypeStruct((prompt_tokens,), np.int32)
        send("stage", name="compiling")
        inputs = _verifier_shapes(config, 0)
        prefill_args = (weights, prompt_shape, *inputs, None)
        session.prepare(secure.prefill, *prefill_args)
        shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), prefill_args)
        _, _, shared_shape, _ = jax.eval_shape(secure.prefill.fn, *shapes)
        for n in dict.fromkeys(positions):
            send("update", name=f"compiling the step of {n} positions")
            tokens = jax.ShapeDtypeStruct((n,), np.int32)
            inputs = _verifier_shapes(config, n - 1)
            session.prepare(
                secure.decode, weights, tokens, None, *inputs, shared_shape, length, None,
            )  # fmt: skip
        session.prepare(announce, jax.ShapeDtypeStruct((2,), np.int32))
    client = _Drafts(job, capacity) if session.rank == CLIENT else None
    secrets = Prg.from_os()  # the provider's part of the joint randomness

    def inputs_of(count: int, work: Callable[[_Drafts], Any]) -> tuple[Any, Any]:
        """Both parties' inputs to the verifier; `work` gives the client's."""

        def mine() -> Any:
            assert client is not None
            return work(client)

        shapes = _verifier_shapes(config, count)
        return (
            private_tree(session, CLIENT, mine, shapes[0]),
            private_tree(
                session, PROVIDER, lambda: VERIFIER.provider_input(count, secrets), shapes[1]
            ),
        )

    def resolve(outcome: Any) -> None:
        """The client resolves a step and announces the number of drafts that stay."""
        seen = jax.tree.map(session.get, outcome)
        accepted = client.resolve(seen) if client is not None else 0
        session.call(announce, session.private(CLIENT, lambda: [accepted, 0], (2,), np.int32))

    send("stage", name=f"prefilling {prompt_tokens} tokens")

    def prefill() -> Any:
        prompt = session.private(CLIENT, lambda: job["prompt"], (prompt_tokens,), np.int32)
        inputs = inputs_of(0, lambda c: c.propose(0))
        outcome, _, shared, _ = session.call(secure.prefill, weights, prompt, *inputs, None)
        resolve(outcome)
        return shared

    shared, cost = timed(session, "prefill", prefill)
    if client is not None:
        client.start()

    def step(n: int) -> dict[str, Any]:
        """The cost of one decode step of n positions."""
        inputs = inputs_of(n - 1, lambda c: c.propose(n - 1))
        tokens = session.private(
            CLIENT, lambda: client.step_tokens() if client else [], (n,), np.int32
        )

        def work() -> None:
            outcome, _, _ = session.call(
                secure.decode, weights, tokens, None, *inputs, shared, length, None
            )
            resolve(outcome)

        return timed(session, f"step {len(session.meter.seconds)}", work)[1]

    def sweep(n: int) -> dict[str, Any]:
        send("stage", name=f"steps of {n} positions")
        warm_up = step(n)
        runs: list[dict[str, Any]] = []
        for i in range(repeat):
            spent = (runs[-1] if runs else warm_up)["seconds"]
            send("update", name=f"step {i + 1} of {repeat}, {n} positions; last took {spent:.1f} s")
            runs.append(step(n))
        return {"positions": n, "warm_up": warm_up, "runs": runs}

    return {
        "prefill": cost,
        "capacity": capacity,
        "steps": [sweep(n) for n in positions],
        # Once more at the end: whether the session got slower or faster meanwhile.
        "again": sweep(positions[0]),
        "learned": session.ledger.learned(),
    }


class _Drafts:
    """The client's plaintext half: what the next step verifies."""

    def __init__(self, job: dict[str, Any], capacity: int) -> None:
        config, params = load_model(Path(job["draft_dir"]))
        self._drafter = Drafter(config, params, capacity)
        self._context: list[int] = job["prompt"]
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
            lambda logits, position: VERIFIER.propose(logits, position, self._streams),
        )
        position = len(self._context)
        return VERIFIER.client_input(self._drafts, self._q, position, self._streams)

    def step_tokens(self) -> list[int]:
        """The last token of the text, not cached yet, and the drafts."""
        return [self._context[-1], *self._drafts]

    def resolve(self, outcome: Any) -> int:
        """Accepted drafts."""
        accepted, self._token = VERIFIER.resolve(
            outcome, self._drafts, self._q, lambda: float(self._streams.sampling.uniform(()))
        )
        return accepted


def _verifier_shapes(config: GPT2Config, drafts: int) -> tuple[Any, Any]:
    return VERIFIER.client_shapes(drafts, config.vocab_size), VERIFIER.provider_shapes(drafts)


# ---- the command at the client


def measure(
    model: Path,
    draft_model: Path,
    prompt: str,
    positions: Sequence[int],
    repeat: int,
    network: str,
) -> dict[str, Any]:
    """One network's session, as JSON fields."""
    tokens = Tokenizer.load(draft_model).encode(prompt)
    check_positions(load_config(model), len(tokens), positions)
    if repeat < 1:
        raise InputError(f"--repeat must be at least 1, found {repeat}")
    outcome, agreed = run_study(
        PROGRAM,
        model,
        {
            "prompt_tokens": len(tokens),
            "positions": ",".join(map(str, positions)),
            "repeat": repeat,
        },
        {"prompt": tokens, "draft_dir": str(draft_model)},
        tokenizer=draft_model,
        network=network,
    )
    result = outcome.result
    return {
        "network": network,
        "prefill": {"prompt_tokens": len(tokens), **result["prefill"]},
        "capacity": result["capacity"],
        "steps": [_with_median(step) for step in result["steps"]],
        "again": _with_median(result["again"]),
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
