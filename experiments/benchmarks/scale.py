"""Benchmark of a completion at scale: a GPT-2 of any shape with random weights, between two
processes.

The provider makes the weights in memory from a seed, the client a random prompt. The prompt is
prefilled, then tokens are decoded one position at a time, greedily, and each token is checked
against plaintext float32 afterwards (`check`). The correlations that a step takes are made before
its clock starts and priced separately.

Both parties know the seed of the weights; a study of cost has nothing to hide.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import commands, measured, report, transfers
from experiments.common.kinds import by_kind
from experiments.common.report import both_ways
from experiments.common.two_parties import run_study, session_record
from models.family import Params, logits
from models.gpt2 import GPT2Config, init_params
from protocols.verification.distribution import Streams
from spu_llm.core.errors import InputError
from spu_llm.core.meter import Entry
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.decoder import JudgeInputs, VerificationResult
from spu_llm.systems.decoding.generate import Completion
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.program import Job, Program, Send

# Times GPT-2's initial scale, of matrices of blocks and of embeddings: logits then differ by more
# than the sharing noise, and no bound on what the weights can give leaves the functions' ranges.
SHARPNESS, CONTRAST = 2.0, 4.0
_CONTRAST_BY_WIDTH = 2048.0  # at most this by the width: what logits can spread grows with it
TIE = 0.05  # a token whose logit is this near the largest one counts as right


@dataclass(frozen=True)
class Shape:
    """Shape of a model and of a completion."""

    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    prompt_tokens: int
    new_tokens: int  # decoded after the prefill's own token
    seed: int = 0
    second_batches: bool = (
        False  # of all correlated randomness, so that its price holds no compilation
    )
    extensions: int = 0  # of SPU's stocks of transfers, made in the end to be priced

    @property
    def config(self) -> GPT2Config:
        return GPT2Config(self.vocab, self.context, self.width, self.layers, self.heads)

    @property
    def request(self) -> Request:
        return Request(self.prompt_tokens, self.new_tokens + 1, 0, temperature=0.0)

    def check(self) -> None:
        """Raise InputError for a shape that cannot be run."""
        try:
            config = self.config
        except ValueError as exc:
            raise InputError(f"no model has this shape: {exc}") from None
        commands.check_range("--vocab", self.vocab, 2)
        commands.check_range("--new-tokens", self.new_tokens, 0)
        self.request.check(config)
        if self.prompt_tokens + self.new_tokens >= self.context:
            raise InputError(
                f"{self.prompt_tokens} prompt tokens and {self.new_tokens} more exceed the "
                f"context of {self.context}; give a longer --context"
            )

    def weights(self) -> Params:
        """Draw the random weights (float32) from the seed."""
        params = init_params(self.config, jax.random.key(self.seed))
        blocks = jax.tree.map(lambda w: w * SHARPNESS if w.ndim == 2 else w, params["blocks"])
        contrast = min(CONTRAST, _CONTRAST_BY_WIDTH / self.width)
        wte, wpe = (params[name] * contrast for name in ("wte", "wpe"))
        return {**params, "blocks": blocks, "wte": wte, "wpe": wpe}

    def prompt(self) -> list[int]:
        """Draw a random prompt from the seed."""
        rng = np.random.default_rng(self.seed)
        return [int(t) for t in rng.integers(0, self.vocab, self.prompt_tokens)]


# ---- the program of both workers


@dataclass(frozen=True)
class ScaleInputs:
    prompt: list[int]


PROGRAM = Program(
    "scale",
    __name__,
    Shape,
    ScaleInputs,
    check=lambda shape, config: shape.check(),
    keeps_hints=False,  # of random weights: nobody asks for a hint of them again
)


def run(session: PartySession, job: Job[Shape, ScaleInputs], send: Send) -> dict[str, Any]:
    """Run the prefill and decode every token; return the costs and, at the client, the tokens."""
    shape = job.request
    for rank in (CLIENT, PROVIDER):
        session.ledger.declare(rank, "the weights: random numbers of a known seed (study)")
    with session.meter.in_phase("offline"):
        send("stage", name="making weights and programs")
        completion = _Course(session, shape, job)
    measured.forget_peak()
    send("stage", name=f"prefilling {shape.prompt_tokens} tokens")
    prefill = completion.prefill()
    after_prefill = measured.peaks(session)
    send("measured", name="prefill", cost=prefill, memory=after_prefill)
    tokens = []
    for i in range(shape.new_tokens):
        send("stage", name=f"token {i + 1} of {shape.new_tokens}")
        tokens.append(completion.decode())
        send("measured", name=f"token {i + 1}", cost=tokens[-1])
    if shape.extensions:
        send("stage", name="extending the stocks of transfers")
        transfers.extend(session, shape.extensions)
    return {
        "prefill": prefill,
        "tokens": tokens,
        "emitted": completion.emitted,
        "material": material(session),
        "memory_after_prefill": after_prefill,
        "peak_memory": measured.peaks(session),
        "learned": session.ledger.learned(),
    }


class _Course:
    """One party's side of the measured completion."""

    def __init__(self, session: PartySession, shape: Shape, job: Job[Shape, ScaleInputs]) -> None:
        self._session, self._second_batches = session, shape.second_batches
        self._completion = Completion.of(shape.config, shape.request)
        params = shape.weights() if session.rank == PROVIDER else None
        weights = share_weights(session, shape.config, params)
        self._decoder = self._completion.decoder(session, weights)
        self._completion.prepare(session, self._decoder)
        self._prompt = job.client.prompt if session.rank == CLIENT else []
        self._streams = Streams(Prg.from_os(), Prg.from_os())
        self._secrets = Prg.from_os()  # the provider's part of the joint randomness
        self._no_drafts = np.zeros((0, shape.vocab))  # their distributions
        self.emitted: list[int] = []  # at the client

    def prefill(self) -> dict[str, Any]:
        shape = (1, self._completion.request.prompt_tokens)
        prompt = self._session.private(CLIENT, np.array, shape, np.int32, [self._prompt])
        inputs = self._inputs()
        return self._measured("prefill", lambda: self._decoder.prefill(prompt, inputs))

    def decode(self) -> dict[str, Any]:
        """Decode one more token; return its cost."""
        last = [self.emitted[-1:]]
        token = self._session.private(CLIENT, np.array, (1, 1), np.int32, last)
        inputs, phase = self._inputs(), f"token {len(self._session.meter.seconds)}"
        all_stay = np.ones((1, 1), bool)
        return self._measured(phase, lambda: self._decoder.step(token, inputs, all_stay))

    def _measured(self, phase: str, run: Callable[[], VerificationResult]) -> dict[str, Any]:
        session = self._session
        done = measured.forward(session, self._decoder, phase, run, self._emit)
        if self._second_batches:
            measured.make_second_batches(session, done.demand)
        material = measured.price(session.meter.entries, done.demand, session.rank)
        return done.cost | {
            "offline": measured.summed(material.values()),
            "kinds": by_kind(done.entries, done.steps, session.rank),
            "ops": {
                name: measured.total(entries, session.rank)
                for name, entries in measured.grouped(done.entries, _op_or_kind).items()
            },
            "material": material,
        }

    def _emit(self, outcome: Any) -> int:
        resolve = self._completion.verifier.resolve
        drafts, token = resolve(outcome, [], self._no_drafts, lambda: 0.0)
        self.emitted.append(token)
        return drafts

    def _inputs(self) -> JudgeInputs:
        return self._decoder.inputs(1, self._secrets, self._of_client)

    def _of_client(self) -> list[Any]:
        position = len(self._prompt) + len(self.emitted)
        make = self._completion.verifier.client_input
        return [make([], self._no_drafts, position, self._streams)]


def _op_or_kind(entry: Entry) -> str:
    return entry.name if entry.kind == "op" else entry.kind


def material(session: PartySession) -> list[dict[str, Any]]:
    """Return the costs of all batches of correlations made in the session, by correlation."""
    return [
        {"name": name, "batches": [measured.total([e], session.rank) for e in entries]}
        for name, entries in measured.batches_made(session.meter.entries).items()
    ]


# ---- the command at the client


def measure(
    model: Path,
    shape: Shape,
    network: str,
    on_part: Callable[[dict[str, Any]], None] = lambda part: None,
) -> dict[str, Any]:
    """Run one network's session; return its result as JSON fields. `model`: any model, because a
    provider needs one to start.

    `on_part` is called with every step's cost when the step is done: a run may take an hour.
    """
    shape.check()
    outcome, agreed = run_study(
        PROGRAM,
        model,
        shape,
        ScaleInputs(shape.prompt()),
        network=network,
        on_event=lambda e: on_part(e) if e["event"] == "measured" else None,
    )
    return {
        "network": network,
        "shape": asdict(shape),
        **outcome.result,
        **check(shape, outcome.result["emitted"]),
        **session_record(outcome, agreed),
    }


def check(shape: Shape, emitted: Sequence[int]) -> dict[str, Any]:
    """Compare the emitted tokens with plaintext float32. Return the gaps between the largest logit
    and each token's, the margins between the two largest logits, and the failures: tokens with a
    gap above TIE.
    """
    text = [*shape.prompt(), *emitted[:-1]]
    rows = jax.jit(lambda p, t: logits(p, shape.config, t))(shape.weights(), np.array(text))
    last = np.asarray(rows)[shape.prompt_tokens - 1 :]
    gaps = [float(row.max() - row[token]) for row, token in zip(last, emitted, strict=True)]
    margins = [float(np.diff(np.sort(row)[-2:])[0]) for row in last]
    failures = [
        f"token {i} has a logit {gap:.3f} below the largest"
        for i, gap in enumerate(gaps)
        if gap > TIE
    ]
    return {"gaps": gaps, "margins": margins, "failures": failures}


def table(result: dict[str, Any]) -> str:
    """Format, as Markdown, the costs of the prefill and of each token, and their parts."""
    shape, rows = result["shape"], [("prefill", result["prefill"])]
    rows += [(f"token {i + 1}", cost) for i, cost in enumerate(result["tokens"])]
    heads = "", "seconds", "MB", "messages", "offline seconds", "offline MB", "in all MB"
    lines = [
        f"network {result['network']}: {shape['layers']} layers of width {shape['width']}, "
        f"{shape['vocab']:,} tokens; a prompt of {shape['prompt_tokens']} tokens",
        "",
        *report.table(heads, [_cells(name, cost) for name, cost in rows]),
    ]
    for name, cost in (rows[0], rows[-1])[: len(rows)]:
        lines += ["", f"{name}, by kind of layer", "", *_parts(cost["kinds"], "layer")]
        made = grouped(cost["material"])
        lines += ["", f"{name}, by kind of material", "", *_parts(made, "material")]
    memory = ", ".join(
        f"{role} {size / 2**30:.2f} GiB" for role, size in result["peak_memory"].items()
    )
    gap = max(result["gaps"])
    lines += ["", f"peak memory: {memory}; logits of emitted tokens: {gap:.3f} below the largest"]
    return "\n".join(lines)


def _cells(name: str, cost: dict[str, Any]) -> list[str]:
    online, offline = both_ways(cost) / 1e6, both_ways(cost["offline"]) / 1e6
    return [
        name,
        f"{cost['seconds']:.1f}",
        f"{online:.1f}",
        str(cost["messages"]),
        f"{cost['offline']['seconds']:.1f}",
        f"{offline:.1f}",
        f"{online + offline:.1f}",
    ]


def grouped(material: dict[str, Any]) -> dict[str, Any]:
    """Add up the costs of correlations by kind (`masked product`, `gate leaf`, ...)."""
    kinds: dict[str, list[Any]] = {}
    for name, cost in material.items():
        kinds.setdefault(" ".join(name.split()[:2]), []).append(cost)
    return {kind: measured.summed(costs) for kind, costs in kinds.items()}


def _parts(costs: dict[str, Any], name: str) -> list[str]:
    rows = sorted(costs.items(), key=lambda item: -both_ways(item[1]))
    return report.table(
        (name, "seconds", "MB"),
        [(part, f"{cost['seconds']:.2f}", f"{both_ways(cost) / 1e6:.2f}") for part, cost in rows],
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, count, what in (
        ("layers", 12, "blocks"),
        ("width", 768, "of the residual stream"),
        ("heads", 12, "of each attention"),
        ("vocab", 50257, "tokens of the vocabulary"),
        ("context", 1024, "positions of the model"),
        ("prompt-tokens", 64, "prefilled"),
        ("new-tokens", 2, "decoded one by one after that"),
        ("seed", 0, "of the random weights and prompt"),
    ):
        commands.add_number(parser, f"--{name}", count, what)
    commands.add_network(parser, "local")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    names = [f.name for f in fields(Shape) if f.name in options]
    shape = Shape(**{name: getattr(options, name) for name in names})
    done: list[dict[str, Any]] = []

    def once(network: str) -> dict[str, Any]:
        parts: list[dict[str, Any]] = []

        def keep(part: dict[str, Any]) -> None:
            parts.append(part)
            commands.write(options, {"networks": done, "unfinished": parts})

        done.append(measure(commands.private_model(options), shape, network, keep))
        return done[-1]

    commands.each_network(options, once, table)
