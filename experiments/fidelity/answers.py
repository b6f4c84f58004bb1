"""Answers of a chat model between two processes, whole commands from start to end, beside the
answers that float32 gives.

Every answer is one `spu-llm chat --prompt` on this machine: greedy, without drafts, nothing made
ahead, the hint of the weights kept from an earlier one. What it sends and how long it takes is the
command's own report; a later token's correlations are those made between two of its steps.
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


@dataclass(frozen=True)
class AnswersPlan:
    """The study's settings. questions: their numbers in the file, from 1; tokens: of an answer, at
    most.
    """

    model: str
    questions: tuple[int, ...]
    tokens: int
    network: str


def measure(
    model: Path,
    file: Path,
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
    asked = Cells(
        plan.questions,
        load=partial(Questions, model, file, plan),
        row=Questions.row,
        key=lambda number: number,
        key_of=lambda row: row["number"],
        reads=(model, file),
        timed=True,
    )
    with_rows(result, asked, say, keep, ray)
    result["failures"] = [
        f"question {row['number']} is answered otherwise: {row['text']!r}"
        for row in result["rows"]
        if row["token_ids"] != row["expected"]
    ]
    return result


class Questions:
    """The questions of a file by their numbers, and the answers that float32 gives."""

    def __init__(
        self, model: Path, file: Path, plan: AnswersPlan, say: Callable[[str], None]
    ) -> None:
        texts = chat_texts(model, [file])
        if not all(1 <= number <= len(texts) for number in plan.questions):
            raise InputError(f"--numbers: {file} has questions 1 to {len(texts)}")
        self.model, self.plan = model, plan
        self.texts = {number: texts[number - 1] for number in plan.questions}
        longest = max(len(text.head) + len(text.rest) for text in self.texts.values())
        self.greedy = greedy_of(model, longest, plan.tokens)

    def row(self, number: int, say: Callable[[str], None]) -> dict[str, Any]:
        """Ask a question by the command."""
        text = self.texts[number]
        say(f"question {number}: {text.words}")
        return {"number": number, **_answer(self.model, text, self.plan, self.greedy)}


def _answer(
    model: Path, text: ChatText, plan: AnswersPlan, greedy: Callable[[list[int]], list[int]]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = run_command(
            [
                "chat",
                "--model",
                str(model),
                f"--prompt={text.words}",
                "--temperature=0",
                "--standard",
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


def table(result: Mapping[str, Any]) -> str:
    """Return one network's answers, and what they cost, as Markdown."""
    return "\n\n".join([answers([result]), costs([result])])


def answers(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each answer, as Markdown."""
    columns: list[Column[tuple[str, Mapping[str, Any]]]] = [
        Column("question", lambda of: report.cell(of[1]["question"])),
        Column("answer", lambda of: report.cell(of[1]["text"])),
        Column("network", lambda of: of[0]),
        Column("secret tokens", lambda of: str(of[1]["secret"])),
        Column("steps", lambda of: str(len(of[1]["per_step"]))),
        Column("as float32", lambda of: "yes" if of[1]["token_ids"] == of[1]["expected"] else "no"),
        Column("seconds in all", lambda of: f"{of[1]['elapsed_seconds']:.0f}"),
    ]
    rows = ((result["plan"]["network"], row) for result in results for row in result["rows"])
    return "\n".join(report.rows_table(columns, rows))


def costs(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a column for each network: means over the answers, with the least and the
    most.
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
        _over("a later token online, s", lambda row: _mean(row, "seconds"), ".2f"),
        _over("a later token ahead, s", lambda row: _mean(row, "ahead_seconds"), ".2f"),
        _over("a later token online, MB", lambda row: _mean(row, "bytes") / 1e6, ".2f"),
        _over("a later token ahead, MB", lambda row: _mean(row, "ahead_bytes") / 1e6, ".1f"),
        _over("a later token online, messages", lambda row: _mean(row, "messages"), ",.0f"),
        _over("everything, s", lambda row: row["elapsed_seconds"], ".0f"),
        _over("everything online, MB", lambda row: both_ways(row["bytes"]["online"]) / 1e6, ".0f"),
        _over("everything ahead, MB", lambda row: both_ways(row["bytes"]["offline"]) / 1e6, ".0f"),
    ]
    networks = {result["plan"]["network"]: result for result in results}
    head = "mean over the answers (least to most)"
    return "\n".join(report.figures_table(head, figures, networks))


def _mean(row: Mapping[str, Any], name: str) -> float:
    return statistics.fmean(step[name] for step in row["per_step"])


def _over(
    name: str, figure: Callable[[Mapping[str, Any]], float], form: str
) -> Column[Mapping[str, Any]]:
    """Return a figure's mean over the answers of a result, with the least and the most."""

    def text(result: Mapping[str, Any]) -> str:
        figures = [figure(row) for row in result["rows"]]
        least, most = min(figures), max(figures)
        return f"{statistics.fmean(figures):{form}} ({least:{form}} to {most:{form}})"

    return Column(name, text)


def in_results(files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what docs/results shows: every network's costs, all answers, and where they come
    from.
    """
    results = list(files.values())
    machines = [row["machine"] for result in results for row in result["rows"]]
    origin = under_table(files, machines)
    return [costs(results), origin, answers(results), origin]


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
    commands.add_cluster(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--answer-tokens", options.answer_tokens, 2)
    if len(set(options.numbers)) < len(options.numbers):
        raise InputError("--numbers: a question is asked once")
    model = commands.private_model(options)
    plan = AnswersPlan(model.name, tuple(options.numbers), options.answer_tokens, options.network)
    result = commands.resumed(
        options, plan, lambda *how: measure(model, options.questions, plan, *how)
    )
    commands.conclude(options, result, table(result))
