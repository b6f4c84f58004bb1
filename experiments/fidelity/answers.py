"""Answers of a chat model between two processes, whole commands from start to end, beside the
answers that float32 gives.

Every answer is one `spu-llm chat --prompt` on this machine: greedy, nothing made ahead, the hint of
the weights kept from an earlier one. What it sends and how long it takes is the command's own
report; a later token's correlations are the ones made between two of its steps.

With a draft model each question is asked several times, next to each other: one token a step, and
with each number of drafts; whichever is first takes turns. All answers must be float32's.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common import commands, report
from experiments.common.cells import Cells, with_rows
from experiments.common.report import Column, both_ways
from experiments.common.saved import under_table
from experiments.common.two_parties import run_command
from experiments.fidelity.chat_texts import ChatText, chat_texts
from experiments.fidelity.pieces import greedy_of
from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.systems.decoding.limits import MAX_DRAFTS


@dataclass(frozen=True)
class AnswersPlan:
    """The study's settings. questions: their numbers in the file, from 1; tokens: of an answer, at
    most; draft_model: its name, if questions are asked with drafts, too; drafts: how many a step.
    """

    model: str
    questions: tuple[int, ...]
    tokens: int
    network: str
    draft_model: str | None = None
    drafts: tuple[int, ...] = ()

    def asked(self) -> list[tuple[int, int]]:
        """Return the questions in the order in which they are asked: numbers, and drafts a step."""
        ways = (0, *self.drafts)
        return [
            (number, ways[(i + place) % len(ways)])
            for i, number in enumerate(self.questions)
            for place in range(len(ways))
        ]


def measure(
    model: Path,
    file: Path,
    draft_model: Path | None,
    plan: AnswersPlan,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
    done: Sequence[dict[str, Any]],
    ray: str | None = None,
) -> dict[str, Any]:
    """Ask the questions; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures.
    """
    result: dict[str, Any] = {"plan": asdict(plan), "rows": list(done), "failures": []}
    model, file = model.absolute(), file.absolute()
    draft_model = None if draft_model is None else draft_model.absolute()
    asked = Cells(
        plan.asked(),
        load=partial(Questions, model, file, draft_model, plan),
        row=Questions.row,
        key=lambda cell: cell,
        key_of=lambda row: (row["number"], row["drafts"]),
        reads=tuple(path for path in (model, file, draft_model) if path is not None),
        timed=True,
    )
    with_rows(result, asked, say, keep, ray)
    result["failures"] = [
        f"question {row['number']} is answered otherwise{_with_drafts(row)}: {row['text']!r}"
        for row in result["rows"]
        if row["token_ids"] != row["expected"]
    ]
    return result


class Questions:
    """The questions of a file by their numbers, and the answers that float32 gives."""

    def __init__(
        self,
        model: Path,
        file: Path,
        draft_model: Path | None,
        plan: AnswersPlan,
        say: Callable[[str], None],
    ) -> None:
        texts = chat_texts(model, [file])
        if not all(1 <= number <= len(texts) for number in plan.questions):
            raise InputError(f"--numbers: {file} has questions 1 to {len(texts)}")
        self.model, self.draft_model, self.plan = model, draft_model, plan
        self.texts = {number: texts[number - 1] for number in plan.questions}
        longest = max(len(text.head) + len(text.rest) for text in self.texts.values())
        self.greedy = greedy_of(model, longest, plan.tokens)

    def row(self, asked: tuple[int, int], say: Callable[[str], None]) -> dict[str, Any]:
        """Ask a question by the command."""
        number, drafts = asked
        text = self.texts[number]
        say(f"question {number}{_with_drafts({'drafts': drafts})}: {text.words}")
        drafting = (
            [f"--draft-model={self.draft_model}", f"--draft-length={drafts}"]
            if drafts
            else ["--standard"]
        )
        answer = _answer(self.model, drafting, text, self.plan, self.greedy)
        return {"number": number, "drafts": drafts, **answer}


def _answer(
    model: Path,
    drafting: list[str],
    text: ChatText,
    plan: AnswersPlan,
    greedy: Callable[[list[int]], list[int]],
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = run_command(
            [
                "chat",
                "--model",
                str(model),
                f"--prompt={text.words}",
                "--temperature=0",
                *drafting,
                f"--max-new-tokens={plan.tokens}",
                f"--network={plan.network}",
            ],
            Path(folder) / "result.json",
        )
    expected = greedy([*text.head, *text.rest])
    if result["finish_reason"] == "eos" and expected[-1] in Tokenizer.load(model).eos_ids:
        result["token_ids"].append(expected[-1])  # which a report leaves out
    names = (
        "text",
        "token_ids",
        "seconds",
        "first_token_seconds",
        "elapsed_seconds",
        "bytes",
        "messages",
        "per_step",
        "accepted",
    )
    return {
        "kind": text.kind,
        "question": text.words,
        "public": len(text.head),
        "secret": len(text.rest),
        "expected": expected,
        **{name: result[name] for name in names},
    }


# ---- as text

Row = Mapping[str, Any]
Result = Mapping[str, Any]


def table(result: Result) -> str:
    """Return one network's answers, and what they cost, as Markdown."""
    tables = [answers([result]), costs([result]), *saved_by_drafts([result])]
    return "\n\n".join(tables)


def answers(results: Sequence[Result]) -> str:
    """Return a table with a row for each answer, as Markdown."""
    columns: list[Column[tuple[str, Row]]] = [
        Column("question", lambda of: report.cell(of[1]["question"])),
        Column("answer", lambda of: report.cell(of[1]["text"])),
        Column("network", lambda of: of[0] + _with_drafts(of[1])),
        Column("secret tokens", lambda of: str(of[1]["secret"])),
        Column("steps", lambda of: str(len(of[1]["per_step"]))),
        Column("as float32", lambda of: "yes" if of[1]["token_ids"] == of[1]["expected"] else "no"),
        Column("seconds in all", lambda of: f"{of[1]['elapsed_seconds']:.0f}"),
    ]
    rows = ((result["plan"]["network"], row) for result in results for row in result["rows"])
    return "\n".join(report.rows_table(columns, rows))


def _drafts(row: Row) -> int:
    return int(row.get("drafts", 0))  # rows of one token a step may lack it


def _with_drafts(row: Row) -> str:
    drafts = _drafts(row)
    return f", {drafts} draft{'s'[: drafts - 1]} a step" if drafts else ""


def costs(results: Sequence[Result]) -> str:
    """Return a table with a column for each network, and for drafts: means over the answers, with
    the least and the most.
    """
    figures = [
        _over(
            "first token, set-up and preprocessing included, s",
            lambda row: row["first_token_seconds"],
            ".0f",
        ),
        _over(
            "prefill of the secret tokens, online, s", lambda row: row["seconds"]["prefill"], ".1f"
        ),
        _over("a later token online, s", lambda row: _of_token(row, "seconds"), ".2f"),
        _over("a later token ahead, s", lambda row: _of_token(row, "ahead_seconds"), ".2f"),
        _over("a later token online, MB", lambda row: _of_token(row, "bytes") / 1e6, ".2f"),
        _over("a later token ahead, MB", lambda row: _of_token(row, "ahead_bytes") / 1e6, ".1f"),
        _over("a later token online, messages", lambda row: _of_token(row, "messages"), ",.0f"),
        _over("everything, s", lambda row: row["elapsed_seconds"], ".0f"),
        _over("everything online, MB", lambda row: both_ways(row["bytes"]["online"]) / 1e6, ".0f"),
        _over("everything ahead, MB", lambda row: both_ways(row["bytes"]["offline"]) / 1e6, ".0f"),
    ]
    columns: dict[str, list[Row]] = {}
    for result in results:
        for row in result["rows"]:
            columns.setdefault(result["plan"]["network"] + _with_drafts(row), []).append(row)
    head = "mean over the answers (least to most)"
    return "\n".join(report.figures_table(head, figures, columns))


def _later(row: Row) -> int:
    """Count the tokens after the first one, the end of the answer included."""
    return len(row["token_ids"]) - 1


def _of_token(row: Row, name: str) -> float:
    """Return what a later token took of something, in the mean of an answer."""
    return float(sum(step[name] for step in row["per_step"]) / _later(row))


def _over(name: str, figure: Callable[[Row], float], form: str) -> Column[Sequence[Row]]:
    """Return a figure's mean over answers, with the least and the most."""

    def text(rows: Sequence[Row]) -> str:
        figures = [figure(row) for row in rows]
        least, most = min(figures), max(figures)
        return f"{statistics.fmean(figures):{form}} ({least:{form}} to {most:{form}})"

    return Column(name, text)


def saved_by_drafts(results: Sequence[Result]) -> list[str]:
    """Return a table with a row for each question and number of drafts, beside one token a step, as
    Markdown; none where no question was asked both ways.
    """
    columns: list[Column[tuple[str, Row, Row]]] = [
        Column("question", lambda of: report.cell(of[1]["question"])),
        Column("network", lambda of: of[0]),
        Column("drafts", lambda of: str(_drafts(of[2]))),
        Column("tokens", lambda of: str(len(of[2]["token_ids"]))),
        Column("tokens a step", lambda of: f"{_later(of[2]) / len(of[2]['per_step']):.2f}"),
        _by_drafts("a later token online, s", lambda row: _of_token(row, "seconds"), ".1f"),
        _by_drafts("everything, s", lambda row: row["elapsed_seconds"], ".0f"),
        _by_drafts("everything, MB", _megabytes, ".0f"),
    ]
    rows = []
    for result in results:
        one = {row["number"]: row for row in result["rows"] if not _drafts(row)}
        drafted = sorted(
            (row for row in result["rows"] if _drafts(row) and row["number"] in one),
            key=lambda row: (result["plan"]["questions"].index(row["number"]), _drafts(row)),
        )
        rows += [(result["plan"]["network"], one[row["number"]], row) for row in drafted]
    return ["\n".join(report.rows_table(columns, rows))] if rows else []


def _by_drafts(
    name: str, figure: Callable[[Row], float], form: str
) -> Column[tuple[str, Row, Row]]:
    """Return a figure without drafts and with them, and how many times less the second one is."""

    def text(of: tuple[str, Row, Row]) -> str:
        one, drafted = figure(of[1]), figure(of[2])
        return f"{one:{form}} to {drafted:{form}}: {one / drafted:.2f} times"

    return Column(name, text)


def _megabytes(row: Row) -> float:
    return float(sum(both_ways(row["bytes"][phase]) for phase in ("online", "offline"))) / 1e6


def in_results(files: Mapping[str, Result]) -> list[str]:
    """Return what docs/results shows: every network's costs, what drafts save, all answers, and
    where they come from.
    """
    results = list(files.values())
    machines = [row["machine"] for result in results for row in result["rows"]]
    origin = under_table(files, machines)
    tables = [costs(results), *saved_by_drafts(results), answers(results)]
    return [text for made in tables for text in (made, origin)]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--questions", type=Path, required=True, metavar="FILE", help="JSON Lines, as for calibrate"
    )
    parser.add_argument(
        "--numbers",
        type=commands.numbers,
        required=True,
        metavar="N,...",
        help="which of them, from 1",
    )
    parser.add_argument(
        "--network", choices=("local", "lan", "wan"), default="local", help="(default: local)"
    )
    commands.add_number(parser, "--answer-tokens", 16, "of an answer, at most")
    parser.add_argument(
        "--draft-model",
        type=Path,
        metavar="DIR",
        help="ask every question with its drafts, too (default: one token a step alone)",
    )
    parser.add_argument(
        "--draft-length",
        type=commands.numbers,
        metavar="G,...",
        help="drafts per secure step (default: 4)",
    )
    commands.add_cluster(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--answer-tokens", options.answer_tokens, 2)
    if len(set(options.numbers)) < len(options.numbers):
        raise InputError("--numbers: a question is asked once")
    model, draft_model = commands.private_model(options), options.draft_model
    if draft_model is not None:
        commands.check_tokenizer(model, draft_model)
    elif options.draft_length is not None:
        raise InputError("--draft-length: drafts are of a --draft-model; give one")
    drafts = () if draft_model is None else tuple(options.draft_length or [4])
    for count in drafts:
        commands.check_range("--draft-length", count, 1, MAX_DRAFTS)
    if len(set(drafts)) < len(drafts):
        raise InputError("--draft-length: each number of drafts is asked for once")
    plan = AnswersPlan(
        model.name,
        tuple(options.numbers),
        options.answer_tokens,
        options.network,
        None if draft_model is None else draft_model.name,
        drafts,
    )
    result = commands.resumed(
        options, plan, lambda *how: measure(model, options.questions, draft_model, plan, *how)
    )
    commands.conclude(options, result, table(result))
