"""The command `spu-llm experiment dp-text`: its options, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.common import commands
from experiments.dp_text.inputs import ORIGINS
from experiments.dp_text.plan import (
    BATCHES,
    CHOSEN,
    CONTROL,
    EPSILONS,
    ITERATIONS,
    MOST_CALLS,
    TEXTS,
    TOKENS,
    TOP_K,
    DpTextPlan,
    cells,
)
from experiments.dp_text.study import measure
from spu_llm.app.printing import show_table
from spu_llm.core.errors import InputError
from spu_llm.systems.dp_text.corpus import METHODS, augpe_for, method_for


def top_ks(text: str) -> list[int | None]:
    """Parse the value of an option: numbers, and `full`."""
    try:
        return [None if part == "full" else int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected 10,50,full, found {text!r}") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Each cell is written at once, and the same command goes on."
    parser.add_argument(
        "--epsilon",
        type=commands.fractions,
        default=list(EPSILONS),
        metavar="E,...",
        help="default: 1,3,5,10",
    )
    parser.add_argument(
        "--batch",
        type=commands.numbers,
        default=list(BATCHES),
        metavar="B,...",
        help="references to a text of InvisibleInk (default: 3,7,15)",
    )
    parser.add_argument(
        "--baseline-batch",
        type=commands.numbers,
        metavar="B,...",
        help="of amin, adapmixed (default: sizes for each)",
    )
    parser.add_argument(
        "--top-k",
        type=top_ks,
        default=list(TOP_K),
        metavar="K,...",
        help="of invisibleink and public-only (default: 10,50,full)",
    )
    parser.add_argument(
        "--temperatures",
        type=commands.fractions,
        metavar="T,...",
        help="of InvisibleInk and the public model (default: 1.2 with top-k, 1 without)",
    )
    parser.add_argument(
        "--methods",
        type=commands.names,
        default=list(CHOSEN),
        metavar="NAME,...",
        help=f"of {', '.join((*METHODS, CONTROL))} (default: without adapmixed-published)",
    )
    commands.add_number(parser, "--texts", TEXTS, "of a cell")
    commands.add_number(parser, "--tokens", TOKENS, "of a text at most", "T")
    commands.add_number(
        parser, "--most-calls", MOST_CALLS, "model calls beyond which a cell is left out (TLE)"
    )
    parser.add_argument(
        "--iterations",
        type=commands.numbers,
        default=list(ITERATIONS),
        metavar="N,...",
        help="of augpe (default: 1; the paper's are 1,3,5,10)",
    )
    commands.add_number(parser, "--seed", 0, "of all draws", "S")
    parser.add_argument(
        "--corpus",
        choices=list(ORIGINS),
        default="tests",
        help="docstrings of Python's tests; sentences of its manual, or of the docstrings of its "
        "library, both asked for in words (default: %(default)s)",
    )
    commands.add_draft_model(parser)
    commands.add_cluster(parser)
    commands.add_plot(parser, "draw MAUVE against model calls into a file")
    commands.add_common(parser)


def plan_of(options: argparse.Namespace) -> DpTextPlan:
    """Return the plan that the options ask for; InputError for what cannot be measured."""
    known = (*METHODS, CONTROL)
    if unknown := set(options.methods) - set(known):
        raise InputError(f"--methods: there is no {min(unknown)!r}; choose from {', '.join(known)}")
    commands.check_range("--texts", options.texts, 2)
    plan = DpTextPlan(
        options.epsilon,
        options.batch,
        options.top_k,
        options.methods,
        options.baseline_batch,
        options.texts,
        options.tokens,
        options.most_calls,
        options.seed,
        options.iterations,
        options.temperatures,
        options.corpus,
    )
    for cell in cells(plan):  # refuses nonsense before any work
        if cell.state(plan) == "run":
            (augpe_for if cell.method == "augpe" else method_for)(cell.wanted(plan))
    return plan


def pair_of(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the model that generates, and the one that perplexity is taken under: by default the
    shipped pair, or a model that is named for both. InputError where tokens of the two differ.
    """
    private, public = commands.pair(options)
    if options.model is not None and options.draft_model is None:
        return private, private
    commands.check_tokenizer(private, public)
    return private, public


def command(options: argparse.Namespace) -> None:
    from experiments.dp_text import report

    commands.check_folders(options)
    plan = plan_of(options)
    pair = pair_of(options)
    result = commands.resumed(options, plan, lambda *how: measure(*pair, plan, *how))
    show_table(report.table(result))
    if options.plot is not None:
        report.plot(result, options.plot)
