"""Complete two-party generations: ours drafted, ours standard, and the stock path, run by run.

A run is one session between two processes, as `demo` starts it, from its launch to its end: nothing
that it takes is left out. What it cost is kept as one record, with the text, the machine and what
else kept it busy (`others`, in cores), and compared with plaintext.

    systems   ours-drafted (7 drafts a step), ours-standard (one token a step), stock (one token a
              step, `experiments.spu_baseline.whole`)
    modes     greedy, sampled (temperature 0.7; the seed is the prompt's number). The stock path is
              greedy only: a draw at the client would add to its argmax, not replace it
    prompts   `data/prompts.json`: whole lines of held-out snippets, one of each kind

A run's parts, which add up to all of it:

    launch    both parties' processes, their imports and handshake, and their end: seconds only
    hint      what the client gets of the weights once, and keeps (`spu_llm.offline.silent`)
    set_up    oblivious transfer, keys, weights, compiling, agreeing on programs
    `material` batches of correlated randomness, what is left over of them included; seconds that
              the parties plan with are apart (`planning`)
    prefill, decode   online, the client's drafting included
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import commands
from experiments.common.load import busy_seconds, own_seconds
from experiments.common.measured import FIGURES, peaks, price, summed, total
from experiments.common.prompts import TEMPERATURE, Prompt, read_prompts
from experiments.common.two_parties import run_study
from experiments.completions.plan import MODES, PARTS, SYSTEMS
from experiments.completions.resumable import check_whole, made
from experiments.fidelity.logits import MAX_ERROR
from experiments.spu_baseline import whole as spu_whole
from models.draft import Drafter
from models.family import logits
from models.hf import load_config, load_model
from models.tokenizer import Tokenizer
from protocols.verification.distribution import Streams
from spu_llm.api.defaults import DRAFT_LENGTH
from spu_llm.app.printing import show_table
from spu_llm.compiler.demand import Demand
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.core.settings import OWN
from spu_llm.offline.ot.transfers import EXTENSION
from spu_llm.runtime.party_session import PartySession
from spu_llm.runtime.session import PlaintextSession
from spu_llm.systems.decoding import completion
from spu_llm.systems.decoding.client_side import ClientSide
from spu_llm.systems.decoding.generate import Completion, generate
from spu_llm.systems.decoding.records import COMPLETION, ClientInputs
from spu_llm.systems.decoding.request import Request
from spu_llm.systems.decoding.secure_model import share_weights
from spu_llm.systems.program import Job, Send

PROGRAM = replace(COMPLETION, name="completion-study", module=__name__)
NGRAM = 4
NO_COST = dict.fromkeys(FIGURES, 0)


@dataclass(frozen=True)
class CompletionStudyRequest:
    """A run of the study. `stock_tokens`: where a stock run ends, if before `tokens`."""

    network: str
    prompt: str  # its kind
    mode: str
    system: str
    tokens: int
    seed: int
    stock_tokens: int | None = None


def matrix(
    prompts: Sequence[Prompt],
    networks: Sequence[str],
    systems: Sequence[str],
    tokens: int,
    stock_tokens: int | None = None,
) -> list[tuple[CompletionStudyRequest, Prompt]]:
    """Return all runs in the order in which they are made: those that are compared next to each
    other, and whoever is first takes turns. After each prompt all systems have as many runs on
    every network.
    """
    runs = []
    for prompt, network, mode in itertools.product(prompts, networks, MODES):
        shift = (prompt.number + MODES.index(mode)) % len(SYSTEMS)
        for system in (*SYSTEMS[shift:], *SYSTEMS[:shift]):
            if system in systems and (system, mode) != ("stock", "sampled"):
                short = stock_tokens if system == "stock" else None
                asked = CompletionStudyRequest(
                    network, prompt.kind, mode, system, tokens, prompt.number, short
                )
                runs.append((asked, prompt))
    return runs


def check(
    model: Path, draft_model: Path, runs: Sequence[tuple[CompletionStudyRequest, Prompt]]
) -> None:
    """Raise InputError for what cannot be measured."""
    config, tokenizer = load_config(model), Tokenizer.load(draft_model)
    for asked, prompt in runs:
        length = len(tokenizer.encode(prompt.text))
        if not 3 <= (asked.stock_tokens or asked.tokens) <= asked.tokens:
            raise InputError(
                "--tokens must be 3 or more, and --stock-tokens 3 to --tokens, found "
                f"{asked.tokens} and {asked.stock_tokens}"
            )
        if length + asked.tokens + DRAFT_LENGTH + 1 > config.context:
            raise InputError(
                f"{asked.tokens} tokens after the {length} of the prompt '{prompt.kind}' exceed "
                f"the model's context of {config.context}; lower --tokens"
            )


# ---- the program of both workers: a completion, and what it cost by its parts


def run(session: PartySession, job: Job[Request, ClientInputs], send: Send) -> dict[str, Any]:
    """Run the completion of `demo` (`spu_llm.systems.decoding.completion`), and account for its
    cost.
    """
    needs: dict[str, Any] = {}  # the last one of each kind of correlated randomness
    started: list[float] = []  # the prefill: offline seconds before it
    make = session.make

    def noting(demand: Demand) -> None:
        needs.update(demand.correlations)
        make(demand)

    def watch(event: str, **fields: Any) -> None:
        if event == "stage" and fields["name"].startswith("prefill"):
            started.append(session.meter.seconds["offline"])
        send(event, **fields)

    session.make = noting  # type: ignore[method-assign]
    result = completion.run(session, job, watch)
    costs = account(session, Demand(needs), started[0])
    return result | {"costs": costs, "peak_memory": peaks(session)}


def account(session: PartySession, demand: Demand, seconds: float) -> dict[str, Any]:
    """Return the cost of a completion by its parts, all that the session's meter has; of correlated
    randomness also what the completion used of it, in units and as its part of the cost of all but
    a kind's first batch.

    `demand`: some of every kind. `seconds`: offline, when the prefill began.
    """
    meter, rank = session.meter, session.rank
    batches = [e for e in meter.entries if e.kind == "pool"]
    hints = [e for e in meter.entries if e.kind == "hint"]
    waits = [e for e in meter.entries if e.kind == "wait"]
    other = "pool", "hint", "wait"
    rest = [e for e in meter.entries if e.phase == "offline" and e.kind not in other]
    kinds, used = {}, {}
    for name, need in demand.correlations.items():
        made = [e for e in batches if e.name == name]
        units = len(made) * need.correlation.chunk
        used[name] = replace(need, units=units - session.preprocessing.available(need.correlation))
        kinds[name] = {"units": units, "used_units": used[name].units} | total(made, rank)
    if extended := [e for e in batches if e.name == EXTENSION]:
        count = len(extended)
        kinds[EXTENSION] = {"units": count, "used_units": count} | total(extended, rank)
    set_up, hint = total(rest, rank) | {"seconds": seconds}, total(hints, rank)
    making = total([replace(e, seconds=0.0) if e.beside else e for e in batches] + waits, rank)
    spent = sum(part["seconds"] for part in (set_up, hint, making))
    planning = meter.seconds["offline"] - spent
    return {
        "hint": hint,
        "set_up": set_up,
        "material": making,
        "planning": NO_COST | {"seconds": planning},
        **{
            phase: total([e for e in meter.entries if e.phase == phase], rank)
            | {"seconds": meter.seconds.get(phase, 0.0)}
            for phase in ("prefill", "decode")
        },
        "used_material": summed(price(batches, Demand(used), rank).values()),
        "kinds": kinds,
    }


def by_kind(kinds: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Add up the cost of correlated randomness by the first two words of its names, which matrices
    and gates share.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, cost in kinds.items():
        groups.setdefault(" ".join(name.split()[:2]), []).append(cost)
    return {
        name: {k: round(v, 3) for k, v in summed(costs).items()} for name, costs in groups.items()
    }


# ---- one run


def measure(
    asked: CompletionStudyRequest, prompt: Prompt, model: Path, draft_model: Path
) -> dict[str, Any]:
    """Make a run; return its record."""
    given = Tokenizer.load(draft_model).encode(prompt.text)

    def work() -> dict[str, Any]:
        if asked.system == "stock":
            return _stock(asked, prompt, model)
        request = _request(asked, len(given))
        return completed(request, given, asked.seed, model, draft_model, asked.network)

    record = {"asked": asdict(asked)} | watched(work)
    compared = against_plaintext(asked, given, model, draft_model, record["token_ids"])
    return record | {
        "prompt_tokens": len(given),
        "repetition": repetition(given, record["token_ids"]),
        **compared,
    }


def watched(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Make a run: return the record that `work` gives, with the launch and the whole among its
    `costs`, its number of tokens, the machine, and what else kept it busy.
    """
    here = asdict(machine())
    before = {
        "commit": here["commit"],
        "date": here["date"],
        "machine": here,
        "load_start": os.getloadavg()[0],
    }
    busy, own, started = busy_seconds(), own_seconds(), time.perf_counter()
    record = work()
    elapsed = time.perf_counter() - started
    others = busy_seconds() - busy - (own_seconds() - own)
    costs = record["costs"]
    parts = ("hint", *PARTS[1:])
    costs["launch"] = NO_COST | {"seconds": elapsed - sum(costs[p]["seconds"] for p in parts)}
    costs["whole"] = summed(costs[p] for p in ("launch", *parts))
    after = {
        "load_end": os.getloadavg()[0],
        "others": max(0.0, others) / elapsed,
        "emitted": len(record["token_ids"]),
    }
    return before | record | after


def completed(
    request: Request,
    given: list[int],
    seed: int,
    model: Path,
    draft_model: Path,
    network: str,
    backend: str = OWN,
) -> dict[str, Any]:
    """Run one completion of a prompt's tokens between two processes; return its record."""
    outcome, agreed = run_study(
        PROGRAM,
        model,
        request,
        ClientInputs(
            given, str(draft_model), draft_seed=seed, sampling_seed=seed, draft_dir=str(draft_model)
        ),
        tokenizer=draft_model,
        network=network,
        sampling_seed=seed,
        backend=backend,
    )
    result = outcome.result
    report = result["report"]
    result["costs"]["kinds"] = by_kind(result["costs"]["kinds"])
    return {
        **{k: result[k] for k in ("costs", "peak_memory", "text", "token_ids", "learned")},
        **{k: report[k] for k in ("steps", "drafted", "accepted", "finish_reason")},
        "stayed": [emitted - 1 for emitted in report["emitted"][1:]],  # drafts, step by step
        "wire_bytes": outcome.wire_sent + outcome.wire_received,
        "config": agreed,
    }


def _stock(asked: CompletionStudyRequest, prompt: Prompt, model: Path) -> dict[str, Any]:
    count = asked.stock_tokens or asked.tokens
    tokenizer = Tokenizer.load(model)
    length = len(tokenizer.encode(prompt.text))
    # One token comes with the prefill, one with the step that `measure` calls its warm-up.
    whole = spu_whole.complete(model, prompt.text, length + count, count - 2, asked.network)
    steps = [whole["warm_up"], *whole["runs"]]
    return {
        "costs": {
            "hint": NO_COST,
            "set_up": whole["set_up"],
            "material": NO_COST,
            "planning": NO_COST,
            "prefill": summed([whole["prefill"]]),
            "decode": summed(steps),
            "used_material": NO_COST,
            "kinds": {},
        },
        "peak_memory": whole["peak_memory"],
        "text": tokenizer.decode(whole["tokens"]),
        "token_ids": whole["tokens"],
        "learned": whole["learned"],
        "steps": len(steps),
        "drafted": 0,
        "accepted": 0,
        "finish_reason": "length",
        "wire_bytes": sum(whole["wire_bytes"].values()),
        "config": whole["config"],
    }


def _request(asked: CompletionStudyRequest, prompt_tokens: int) -> Request:
    drafts = DRAFT_LENGTH if asked.system == "ours-drafted" else 0
    temperature = TEMPERATURE if asked.mode == "sampled" else 0.0
    return Request(prompt_tokens, asked.tokens, drafts, temperature)


def repetition(prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return the share of `tokens` that lie in a run of NGRAM which stood earlier in prompt and
    text.
    """
    text, seen = [*prompt, *tokens], set()
    repeated = np.zeros(len(text), bool)
    for i in range(len(text) - NGRAM + 1):
        gram = tuple(text[i : i + NGRAM])
        if gram in seen:
            repeated[i : i + NGRAM] = True
        seen.add(gram)
    return float(repeated[len(prompt) :].mean()) if tokens else 0.0


# ---- against plaintext


def against_plaintext(
    asked: CompletionStudyRequest,
    given: list[int],
    model: Path,
    draft_model: Path,
    tokens: list[int],
) -> dict[str, Any]:
    """Return how far the tokens after those `given` are plaintext's, and what is wrong with them.

    Greedy: at each token, how much less likely (in logits of float32, after the same text) it is
    than the likeliest; where that is above zero it is a near-tie, and wrong where it is above twice
    the bound on errors of logits (ours; the stock path has no such bound). Sampled: the number of
    tokens until the first one that plaintext, with the same seeds, does not draw.
    """
    if asked.mode == "sampled":
        wanted = plaintext_tokens(asked, given, model, draft_model)
        same = len(os.path.commonprefix([tokens, wanted]))
        return {"same_as_plaintext": same, "failures": []}
    config, params = load_model(model)
    text = np.asarray([*given, *tokens[:-1]], np.int32)
    rows = np.asarray(jax.jit(lambda p, ids: logits(p, config, ids))(params, text))
    rows = rows[len(given) - 1 :]
    margins = rows.max(axis=-1) - rows[np.arange(len(tokens)), tokens]
    near, largest = int((margins > 0).sum()), float(margins.max())
    failures = []
    if asked.system != "stock" and largest > 2 * MAX_ERROR:
        failures.append(f"{asked.prompt}, {asked.network}: a greedy token is {largest:.3f} below")
    return {"near_ties": near, "largest_margin": largest, "failures": failures}


def plaintext_tokens(
    asked: CompletionStudyRequest, given: list[int], model: Path, draft_model: Path
) -> list[int]:
    """Return what a run's completion gives in plaintext with the run's seeds."""
    config, params = load_model(model)
    wanted = Completion.of(config, _request(asked, len(given)))
    streams = Streams(*(completion.stream(name, asked.seed) for name in ("drafts", "sampling")))
    drafter = None
    if drafts := wanted.request.draft_length:
        drafter = Drafter(*load_model(draft_model), wanted.layout.live_rows + drafts)
    client = ClientSide(given, Tokenizer.load(draft_model), drafter, wanted.verifier, streams)
    session = PlaintextSession()
    decoder = wanted.decoder(session, share_weights(session, config, params))
    secrets = completion.stream("joint randomness", asked.seed)
    generate(session, wanted, decoder, client, secrets)
    return client.tokens


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Hours. Each run is written at once; the same command goes on where it was stopped."
    )
    commands.add_network(parser, "local,lan", "local, lan, wan (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="the first N held-out prompts (default: all)"
    )
    parser.add_argument(
        "--only",
        type=commands.names,
        metavar="NAME,...",
        help="ours-drafted, ours-standard, stock (default: all)",
    )
    commands.add_number(parser, "--tokens", 32, "of each completion")
    parser.add_argument(
        "--stock-tokens",
        type=int,
        metavar="N",
        help="end the stock path's runs earlier; they are marked",
    )
    commands.add_draft_model(parser)
    commands.add_plot(parser, "draw seconds per token")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    from experiments.completions import report as completions_report

    commands.check_folders(options)
    pair = commands.pair(options)
    systems = options.only or list(SYSTEMS)
    if unknown := set(systems) - set(SYSTEMS):
        raise InputError(f"--only: there is no {min(unknown)!r}; choose from {', '.join(SYSTEMS)}")
    prompts = read_prompts()
    if options.prompts is not None:
        commands.check_range("--prompts", options.prompts, 1, len(prompts))
    runs = matrix(
        prompts[: options.prompts], options.network, systems, options.tokens, options.stock_tokens
    )
    check(*pair, runs)
    data, failed = made(options, runs, lambda asked, prompt: measure(asked, prompt, *pair))
    if data["runs"]:
        show_table(completions_report.table(data))
    if options.plot is not None and data["runs"]:
        completions_report.plot(data, options.plot)
    check_whole(runs, failed)
    commands.check(data["runs"])
