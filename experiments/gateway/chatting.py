"""A chat through the gateway, turn after turn: what is waited for, and what was made before.

Each chat is had twice, by parties that start anew and have their hints from a session before all
that is measured. *Not stocked*: `--ahead-turn 0`, and each turn is asked as soon as the one before
has ended, so that its correlated randomness is made while it is waited for. *Stocked*: a session is
open, and all that a turn takes was made before it is asked; the program waits for that before every
turn, as people do who read and write. Answers are drawn, so both have words of their own; drafts
come from the text itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments.common import commands, report
from experiments.common.load import busy_seconds
from experiments.common.report import Column, three
from experiments.gateway.asking import ask, get
from experiments.gateway.load import gateway_options, provider_options
from experiments.gateway.parties import Party, with_template
from spu_llm.core.errors import PeerError
from spu_llm.core.machine import machine

Row = dict[str, Any]

# About twenty tokens each, on one subject a chat.
CHATS = (
    (
        "I want to walk in the mountains for a week; what should I take along in my bag?",
        "How much water does one person need on a hot day of walking, and where is it found?",
        "What can I do when the weather turns bad and I am far from any house or road?",
        "Which food stays good for a week without a fridge, and does not weigh too much?",
        "How should I plan each day so that I am at a safe place before it gets dark?",
    ),
    (
        "My small company keeps its books in spreadsheets; when should it use something better?",
        "What should we look for in such a program if three people work with it every day?",
        "How can we move the numbers of the last two years without losing or changing any of them?",
        "Who should be allowed to see what, and how do we notice that somebody made a mistake?",
        "What would you do in the first week after the change so that nothing gets forgotten?",
    ),
)
MOST_READY_S = 1800.0  # until all that a turn takes is there
MOST_RATIO = 2.0  # of the first text's seconds to those of the prefill's online phase


@dataclass(frozen=True)
class ChatPlan:
    """Chats of `turns`, each answered in `answer_tokens` at most; before a stocked turn, what
    `ahead_turn` tokens of a question and `answer_tokens` take is made.
    """

    chats: int
    turns: int
    answer_tokens: int
    ahead_turn: int
    network: str


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Chats through a gateway, stocked and not. The model needs a chat template; the shipped "
        "one gets a plain one."
    )
    commands.add_number(parser, "--chats", 1, "each stocked and not, one after another")
    commands.add_number(parser, "--turns", len(CHATS[0]), "of a chat")
    commands.add_number(parser, "--answer-tokens", 16, "of each answer")
    commands.add_number(parser, "--ahead-turn", 32, "tokens of a question that is prepared for")
    parser.add_argument(
        "--network",
        type=commands.network,
        default="local",
        metavar="NAME",
        help="to emulate: local, lan, wan, or as 3000mbps-1ms (default: %(default)s)",
    )
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    commands.check_range("--chats", options.chats, 1, len(CHATS))
    commands.check_range("--turns", options.turns, 1, len(CHATS[0]))
    commands.check_range("--answer-tokens", options.answer_tokens, 1, 256)
    commands.check_range("--ahead-turn", options.ahead_turn, 16, 512)
    plan = ChatPlan(
        options.chats, options.turns, options.answer_tokens, options.ahead_turn, options.network
    )

    def measure(say: Callable[[str], None]) -> Row:
        with tempfile.TemporaryDirectory(prefix="spu-llm-chat-") as name:
            model = with_template(commands.private_model(options), Path(name))
            return run(plan, model, Path(name), say, lambda made: commands.write(options, made))

    commands.conclude(options, made := commands.with_progress("chat", measure), table(made))


def run(
    plan: ChatPlan,
    model: Path,
    folder: Path,
    say: Callable[[str], None],
    keep: Callable[[Row], None],
) -> Row:
    """Have every chat, not stocked and stocked; return what was seen. `keep` gets the result so far
    after each turn.
    """
    result: Row = {"plan": asdict(plan), "model": model.name, "rows": []}
    say("having both parties make and fetch their hints")
    for _ in _chat(replace(plan, turns=1, answer_tokens=1), model, folder, 0, False, say):
        pass
    for chat in range(plan.chats):
        for stocked in (False, True):
            say(f"chat {chat + 1}, {'stocked' if stocked else 'not stocked'}")
            for row in _chat(plan, model, folder, chat, stocked, say):
                result["rows"].append(row)
                result |= {"machine": asdict(machine())}
                result["failures"] = failures(result)
                keep(result)
    return result


def _chat(
    plan: ChatPlan, model: Path, folder: Path, chat: int, stocked: bool, say: Callable[[str], None]
) -> Iterator[Row]:
    """Yield the turns of a chat, with parties of its own."""
    network = ["--network", plan.network]
    provider = Party([*provider_options(model, 3), *network], folder / "provider")
    try:
        ahead = ["--ahead-turn", str(plan.ahead_turn if stocked else 0)]
        ahead += ["--ahead-answer", str(plan.answer_tokens)]
        options = [*gateway_options(provider.port, 1, 1), *network, *ahead]
        gateway = Party(options, folder / "gateway")
        try:
            yield from _turns(plan, gateway, chat, stocked, say)
        finally:
            gateway.stop()
    finally:
        provider.stop()


def _turns(
    plan: ChatPlan, gateway: Party, chat: int, stocked: bool, say: Callable[[str], None]
) -> Iterator[Row]:
    said: list[dict[str, str]] = []
    for turn, question in enumerate(CHATS[chat][: plan.turns]):
        begun = time.monotonic()
        if stocked:
            say(f"waiting until all is there for turn {turn + 1}")
            _wait_until_ready(gateway.port, turn)
        waited, busy = time.monotonic() - begun, busy_seconds()
        say(f"turn {turn + 1}")
        said.append({"role": "user", "content": question})
        # At the gateway's own temperature, which the session that is open before a chat has.
        reply = ask(gateway.port, said, plan.answer_tokens, stream=True, temperature=None)
        row = {
            "chat": chat,
            "stocked": stocked,
            "turn": turn,
            "prepared": round(waited, 3),
            "how": reply.how,
            "message": reply.message,
            "text": reply.text,
            "first_text": None if reply.first_text_s is None else round(reply.first_text_s, 3),
            "seconds": round(reply.seconds, 3),
            "busy": round((busy_seconds() - busy) / reply.seconds, 2),
        }
        if reply.how != "answered":
            yield row
            return
        usage = reply.usage
        row |= {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "tokens": usage["completion_tokens"],
            "cost": usage["spu_llm"],
        }
        yield row
        said.append({"role": "assistant", "content": reply.text})


def _wait_until_ready(port: int, turns: int) -> None:
    """Wait until the session that had so many turns has all that the next one takes."""
    deadline = time.monotonic() + MOST_READY_S
    while time.monotonic() < deadline:
        ready = json.loads(get(port, "/health"))["ready"]
        if any(one["turns"] == turns and _is_ready(one) for one in ready):
            return
        time.sleep(0.5)
    raise PeerError(f"what a turn takes is not there after {MOST_READY_S:g} s")


def _is_ready(session: Row) -> bool:
    return bool(session["prompt_tokens"]) and not session["batches_lacking"]


# ---- report


def failures(result: Row) -> list[str]:
    """Return which turns have no answer."""
    return [
        f"chat {row['chat'] + 1}, turn {row['turn'] + 1}: {row['how']}: {row['message']}"
        for row in result["rows"]
        if row["how"] != "answered"
    ]


def ratio(row: Row) -> float:
    """Return a turn's seconds to the first text, in those of its prefill's online phase."""
    return float(row["first_text"] / row["cost"]["seconds"]["prefill"])


def speed(row: Row) -> float:
    """Return tokens a second, of the whole answer."""
    return float(row["tokens"] / row["seconds"])


def _tokens(row: Row) -> tuple[int, int, int]:
    cached = row["cached_tokens"]
    return cached, row["prompt_tokens"] - cached, row["tokens"]


_TURNS: list[Column[Row]] = [
    Column("chat, turn", lambda row: f"{row['chat'] + 1}, {row['turn'] + 1}"),
    Column("correlated randomness", lambda row: "ready" if row["stocked"] else "made meanwhile"),
    Column("tokens: cached, new, answer", lambda row: ", ".join(map(str, _tokens(row)))),
    Column("first text, s", lambda row: three(row["first_text"])),
    Column("prefill online, s", lambda row: three(row["cost"]["seconds"]["prefill"])),
    Column("first text to prefill", lambda row: f"{ratio(row):.2f}"),
    Column("decoding online, s", lambda row: three(row["cost"]["seconds"]["decode"])),
    Column("waited for it, s", lambda row: three(row["cost"]["seconds"]["offline"])),
    Column("answer, s", lambda row: three(row["seconds"])),
    Column("tokens a second", lambda row: three(speed(row))),
    Column(
        "MB online, ahead",
        lambda row: ", ".join(_megabytes(row, phase) for phase in ("online", "offline")),
    ),
    Column("getting ready, s", lambda row: three(row["prepared"]) if row["stocked"] else "-"),
]


def _megabytes(row: Row, phase: str) -> str:
    return three(row["cost"]["bytes"][phase] / 1e6)


def summary(rows: list[Row], *, stocked: bool) -> str:
    """Return medians of all turns, with their spread, on one line."""
    some = [row for row in rows if row["stocked"] == stocked]
    parts = []
    for name, value in (("first text, s", lambda r: r["first_text"]), ("tokens a second", speed)):
        values = [float(value(row)) for row in some]
        middle, least, most = statistics.median(values), min(values), max(values)
        parts.append(f"{name}: {three(middle)} ({three(least)} to {three(most)})")
    return f"{'stocked' if stocked else 'not stocked'}: {'; '.join(parts)}"


def table(result: Row) -> str:
    """Return the table of turns, medians, and the criterion."""
    rows = [row for row in result["rows"] if row["how"] == "answered"]
    lines = report.rows_table(_TURNS, rows)
    for stocked in (True, False):
        if any(row["stocked"] == stocked for row in rows):
            lines += ["", summary(rows, stocked=stocked)]
    ratios = [ratio(row) for row in rows if row["stocked"]]
    if ratios:
        middle, most = statistics.median(ratios), max(ratios)
        value = f"{middle:.2f} (median of {len(ratios)} turns; {most:.2f} at most)"
        words = "first text of a stocked turn, by its prefill's online seconds"
        holds = most <= MOST_RATIO
        lines += ["", report.criterion(words, f"{MOST_RATIO:g} at most", value, holds=holds)]
    return "\n".join(lines)
