"""How much memory a vault takes against the number of fakes beside its user's prompt: all prompts
exact, which is the default, and compact, as published.

"Confidential Prompting" (Gim, Li, Zhong), section 5.2 and figure 14: compact prompts share the keys
and values of what surrounds the secret, so that lambda |S| rows become |S - S_target| + lambda
|S_target|; the user's own prompt has |S| of its own besides, which the paper leaves out. Each cell
has an engine and a vault of its own, as processes (`experiments.confidential.systems`), and is
looked at when all prompts are prefilled. What prompts say does not change it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands
from experiments.common.cells import Cells, with_rows
from experiments.common.report import Column, bytes_text, rows_table
from experiments.confidential.inputs import larger_model
from experiments.confidential.study import LARGER, row_bytes
from experiments.confidential.systems import resident, started, timed, warm_up
from models.hf import load_config
from spu_llm.api.defaults import shipped
from spu_llm.app.printing import show_table

LENGTH, SECRET = 64, 8  # tokens of a prompt, and of its secret
_TOKENS = 3  # that are generated: memory is looked at after the first
_SEED = 0

Row = dict[str, Any]


@dataclass(frozen=True)
class MemoryPlan:
    """The study's settings. fakes, larger: numbers of them, with the shipped model, and with the
    larger one.
    """

    fakes: Sequence[int] = (0, 8, 64, 128)
    larger: Sequence[int] = (0, 8, 64)


@dataclass(frozen=True)
class MemoryCell:
    """A vault. compact: whether fakes share what surrounds the secret."""

    model: str
    fakes: int
    compact: bool


def cells_of(plan: MemoryPlan) -> list[MemoryCell]:
    """Return the vaults of a plan; without fakes there is nothing to share."""
    return [
        MemoryCell(model, fakes, compact)
        for model, numbers in (("shipped", plan.fakes), ("larger", plan.larger))
        for fakes in numbers
        for compact in ((False, True) if fakes else (False,))
    ]


def kept_rows(cell: MemoryCell) -> int:
    """Return for how many tokens a vault keeps keys and values."""
    if cell.compact:
        return LENGTH + (LENGTH - SECRET) + cell.fakes * SECRET
    return LENGTH * (cell.fakes + 1)


def prompts_of(cell: MemoryCell, vocab: int) -> tuple[list[list[int]], list[int]]:
    """Return the prompts of a vault, the user's own first, and the positions of its secret."""
    source, at = np.random.default_rng(_SEED), (LENGTH - SECRET) // 2
    own = source.integers(vocab // 2, vocab, LENGTH)
    rows = np.tile(own, (cell.fakes + 1, 1))
    rows[1:, at : at + SECRET] = source.integers(vocab // 2, vocab, (cell.fakes, SECRET))
    return rows.tolist(), list(range(at, at + SECRET))


def row_of(cell: MemoryCell, say: Callable[[str], None]) -> Row:
    """Start a vault, let it prefill its prompts, and look at its process."""
    say(f"{cell.model}, {cell.fakes} fakes, {'compact' if cell.compact else 'exact'}")
    looked: Row = {}
    with ExitStack() as stack:
        model = shipped("private")
        if cell.model == "larger":
            model = stack.enter_context(larger_model(model, LARGER))
        config = load_config(model)
        prompts, secret = prompts_of(cell, config.vocab_size)
        (system,) = stack.enter_context(started(["vault"], model, 1, len(prompts)))
        (vault,) = system.users
        system.fakes = secret if cell.compact else ()

        def look() -> None:
            looked.update(resident(vault.pid), peak=_peak(vault.pid))

        warm_up(system, [prompts])
        timed(system, [prompts], _TOKENS, look)
    del looked["processes"]
    return {**asdict(cell), "computed": kept_rows(cell) * row_bytes(config), **looked}


def _peak(pid: int) -> int:
    """Return the largest number of resident bytes that a process had."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return 1024 * int(match[1])


def measure(
    plan: MemoryPlan,
    say: Callable[[str], None],
    keep: Callable[[Row], None] = lambda result: None,
    done: Sequence[Row] = (),
    ray: str | None = None,
) -> Row:
    """Measure all vaults; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures.
    """
    result: Row = {"plan": asdict(plan), "rows": list(done)}
    cells = Cells(
        cells_of(plan),
        load=lambda say: plan,
        row=lambda plan, cell, say: row_of(cell, say),
        key=lambda cell: cell,
        key_of=lambda row: MemoryCell(row["model"], row["fakes"], row["compact"]),
        reads=(shipped("private"),),
    )
    return with_rows(result, cells, say, keep, ray)


# ---- the report


def table(result: Row) -> str:
    """Return the figures as Markdown."""
    rows = result["rows"]

    def more(row: Row) -> str:
        """Write what a vault has beyond one of the same model without fakes."""
        alone = next(r for r in rows if r["model"] == row["model"] and not r["fakes"])
        return "–" if row is alone else bytes_text(row["own"] - alone["own"])

    columns: list[Column[Row]] = [
        Column("model", lambda row: row["model"]),
        Column("λ", lambda row: str(row["fakes"])),
        Column("prompts", lambda row: "compact" if row["compact"] else "exact"),
        Column("keys and values, computed", lambda row: bytes_text(row["computed"])),
        Column("the vault's memory, without shared pages", lambda row: bytes_text(row["own"])),
        Column("more than with λ = 0", more),
        Column("largest resident", lambda row: bytes_text(row["peak"])),
    ]
    return "\n".join(rows_table(columns, rows))


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Each vault is written at once, and the same command goes on."
    commands.add_cluster(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    commands.add_debug(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    plan = MemoryPlan()
    show_table(table(commands.resumed(options, plan, lambda *how: measure(plan, *how))))
