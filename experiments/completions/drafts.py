"""How many drafts stay, by what drafts: n-grams of the text, a draft model, or both.

In plaintext, since drafting is the client's in the clear and verification on shares follows the
same rule: a model of this machine's is sampled from by speculative sampling (`verification.plain`),
of five prompts whose answers repeat much of them and five whose answers do not, or of questions in
a file. A model with a chat template gets them as chats. What a step costs on shares is not in it:
tokens a step say how many steps a text takes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands
from experiments.common.cells import Cells, with_rows
from experiments.common.report import Column, figures_table, rows_table
from models.chat import Message
from models.draft import Drafter, Proposer
from models.family import ModelConfig, Params
from models.hf import load_model
from models.ngrams import Ngrams
from models.text_format import TextFormat
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.plain import Plain
from spu_llm.api.defaults import DRAFT_LENGTH, shipped
from spu_llm.app.calibration_texts import messages_in
from spu_llm.app.printing import show_table
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.core.text_files import read_text
from spu_llm.systems.decoding.limits import MAX_DRAFTS

TEXTS = Path(__file__).parents[1] / "data" / "drafts_texts.json"
TEMPERATURES = (0.0, 0.7)
WAYS = ("n-grams", "the draft model", "both")

Row = dict[str, Any]


@dataclass(frozen=True)
class DraftsPlan:
    """The study's settings. draft_model: None for n-grams alone; tokens: of a text, at most;
    questions: the name and a digest of their file, None for the study's prompts.
    """

    model: str
    draft_model: str | None
    tokens: int
    draft_length: int
    questions: str | None = None


@dataclass(frozen=True)
class DraftsCell:
    """A text. way: one of `WAYS`; prompt: its number."""

    way: str
    temperature: float
    prompt: int


class LazyLogits:
    """The model's logits at the places of a step, made when they are asked for, and kept: those
    after a rejection never are.
    """

    def __init__(self, model: Proposer, text: list[int], drafts: list[int]) -> None:
        self._model, self._text, self._drafts = model, text, drafts
        self.made: dict[int, np.ndarray] = {}

    def __getitem__(self, place: int) -> np.ndarray:
        if place not in self.made:
            self.made[place] = self._model.logits(self._text + self._drafts[:place])
        return self.made[place]


@dataclass(frozen=True)
class DraftedText:
    """Counts of one drafted text."""

    tokens: int
    steps: int
    drafted: int
    accepted: int
    places: int  # of drafts that were decided: up to the first rejection of each step
    overlap: float  # sum over these of sum_x min(p(x), q(x)), the chance that a draft stays
    likeliest: int  # drafts at these that are the model's likeliest token


def run(
    model: Proposer,
    drafter: Proposer,
    prompt: list[int],
    ends: frozenset[int],
    tokens: int,
    drafts: int,
    sampling: Sampling,
    seed: int,
) -> DraftedText:
    """Write up to so many tokens after a prompt; the first one is the prefill's."""
    rule = Plain(sampling)
    streams = Streams(Prg.from_seed(seed, "drafts"), Prg.from_seed(seed, "sampling"))
    made: list[int] = []
    steps = accepted = places = likeliest = 0
    overlap = 0.0

    def step(count: int) -> None:
        nonlocal accepted, places, overlap, likeliest
        text = prompt + made
        proposed, q = drafter.propose(text, count, lambda z, at: rule.propose(z, at, streams))
        rows: Any = LazyLogits(model, text, proposed)
        k, token = rule.resolve(rows, proposed, q, lambda: float(streams.sampling.uniform(())))
        made.extend([*proposed[:k], token])
        accepted += k
        for place, logits in rows.made.items():
            if place < count:
                places += 1
                likeliest += int(proposed[place] == int(np.argmax(logits)))
                overlap += float(np.minimum(sampling.distribution(logits), q[place]).sum())

    step(0)
    while len(made) < tokens and not ends & set(made):
        step(drafts)
        steps += 1
    return DraftedText(len(made), steps, drafts * steps, accepted, places, overlap, likeliest)


def prompts_of(text: TextFormat, questions: Path | None = None) -> Iterator[tuple[str, list[int]]]:
    """Yield each prompt's kind, and its tokens: of a file of questions, or the study's prompts.
    InputError for questions to a model without a chat template.
    """
    if questions is not None:
        if text.template is None:
            raise InputError("--questions is for models with a chat template; leave it out")
        for said, messages in messages_in(questions, None, "--questions"):
            kind = str(said.get("kind", "questions"))
            yield kind, text.tokenizer.encode(text.template.render(messages))
        return
    texts = json.loads(TEXTS.read_text(encoding="utf-8"))
    kinds = texts["code" if text.template is None else "chats"]
    for kind, prompts in kinds.items():
        for prompt in prompts:
            if text.template is not None:
                prompt = text.template.render([Message("user", prompt)])
            yield kind, [*text.tokenizer.encode(prompt), *text.after_prompt]


def for_prompts(model: tuple[ModelConfig, Params], rows: int) -> Callable[[list[int]], Drafter]:
    """Return what makes a model ready to write after a prompt, in one shape for all prompts, with
    the prompt encoded where the model does that. Nothing is cached of other texts, whose order
    could show in the last bit.
    """
    config, params = model
    return lambda prompt: Drafter(config, params, rows, prompt[:-1] if config.encodes else ())


class Study:
    """The prompts, and the models that write after them."""

    def __init__(
        self,
        model: Path,
        draft_model: Path | None,
        questions: Path | None,
        plan: DraftsPlan,
        say: Callable[[str], None],
    ) -> None:
        say("compiling")
        text = TextFormat.of_model(model)
        self.plan, self.ends = plan, text.tokenizer.eos_ids
        self.prompts = list(prompts_of(text, questions))
        rows = max(len(prompt) for _, prompt in self.prompts) + plan.tokens + plan.draft_length
        private = load_model(model, encoders=True)
        if rows > private[0].context:
            raise InputError(
                f"the longest prompt and --tokens take {rows} positions, but the model's context "
                f"has {private[0].context}; give fewer --tokens, or shorter questions"
            )
        self.model, size = for_prompts(private, rows), private[0].vocab_size
        self.drafters: dict[str, Callable[[list[int]], Proposer]] = {
            WAYS[0]: lambda prompt: Ngrams(size)
        }
        if draft_model is not None:
            small = for_prompts(load_model(draft_model, encoders=True), rows)
            self.drafters |= {WAYS[1]: small, WAYS[2]: lambda prompt: Ngrams(size, small(prompt))}

    def row(self, cell: DraftsCell, say: Callable[[str], None]) -> Row:
        """Return what is counted of a text."""
        say(f"{cell.way} at {cell.temperature:g}: prompt {cell.prompt + 1} of {len(self.prompts)}")
        kind, prompt = self.prompts[cell.prompt]
        counts = run(
            self.model(prompt),
            self.drafters[cell.way](prompt),
            prompt,
            self.ends,
            self.plan.tokens,
            self.plan.draft_length,
            Sampling(cell.temperature),
            cell.prompt,
        )
        return {"kind": kind, **asdict(cell), **asdict(counts)}


def measure(
    model: Path,
    draft_model: Path | None,
    questions: Path | None,
    plan: DraftsPlan,
    say: Callable[[str], None],
    keep: Callable[[Row], None] = lambda result: None,
    done: Sequence[Row] = (),
    ray: str | None = None,
) -> Row:
    """Measure all cells; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures.
    """
    result: Row = {"plan": asdict(plan), "rows": list(done)}
    return with_rows(result, all_cells(model, draft_model, questions, plan), say, keep, ray)


def all_cells(
    model: Path, draft_model: Path | None, questions: Path | None, plan: DraftsPlan
) -> Cells[Study, DraftsCell]:
    """Return the study's cells: temperature, way and prompt."""
    model = model.absolute()
    draft_model = None if draft_model is None else draft_model.absolute()
    questions = None if questions is None else questions.absolute()
    ways = WAYS[:1] if draft_model is None else WAYS
    count = len(list(prompts_of(TextFormat.of_model(model), questions)))
    return Cells(
        [DraftsCell(way, t, i) for t in TEMPERATURES for way in ways for i in range(count)],
        load=partial(Study, model, draft_model, questions, plan),
        row=Study.row,
        key=lambda cell: cell,
        key_of=lambda row: DraftsCell(row["way"], row["temperature"], row["prompt"]),
        reads=tuple(path for path in (model, draft_model, questions) if path is not None),
    )


def _tokens_a_step(runs: list[dict[str, Any]]) -> str:
    """Write the mean over prompts, the least and the most; texts that were over with their first
    token do not count.
    """
    each = [(run["tokens"] - 1) / run["steps"] for run in runs if run["steps"]]
    return f"{np.mean(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def _accepted(runs: list[dict[str, Any]]) -> str:
    drafted = sum(run["drafted"] for run in runs)
    return f"{sum(run['accepted'] for run in runs) / max(1, drafted):.0%}"


def _acceptance(runs: list[dict[str, Any]]) -> str:
    """Write the acceptance rate: how likely a draft stays, on average over places."""
    return f"{sum(run['overlap'] for run in runs) / max(1, sum(run['places'] for run in runs)):.2f}"


def _likeliest(runs: list[dict[str, Any]]) -> str:
    """Write how often a draft that was looked at is the model's likeliest token."""
    if any("likeliest" not in run for run in runs):
        return "–"
    return (
        f"{sum(run['likeliest'] for run in runs) / max(1, sum(run['places'] for run in runs)):.2f}"
    )


COLUMNS: Sequence[Column[list[dict[str, Any]]]] = (
    Column("prompts", lambda runs: runs[0]["kind"]),
    Column("drafts by", lambda runs: runs[0]["way"]),
    Column("temperature", lambda runs: f"{runs[0]['temperature']:g}"),
    Column("tokens", lambda runs: str(sum(run["tokens"] for run in runs))),
    Column("tokens a step", _tokens_a_step),
    Column("drafts that stay", _accepted),
    Column("acceptance rate", _acceptance),
    Column("drafts that are the likeliest token", _likeliest),
)


def table(result: Row) -> str:
    """Return a table with a row for each kind of prompt, drafter and temperature."""
    alike: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for run in result["rows"]:
        alike.setdefault((run["kind"], run["way"], run["temperature"]), []).append(run)
    return "\n".join(rows_table(COLUMNS, alike.values()))


_LEARNT = (
    Column[Row]("acceptance", lambda point: f"{point['acceptance']:.2f}"),
    Column[Row]("the same likeliest token", lambda point: f"{point['same']:.0%}"),
)


def curve_table(result: Row, most: int = 8) -> str:
    """Return a table of acceptance by how many tokens of answers a draft model had learnt: about
    `most` points of its alignment's curve (`align.json`), evenly, with the last one.
    """
    curve = result["curve"]
    places = sorted({round(i) for i in np.linspace(0, len(curve) - 1, most)})
    points = {f"{round(curve[i]['tokens'], -3):,}": curve[i] for i in places}
    return "\n".join(figures_table("tokens learnt", _LEARNT, points))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Each text is counted at once, and the same command goes on."
    commands.add_cluster(parser)
    commands.add_common(parser)
    commands.add_draft_model(parser)
    commands.add_number(parser, "--tokens", 96, "of each text, at most")
    commands.add_number(parser, "--draft-length", DRAFT_LENGTH, "drafts a step", "G")
    parser.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help='JSON Lines, as for calibrate, each with a "kind" (default: ten prompts of two kinds)',
    )


def _told(questions: Path) -> str:
    """Return a file's name and the beginning of its text's digest; InputError where it cannot be
    read.
    """
    text = read_text(questions, "--questions")
    return f"{questions.name} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def command(options: argparse.Namespace) -> None:
    """Print the table; write each row to `--json`."""
    commands.check_range("--tokens", options.tokens, 2)
    commands.check_range("--draft-length", options.draft_length, 1, MAX_DRAFTS)
    commands.check_folders(options)
    directory, draft_model = commands.private_model(options), options.draft_model
    if options.model is None and draft_model is None:
        draft_model = shipped("public")
    if draft_model is not None:
        commands.check_tokenizer(directory, draft_model)
    plan = DraftsPlan(
        directory.name,
        None if draft_model is None else draft_model.name,
        options.tokens,
        options.draft_length,
        None if options.questions is None else _told(options.questions),
    )
    result = commands.resumed(
        options, plan, lambda *how: measure(directory, draft_model, options.questions, plan, *how)
    )
    show_table(table(result))
