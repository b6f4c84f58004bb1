"""What drafts save: drafted against standard decoding, whole runs, network by network.

POST (Section 5.2) states the speed-up of drafted over standard decoding in one framework. A run is
a complete completion between two processes (`experiments.completions.study`), with all that it
takes; drafts come from the public model alone, whose gamma drafts a step verifies. A run's speed-up
is measured against the standard run of the same prompt, network, backend and way of drawing, which
is made next to it; gamma changes the order in which runs are made from prompt to prompt.

    online      prefill and decode, the client's drafting included
    everything  online, and all correlated randomness, set-up and launch; but for the hint, which a
                client gets once for all its sessions

Acceptance is the chance that a draft which is looked at stays: of steps that accept k of gamma
drafts, sum(k) / (sum(k) + number of steps with k < gamma), which a rejection ends. The paper takes
its tokens a step to be (1 - a^(gamma + 1)) / (1 - a). What a step verified counts in both, also
where the text's length cut its last step.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.common import commands, saved
from experiments.common.prompts import TEMPERATURE, Prompt, read_prompts
from experiments.common.report import Column, Files, both_ways, rows_table, spread
from experiments.completions.plan import MODES, PARTS
from experiments.completions.resumable import check_whole, made
from experiments.completions.study import completed, watched
from models.hf import load_config
from models.text_format import TextFormat
from spu_llm.api.texts import tokens_of_prompt
from spu_llm.app.printing import show_table
from spu_llm.core.errors import InputError
from spu_llm.core.settings import BACKENDS, OWN
from spu_llm.systems.decoding.limits import MAX_DRAFTS
from spu_llm.systems.decoding.request import Request

PAPERS = ("3000mbps-1ms", "lan", "wan", "200mbps-80ms")  # its networks, Appendix E
DRAFTS = (4, 8, 16)  # and its lengths of drafts


@dataclass(frozen=True)
class SpeedupRun:
    """A run. `drafts`: of a step; 0 is standard decoding."""

    backend: str
    network: str
    mode: str
    prompt: str  # its kind
    drafts: int
    tokens: int
    seed: int


def matrix(
    prompts: Sequence[Prompt],
    backends: Sequence[str],
    networks: Sequence[str],
    modes: Sequence[str],
    drafts: Sequence[int],
    tokens: int,
) -> list[tuple[SpeedupRun, Prompt]]:
    """Return all runs in the order in which they are made: those that are compared next to each
    other, and whoever is first takes turns.
    """
    lengths = tuple(dict.fromkeys((0, *drafts)))
    runs = []
    places = (dict.fromkeys(names) for names in (backends, networks, modes))
    for prompt, (backend, network, mode) in itertools.product(
        prompts, list(itertools.product(*places))
    ):
        shift = prompt.number % len(lengths)
        for length in (*lengths[shift:], *lengths[:shift]):
            run = SpeedupRun(backend, network, mode, prompt.kind, length, tokens, prompt.number)
            runs.append((run, prompt))
    return runs


def check(model: Path, draft_model: Path, runs: Sequence[tuple[SpeedupRun, Prompt]]) -> None:
    """Raise InputError for what cannot be measured."""
    config, text = load_config(model, encoders=True), TextFormat.of_model(model)
    commands.check_tokenizer(model, draft_model)
    for run, prompt in runs:
        request = _request(run, tokens_of_prompt("", prompt.text, text)[1])
        request.check(config)
        length = request.begun(config)
        if run.tokens < 2 or length + run.tokens + run.drafts + 1 > config.context:
            raise InputError(
                f"--tokens must be 2 or more, and {run.tokens} after the {length} of the prompt "
                f"'{prompt.kind}' within the model's context of {config.context}"
            )


def _request(run: SpeedupRun, given: Sequence[int]) -> Request:
    temperature = TEMPERATURE if run.mode == "sampled" else 0.0
    return Request(len(given), run.tokens, run.drafts, temperature)


def measure(run: SpeedupRun, prompt: Prompt, model: Path, draft_model: Path) -> dict[str, Any]:
    """Make a run; return its record."""
    given = tokens_of_prompt("", prompt.text, TextFormat.of_model(model))[1]
    request = _request(run, given)

    def work() -> dict[str, Any]:
        return completed(request, given, run.seed, model, draft_model, run.network, run.backend)

    record = {"asked": asdict(run)} | watched(work)
    del record["costs"]["kinds"], record["learned"]
    return record


# ---- figures of runs

Record = dict[str, Any]
Figure = Callable[[Record], float]


def seconds(*parts: str) -> Figure:
    """Return the figure: seconds of some parts of a run, for each token."""
    return lambda record: (
        sum(record["costs"][part]["seconds"] for part in parts) / record["emitted"]
    )


def megabytes(record: Record) -> float:
    """Return all bytes of a run but the hint's for each token, in MB."""
    moved = sum(both_ways(record["costs"][part]) for part in PARTS)
    return float(moved) / 1e6 / int(record["emitted"])


ONLINE, EVERYTHING = seconds("prefill", "decode"), seconds(*PARTS)


def key_of(record: Record) -> tuple[str, str, str, int]:
    """Return what runs that are compared have in common."""
    asked = record["asked"]
    return asked["network"], asked["mode"], asked["backend"], asked["tokens"]


def tokens_per_step(records: Sequence[Record]) -> float:
    """Return the tokens that a decode step verified, in the mean."""
    stayed = [k for record in records for k in record["stayed"]]
    return 1 + sum(stayed) / len(stayed)


def acceptance(records: Sequence[Record]) -> float:
    """Return the chance that a draft that is looked at stays (module docstring)."""
    steps = [(stayed, r["asked"]["drafts"]) for r in records for stayed in r["stayed"]]
    accepted = sum(stayed for stayed, _ in steps)
    rejections = sum(stayed < drafts for stayed, drafts in steps)
    return accepted / (accepted + rejections) if accepted else 0.0


def expected(alpha: float, drafts: int) -> float:
    """Return the paper's tokens a step at acceptance `alpha`."""
    return (1 - alpha ** (drafts + 1)) / (1 - alpha) if alpha < 1 else drafts + 1


def speedups(records: Sequence[Record], standard: Sequence[Record], figure: Figure) -> list[float]:
    """Divide the standard run's figure by the figure of each run of the same prompt."""
    base = {r["asked"]["prompt"]: figure(r) for r in standard}
    return [base[p] / figure(r) for r in records if (p := r["asked"]["prompt"]) in base]


# ---- the table


@dataclass(frozen=True)
class _Row:
    network: str
    mode: str
    backend: str
    tokens: int
    drafts: int
    runs: Sequence[Record]
    standard: Sequence[Record]

    def per_token(self, figure: Figure, form: str = ".2f") -> str:
        return spread(map(figure, self.runs), lambda x: format(x, form))

    def speedup(self, figure: Figure) -> str:
        each = speedups(self.runs, self.standard, figure) if self.drafts else []
        return spread(each, lambda x: f"{x:.2f}") or "–"

    def drafted(self, figure: Callable[[], float]) -> str:
        return f"{figure():.2f}" if self.drafts else "–"


def rows(runs: Sequence[Record]) -> list[_Row]:
    """Return the rows of the table: runs of one network, mode, backend and length of drafts."""
    made: dict[tuple[Any, ...], list[Record]] = {}
    for record in runs:
        made.setdefault((*key_of(record), record["asked"]["drafts"]), []).append(record)
    places = {n: i for i, n in enumerate(PAPERS)}

    def order(key: tuple[Any, ...]) -> tuple[Any, ...]:
        network, mode, backend, tokens, drafts = key
        return places.get(network, -1), network, backend, mode, tokens, drafts

    return [
        _Row(network, mode, backend, tokens, drafts, runs, made.get((*key[:4], 0), []))
        for key, runs in sorted(made.items(), key=lambda item: order(item[0]))
        for network, mode, backend, tokens, drafts in [key]
    ]


def table(runs: Sequence[Record]) -> list[str]:
    """Return the speed-ups as the lines of a Markdown table: medians, smallest to largest."""
    columns: list[Column[_Row]] = [
        Column("network", lambda r: r.network),
        Column("backend", lambda r: r.backend),
        Column("drawn", lambda r: r.mode),
        Column("tokens", lambda r: str(r.tokens)),
        Column("γ", lambda r: str(r.drafts or "standard")),
        Column("prompts", lambda r: str(len(r.runs))),
        Column("acceptance", lambda r: r.drafted(lambda: acceptance(r.runs))),
        Column("tokens a step", lambda r: r.drafted(lambda: tokens_per_step(r.runs))),
        Column(
            "by the paper's formula",
            lambda r: r.drafted(lambda: expected(acceptance(r.runs), r.drafts)),
        ),
        Column("online, s a token", lambda r: r.per_token(ONLINE)),
        Column("speed-up", lambda r: r.speedup(ONLINE)),
        Column("everything, s a token", lambda r: r.per_token(EVERYTHING)),
        Column("speed-up", lambda r: r.speedup(EVERYTHING)),
        Column("MB a token", lambda r: r.per_token(megabytes, ".1f")),
    ]
    return rows_table(columns, rows(runs))


def tables(files: Files) -> list[str]:
    """Return the table of committed runs, with where it comes from."""
    runs = [record for data in files.values() for record in data["runs"]]
    busiest = max(r["others"] for r in runs)
    before = [r["load_start"] for r in runs]
    load = (
        f"load {min(before):.2f} to {max(before):.2f} as runs began, other work at most "
        f"{busiest:.2f} cores"
    )
    under = saved.under_table(files, (r["machine"] for r in runs), load)
    return ["\n".join(table(runs)), under]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Hours. Each run is written at once; the same command goes on where it was stopped."
    )
    commands.add_network(parser, ",".join(PAPERS))
    parser.add_argument("--backend", type=commands.names, default=[OWN], metavar="NAME,...")
    parser.add_argument("--drafts", type=commands.numbers, default=list(DRAFTS), metavar="N,...")
    parser.add_argument("--modes", type=commands.names, default=list(MODES), metavar="NAME,...")
    commands.add_number(parser, "--prompts", 8, "the first N held-out prompts")
    commands.add_number(parser, "--tokens", 32, "of each completion")
    commands.add_draft_model(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    for name, known in (("backend", BACKENDS), ("modes", MODES)):
        if unknown := set(getattr(options, name)) - set(known):
            raise InputError(
                f"--{name}: there is no {min(unknown)!r}; choose from {', '.join(known)}"
            )
    for drafts in options.drafts:
        commands.check_range("--drafts", drafts, 1, MAX_DRAFTS)
    prompts = read_prompts()
    commands.check_range("--prompts", options.prompts, 1, len(prompts))
    pair = commands.pair(options)
    runs = matrix(
        prompts[: options.prompts],
        options.backend,
        options.network,
        options.modes,
        options.drafts,
        options.tokens,
    )
    check(*pair, runs)
    data, failed = made(options, runs, lambda run, prompt: measure(run, prompt, *pair))
    if data["runs"]:
        show_table("\n".join(table(data["runs"])))
    check_whole(runs, failed)
