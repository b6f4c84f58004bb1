"""How faithful a chat model by pieces is to float32: logits, most likely tokens, perplexity, and
whether texts stay in the ranges that were chosen on others.

By pieces: in plaintext, with every function in its form on shares (`experiments.fidelity.logits`);
`experiments.fidelity.shares` does it on shares. All texts begin with the same public tokens,
the head of the model's template, which the provider runs in the clear; positions are those that
come after.

Questions are answered by float32, greedily: where at every place of an answer pieces have the same
most likely token, they give the same answer. Where one differs, the first such place is listed with
the margin that float32 had.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands, report
from experiments.common.report import Column, rows_table
from experiments.common.saved import NO_SECONDS, under_table
from experiments.fidelity.chat_texts import ChatText, Forward, chat_texts
from experiments.fidelity.logits import MIN_AGREEMENT, Comparison, LogitRows, figures_of
from models.draft import Drafter
from models.hf import load_model
from models.tokenizer import Tokenizer
from spu_llm.app.progress import Progress
from spu_llm.core.errors import InputError
from spu_llm.core.machine import machine

MAX_PERPLEXITY = 0.001  # relative


# ---- in plaintext


@dataclass(frozen=True)
class Text:
    """A chat computed by pieces, and the ranges that it left."""

    kind: str
    tokens: int
    outside: list[str]  # sites whose range it left


@dataclass(frozen=True)
class Question:
    """A question with the greedy answer of float32, whose first different token by pieces, if any,
    is number `flip`, where float32 preferred its own by `margin`.
    """

    kind: str
    question: str
    answer: str
    tokens: int
    flip: int | None
    margin: float | None
    closest: float  # least margin of float32's token before the next likely one, of all places


def by_pieces(
    texts: Sequence[ChatText], exact: Forward, pieces: Forward, say: Callable[[str], None]
) -> tuple[Comparison, list[Text]]:
    """Compare whole chats; those that leave their ranges are listed, and not compared: no
    completion gives anything for them.
    """
    rows, left = [], []
    for i, text in enumerate(texts):
        say(f"by pieces: chat {i + 1} of {len(texts)}")
        logits, outside = pieces(text.rest)
        left.append(Text(text.kind, len(text.rest), outside))
        if not outside:
            rows.append(LogitRows.of(np.array(text.rest), exact(text.rest)[0], logits))
    if not rows:
        raise InputError("every chat leaves the ranges of the model; calibrate it again")
    return Comparison.of(rows), left


def answered(
    texts: Sequence[ChatText],
    exact: Forward,
    pieces: Forward,
    tokenizer: Tokenizer,
    greedy: Callable[[list[int]], list[int]],
    say: Callable[[str], None],
) -> list[Question]:
    """Compare answers token by token."""
    answers = []
    for i, text in enumerate(texts):
        say(f"question {i + 1} of {len(texts)}")
        answer = greedy([*text.head, *text.rest])
        ids, places = [*text.rest, *answer[:-1]], slice(len(text.rest) - 1, None)
        reference, (logits, outside) = exact(ids)[0][places], pieces(ids)
        if outside:
            raise InputError(f"a question leaves {', '.join(outside)}: {text.words!r}")
        best, others = np.sort(reference, axis=-1)[:, -1], np.sort(reference, axis=-1)[:, -2]
        chosen = logits[places].argmax(axis=-1)
        differ = np.flatnonzero(chosen != np.array(answer))
        flip = int(differ[0]) if len(differ) else None
        margin = None if flip is None else float(best[flip] - reference[flip, chosen[flip]])
        words = tokenizer.decode([t for t in answer if t not in tokenizer.eos_ids])
        answers.append(
            Question(
                text.kind,
                text.words,
                words,
                len(answer),
                flip,
                margin,
                float((best - others).min()),
            )
        )
    return answers


def greedy_of(model: Path, longest: int, tokens: int) -> Callable[[list[int]], list[int]]:
    """Return what answers prompts of so many tokens at most by float32, greedily, up to the end of
    the answer or `tokens`.
    """
    drafter = Drafter(*load_model(model), longest + tokens)
    ends = Tokenizer.load(model).eos_ids

    def answer(prompt: list[int]) -> list[int]:
        made: list[int] = []
        while len(made) < tokens and not ends & set(made):
            made.append(int(np.argmax(drafter.logits(prompt + made))))
        return made

    return answer


# ---- the study


def measure(
    model: Path, chats: Sequence[Path], questions: Path, tokens: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Make both comparisons, as JSON fields."""
    texts, asked = chat_texts(model, chats), chat_texts(model, [questions])
    config, params = load_model(model)
    exact, pieces = (Forward(config, params, texts[0].head, pieces=p) for p in (False, True))
    longest = max(len(text.head) + len(text.rest) for text in asked)
    answers = answered(
        asked, exact, pieces, Tokenizer.load(model), greedy_of(model, longest, tokens), say
    )
    compared, outside = by_pieces(texts, exact, pieces, say)
    failures = failures_of(compared)
    return {
        "passed": not failures,
        "failures": failures,
        "pieces": asdict(compared),
        "texts": [asdict(text) for text in outside],
        "questions": [asdict(answer) for answer in answers],
        "machine": asdict(machine()),
        "config": {"model": model.name, "public": len(texts[0].head)},
    }


def failures_of(compared: Comparison) -> list[str]:
    """Say what the criterion finds wrong; nothing when it holds."""
    failures = []
    if not compared.agreement >= MIN_AGREEMENT:
        failures.append(f"top-1 agreement {compared.agreement:.2%} is below {MIN_AGREEMENT:.0%}")
    if not abs(_change(asdict(compared))) <= MAX_PERPLEXITY:
        change = _change(asdict(compared))
        failures.append(f"perplexity changes by {change:+.2%}, more than {MAX_PERPLEXITY:.1%}")
    return failures


def _change(compared: Mapping[str, Any]) -> float:
    """Return the relative change of perplexity."""
    return float(compared["perplexity_secure"] / compared["perplexity_float32"] - 1)


# ---- as text


def table(result: dict[str, Any]) -> str:
    """Return the comparison, the kinds of text, and the answers, as Markdown."""
    verdict = "criterion: " + ("; ".join(result["failures"]) or "holds")
    compared = comparisons({"by pieces, in plaintext": result["pieces"]})
    return "\n\n".join([compared, *_of_texts(result), verdict])


def in_results(files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what docs/results shows: also comparisons on shares, where they are there: between two
    processes, and with a dealer's correlated randomness.
    """
    pieces, *others = files.values()
    names = "on shares, two processes", "on shares, dealt"
    compared = {name: made["shares"] for name, made in zip(names, others, strict=False)}
    origins = [
        under_table([name], [result["machine"]], NO_SECONDS.format(*result["machine"]["load"]))
        for name, result in files.items()
    ]
    ranges, questions = _of_texts(pieces)
    compared["by pieces, in plaintext"] = pieces["pieces"]
    return [comparisons(compared), *origins[::-1], ranges, origins[0], questions, origins[0]]


def comparisons(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table with a column for each comparison, as `Comparison` has it."""
    figures = [
        *figures_of(next(iter(results.values())), 3),
        Column(
            f"perplexity, these logits (within {MAX_PERPLEXITY:.1%})",
            lambda r: f"{r['perplexity_secure']:.3f} ({_change(r):+.3%})",
        ),
    ]
    return "\n".join(report.figures_table("logits against float32's", figures, results))


def _of_texts(result: Mapping[str, Any]) -> list[str]:
    """Return what became of the chats, by kind, and the questions with their answers."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for text in sorted(result["texts"], key=lambda text: text["kind"]):
        by_kind.setdefault(text["kind"], []).append(text)
    ranges: list[Column[list[Mapping[str, Any]]]] = [
        Column("kind of chat", lambda texts: texts[0]["kind"]),
        Column("chats", lambda texts: str(len(texts))),
        Column("tokens on shares", lambda texts: f"{sum(t['tokens'] for t in texts):,}"),
        Column("left their ranges", _left),
    ]
    answers: list[Column[Mapping[str, Any]]] = [
        Column("kind", lambda q: q["kind"]),
        Column("question", lambda q: report.cell(q["question"])),
        Column("tokens", lambda q: str(q["tokens"])),
        Column("closest decision", lambda q: f"{q['closest']:.3f}"),
        Column("by pieces", _by_pieces),
    ]
    tables = rows_table(ranges, by_kind.values()), rows_table(answers, result["questions"])
    return ["\n".join(lines) for lines in tables]


def _by_pieces(question: Mapping[str, Any]) -> str:
    """Say whether an answer by pieces is float32's."""
    if question["flip"] is None:
        return "the same"
    return f"token {question['flip'] + 1} differs, margin {question['margin']:.3f}"


def _left(texts: Sequence[Mapping[str, Any]]) -> str:
    """Return how many texts left a range, and which ranges."""
    sites = sorted({site for text in texts for site in text["outside"] or ()})
    count = sum(bool(text["outside"]) for text in texts)
    return f"{count} ({', '.join(sites)})" if sites else str(count)


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chats",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON Lines, as for calibrate: chats that the ranges were not chosen on",
    )
    parser.add_argument(
        "--questions",
        type=Path,
        required=True,
        metavar="FILE",
        help="likewise: chats that are answered greedily",
    )
    commands.add_number(parser, "--answer-tokens", 48, "of an answer, at most")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--answer-tokens", options.answer_tokens, 1)
    progress = Progress()
    try:
        result = measure(
            commands.private_model(options),
            options.chats,
            options.questions,
            options.answer_tokens,
            progress.stage,
        )
    finally:
        progress.close()
    commands.conclude(options, result, table(result))
