"""What came of attacks on confidential prompting, as tables in docs/results: one row an outcome."""

from __future__ import annotations

from typing import Any

from experiments.common import report, saved
from experiments.common.report import Files
from spu_llm.attacks.registry import ATTACKS, MODES, SPLIT_MODES

# Files of `spu-llm attack NAME --mode MODE --json`.
NAMES = tuple(
    f"attack_{name}_{mode.replace('-', '_')}"
    for name, attack in ATTACKS.items()
    for mode in MODES
    if mode in attack.runs and mode not in SPLIT_MODES
)
# What was run later of each mode is in files of its own.
SPLIT_NAMES = tuple(f"attack_noir_{mode}{more}" for more in ("", "_more") for mode in SPLIT_MODES)


def in_results(files: Files) -> list[str]:
    """Return all outcomes, by attack: a table for each commit, and where it comes from."""
    heads = (
        "attack",
        "mode",
        "what counts",
        "found",
        "95 %",
        "by guessing",
        "as often by luck",
        "bound",
    )
    by_commit: dict[str, dict[str, Any]] = {}
    for name, data in files.items():
        by_commit.setdefault(data["machine"]["commit"], {})[name] = data
    parts = []
    for some in by_commit.values():
        rows = [_row(outcome) for data in some.values() for outcome in data["outcomes"]]
        machines = [data["machine"] for data in some.values()]
        loads = [load for machine in machines for load in machine["load"]]
        load = f"load {min(loads):.1f} to {max(loads):.1f} (no seconds in it)"
        parts += ["\n".join(report.table(heads, rows)), saved.under_table(some, machines, load)]
    return parts


def _row(outcome: dict[str, Any]) -> list[str]:
    low, high = outcome["interval"]
    bound = outcome["bound"]
    notes = f" ({outcome['notes']})" if outcome["notes"] else ""
    return [
        outcome["attack"],
        outcome["mode"],
        outcome["what"] + notes,
        f"{outcome['successes']:,} of {outcome['tries']:,} = {outcome['rate']:.1%}",
        f"{low:.1%} to {high:.1%}",
        f"{outcome['chance']:.2%}",
        f"{outcome['by_luck']:.2g}",
        "–" if bound is None else f"{bound:.1%}",
    ]
