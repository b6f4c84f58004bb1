"""What marking by candidates costs between two parties: an emitted token, beside an unmarked one.

Complete runs of `demo`, as a user starts them, sampled, of prompts that the complete generations
have. Systems take turns, so that a machine that gets slower does so for all:

    unmarked    drafted, as by default
    candidates  `--candidates M`, by any verifier that can
    race        marked by the noise of a race, drafted as by default

Three drafts a candidate are the default: by dry runs of the shipped pair's steps on lan, over the
tokens that its acceptance rate lets expect, they cost online what four do within 3 %, on a tree
that is a quarter smaller; two cost 16 % more, one 47 %. Correlated randomness grows with all rows.

Every marked text has a key of its own, and is looked for by it: the figure beside is log10 p.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.common import commands, report, saved
from experiments.common.load import busy_seconds, own_seconds
from experiments.common.prompts import TEMPERATURE, Prompt, read_prompts
from experiments.common.report import spread
from experiments.common.saved import under_table
from experiments.common.two_parties import run_command
from models.tokenizer import Tokenizer
from protocols.verification.variants import BRANCHING
from spu_llm.api.defaults import DRAFT_LENGTH
from spu_llm.app.printing import show, show_table
from spu_llm.core.errors import InputError, SpuLlmError
from spu_llm.core.machine import machine
from spu_llm.service.launching import network_options
from spu_llm.systems.decoding.limits import MAX_DRAFTS
from spu_llm.systems.watermark.detecting import detect
from spu_llm.systems.watermark.keys import Key, KeyFile, Scheme, write_key
from spu_llm.systems.watermark.units import TokenUnits

SYSTEMS = ("unmarked", "candidates", "race")
NGRAM = 4

Run = dict[str, Any]


@dataclass(frozen=True)
class RunKey:
    """A run of the study; `prompt`: its kind."""

    network: str
    prompt: str
    system: str
    tokens: int
    drafts: int
    candidates: int
    verify: str
    seed: int


def matrix(
    prompts: Sequence[Prompt],
    networks: Sequence[str],
    systems: Sequence[str],
    tokens: int,
    candidates: int,
    drafts: Sequence[int],
    variants: Sequence[str],
) -> list[tuple[RunKey, Prompt]]:
    """Return all runs in the order in which they are made; `drafts` and `variants` of verification
    are for candidates, one system each.
    """
    of_candidates = [("candidates", d, candidates, v) for d in drafts for v in variants]
    kinds = {
        "unmarked": [("unmarked", DRAFT_LENGTH, 1, "token")],
        "candidates": of_candidates,
        "race": [("race", DRAFT_LENGTH, 1, "race")],
    }
    chosen = [kind for system in SYSTEMS if system in systems for kind in kinds[system]]
    runs = []
    for network in networks:
        for turn, prompt in enumerate(prompts):
            shift = turn % len(chosen)
            for system, length, count, variant in (*chosen[shift:], *chosen[:shift]):
                asked = RunKey(
                    network, prompt.kind, system, tokens, length, count, variant, prompt.number
                )
                runs.append((asked, prompt))
    return runs


# ---- one run


def one(asked: RunKey, prompt: Prompt, model: Path, draft: Path, folder: Path) -> Run:
    """Make a complete run; return its record, with how busy others kept the machine meanwhile.
    SpuLlmError if it fails.
    """
    arguments = [
        "demo",
        "--prompt",
        prompt.text,
        "--max-new-tokens",
        str(asked.tokens),
        *network_options(asked.network),
        "--model",
        str(model),
        "--draft-model",
        str(draft),
        "--temperature",
        str(TEMPERATURE),
        "--seed",
        str(asked.seed),
        "--draft-length",
        str(asked.drafts),
        "--verify",
        asked.verify,
    ]
    tokenizer, file = Tokenizer.load(draft), None
    if asked.system != "unmarked":
        file = KeyFile(
            Key.from_os(), Scheme(NGRAM, method=asked.system, tokenizer=tokenizer.digest)
        )
        path = folder / file.key.fingerprint().hex()
        write_key(path, *file)
        arguments += ["--watermark", str(path)]
        arguments += ["--candidates", str(asked.candidates)] if asked.candidates > 1 else []
    busy, own, started = busy_seconds(), own_seconds(), time.perf_counter()
    load_start = os.getloadavg()[0]
    result = run_command(arguments, folder / "run.json")
    elapsed = time.perf_counter() - started
    others = busy_seconds() - busy - (own_seconds() - own)
    mark = None
    if file is not None and result["text"].strip():
        verdict = detect([file], [TokenUnits(tokenizer)], result["text"], locate=False)
        mark = verdict.log_p / math.log(10)
    figures = ("steps", "drafted", "accepted", "seconds", "bytes", "messages", "text", "learned")
    return {
        "asked": asdict(asked),
        "elapsed": elapsed,
        "others": max(0.0, others) / elapsed,
        "load_start": load_start,
        "machine": asdict(machine()),
        "log10_p": mark,
        "tokens": len(result["token_ids"]),
        **{name: result[name] for name in figures},
    }


# ---- the report


def _megabytes(run: Run, *kinds: str) -> float:
    return float(sum(report.both_ways(run["bytes"][kind]) for kind in kinds) / 1e6 / run["tokens"])


FIGURES: dict[str, Callable[[Run], float]] = {
    "online, s": lambda r: (r["seconds"]["prefill"] + r["seconds"]["decode"]) / r["tokens"],
    "everything, s": lambda r: r["elapsed"] / r["tokens"],
    "tokens a step": lambda r: (r["tokens"] - 1) / max(1, r["steps"]),
    "messages online": lambda r: r["messages"]["online"] / r["tokens"],
    "MB online": lambda r: _megabytes(r, "online"),
    "MB, everything": lambda r: _megabytes(r, "online", "offline"),
}
COMPARED = ("online, s", "everything, s", "MB, everything")


def name_of(asked: dict[str, Any]) -> str:
    """Name the system of a run."""
    if asked["candidates"] == 1:
        return f"{asked['system']}, {asked['drafts']} drafts"
    return f"{asked['candidates']} candidates of {asked['drafts']} drafts, {asked['verify']}"


def groups(result: Run) -> dict[tuple[str, int, str], dict[str, Run]]:
    """Return runs by network, length and system, and there by their prompts."""
    by_place: dict[tuple[str, int, str], dict[str, Run]] = {}
    for run in result["runs"]:
        asked = run["asked"]
        if run["tokens"]:
            key = (asked["network"], asked["tokens"], name_of(asked))
            by_place.setdefault(key, {})[asked["prompt"]] = run
    return by_place


def table(result: Run) -> str:
    """Return a table of a token of every system: medians with the smallest and the largest, and in
    units of the unmarked run of the same prompt.
    """
    heads = ["a token of", "runs", *FIGURES, "log10 p", *(f"{n} / unmarked" for n in COMPARED)]
    lines, there = [], groups(result)
    for (network, tokens, name), runs in there.items():
        plain = next(
            (
                of
                for (n, t, other), of in there.items()
                if (n, t) == (network, tokens) and other.startswith("unmarked")
            ),
            {},
        )
        cells = [spread(map(figure, runs.values()), report.three) for figure in FIGURES.values()]
        marks = [run["log10_p"] for run in runs.values() if run["log10_p"] is not None]
        cells.append(spread(marks, report.three))
        for compared in map(FIGURES.__getitem__, COMPARED):
            pairs = [(runs[p], plain[p]) for p in runs if p in plain]
            ratios = [compared(a) / compared(b) for a, b in pairs]
            cells.append("" if runs is plain else spread(ratios, report.three))
        lines.append([f"{network}, {tokens} tokens: {name}", str(len(runs)), *cells])
    return "\n".join(report.table(heads, lines))


def in_results(files: Mapping[str, Run]) -> list[str]:
    """Return the runs as paragraphs of its page in docs/results."""
    ((name, data),) = files.items()
    others = [run["others"] for run in data["runs"]]
    load_text = f"load of other work {min(others):.2f} to {max(others):.2f} cores"
    machines = [run["machine"] for run in data["runs"]]
    return [table(data), under_table((name,), machines, load_text)]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Each run is written at once; the same command goes on where it was stopped."
    )
    commands.add_network(parser, "lan")
    parser.add_argument(
        "--only",
        type=commands.names,
        default=list(SYSTEMS),
        metavar="NAME,...",
        help=f"{', '.join(SYSTEMS)} (default: all)",
    )
    commands.add_number(parser, "--prompts", 8, "the first N held-out prompts")
    commands.add_number(parser, "--tokens", 32, "of each completion")
    commands.add_number(parser, "--candidates", 4, "that a step verifies", "M")
    parser.add_argument(
        "--draft-length",
        type=commands.numbers,
        default=[3],
        metavar="G,...",
        help=f"drafts of a candidate, 1 to {MAX_DRAFTS} (default: 3)",
    )
    parser.add_argument(
        "--verify",
        type=commands.names,
        default=["token"],
        metavar="NAME,...",
        help="of candidates: token, race (default: token)",
    )
    commands.add_draft_model(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    prompts = read_prompts()
    commands.check_range("--prompts", options.prompts, 1, len(prompts))
    commands.check_range("--tokens", options.tokens, 3)
    commands.check_range("--candidates", options.candidates, 2, 16)
    for drafts in options.draft_length:
        commands.check_range("--draft-length", drafts, 1, MAX_DRAFTS)
    if unknown := set(options.only) - set(SYSTEMS):
        raise InputError(f"--only: there is no {min(unknown)!r}; choose from {', '.join(SYSTEMS)}")
    if unknown := set(options.verify) - set(BRANCHING):
        raise InputError(
            f"--verify: there is no {min(unknown)!r}; choose from {', '.join(BRANCHING)}"
        )
    runs = matrix(
        prompts[: options.prompts],
        options.network,
        options.only,
        options.tokens,
        options.candidates,
        options.draft_length,
        options.verify,
    )
    data, pair = saved.runs_in(options.json), commands.pair(options)
    done = [run["asked"] for run in data["runs"]]
    left = [(asked, prompt) for asked, prompt in runs if asdict(asked) not in done]
    with tempfile.TemporaryDirectory() as folder:
        for asked, prompt in left:
            show(f"{asked.network}, {asked.prompt}, {name_of(asdict(asked))}")
            try:
                data["runs"].append(one(asked, prompt, *pair, Path(folder)))
            except SpuLlmError as exc:
                show(f"  failed: {exc}")
                data["failed"].append({"asked": asdict(asked), "error": str(exc)})
            commands.write(options, data)
    show_table(table(data))
    if failed := len(runs) - sum(asdict(a) in [r["asked"] for r in data["runs"]] for a, _ in runs):
        raise SpuLlmError(f"{failed} of {len(runs)} runs failed; give the command again")
