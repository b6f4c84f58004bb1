"""What the number of fakes of a secret depends on, as published: how long the secret is, what kind
of text, whether it is spelt right, and the model's size and temperature.

"Confidential Prompting" (Gim, Li, Zhong), figures 5 to 7 and 13, with lambda_max = 512: greedy
quantized sampling as printed, with the prompt for infilling. Secrets are of held-out text, source
of Python's library: words, words with a capital, numbers, or any n tokens, with text before and
after them. The same secrets serve all models, temperatures and spellings. The larger model is the
shipped private one.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import commands
from experiments.common.cells import Cells, with_rows
from experiments.common.report import Column, rows_table
from models.hf import load_model
from models.scoring import Scorer
from models.tokenizer import Tokenizer
from models.training.snippets import SHIPPED
from spu_llm.api.defaults import shipped
from spu_llm.app.printing import show_table
from spu_llm.attacks.prompts import AFTER, BEFORE, held_out
from spu_llm.core.errors import InputError
from spu_llm.systems.confidential import published
from spu_llm.systems.confidential.infilling import Infilling
from spu_llm.systems.confidential.obfuscation import Public
from spu_llm.systems.confidential.spans import Marked, Prompt, Span, tokenised

EPSILONS = (1 / 32, 1 / 8, 1 / 2)
MOST, PROMPTS = 512, 20
LONGEST = 8  # tokens of a secret
_TRIES = 400  # pieces of text for each secret
KINDS = {
    "word": re.compile(r"(?<!\w)[A-Za-z]{4,}(?!\w)"),
    "capital": re.compile(r"(?<!\w)[A-Z][a-z]{2,}(?!\w)"),
    "number": re.compile(r"(?<!\w)\d{2,}(?!\w)"),
}

Row = dict[str, Any]


@dataclass(frozen=True)
class FakesPlan:
    """The study's settings. prompts: secrets of each kind; seed: of their choice."""

    prompts: int = PROMPTS
    seed: int = 0


@dataclass(frozen=True)
class FakesCell:
    """Secrets and what makes fakes of them. tokens: of a secret; 0: one of `KINDS`. most: fakes."""

    name: str
    kind: str = "word"
    tokens: int = 0
    misspelt: bool = False
    larger: bool = False
    temperature: float = 1.0
    most: int = MOST


_WORDS = FakesCell("words")
CELLS = (
    _WORDS,
    replace(_WORDS, name="words, misspelt", misspelt=True),
    replace(_WORDS, name="words, larger model", larger=True),
    replace(_WORDS, name="words, temperature 2", temperature=2.0),
    FakesCell("words with a capital", "capital"),
    FakesCell("numbers", "number"),
    *(FakesCell(f"{n} token{'s' * (n > 1)}", tokens=n) for n in (1, 2, 4, 8)),
    FakesCell(f"{LONGEST} tokens, 64 fakes at most", tokens=LONGEST, most=64),
)


# ---- secrets


def misspelt(word: str) -> str:
    """Return a word with two letters inside exchanged, the first two that differ; as it is where
    all are alike.
    """
    for i in range(1, len(word) - 2):
        if word[i] != word[i + 1]:
            return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    return word


def secrets(tokenizer: Tokenizer, cell: FakesCell, count: int, seed: int) -> list[Prompt]:
    """Draw `count` pieces of held-out text with a secret each, by kind or of so many tokens: the
    same for all cells that differ in nothing else. InputError where held-out text has too few.
    """
    source = np.random.default_rng(seed)
    room = BEFORE + LONGEST + AFTER
    texts = [text for text in held_out(tokenizer) if len(text) > 2 * room]
    prompts: list[Prompt] = []
    for _ in range(_TRIES * count):
        text = texts[source.integers(len(texts))]
        at = int(source.integers(len(text) - room))
        prompt = _secret(tokenizer, cell, text[at : at + room])
        if prompt is not None:
            prompts.append(prompt)
        if len(prompts) == count:
            return prompts
    raise InputError(f"--prompts must be {len(prompts)} or fewer for {cell.name}")


def _secret(tokenizer: Tokenizer, cell: FakesCell, piece: Sequence[int]) -> Prompt | None:
    """Return the piece with its secret, which begins among the `LONGEST` tokens behind the first
    `BEFORE`, and has text behind it; None where there is none.
    """
    text, start = tokenizer.decode(piece), len(tokenizer.decode(piece[:BEFORE]))
    end = len(tokenizer.decode(piece[: BEFORE + LONGEST]))
    if "\ufffd" in text:
        return None
    if cell.tokens:
        span = Span(start, len(tokenizer.decode(piece[: BEFORE + cell.tokens])))
    else:
        match = KINDS[cell.kind].search(text, start)
        if match is None or match.end() > end:
            return None
        if cell.kind == "word" and misspelt(match[0]) == match[0]:
            return None
        span = Span(*match.span())
        if cell.misspelt:
            text = text[: span.start] + misspelt(match[0]) + text[span.stop :]
    try:
        prompt = tokenised(Marked(text, [span], [span]), tokenizer)
    except InputError:
        return None
    (target,) = prompt.targets
    right = len(target) == cell.tokens if cell.tokens else len(target) <= LONGEST
    return prompt if right and target.start else None


# ---- models


class Warm(Scorer):
    """A model whose next tokens are drawn at a temperature."""

    def __init__(self, directory: Path, room: int, temperature: float) -> None:
        super().__init__(*load_model(directory), room)
        head = jax.tree.map(lambda w: w / temperature, self._weights["head"])
        self._weights = {**self._weights, "head": head}


def public_of(cell: FakesCell) -> Public:
    """Return the model that makes a cell's fakes."""
    directory = shipped("private" if cell.larger else "public")
    tokenizer = Tokenizer.load(directory)
    infilling = Infilling.of(tokenizer)
    # A misspelt word, or what a token's place makes of it, may be longer.
    room = infilling.room(BEFORE + 2 * LONGEST + AFTER)
    return Public(Warm(directory, room, cell.temperature), tokenizer, infilling=infilling)


# ---- cells


@lru_cache(maxsize=1)
def prepared(cell: FakesCell, plan: FakesPlan) -> tuple[Public, list[Prompt]]:
    """Return the model and the secrets of a cell, which all eps share."""
    public = public_of(cell)
    chosen = secrets(public.tokenizer, cell, plan.prompts, plan.seed)
    # Compiles, as far as the first secret has its shapes.
    published.as_printed(public, chosen[0], chosen[0].targets[0], EPSILONS[-1], cell.most)
    return public, chosen


def row_of(plan: FakesPlan, cell: FakesCell, eps: float, say: Callable[[str], None]) -> Row:
    """Count the fakes of each secret, and processor seconds."""
    public, chosen = prepared(cell, plan)
    made = list(timed(public, chosen, eps, cell.most, lambda at: say(f"{cell.name}, {at}")))
    lengths = [len(prompt.targets[0]) for prompt in chosen]
    counts, seconds = [len(fakes) for fakes, _ in made], [spent for _, spent in made]
    return {**asdict(cell), "eps": eps, "lengths": lengths, "fakes": counts, "seconds": seconds}


def timed(
    public: Public, prompts: Sequence[Prompt], eps: float, most: int, say: Callable[[str], None]
) -> Iterator[tuple[list[list[int]], float]]:
    """Make the fakes of the one secret of each prompt, as printed; yield them with the processor
    seconds that they took.
    """
    for i, prompt in enumerate(prompts):
        say(f"eps {eps:g}: secret {i + 1} of {len(prompts)}")
        (target,) = prompt.targets
        started = time.process_time()
        fakes = published.as_printed(public, prompt, target, eps, most).fakes
        yield fakes, time.process_time() - started


def measure(
    plan: FakesPlan,
    say: Callable[[str], None],
    keep: Callable[[Row], None] = lambda result: None,
    done: Sequence[Row] = (),
    ray: str | None = None,
) -> Row:
    """Measure all cells; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures.
    """
    result: Row = {"plan": asdict(plan), "most": MOST, "rows": list(done)}
    return with_rows(result, all_cells(plan), say, keep, ray)


def all_cells(plan: FakesPlan) -> Cells[FakesPlan, tuple[FakesCell, float]]:
    """Return the study's cells: secrets and eps."""
    return Cells(
        [(cell, eps) for cell in CELLS for eps in EPSILONS],
        load=lambda say: plan,
        row=lambda plan, one, say: row_of(plan, *one, say),
        key=lambda one: one,
        key_of=lambda row: (FakesCell(**{name: row[name] for name in asdict(_WORDS)}), row["eps"]),
        reads=(shipped("private"), shipped("public"), SHIPPED / "held_out.jsonl"),
    )


# ---- the report


def table(result: Row) -> str:
    """Return the figures as Markdown."""
    rows = result["rows"]

    def at(eps: float) -> Column[list[Row]]:
        return Column(f"fakes at ε = {eps:g}", lambda of: _mean(_at(of, eps)["fakes"]))

    columns: list[Column[list[Row]]] = [
        Column("secrets", lambda of: of[0]["name"]),
        Column("tokens, mean", lambda of: f"{np.mean(of[0]['lengths']):.1f}"),
        *map(at, EPSILONS),
        Column(
            f"fewer than 4 at ε = {EPSILONS[1]:g}",
            lambda of: f"{np.mean(np.array(_at(of, EPSILONS[1])['fakes']) < 4):.0%}",
        ),
    ]
    names = dict.fromkeys(row["name"] for row in rows)
    return "\n".join(
        rows_table(columns, ([row for row in rows if row["name"] == name] for name in names))
    )


def _at(rows: Sequence[Row], eps: float) -> Row:
    return next(row for row in rows if row["eps"] == eps)


def _mean(counts: Sequence[int]) -> str:
    """Write a mean and half its 95 % interval."""
    return f"{np.mean(counts):.0f} ± {1.96 * np.std(counts, ddof=1) / np.sqrt(len(counts)):.0f}"


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Each cell is written at once, and the same command goes on."
    commands.add_number(parser, "--prompts", PROMPTS, "secrets of a kind")
    commands.add_number(parser, "--seed", 0, "of their choice", "S")
    commands.add_cluster(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    commands.add_debug(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--prompts", options.prompts, 2)
    plan = FakesPlan(options.prompts, options.seed)
    show_table(table(commands.resumed(options, plan, lambda *how: measure(plan, *how))))
