"""What came of attacks on confidential prompting, as tables in docs/results: one row an outcome."""

from __future__ import annotations

from typing import Any

from experiments.common import saved
from experiments.common.report import Column, Files, rows_table
from spu_llm.attacks.registry import ATTACKS, MODES, SPLIT_MODES

# Files of `spu-llm attack NAME --mode MODE --json`.
NAMES = tuple(
    f"attack_{name}_{mode.replace('-', '_')}"
    for name, attack in ATTACKS.items()
    for mode in MODES
    if mode in attack.runs and mode not in SPLIT_MODES
)
# What was run later of each mode is in files of its own.
SPLIT_NAMES = tuple(
    f"attack_noir_{mode}{more}"
    for more in ("", "_more", "_places", "_codebooks")
    for mode in SPLIT_MODES
)


def _successes(outcome: dict[str, Any]) -> str:
    return f"{outcome['successes']:,} of {outcome['tries']:,} = {outcome['rate']:.1%}"


_COLUMNS: list[Column[dict[str, Any]]] = [
    Column("attack", lambda o: o["attack"]),
    Column("mode", lambda o: o["mode"]),
    Column("what counts", lambda o: o["what"] + (f" ({o['notes']})" if o["notes"] else "")),
    Column("found", _successes),
    Column("95 %", lambda o: "{:.1%} to {:.1%}".format(*o["interval"])),
    Column("by guessing", lambda o: f"{o['chance']:.2%}"),
    Column("as often by luck", lambda o: f"{o['by_luck']:.2g}"),
    Column("bound", lambda o: "–" if o["bound"] is None else f"{o['bound']:.1%}"),
]


def in_results(files: Files) -> list[str]:
    """Return all outcomes, by attack: a table for each commit, and where it comes from."""
    by_commit: dict[str, dict[str, Any]] = {}
    for name, data in files.items():
        by_commit.setdefault(data["machine"]["commit"], {})[name] = data
    parts = []
    for some in by_commit.values():
        outcomes = (outcome for data in some.values() for outcome in data["outcomes"])
        machines = [data["machine"] for data in some.values()]
        loads = [load for machine in machines for load in machine["load"]]
        load = f"load {min(loads):.1f} to {max(loads):.1f} (no seconds in it)"
        lines = rows_table(_COLUMNS, outcomes)
        parts += ["\n".join(lines), saved.under_table(some, machines, load)]
    return parts
