"""What alignment does to acceptance, by task set (POST, Table 1 and Figure 4).

The private model answers text of a task set (`experiments.common.task_sets`), and a draft model
learns the answers: `spu-llm align`, as it stands, in a process of its own. Before and after, both
write texts after held-out documents' beginnings by speculative sampling, in plaintext, since
verification on shares follows the same rule.

    acceptance      sum over the vocabulary of min(p, q), the chance that a draft stays, on average
                    over the places of drafts that were decided
    hard matching   share of these at which the draft is the private model's likeliest token: what
                    would stay if only that did
    tokens a step   measured, at each length of drafts; and (1 - a^(G + 1)) / (1 - a), which the
                    paper takes it to be

The curve over answers learnt is that of `align`: on held-out parts of the text that is learnt, of
the K likeliest tokens alone, so it lies below the acceptance.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands, saved
from experiments.common.prompts import TEMPERATURE
from experiments.common.report import Column, Files, rows_table
from experiments.common.task_sets import TASKS, task_set
from experiments.common.two_parties import finish_command
from experiments.completions.drafts import DraftedText, for_prompts, run
from experiments.completions.resumable import check_whole, made
from experiments.completions.speedup import DRAFTS, expected
from models.alignment import student
from models.alignment.run import CURVE
from models.family import ModelConfig, Params
from models.hf import load_model, load_uncalibrated
from models.text_format import TextFormat
from protocols.verification.distribution import Sampling
from spu_llm.app.printing import show_table
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine

PROMPT = 32  # tokens of a held-out document
TOKENS = 48  # after it
_SAMPLE = 100_000  # characters, of which tokens per character are taken
_OF_TABLE = 8  # drafts a step, as in the paper's Table 1


@dataclass(frozen=True)
class AlignmentRun:
    """One draft model, aligned on one task set. `keep`: the blocks of the private model that it
    begins with, where it begins with no model of its own.
    """

    pair: str
    task: str
    keep: str
    answers: int
    epochs: int
    prompts: int
    top_k: int


def prompts_of(text: TextFormat, task: str, count: int) -> list[list[int]]:
    """Return so many beginnings, of held-out documents in turn, each from another place."""
    documents = task_set(task).held_out
    prompts = []
    for number in range(count):
        whole = documents[number % len(documents)].text
        at = (number // len(documents) + 1) * len(whole) // (count // len(documents) + 2)
        tokens = text.tokenizer.encode(whole[at : at + 20 * PROMPT])[:PROMPT]
        prompts.append([*tokens, *text.after_prompt])
    return prompts


def learnt_text(text: TextFormat, task: str, answers: int) -> str:
    """Return text of a task set of about so many tokens, a part of each document."""
    documents = [one.text for one in task_set(task).learnt]
    sample = "\n\n".join(documents)[:_SAMPLE]
    wanted = answers * len(sample) // (2 * len(text.tokenizer.encode(sample)))
    share = min(1.0, wanted / sum(map(len, documents)))
    return "\n\n".join(one[: int(share * len(one))] for one in documents)


def _draft_model(
    asked: AlignmentRun, model: Path, draft_model: Path | None
) -> tuple[ModelConfig, Params]:
    """Return the draft model as it is before it learns."""
    if draft_model is not None:
        return load_model(draft_model, encoders=True)
    begun = student.of_blocks(*load_uncalibrated(model), list(map(int, asked.keep.split(","))))
    return begun.config, begun.params


def _drafted(
    private: tuple[ModelConfig, Params],
    small: tuple[ModelConfig, Params],
    prompts: Sequence[list[int]],
    ends: frozenset[int],
    drafts: int,
) -> list[DraftedText]:
    rows = max(map(len, prompts)) + TOKENS + drafts
    of_private, of_small = for_prompts(private, rows), for_prompts(small, rows)
    return [
        run(of_private(p), of_small(p), p, ends, TOKENS, drafts, Sampling(TEMPERATURE), seed)
        for seed, p in enumerate(prompts)
    ]


def measure(
    asked: AlignmentRun, model: Path, draft_model: Path | None, work: Path
) -> dict[str, Any]:
    """Align; return counts of drafted texts before and after, by drafts a step, and the curve."""
    text = TextFormat.of_model(model)
    prompts = prompts_of(text, asked.task, asked.prompts)
    out = work / f"{asked.pair} {asked.task} {asked.top_k}".replace(" ", "_")
    learnt = out.with_suffix(".txt")
    learnt.write_text(learnt_text(text, asked.task, asked.answers), encoding="utf-8")
    begun = ["--keep", asked.keep] if draft_model is None else ["--public", str(draft_model)]
    rate = "2e-3" if draft_model is None else "1e-3"
    finish_command(
        ["align", "--private", str(model), *begun, "--text", str(learnt), "--out", str(out)]
        + ["--top-k", str(asked.top_k), "--temperature", str(TEMPERATURE)]
        + ["--epochs", str(asked.epochs), "--learning-rate", rate]
    )
    private, ends = load_model(model, encoders=True), text.tokenizer.eos_ids
    models = {
        "before": _draft_model(asked, model, draft_model),
        "after": load_model(out, encoders=True),
    }
    return {
        "asked": asdict(asked),
        **{
            name: {
                str(drafts): [asdict(o) for o in _drafted(private, small, prompts, ends, drafts)]
                for drafts in DRAFTS
            }
            for name, small in models.items()
        },
        "curve": json.loads((out / CURVE).read_text(encoding="utf-8"))["curve"],
        "machine": asdict(machine()),
    }


# ---- tables

Record = dict[str, Any]
_ASKED: list[Column[Record]] = [
    Column("pair", lambda record: record["asked"]["pair"]),
    Column("task set", lambda record: record["asked"]["task"]),
    Column("K", lambda record: str(record["asked"]["top_k"])),
]


def rate(runs: Sequence[Record], figure: str) -> tuple[float, float]:
    """Return a figure of texts for each place of a draft, and its standard error, from how far the
    texts lie apart.
    """
    places = np.array([r["places"] for r in runs], float)
    each = np.array([r[figure] for r in runs], float)
    mean = each.sum() / places.sum()
    apart = each - mean * places
    more = len(runs) / max(1, len(runs) - 1)
    return float(mean), float(np.sqrt(more * (apart**2).sum()) / places.sum())


def _tokens_a_step(runs: Sequence[Record]) -> float:
    """Return tokens a step, in the mean; a text that ends with its first token has none."""
    return float(sum(r["tokens"] - 1 for r in runs) / sum(r["steps"] for r in runs))


def table(records: Sequence[Record]) -> list[str]:
    """Return acceptance and tokens a step of each pair and task set as a Markdown table."""

    def of_place(figure: str, when: str) -> Callable[[Record], str]:
        def cell(record: Record) -> str:
            mean, error = rate(record[when][str(_OF_TABLE)], figure)
            return f"{mean:.2f} ± {error:.2f}"

        return cell

    def steps(drafts: int) -> Callable[[Record], str]:
        def cell(record: Record) -> str:
            runs = record["after"][str(drafts)]
            follows = expected(rate(record["after"][str(_OF_TABLE)], "overlap")[0], drafts)
            before = _tokens_a_step(record["before"][str(drafts)])
            return f"{before:.2f} → {_tokens_a_step(runs):.2f} ({follows:.2f})"

        return cell

    columns: list[Column[Record]] = [
        *_ASKED,
        Column("answers learnt", lambda record: f"{record['curve'][-1]['tokens']:,}"),
        Column("acceptance before", of_place("overlap", "before")),
        Column("after", of_place("overlap", "after")),
        Column("hard matching before", of_place("likeliest", "before")),
        Column("after", of_place("likeliest", "after")),
        *(Column(f"tokens a step, {drafts} drafts", steps(drafts)) for drafts in DRAFTS),
    ]
    return rows_table(columns, records)


def curves(records: Sequence[Record]) -> list[str]:
    """Return acceptance over answers learnt as a Markdown table, a row for each pair and task."""
    most = max(len(record["curve"]) for record in records)
    kept = sorted({*range(0, most, max(1, -(-most // 6))), most - 1})

    def point(number: int) -> Callable[[Record], str]:
        def cell(record: Record) -> str:
            if number >= len(record["curve"]):
                return "–"
            at = record["curve"][number]
            return f"{at['acceptance']:.3f} ({at['tokens'] / 1000:.0f})"

        return cell

    columns: list[Column[Record]] = [
        *_ASKED,
        *(Column(f"point {number}", point(number)) for number in kept),
    ]
    return rows_table(columns, records)


def tables(files: Files) -> list[str]:
    """Return the tables of committed runs, with where they come from."""
    records = [record for data in files.values() for record in data["runs"]]
    begun, ended = zip(*(record["machine"]["load"] for record in records), strict=True)
    load = saved.NO_SECONDS.format(max(begun), max(ended))
    under = saved.under_table(files, (r["machine"] for r in records), load)
    return ["\n".join(table(records)), under, "\n".join(curves(records)), under]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "An hour and more. Each alignment is written at once; the same command goes on where it "
        "was stopped."
    )
    commands.add_common(parser)
    commands.add_draft_model(parser)
    parser.add_argument(
        "--keep",
        default="",
        metavar="I,J,...",
        help="begin with these blocks of the private model, in place of a draft model",
    )
    parser.add_argument(
        "--tasks",
        type=commands.names,
        default=list(TASKS),
        metavar="NAME,...",
        help=f"(default: {','.join(TASKS)})",
    )
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="alignments")
    commands.add_number(parser, "--answers", 100_000, "tokens of a task set to learn, about")
    commands.add_number(parser, "--epochs", 4, "times that they are learnt")
    commands.add_number(parser, "--prompts", 40, "held-out texts")
    commands.add_number(parser, "--top-k", 512, "likeliest tokens of an answer that are learnt")


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    if unknown := set(options.tasks) - set(TASKS):
        raise InputError(f"--tasks: there is no {min(unknown)!r}; choose from {', '.join(TASKS)}")
    commands.check_range("--answers", options.answers, 10_000)
    commands.check_range("--epochs", options.epochs, 1)
    commands.check_range("--prompts", options.prompts, 1)
    commands.check_range("--top-k", options.top_k, 1)
    if options.keep and options.draft_model is not None:
        raise InputError("--keep is in place of --draft-model; leave one out")
    model = commands.private_model(options)
    draft_model = None if options.keep else commands.pair(options)[1]
    title = load_uncalibrated(model, encoders=True)[0].title
    options.work.mkdir(parents=True, exist_ok=True)
    sizes = options.answers, options.epochs, options.prompts, options.top_k
    runs = [AlignmentRun(title, task, options.keep, *sizes) for task in options.tasks]
    data, failed = made(
        options,
        [(run, draft_model) for run in runs],
        lambda asked, small: measure(asked, model, small, options.work),
    )
    if data["runs"]:
        show_table("\n".join([*table(data["runs"]), "", *curves(data["runs"])]))
    check_whole(runs, failed)
