"""How the study of NOIR's codebook is shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common import report

Row = dict[str, Any]
CHANCE = "at chance"


def name_of(row: Row) -> str:
    if row["mechanism"] == "none":
        return "no codebook"
    return f"{row['mechanism']}, ε / m = {row['epsilon']:.3g}"


def table(result: Row) -> str:
    """All of it as Markdown."""
    return "\n".join([circumstances(result), "", *utility(result), "", *attacks(result)])


def in_results(result: Row, origin: str) -> list[str]:
    """The same as paragraphs of RESULTS.md."""
    return [
        circumstances(result), "\n".join(utility(result)), origin, "\n".join(attacks(result)),
        origin,
    ]  # fmt: skip


def circumstances(result: Row) -> str:
    of, plan = result["corpus"], result["plan"]
    return (
        f"Tuning: {plan['rounds']} rounds, {of['tuning_tokens']:,} tokens of {of['known_files']} "
        f"files. Perplexity and accuracy: {of['windows']} windows of {of['length']} tokens from "
        f"{of['held_out_files']} held-out files. Attacked: {plan['texts']} texts of {of['length']} "
        f"tokens from these files, the first half of each as the prompt. 95 % intervals (±)."
    )


def _by_name(result: Row) -> dict[str, dict[bool, Row]]:
    """Rows by what they are of, then by whether they were tuned."""
    found: dict[str, dict[bool, Row]] = {}
    for row in result["rows"]:
        found.setdefault(name_of(row), {})[row["rounds"] > 0] = row
    return found


def utility(result: Row) -> list[str]:
    """Perplexity and accuracy, before and after tuning."""
    lines = []
    for name, rows in _by_name(result).items():
        cells = []
        for tuned in (False, True):
            row = rows.get(tuned)
            if row is None:
                cells += ["–", "–"]
                continue
            (perplexity, nats), (accuracy, half) = row["perplexity"], row["accuracy"]
            cells += [f"{report.three(perplexity)} (× or / {1 + nats:.2f})",
                      f"{100 * accuracy:.1f} ± {100 * half:.1f} %"]  # fmt: skip
        kept = next(iter(rows.values()))["kept"]
        lines.append([name, "all" if kept is None else report.three(kept), *cells])
    heads = ["mechanism", "features kept of a token", "perplexity, not tuned", "next token right",
             "perplexity, tuned", "next token right, tuned"]  # fmt: skip
    return report.table(heads, lines)


def attacks(result: Row) -> list[str]:
    """What each attack recovers, in per cent, after tuning (without a codebook: before)."""
    columns = [
        (name, rows.get(name != "no codebook") or next(iter(rows.values())))
        for name, rows in _by_name(result).items()
    ]
    whats: dict[tuple[str, str], None] = {}
    for _, row in columns:
        whats |= {(o["attack"], o["what"]): None for o in row["outcomes"]}
    lines = []
    for attack, what in whats:
        cells = [_cell(row["outcomes"], attack, what) for _, row in columns]
        lines.append([f"{attack}: {what}", *cells])
    return report.table(["%, after tuning", *(name for name, _ in columns)], lines)


def _cell(outcomes: Sequence[Row], attack: str, what: str) -> str:
    for o in outcomes:
        if (o["attack"], o["what"]) == (attack, what):
            low, high = o["interval"]
            text = f"{100 * o['rate']:.1f} ({100 * low:.1f} to {100 * high:.1f})"
            return f"{text}, {CHANCE}" if o["at_chance"] else text
    return "–"


def plot(result: Row, path: Path) -> None:
    """Accuracy, and what the strongest attacks recover, against epsilon. InputError without
    matplotlib.
    """
    shown = (("A8", "#D55E00"), ("A10", "#0072B2"), ("A2", "#009E73"))
    figure = report.figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    for mechanism in dict.fromkeys(r["mechanism"] for r in result["rows"] if r["epsilon"]):
        rows = [r for r in result["rows"] if r["mechanism"] == mechanism and r["rounds"]]
        x = [r["epsilon"] for r in rows]
        left.plot(x, [100 * r["accuracy"][0] for r in rows], marker="o", label=mechanism)
        for attack, colour in shown:
            rates = [
                max((100 * o["rate"] for o in r["outcomes"] if o["attack"] == attack), default=0)
                for r in rows
            ]
            right.plot(x, rates, marker="o", color=colour,
                       label=attack if mechanism == "grr" else None)  # fmt: skip
    whole = next(r for r in result["rows"] if r["mechanism"] == "none" and not r["rounds"])
    left.axhline(100 * whole["accuracy"][0], color="black", linestyle="--", label="untouched")
    for axes, words in ((left, "next token right, %"), (right, "tokens recovered, %")):
        axes.set(xlabel="ε / m", ylabel=words)
        axes.set_xscale("log")
        axes.legend(fontsize=7)
    report.save(figure, path, dpi=110)
