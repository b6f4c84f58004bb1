"""Does what passes between the parties depend on their secrets?

Claim: a run with another prompt of the same length, or another model of the same shape, looks like
a further run with equal secrets, message by message. `EQUAL_RUNS` runs have equal secrets; others
differ in the client's (prompt, drafts and their distributions) or the provider's (weights). The
public course is the same in all: prefill, then `STEPS` steps of which `ACCEPTED` drafts are kept,
whatever the verification (the default variant) says. A recorder at the client's end of the
connection lists the workers' messages; one message is paired with the same one of another run by
its name (see `experiments.common.wire`).

Criterion, for each run with other secrets, against those with equal ones:
1. It consists of the same messages, and every step of the plan counts as many.
2. A message of one size in all equal runs has that size.
3. Other messages are compressed ciphertexts, whose size is random. None is further from the equal
   runs' mean than twice the furthest of the equal runs from the mean of the others among them.
4. Their sizes fall outside the range of the equal runs as often as chance has it: a further draw
   does so with probability 2 / (EQUAL_RUNS + 1), independently by message; the count may be off by
   `DEVIATIONS` standard deviations.

False alarms: 1 none. 2 when a random size comes out the same in all equal runs: with standard
deviations of 13 bytes and more, about once in a thousand experiments. 3 compares extremes of a
bounded distribution over many hundreds of messages. 4 a few in a million. What the criterion cannot
see: a random size shifted by less than it varies (about 0.5 %) in few messages, the order in which
two threads of a worker send (it differs between equal runs), timing, and what messages contain.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import commands, report
from experiments.common.report import Column, rows_table
from experiments.common.two_parties import run_study
from experiments.common.wire import Message, Recorder
from models.family import ModelConfig, Params, family_of
from models.files import TOKENIZER_FILE
from models.hf import load_model, save_model
from models.tokenizer import Tokenizer
from protocols.verification.distribution import DRAFT_BITS, Sampling, Streams
from protocols.verification.variants import verifier
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.core.prg import Prg
from spu_llm.core.values import CLIENT, PROVIDER
from spu_llm.net.stream import ByteStream
from spu_llm.runtime.party_session import PartySession
from spu_llm.systems.decoding.completion import held_weights
from spu_llm.systems.decoding.decoder import Decoder, JudgeInputs, Retained
from spu_llm.systems.decoding.generate import announce
from spu_llm.systems.decoding.session_shape import SessionShape
from spu_llm.systems.program import Job, Program, Send

VERIFIER = verifier("token", Sampling(1.0))
POSITIONS = 4  # per step
STEPS = 2
ACCEPTED = 1  # drafts per step
EQUAL_RUNS = 4
DEVIATIONS = 5.0
_WHOLE = 1 << DRAFT_BITS


# ---- the program of both workers


@dataclass(frozen=True)
class TranscriptRequest:
    prompt_tokens: int


@dataclass(frozen=True)
class TranscriptInputs:
    """`secrets`: `prompt`, and per step `tokens` [POSITIONS] and `chances` [POSITIONS - 1], what
    its distribution gives each draft. `label`: of the run, to be shown.
    """

    secrets: dict[str, Any]
    label: str


# Hints are fetched in every session: a run must not differ by what another one has left.
PROGRAM = Program("transcript", __name__, TranscriptRequest, TranscriptInputs, keeps_hints=False)


def run(
    session: PartySession, job: Job[TranscriptRequest, TranscriptInputs], send: Send
) -> dict[str, Any]:
    """Run a prefill and a few decode steps whose public course is the same for all secrets."""
    config, prompt_tokens = job.model, job.request.prompt_tokens
    capacity = prompt_tokens + POSITIONS + STEPS * (1 + ACCEPTED)
    if not 1 <= prompt_tokens <= capacity <= config.context:
        raise InputError(f"a prompt of {prompt_tokens} tokens does not fit this model")
    secrets: Any = job.client.secrets if session.rank == CLIENT else None
    label = job.client.label if session.rank == CLIENT else ""
    # Of known seeds, so that runs with equal secrets have equal outcomes.
    streams = Streams(*(Prg.from_seed(0, name) for name in ("drafting", "sampling")))
    provider = Prg.from_seed(0, "provider")

    def inputs(count: int, step: int = 0) -> JudgeInputs:
        """Return both parties' inputs to a forward that verifies so many drafts of a step."""

        def drafted() -> list[Any]:
            drafts = secrets["tokens"][step][1 : 1 + count]
            q = _distributions(drafts, secrets["chances"][step][:count], config.vocab_size)
            return [VERIFIER.client_input(drafts, q, 0, streams)]

        return decoder.inputs(count + 1, provider, drafted)

    def tell(accepted: int) -> None:
        session.call(announce, session.private(CLIENT, np.array, (2,), np.int32, [accepted, 0]))

    with session.meter.in_phase("offline"):
        layout = SessionShape(config, (prompt_tokens,), (capacity,))
        decoder = Decoder(session, layout, VERIFIER, held_weights(session, config, job))
    send("update", name=f"{label}, prefill")
    with session.meter.in_phase("prefill"):
        prompt = session.private(CLIENT, lambda: [secrets["prompt"]], (1, prompt_tokens), np.int32)
        decoder.prefill(prompt, inputs(0))
        tell(0)
    retained: Retained = None
    for step in range(STEPS):
        send("update", name=f"{label}, step {step + 1} of {STEPS}")
        with session.meter.in_phase(f"step {step + 1}"):
            tokens = session.private(
                CLIENT, lambda i: [secrets["tokens"][i]], (1, POSITIONS), np.int32, step
            )
            decoder.step(tokens, inputs(POSITIONS - 1, step), retained)
            tell(ACCEPTED)
        retained = np.arange(POSITIONS)[None] <= ACCEPTED
    steps = [{"phase": e.phase} | asdict(e.traffic) for e in session.meter.entries]
    return {"plan_steps": steps}


def _distributions(drafts: Sequence[int], chances: Sequence[float], vocab: int) -> np.ndarray:
    """Return float64 [drafts, vocab] with these chances of the drafts; the rest is on one token."""
    q = np.zeros((len(drafts), vocab))
    for row, draft, chance in zip(q, drafts, chances, strict=True):
        row[draft], row[(draft + 1) % vocab] = chance, 1 - chance
    return q


# ---- analysis


@dataclass(frozen=True)
class Recorded:
    """One run: its messages, and the client's meter, an entry for each step of its plans."""

    name: str
    messages: Sequence[Message]
    plan_steps: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class OtherRun:
    """A run with other secrets, against those with equal secrets."""

    name: str
    other_messages: int  # in one of the two but not in the other
    other_counts: int  # plan steps with another number of messages
    changed: int  # messages whose size should be fixed and is another
    deviation: float  # largest relative difference from the equal runs' mean, random sizes
    outside: int  # random sizes outside the range of the equal runs
    failures: list[str]


@dataclass(frozen=True)
class Comparison:
    """All runs with other secrets, and what equal secrets alone do."""

    messages: list[int]  # in an equal run, by sender
    fixed: int  # messages of one size in all equal runs
    random: int  # the rest
    spread: list[float]  # relative standard deviation of the random ones: median, largest
    deviation: float  # largest among equal runs: one from the mean of the others
    outside_expected: float
    outside_tolerance: float
    reordered: int  # messages whose place among the sender's differs between equal runs
    others: list[OtherRun]
    failures: list[str]


def compare(equal: Sequence[Recorded], others: Sequence[Recorded]) -> Comparison:
    """Apply the criterion; `failures` is empty when it holds."""
    names = [{(m.sender, m.name): m for m in r.messages} for r in equal]
    common = sorted(set.intersection(*map(set, names)))
    failures = []
    if any(len(n) != len(common) for n in names):
        failures.append("runs with equal secrets differ in their messages")
    if any(_counts(r) != _counts(equal[0]) for r in equal):
        failures.append("runs with equal secrets differ in the messages of a plan step")
    sizes = np.array([[n[k].size for k in common] for n in names], np.float64)
    fixed = sizes.min(axis=0) == sizes.max(axis=0)
    random = sizes[:, ~fixed]
    count, draws = random.shape[1], len(equal)
    among = max((_deviation(random[i], np.delete(random, i, 0)) for i in range(draws)), default=0.0)
    chance = 2 / (draws + 1)
    expected, sigma = count * chance, math.sqrt(count * chance * (1 - chance))

    def judge(other: Recorded) -> OtherRun:
        of_other = {(m.sender, m.name): m.size for m in other.messages}
        differing = len(set(of_other) ^ set(common))
        wrong_counts = sum(a != b for a, b in zip_longest(_counts(other), _counts(equal[0])))
        row = np.array([of_other.get(k, np.nan) for k in common])
        present = ~np.isnan(row)
        changed = int(np.sum(fixed & present & (row != sizes[0])))
        own = np.where(present, row, sizes.mean(axis=0))[~fixed]
        deviation = _deviation(own, random)
        outside = _outside(own, random)
        mistakes = {
            f"{differing} messages in one run only": differing,
            f"{wrong_counts} plan steps with another number of messages": wrong_counts,
            f"{changed} messages of fixed size have another size": changed,
            f"a size differs by {deviation:.2%}; equal secrets: {among:.2%}": deviation > 2 * among,
            f"{outside} of {count} sizes out of range; chance: {expected:.0f}": (
                abs(outside - expected) > DEVIATIONS * sigma
            ),
        }
        wrong = [text for text, is_so in mistakes.items() if is_so]
        return OtherRun(other.name, differing, wrong_counts, changed, deviation, outside, wrong)

    judged = [judge(other) for other in others]
    relative = random.std(axis=0, ddof=1) / random.mean(axis=0) if count else np.zeros(1)
    places = [np.array([n[k].number for k in common]) for n in names]
    return Comparison(
        messages=[sum(s == rank for s, _ in common) for rank in (CLIENT, PROVIDER)],
        fixed=int(fixed.sum()),
        random=count,
        spread=[float(np.median(relative)), float(relative.max())],
        deviation=among,
        outside_expected=expected,
        outside_tolerance=DEVIATIONS * sigma,
        reordered=int(np.any([p != places[0] for p in places], axis=0).sum()),
        others=judged,
        failures=failures + [f"{o.name}: {f}" for o in judged for f in o.failures],
    )


def _counts(recorded: Recorded) -> list[tuple[int, int]]:
    return [(s["sent_messages"], s["received_messages"]) for s in recorded.plan_steps]


def _deviation(one: np.ndarray, rest: np.ndarray) -> float:
    """Return the largest relative difference of sizes `one` [m] from the mean of `rest` [run,
    m].
    """
    mean = rest.mean(axis=0)
    return float(np.max(np.abs(one - mean) / mean, initial=0.0))


def _outside(one: np.ndarray, rest: np.ndarray) -> int:
    """Return how many of `one` [m] are outside the range of `rest` [run, m]; ties are broken by
    lot.
    """
    lots = np.random.default_rng(0).uniform(0, 1, (1 + len(rest), one.size))
    own, peers = one + lots[0], rest + lots[1:]
    return int(np.sum((own < peers.min(axis=0)) | (own > peers.max(axis=0))))


# ---- the command


def client_secrets(prompt: Sequence[int], vocab: int, seed: int) -> dict[str, Any]:
    """Return a prompt with random drafts and chances of them, in the multiples that distributions
    have.
    """
    rng = np.random.default_rng(seed)
    return {
        "prompt": list(prompt),
        "tokens": rng.integers(vocab, size=(STEPS, POSITIONS)).tolist(),
        "chances": (rng.integers(1, _WHOLE, size=(STEPS, POSITIONS - 1)) / _WHOLE).tolist(),
    }


def measure(model: Path, prompt: str) -> dict[str, Any]:
    """Make all runs and the comparison, as JSON fields."""
    config, params = load_model(model)
    tokens = Tokenizer.load(model).encode(prompt)
    vocab, rng = config.vocab_size, np.random.default_rng(1)
    usual = client_secrets(tokens, vocab, seed=0)
    other = client_secrets(rng.integers(vocab, size=len(tokens)).tolist(), vocab, seed=1)
    # As far from text as a prompt can be: one token throughout, and drafts of the least chance,
    # which verification accepts.
    constant = {
        "prompt": [0] * len(tokens),
        "tokens": [[0] * POSITIONS] * STEPS,
        "chances": [[1 / _WHOLE] * (POSITIONS - 1)] * STEPS,
    }
    with tempfile.TemporaryDirectory(prefix="spu-llm-") as root:
        shuffled = _sibling(Path(root), "shuffled", model, config, _shuffled(params, rng))
        fresh = family_of(config).init(config, jax.random.key(1))
        # As training begins, rows are so short that some are out of the range of norms.
        fresh = jax.tree.map(lambda w: 4 * w, fresh)
        untrained = _sibling(Path(root), "untrained", model, config, fresh)
        # Runs of a kind are not neighbours, so that nothing else can tell them apart.
        plan = [
            ("equal 1", model, usual),
            ("other prompt", model, other),
            ("equal 2", model, usual),
            ("shuffled model", shuffled, usual),
            ("equal 3", model, usual),
            ("constant prompt", model, constant),
            ("equal 4", model, usual),
            ("untrained model", untrained, usual),
        ]
        recorded = [
            _record(name, f"run {i} of {len(plan)}: {name}", directory, secrets)
            for i, (name, directory, secrets) in enumerate(plan, start=1)
        ]
    runs, agreed = [run for run, _ in recorded], recorded[-1][1]
    equal = [r for r in runs if r.name.startswith("equal")]
    assert len(equal) == EQUAL_RUNS
    result = compare(equal, [r for r in runs if r not in equal])
    return {
        "passed": not result.failures,
        **asdict(result),
        "totals": [_totals(r) for r in runs],
        "machine": asdict(machine()),
        "config": {
            **agreed,
            "model": model.name,
            "prompt_tokens": len(tokens),
            "positions": POSITIONS,
            "steps": STEPS,
        },
    }


def _record(
    name: str, label: str, model: Path, secrets: dict[str, Any]
) -> tuple[Recorded, dict[str, Any]]:
    recorders: list[Recorder] = []

    def wrap(stream: ByteStream) -> ByteStream:
        recorders.append(Recorder(stream))
        return recorders[-1]

    outcome, agreed = run_study(
        PROGRAM,
        model,
        TranscriptRequest(len(secrets["prompt"])),
        TranscriptInputs(secrets, label),
        tokenizer=model,
        wrap=wrap,
    )
    messages = recorders[0].transcript.messages()
    return Recorded(name, messages, outcome.result["plan_steps"]), dict(agreed)


def _shuffled(params: Params, rng: np.random.Generator) -> Params:
    """Return each tensor with its own values in another order."""
    return jax.tree.map(lambda w: rng.permutation(np.ravel(w)).reshape(w.shape), params)


def _sibling(root: Path, name: str, model: Path, config: ModelConfig, params: Params) -> Path:
    """Make a directory with another model of the same shape, and the tokenizer of `model`."""
    save_model(root / name, config, params, dtype=np.float32)
    shutil.copy(model / TOKENIZER_FILE, root / name)
    return root / name


def _totals(recorded: Recorded) -> dict[str, Any]:
    """Return the payload bytes by sender on the wire, and the client's meter by phase."""
    phases: dict[str, dict[str, int]] = {}
    for step in recorded.plan_steps:
        total = phases.setdefault(step["phase"], {"bytes": 0, "messages": 0})
        total["bytes"] += step["sent_bytes"] + step["received_bytes"]
        total["messages"] += step["sent_messages"] + step["received_messages"]
    return {
        "run": recorded.name,
        "client_to_provider": sum(m.size for m in recorded.messages if m.sender == CLIENT),
        "provider_to_client": sum(m.size for m in recorded.messages if m.sender == PROVIDER),
        "messages": len(recorded.messages),
        "phases": phases,
    }


def summary(result: Mapping[str, Any]) -> str:
    """Describe what equal secrets alone do, in a sentence."""
    client, provider = result["messages"]
    median, largest = result["spread"]
    return (
        f"Equal secrets ({EQUAL_RUNS} runs): {client} messages of the client, {provider} of the "
        f"provider; {result['fixed']} of fixed size, {result['random']} of random size (standard "
        f"deviation {median:.3%} in the median, {largest:.3%} at most); "
        f"{result['reordered']} sent at another place in some run."
    )


def compared(result: Mapping[str, Any]) -> str:
    """Return runs with other secrets beside what is allowed, as Markdown."""
    expected, tolerance = result["outside_expected"], result["outside_tolerance"]
    heads = (
        "run",
        "other messages",
        "plan steps with other counts",
        "fixed sizes changed",
        "largest deviation",
        "out of range",
    )
    allowed = f"{2 * result['deviation']:.3%}", f"{expected:.0f} ± {tolerance:.0f}"
    runs = [
        [
            *(str(other[k]) for k in ("name", "other_messages", "other_counts", "changed")),
            f"{other['deviation']:.3%}",
            str(other["outside"]),
        ]
        for other in result["others"]
    ]
    return "\n".join(report.table(heads, [["allowed", "0", "0", "0", *allowed], *runs]))


def table(result: Mapping[str, Any]) -> str:
    """Return the comparison as Markdown."""

    def metered(phase: str) -> Column[dict[str, Any]]:
        return Column(f"{phase}, metered", lambda total: str(total["phases"][phase]["bytes"]))

    columns: list[Column[dict[str, Any]]] = [
        Column("payload bytes", lambda total: total["run"]),
        Column("client→provider", lambda total: str(total["client_to_provider"])),
        Column("provider→client", lambda total: str(total["provider_to_client"])),
        *map(metered, result["totals"][0]["phases"]),
    ]
    lines = [
        summary(result),
        "",
        compared(result),
        "",
        *rows_table(columns, result["totals"]),
        "",
        "criterion: " + ("; ".join(result["failures"]) or "holds"),
    ]
    return "\n".join(lines)


def in_results(result: Mapping[str, Any], origin: str) -> list[str]:
    """Return what docs/results says: a paragraph and a table, and the `origin` of both."""
    runs, online = result["totals"], []
    for phase in (name for name in runs[0]["phases"] if name != "offline"):
        sizes = sorted({run["phases"][phase]["bytes"] for run in runs})
        online.append(f"{' or '.join(f'{size:,}' for size in sizes)} in {phase}")
    bytes_online = f"Bytes online in all {len(runs)} runs: {', '.join(online)}."
    return [f"{summary(result)} {bytes_online}", compared(result), origin]


add_options = commands.add_common


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    result = measure(commands.private_model(options), commands.prompt(options))
    commands.conclude(options, result, table(result))
