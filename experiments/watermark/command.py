"""How good a watermark is: how well it is detected, what it changes, what becomes of it under
edits, and what somebody without the key can do. "A Watermark for Black-Box Language Models" (Bahri,
Wieting, Alon, Metzler), tables 1 and 5, on the shipped private model.

All texts follow the first tokens of held-out snippets, one of a method after each; each has a key
of its own, so that figures are averages over keys. At temperature 1 the model's text has more than
5 bits a token; at the lower one less than 2, which is nearer to the paper's. Unmarked texts are
several after each prompt; detection is of equal lengths, cut from the same texts, against unmarked
texts under many keys (`scores`), and intervals are 95 % ones by prompt
(`metrics`).

Distortion has two signs, so that neither is a merit: nats per token under the distribution that is
sampled from, less the nats of unmarked texts of the same prompts; and the excess of a text's nats
over the entropy that each token was drawn with, which is 0 in the mean for the unmarked
distribution, whatever course texts take. `history`: an n-gram marks once per key, the default of
`spu-llm watermark embed`; off, as published."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common import commands
from experiments.common.cells import Cells, with_rows
from experiments.watermark.plan import (
    TOKENS,
    WatermarkCell,
    WatermarkPlan,
    add_plan,
    cell_of,
    cells,
    plan_of,
)
from experiments.watermark.study import Study
from spu_llm.app.printing import show_table


def measure(
    private: Path,
    public: Path,
    plan: WatermarkPlan,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    done: Sequence[Any] = (),
    ray: str | None = None,
) -> dict[str, Any]:
    """Measure all cells; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures.
    """
    result: dict[str, Any] = {"plan": asdict(plan), "rows": list(done)}
    return with_rows(result, all_cells(private, public, plan), say, keep, ray)


def all_cells(private: Path, public: Path, plan: WatermarkPlan) -> Cells[Study, WatermarkCell]:
    """Return the study's cells."""
    private, public = private.absolute(), public.absolute()
    return Cells(
        cells(plan),
        load=partial(Study, private, public, plan),
        row=lambda study, cell, say: study.row(cell),
        key=lambda cell: cell.name,
        key_of=lambda row: cell_of(row).name,
        reads=(private, public),
    )


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Half an hour: each cell is written at once, and the same command goes on."
    add_plan(parser, "of a method", TOKENS)
    commands.add_plot(parser, "draw detection against length and edits")
    commands.add_cluster(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    from experiments.watermark import report

    commands.check_folders(options)
    plan = plan_of(options, 30)
    pair = commands.pair(options)
    result = commands.resumed(options, plan, lambda *how: measure(*pair, plan, *how))
    show_table(report.table(result))
    if options.plot is not None:
        report.plot(result, options.plot)
