"""How the study of NOIR's codebook is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common import report
from experiments.common.report import Column, rows_table

Row = dict[str, Any]
CHANCE = "at chance"
PLOTTED = {
    ("A8", "the right token in its place, by trying all"): "-",
    ("A10", "the right token in its place, the first 16 of each text known"): ":",
}
# Of the win rules, and of other ways to count, the table has those that say something else.
_LEFT_OUT = ("privacy won", "confidentiality won", "an identifier", "a token of the text")


def name_of(row: Row) -> str:
    if row["mechanism"] == "none":
        return "no codebook"
    return f"{row['mechanism']}, ε / m = {row['epsilon']:.3g}"


def table(result: Row) -> str:
    """Return the whole result as Markdown."""
    lines = [circumstances(result), "", *utility(result)]
    for epsilon in _epsilons(result):
        lines += ["", *attacks(result, epsilon)]
    return "\n".join(lines)


def in_results(result: Row, origin: str) -> list[str]:
    """Return the whole result as paragraphs of its page in docs/results."""
    paragraphs = [circumstances(result), "\n".join(utility(result)), origin]
    for epsilon in _epsilons(result):
        paragraphs += ["\n".join(attacks(result, epsilon)), origin]
    return paragraphs


def _epsilons(result: Row) -> list[float]:
    return sorted({r["epsilon"] for r in result["rows"] if r["epsilon"] is not None})


def circumstances(result: Row) -> str:
    of, plan, inverters = result["corpus"], result["plan"], result.get("inverters")
    text = (
        f"Tuning: {plan['rounds']} rounds, {of['tuning_tokens']:,} tokens of {of['known_files']} "
        f"files. Perplexity and accuracy: {of['windows']} windows of {of['length']} tokens from "
        f"{of['held_out_files']} held-out files. Attacked: {plan['texts']} texts of {of['length']} "
        f"tokens from these files, the first half of each as the prompt. 95 % intervals (±)."
    )
    if inverters:
        text += (
            f" Of {inverters['tokens']:,} tokens of public text that it was not trained on, the "
            f"inverter of A1, A3 and A4 finds {inverters['base']:.1%} where there is no "
            f"codebook, with A1's corrector {inverters['corrected']:.1%}."
        )
    return text


def _by_name(result: Row) -> dict[str, dict[bool, Row]]:
    """Return rows by what they are of, then by whether they were tuned."""
    by_name: dict[str, dict[bool, Row]] = {}
    for row in result["rows"]:
        by_name.setdefault(name_of(row), {})[row["rounds"] > 0] = row
    return by_name


def utility(result: Row) -> list[str]:
    """Return a table of perplexity and accuracy, before and after tuning."""
    columns: list[Column[tuple[str, dict[bool, Row]]]] = [
        Column("mechanism", lambda of: of[0]),
        Column("features kept of a token", lambda of: _kept(next(iter(of[1].values())))),
        Column("perplexity, not tuned", lambda of: perplexity(of[1].get(False))),
        Column("next token right", lambda of: accuracy(of[1].get(False))),
        Column("perplexity, tuned", lambda of: perplexity(of[1].get(True))),
        Column("next token right, tuned", lambda of: accuracy(of[1].get(True))),
    ]
    return rows_table(columns, _by_name(result).items())


def _kept(row: Row) -> str:
    return "all" if row["kept"] is None else report.three(row["kept"])


def perplexity(row: Row | None) -> str:
    """Write a row's perplexity and the factor of its interval."""
    if row is None:
        return "–"
    value, nats = row["perplexity"]
    return f"{report.three(value)} (× or / {math.exp(nats):.2f})"


def accuracy(row: Row | None) -> str:
    """Write how often a row's next token is right, and half the interval, in per cent."""
    return "–" if row is None else "{:.1f} ± {:.1f} %".format(*(100 * x for x in row["accuracy"]))


def attacks(result: Row, epsilon: float) -> list[str]:
    """Return a table of what each attack recovers, in per cent, after tuning, at an epsilon; where
    there is no codebook, also before.
    """
    attacked = [
        row for row in result["rows"] if row["outcomes"] and row["epsilon"] in (None, epsilon)
    ]
    return outcomes_table(
        f"%, ε / m = {epsilon:.3g}", [(_column(row), row["outcomes"]) for row in attacked]
    )


def outcomes_table(head: str, attacked: Sequence[tuple[str, Sequence[Row]]]) -> list[str]:
    """Return a table of outcomes: a row for each attack, a column for each of what is attacked."""
    whats = dict.fromkeys(
        (o["attack"], o["what"])
        for _, outcomes in attacked
        for o in outcomes
        if not o["what"].startswith(_LEFT_OUT)
    )
    columns: list[Column[tuple[str, str]]] = [
        Column(head, lambda known: f"{known[0]}: {known[1]}"),
        *(Column(name, partial(_cell, outcomes)) for name, outcomes in attacked),
    ]
    return rows_table(columns, sorted(whats, key=lambda known: int(known[0][1:])))


def _column(row: Row) -> str:
    if row["mechanism"] == "none":
        return "no codebook, tuned" if row["rounds"] else "no codebook"
    return str(row["mechanism"])


def _cell(outcomes: Sequence[Row], known: tuple[str, str]) -> str:
    for o in outcomes:
        if (o["attack"], o["what"]) == known:
            low, high = o["interval"]
            text = f"{100 * o['rate']:.1f} ({100 * low:.1f} to {100 * high:.1f})"
            return f"{text}, {CHANCE}" if o["at_chance"] else text
    return "–"


def plot(result: Row, path: Path) -> None:
    """Write `draw` to a file; InputError without matplotlib."""
    figure = report.figure(9, 3.6)
    draw(figure, result)
    report.save(figure, path, dpi=110)


def draw(figure: Any, result: Row) -> None:
    """Draw accuracy after tuning, and tokens that attacks recover in their places, against
    epsilon.
    """
    left, right = figure.subplots(1, 2)
    rows = [r for r in result["rows"] if r["epsilon"] is not None]
    for mechanism in dict.fromkeys(r["mechanism"] for r in rows):
        # Baselines are not tuned.
        of = {r["epsilon"]: r for r in rows if r["mechanism"] == mechanism}
        x = sorted(of)
        colour = left.plot(x, [100 * of[e]["accuracy"][0] for e in x], marker="o", label=mechanism)[
            0
        ].get_color()
        for (attack, what), style in PLOTTED.items():
            right.plot(
                x,
                [_rate(of[e]["outcomes"], attack, what) for e in x],
                color=colour,
                marker="o",
                linestyle=style,
                label=f"{attack}, {mechanism}",
            )
    whole = next(r for r in result["rows"] if r["mechanism"] == "none" and not r["rounds"])
    left.axhline(100 * whole["accuracy"][0], color="black", linestyle="--", label="untouched")
    for axes, words in ((left, "next token right, %"), (right, "tokens recovered, %")):
        axes.set(xlabel="ε / m", ylabel=words, ylim=(0, None))
        axes.set_xscale("log")
        axes.legend(fontsize=6)


def _rate(outcomes: Sequence[Row], attack: str, what: str) -> float:
    rates = [100 * o["rate"] for o in outcomes if (o["attack"], o["what"]) == (attack, what)]
    return float(rates[0]) if rates else float("nan")
