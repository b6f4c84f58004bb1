"""The HTTP gateway under load and under faults, with a real provider, all processes here.

Load: conversations (programs, each with several chats going on at once) ask for as long as
`--minutes` says. Every request is to be answered once, by the model's own answer to that very chat:
the text that greedy choice in float32 writes, or one that is below it by less than twice the
secure logits' bound at some position (`checking.margin_of`), which is counted apart. Memory is the
kernel's proportional count (Pss), every five seconds.

Faults (`--faults`): what becomes of a streamed and an unstreamed request when one comes, and
whether the next request is answered. No fault may take longer than `plan.MOST_FAULT_S` to be told.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from experiments.common import commands
from experiments.gateway import faults, load, report
from experiments.gateway.parties import with_template
from experiments.gateway.plan import FaultsPlan, LoadPlan
from spu_llm.core.errors import InputError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "An hour of load, or with --faults half an hour of faults. What was measured is written "
        "every minute."
    )
    parser.add_argument("--faults", action="store_true", help="meet faults, in place of load")
    parser.add_argument(
        "--minutes", type=float, default=60.0, metavar="N", help="of load (default: 60)"
    )
    commands.add_number(parser, "--conversations", 8, "programs that ask")
    commands.add_number(parser, "--chats", 6, "of each program, going on at once")
    commands.add_number(parser, "--at-once", 4, "requests that the gateway answers at a time")
    commands.add_number(parser, "--keep", 1, "chats whose sessions the gateway keeps")
    commands.add_number(parser, "--turns", 2, "of a chat, before another one begins")
    commands.add_number(parser, "--answer-tokens", 6, "of each answer")
    commands.add_plot(parser, "draw memory, answers and waiting times of the load")
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    if not 0 < options.minutes <= 24 * 60:
        raise InputError(f"--minutes must be above 0 and 1440 at most, found {options.minutes:g}")
    for name, most in (("conversations", 64), ("chats", 64), ("at_once", 16), ("turns", 8)):
        commands.check_range(f"--{name.replace('_', '-')}", getattr(options, name), 1, most)
    commands.check_range("--answer-tokens", options.answer_tokens, 1, 32)
    commands.check_range("--conversations times --chats", _outstanding(options), 1, 64)
    plan = LoadPlan(
        options.minutes,
        options.conversations,
        options.chats,
        options.at_once,
        options.keep,
        options.turns,
        options.answer_tokens,
    )

    def measure(say: Any) -> dict[str, Any]:
        def keep(result: dict[str, Any]) -> None:
            commands.write(options, result)

        with tempfile.TemporaryDirectory(prefix="spu-llm-gateway-") as name:
            folder = Path(name)
            model = with_template(commands.private_model(options), folder)
            if options.faults:
                return faults.run(FaultsPlan(), model, folder, say, keep)
            return load.run(plan, model, folder, say, keep)

    result = commands.with_progress("gateway", measure)
    if options.faults:
        result["failures"] = report.failures_of_faults(result)
        return commands.conclude(options, result, report.faults_table(result))
    result["failures"] = report.failures_of_load(result)
    commands.write(options, result)  # whatever becomes of the plot
    if options.plot is not None:
        report.plot(result, options.plot)
    commands.conclude(options, result, report.load_table(result))


def _outstanding(options: argparse.Namespace) -> int:
    return int(options.conversations * options.chats)
