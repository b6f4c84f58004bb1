"""What came of attacks on confidential prompting, as tables of RESULTS.md: one row an outcome."""

from __future__ import annotations

from typing import Any

from experiments.claims.measured_tables import Files
from experiments.common import report, saved
from spu_llm.app.attacking import ATTACKS, MODES

# Files of `spu-llm attack NAME --mode MODE --json`.
NAMES = tuple(
    f"attack_{name}_{mode.replace('-', '_')}"
    for name, attack in ATTACKS.items()
    for mode in MODES
    if mode in attack.runs
)


def in_results(files: Files) -> list[str]:
    """All outcomes, by attack, and where they come from."""
    heads = (
        "attack", "mode", "what counts", "found", "95 %", "by guessing", "as often by luck",
        "bound",
    )  # fmt: skip
    rows = [_row(outcome) for data in files.values() for outcome in data["outcomes"]]
    by_commit: dict[str, Files] = {}
    for name, data in files.items():
        of = by_commit.setdefault(data["machine"]["commit"], {})
        by_commit[data["machine"]["commit"]] = {**of, name: data}
    origins = [
        saved.under_table(some, [data["machine"] for data in some.values()], "no seconds in it")
        for some in by_commit.values()
    ]
    return ["\n".join(report.table(heads, rows)), *origins]


def _row(outcome: dict[str, Any]) -> list[str]:
    low, high = outcome["interval"]
    bound = outcome["bound"]
    notes = f" ({outcome['notes']})" if outcome["notes"] else ""
    return [
        outcome["attack"], outcome["mode"], outcome["what"] + notes,
        f"{outcome['successes']:,} of {outcome['tries']:,} = {outcome['rate']:.1%}",
        f"{low:.1%} to {high:.1%}", f"{outcome['chance']:.2%}",
        f"{outcome['by_luck']:.2g}",
        "–" if bound is None else f"{bound:.1%}",
    ]  # fmt: skip
