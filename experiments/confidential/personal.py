"""How many fakes personal data has, by its class, as published, and how many of them have the form
of the class.

"Confidential Prompting" (Gim, Li, Zhong), figures 5, 6, 7 and 13, with lambda_max = 512: greedy
quantized sampling as printed, with the prompt for infilling, so that fakes are made in view of what
follows. Sentences are made up (`personal_data`), in the place of the paper's clinical notes and
resumes. A class whose data has a form (a date, a checksum) tells which fakes anybody would strike
out. `--redact patterns` is tried on the same sentences.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from experiments.common import commands, saved
from experiments.common.cells import Cells, with_rows
from experiments.common.report import Column, Files, rows_table
from experiments.confidential.fakes import EPSILONS, MOST, timed
from experiments.confidential.one_context import OneContext
from experiments.confidential.personal_data import CLASSES, FORMS, SENTENCES, sentences
from models.tokenizer import Tokenizer
from spu_llm.api.defaults import shipped
from spu_llm.app.printing import show_table
from spu_llm.systems.confidential import published
from spu_llm.systems.confidential.infilling import Infilling
from spu_llm.systems.confidential.obfuscation import Public
from spu_llm.systems.confidential.spans import Prompt, secret_in, tagged, tokenised
from spu_llm.systems.confidential.taggers import by_patterns

_FEW = 4  # lambda_min

Row = dict[str, Any]


@dataclass(frozen=True)
class PersonalPlan:
    """The study's settings. model: the directory of the public model that makes fakes, by name."""

    model: str


@dataclass(frozen=True)
class Study:
    """The public model and sentences by class, which all cells share."""

    public: Public
    prompts: dict[str, list[Prompt]]


@lru_cache(maxsize=1)
def prepared(directory: Path) -> Study:
    """Load the model, with room for the longest sentence; compile what it takes."""
    tokenizer = Tokenizer.load(directory)
    infilling = Infilling.of(tokenizer)
    prompts = {kind: [tokenised(s, tokenizer) for s in sentences(kind)] for kind in CLASSES}
    every = [(prompt, prompt.targets[0]) for of in prompts.values() for prompt in of]
    before = max(len(infilling.context(prompt.tokens, target)) for prompt, target in every)
    scorer = OneContext(directory, before, max(len(target) for _, target in every))
    public = Public(scorer, tokenizer, infilling=infilling)
    published.as_printed(public, *every[0], EPSILONS[-1], MOST)
    return Study(public, prompts)


def row_of(directory: Path, kind: str, eps: float, say: Callable[[str], None]) -> Row:
    """Count the fakes of each secret of a class, those with its form, and processor seconds."""
    study, form = prepared(directory), FORMS.get(kind)
    prompts, tokenizer = study.prompts[kind], study.public.tokenizer
    counts, formed, seconds = [], [], []
    made = timed(study.public, prompts, eps, MOST, lambda at: say(f"{kind}, {at}"))
    for prompt, (fakes, spent) in zip(prompts, made, strict=True):
        seconds.append(spent)
        counts.append(len(fakes))
        if form is not None:
            texts = (secret_in(tokenizer, fake, prompt.edges[0]) for fake in fakes)
            formed.append(sum(text is not None and form(text) for text in texts))
    return {
        "kind": kind,
        "eps": eps,
        "lengths": [len(prompt.targets[0]) for prompt in prompts],
        "fakes": counts,
        "formed": formed if form is not None else None,
        "seconds": seconds,
        "tagged": [is_tagged(prompt) for prompt in prompts],
    }


def is_tagged(prompt: Prompt) -> bool:
    """Return whether `--redact patterns` hides all of the secret of a sentence."""
    (span,) = prompt.marked.redacted
    spans = tagged(prompt.marked.text, by_patterns).redacted
    return any(start <= span.start and span.stop <= stop for start, stop in spans)


def measure(
    directory: Path,
    plan: PersonalPlan,
    say: Callable[[str], None],
    keep: Callable[[Row], None] = lambda result: None,
    done: Sequence[Row] = (),
    ray: str | None = None,
) -> Row:
    """Measure all cells; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures.
    """
    result: Row = {"plan": asdict(plan), "most": MOST, "rows": list(done)}
    return with_rows(result, all_cells(directory), say, keep, ray)


def all_cells(directory: Path) -> Cells[Path, tuple[str, float]]:
    """Return the study's cells: classes and eps."""
    return Cells(
        [(kind, eps) for kind in CLASSES for eps in EPSILONS],
        load=lambda say: directory,
        row=lambda directory, one, say: row_of(directory, *one, say),
        key=lambda one: one,
        key_of=lambda row: (row["kind"], row["eps"]),
        reads=(directory, SENTENCES),
    )


# ---- the report


def table(result: Row) -> str:
    """Return the figures as Markdown."""
    rows = result["rows"]

    def at(eps: float) -> Column[list[Row]]:
        return Column(f"fakes at ε = {eps:g}; median", lambda of: _mean(_at(of, eps)["fakes"]))

    middle = EPSILONS[1]
    columns: list[Column[list[Row]]] = [
        Column("class", lambda of: CLASSES[of[0]["kind"]]),
        Column("secrets", lambda of: str(len(of[0]["lengths"]))),
        Column("tokens, mean", lambda of: f"{np.mean(of[0]['lengths']):.1f}"),
        *map(at, EPSILONS),
        Column(
            f"fewer than {_FEW} at ε = {middle:g}",
            lambda of: str(np.sum(np.array(_at(of, middle)["fakes"]) < _FEW)),
        ),
        Column("with the form, at each ε", _formed),
        Column("processor seconds at each ε, median", lambda of: _seconds(of, np.median)),
        Column("largest", lambda of: _seconds(of, np.max)),
        Column("hidden by --redact patterns", lambda of: str(sum(of[0]["tagged"]))),
    ]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    parts = ([row for row in rows if row["kind"] == kind] for kind in kinds)
    return "\n".join(rows_table(columns, (of for of in parts if len(of) == len(EPSILONS))))


def in_results(files: Files) -> list[str]:
    """Return the figures as paragraphs of their page in docs/results."""
    ((name, data),) = files.items()
    load = data["machine"]["load"]
    beside = f"load {load[0]:.1f} before, {load[1]:.1f} at the end"
    if not saved.timed(name):
        beside += " (seconds beside other work: upper bounds)"
    return [table(data), saved.under_table(files, [data["machine"]], beside)]


def _at(rows: Sequence[Row], eps: float) -> Row:
    return next(row for row in rows if row["eps"] == eps)


def _mean(counts: Sequence[int]) -> str:
    """Write a mean and half its 95 % interval, by Student's t; and the median."""
    half = stats.t.ppf(0.975, len(counts) - 1) * np.std(counts, ddof=1) / np.sqrt(len(counts))
    return f"{np.mean(counts):.0f} ± {half:.0f}; {np.median(counts):g}"


def _formed(rows: Sequence[Row]) -> str:
    """Write how many of all fakes have the form of their class, at each eps."""
    if rows[0]["formed"] is None:
        return "–"
    of = (_at(rows, eps) for eps in EPSILONS)
    return "; ".join(f"{sum(row['formed']):,} of {sum(row['fakes']):,}" for row in of)


def _seconds(rows: Sequence[Row], of: Callable[[Any], Any]) -> str:
    """Write a figure of processor seconds at each eps."""
    return ", ".join(f"{of(_at(rows, eps)['seconds']):.2g}" for eps in EPSILONS)


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Each cell is written at once, and the same command goes on."
    parser.add_argument(
        "--draft-model", type=Path, metavar="DIR", help="public model (default: the shipped one)"
    )
    commands.add_cluster(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    commands.add_debug(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    directory = options.draft_model or shipped("public")
    plan = PersonalPlan(directory.resolve().name)
    show_table(table(commands.resumed(options, plan, lambda *how: measure(directory, plan, *how))))
