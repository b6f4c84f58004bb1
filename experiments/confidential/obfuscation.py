"""How many fakes there are for a secret, and how long it takes to find them.

"Confidential Prompting" (Gim, Li, Zhong), figures 5 to 7 (lambda against eps) and 13 (seconds):
words of held-out text are the secrets, the shipped public model makes the fakes. As published,
printed and as programmed, against eps; repaired, against eta.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands
from experiments.common.report import Column, rows_table
from spu_llm.api.defaults import shipped
from spu_llm.app.printing import show_table
from spu_llm.app.progress import Progress
from spu_llm.attacks.prompts import Setting, of_text, setting_of
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine
from spu_llm.core.prg import Prg
from spu_llm.systems.confidential import published
from spu_llm.systems.confidential.obfuscation import Limits, alike
from spu_llm.systems.confidential.spans import Prompt

EPSILONS = (1 / 32, 1 / 8, 1 / 2)
ETAS = (0.1, 0.5, 1.0, 2.0)
MOST = 64  # fakes looked for: lambda_max
ENOUGH = (4, 8)
PROMPTS = 60
_DRAWS = 40  # for each prompt, until one has a word in the right place

Count = Callable[[Setting, Prompt], int]


def _published(variant: str, eps: float) -> Count:
    def count(setting: Setting, prompt: Prompt) -> int:
        sample = published.sampler(variant, setting.public, prompt, eps, MOST, Prg.from_os())
        return len(sample(prompt.targets[0]).fakes)

    return count


def _repaired(eta: float) -> Count:
    limits = replace(Limits(), fakes=MOST, fewest=1, eta=eta)

    def count(setting: Setting, prompt: Prompt) -> int:
        try:
            return len(alike(setting.public, prompt, Prg.from_os(), limits)) - 1
        except InputError:  # too few, or a word that stands elsewhere in the text, too
            return 0

    return count


def ways() -> Iterator[tuple[str, float, Count]]:
    """Yield each way to find fakes, its width, and how many it finds."""
    for variant in published.VARIANTS:
        for eps in EPSILONS:
            yield f"as published, {variant}: eps", eps, _published(variant, eps)
    for eta in ETAS:
        yield "repaired: eta", eta, _repaired(eta)


def measure(prompts: int, seed: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Count the fakes of each prompt, and processor seconds, by way and width."""
    setting = setting_of(shipped("private"), seed)
    drawn = (of_text(setting) for _ in range(_DRAWS * prompts))
    chosen = [prompt for prompt in drawn if prompt is not None][:prompts]
    rows = []
    for name, width, count in ways():
        count(setting, chosen[0])  # compiles
        guesses, seconds = [], []
        for i, prompt in enumerate(chosen):
            say(f"{name} {width:g}: prompt {i + 1} of {len(chosen)}")
            started = time.process_time()
            guesses.append(count(setting, prompt))
            seconds.append(time.process_time() - started)
        rows.append({"way": name, "width": width, "found": guesses, "seconds": seconds})
    return rows


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""

    def at_least(n: int) -> Column[dict[str, Any]]:
        name = f"prompts with {n} or more"
        return Column(name, lambda row: f"{np.mean(np.array(row['found']) >= n):.0%}")

    columns: list[Column[dict[str, Any]]] = [
        Column("fakes", lambda row: row["way"]),
        Column("width", lambda row: f"{row['width']:g}"),
        Column(f"found, of at most {MOST}: mean (95 %)", lambda row: _mean(row["found"])),
        Column("median", lambda row: f"{np.median(row['found']):g}"),
        *map(at_least, ENOUGH),
        Column("processor seconds, median", lambda row: f"{np.median(row['seconds']):.2f}"),
        Column("largest", lambda row: f"{max(row['seconds']):.2f}"),
    ]
    return "\n".join(rows_table(columns, result["rows"]))


def _mean(counts: Sequence[int]) -> str:
    """Write a mean and its 95 % interval."""
    mean = np.mean(counts)
    around = 1.96 * np.std(counts, ddof=1) / np.sqrt(len(counts))
    return f"{mean:.1f} ({mean - around:.1f} to {mean + around:.1f})"


def add_options(parser: argparse.ArgumentParser) -> None:
    commands.add_number(parser, "--prompts", PROMPTS, "words of held-out text")
    commands.add_number(parser, "--seed", 0, "of their choice", "S")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    commands.add_debug(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--prompts", options.prompts, 2)
    progress = Progress()
    try:
        rows = measure(options.prompts, options.seed, progress.update)
    finally:
        progress.close()
    result = {"machine": asdict(machine()), "most": MOST, "rows": rows}
    commands.write(options, result)
    show_table(table(result))
