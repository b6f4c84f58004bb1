"""How the study is shown where temperatures are its subject: figures 2 and 8 and tables 3 and 12
of "InvisibleInk" (Vinod, Pillutla, Thakurta).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from experiments.common import report
from experiments.dp_text.report import (
    around,
    circumstances,
    differs,
    has_run,
    references_help,
    untempered,
    utility,
)

Row = dict[str, Any]
TEMPERED = ("public-only", "null-references", "invisibleink", "full-vocabulary")
READING = ("invisibleink", "full-vocabulary")


def in_results(result: Row, origin: str) -> list[str]:
    """Return the whole result as paragraphs of its page in docs/results."""
    tables = [
        by_temperature(result, "MAUVE, %", lambda row: around(row["mauve"], 100, 1)),
        by_temperature(result, "perplexity gap", lambda row: around(row["perplexity_gap"], 1, 0)),
        by_temperature(result, "tokens", lambda row: around(row["length"], 1, 1)),
        expansion(result),
    ]
    shown = [text for rows in tables if rows for text in ("\n".join(rows), origin)]
    return [circumstances(result), *shown, "\n".join(f"- {line}" for line in comparisons(result))]


def _series(rows: Sequence[Row]) -> dict[tuple[str, float | None], dict[float, Row]]:
    """Return rows that differ in the temperature alone, by temperature."""
    series: dict[tuple[str, float | None], dict[float, Row]] = {}
    for row in rows:
        if row["method"] in TEMPERED:
            series.setdefault((untempered(row), row["epsilon"]), {})[row["temperature"]] = row
    return series


def by_temperature(result: Row, what: str, figure: Callable[[Row], str]) -> list[str]:
    """Return a table of a figure with a column for each temperature: figure 8, and the heat map of
    figure 2.
    """
    temperatures = result["plan"]["temperatures"]
    lines = [
        [
            name,
            "–" if epsilon is None else f"{epsilon:g}",
            *(figure(of[t]) if t in of else "" for t in temperatures),
        ]
        for (name, epsilon), of in _series(has_run(result["rows"])).items()
    ]
    return report.table([what, "ε", *(f"τ = {t:g}" for t in temperatures)], lines)


def expansion(result: Row) -> list[str]:
    """Return table 12: the mean size of V_k+, and the tokens of a text that are drawn from what it
    adds to the top k; nothing without top-k.
    """
    plan = result["plan"]
    ks = [k for k in plan["top_k"] if k is not None]
    rows = {
        ((row["batch"], row["epsilon"], row["temperature"]), row["top_k"]): row
        for row in has_run(result["rows"])
        if row["method"] == "invisibleink"
    }
    lines = []
    for at in product(plan["batches"], plan["epsilons"], plan["temperatures"]):
        of = [rows[at, k] for k in ks if (at, k) in rows]
        if of:
            batch, epsilon, temperature = at
            lines.append(
                [
                    f"{batch}",
                    f"{epsilon:g}",
                    f"{temperature:g}",
                    f"{of[0]['clip']:.2f}",
                    *(f"{around(r['effective_k'], 1, 1)} / {around(r['added'], 1, 2)}" for r in of),
                ]
            )
    heads = [f"k = {k}: effective k / tokens added" for k in ks]
    return report.table(["B", "ε", "τ", "C", *heads], lines) if lines else []


# ---- comparisons


def comparisons(result: Row) -> list[str]:
    """Return what can be said beyond chance of temperatures, of k, and of references."""
    rows = has_run(result["rows"])
    return [*hotter(result["plan"], rows), *fifty(rows), *best_alone(rows), *references_help(rows)]


def hotter(plan: Row, rows: Sequence[Row]) -> list[str]:
    """Compare each temperature with the lowest one, over the series of methods that read."""
    lowest, *others = sorted(plan["temperatures"])
    series = [
        of
        for of in _series(rows).values()
        if all(row["method"] in READING for row in of.values()) and lowest in of
    ]
    lines = []
    for t in others:
        signs = [differs(of[t], of[lowest]) for of in series if t in of]
        lines.append(
            f"InvisibleInk at τ = {t:g} against τ = {lowest:g}, same ε, B and k: MAUVE is higher "
            f"by more than the interval of the difference in {signs.count(1)} of {len(signs)} "
            f"pairs, lower in {signs.count(-1)}"
        )
    return lines


def fifty(rows: Sequence[Row]) -> list[str]:
    """Compare k = 50 with other k, at the same epsilon, B and temperature: table 3."""
    ours = {
        (row["top_k"], (row["epsilon"], row["batch"], row["temperature"])): row
        for row in rows
        if row["method"] == "invisibleink"
    }
    lines = []
    for k in dict.fromkeys(k for k, _ in ours if k != 50):
        signs = [
            differs(ours[50, at], row)
            for (other, at), row in ours.items()
            if other == k and (50, at) in ours
        ]
        if signs:
            lines.append(
                f"InvisibleInk with k = 50 against k = {k}, same ε, B and τ: MAUVE is higher by "
                f"more than the interval of the difference in {signs.count(1)} of {len(signs)} "
                f"pairs, lower in {signs.count(-1)}"
            )
    return lines


def best_alone(rows: Sequence[Row]) -> list[str]:
    """Return the best cell of the public model's heat map, and how many cells chance leaves beside
    it: figure 2.
    """
    alone = [row for row in rows if row["method"] == "public-only"]
    if not alone:
        return []
    best = max(alone, key=utility)
    near = [row for row in alone if row is not best and differs(best, row) == 0]
    return [
        f"the public model alone is best with {untempered(best).split(', ')[1]} at τ = "
        f"{best['temperature']:g}: MAUVE {around(best['mauve'], 100, 1)} %; {len(near)} of "
        f"{len(alone) - 1} other cells are within the interval of the difference"
    ]
