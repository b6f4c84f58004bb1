"""How the study of tuning's tokens is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import report
from experiments.common.report import Column, rows_table
from experiments.common.saved import under_table
from experiments.split import report as noir_report
from experiments.split.study import LENGTH, NONE

NEAR = 1.05  # the criterion: perplexity within this factor of the untouched model's

Row = dict[str, Any]
Point = dict[str, Any]


def circumstances(result: Row) -> str:
    """Say what all rows share."""
    plan, (tuned, validation, held_out) = result["plan"], result["files"]
    front, back = plan["split"]
    shares = result["without_context"]
    return (
        f"{result['model']}, {front} + {back} blocks at the client. A round has {plan['batch']} "
        f"windows of {LENGTH} tokens of {tuned} files, {result['text']:,} tokens in all. Learning "
        f"rates are tried for {plan['trial']} rounds, and perplexity is then of windows of "
        f"{validation} other files. Curves: {plan['windows']} windows of {held_out} held-out "
        "files. 95 % intervals; ratios of perplexities are paired by window. Seconds of a round "
        "are the processors', not the clock's, of both parties' work together. The shares of "
        "tokens in the text to tune on, whatever came before, have a perplexity of "
        f"{noir_report.perplexity(shares)}, and the likeliest is right for "
        f"{noir_report.accuracy(shares)}."
    )


def half(x: np.ndarray) -> float:
    """Return half the 95 % interval of a mean."""
    return float(1.96 * x.std(ddof=1) / np.sqrt(len(x)))


def label(row: Row) -> str:
    """Name a variant."""
    name = "no codebook"
    if row["epsilon"] is not None:
        name = f"{row['mechanism']}, ε / m = {row['epsilon']:.3g}"
    return f"{name}, LoRA of rank {row['lora']} at the ends" if row["lora"] else name


def curves_of(result: Row) -> list[Row]:
    return [row for row in result["rows"] if not row["trial"]]


# ---- tables


def trials(result: Row) -> list[str]:
    """Return a table of the perplexity that each learning rate came to in its trial."""
    of: dict[str, dict[float, Point]] = {}
    for row in result["rows"]:
        if row["trial"]:
            of.setdefault(label(row), {})[row["learning_rate"]] = row["points"][-1]
    columns: list[Column[tuple[str, dict[float, Point]]]] = [
        Column("perplexity after a trial", lambda tried: tried[0])
    ]
    for rate in result["plan"]["learning_rates"]:
        columns.append(Column(f"learning rate {rate:g}", partial(_tried, rate)))
    return rows_table(columns, of.items())


def _tried(rate: float, tried: tuple[str, dict[float, Point]]) -> str:
    return noir_report.perplexity(tried[1].get(rate))


def points(result: Row) -> list[str]:
    """Return a table of perplexity and accuracy by tokens seen, a column for each curve."""
    curves = curves_of(result)
    columns: list[Column[int]] = [Column("tokens seen", lambda tokens: f"{tokens:,}")]
    columns += [Column(label(row), partial(_at, row)) for row in curves]
    return rows_table(columns, sorted({p["tokens"] for row in curves for p in row["points"]}))


def _at(row: Row, tokens: int) -> str:
    for point in row["points"]:
        if point["tokens"] == tokens:
            return f"{noir_report.perplexity(point)}, {100 * point['accuracy'][0]:.1f} %"
    return "–"


def ends(result: Row) -> list[str]:
    """Return a table of how each curve ends: beside the untouched model, and how it still falls."""
    untouched = untouched_of(result)
    columns: list[Column[Row]] = [
        Column("at the end of the curve", label),
        Column("features kept of a token", _kept),
        Column("learning rate", lambda row: f"{row['learning_rate']:g}"),
        Column("perplexity, of the untouched model's", lambda row: _ratio(row, untouched)),
        Column("over the last doubling of tokens", lambda row: _ratio(row, row["points"][-2])),
        Column(
            "doublings until 5 % above it, at that pace", lambda row: doublings_text(row, untouched)
        ),
        Column("next token right", lambda row: noir_report.accuracy(row["points"][-1])),
        Column("a round", lambda row: report.duration_text(row["round_s"])),
    ]
    return rows_table(columns, curves_of(result))


def untouched_of(result: Row) -> Point:
    """Return the point of the model before any tuning, without a codebook."""
    return next(row["points"][0] for row in curves_of(result) if row["mechanism"] == NONE)


def log_ratio(point: Point, other: Point) -> tuple[float, float]:
    """Return the logarithm of the ratio of two perplexities, and half its interval: paired."""
    apart = np.asarray(point["nats"]) - np.asarray(other["nats"])
    return float(apart.mean()), half(apart)


def _ratio(row: Row, other: Point) -> str:
    mean, around = log_ratio(row["points"][-1], other)
    low, high = math.exp(mean - around), math.exp(mean + around)
    return f"× {report.three(math.exp(mean))} ({report.three(low)} to {report.three(high)})"


def doublings_text(row: Row, untouched: Point) -> str:
    """Write how many doublings of the tokens would bring perplexity near the untouched model's, if
    each changed it as the last one did.
    """
    above = log_ratio(row["points"][-1], untouched)[0] - math.log(NEAR)
    if above <= 0:
        return "0"
    change, around = log_ratio(row["points"][-1], row["points"][-2])
    if change + around >= 0:
        return "does not fall beyond the interval"
    return report.three(above / -change)


def _kept(row: Row) -> str:
    return "all" if row["kept"] is None else report.three(row["kept"])


def tables(result: Row) -> list[list[str]]:
    """Return all tables of a result that has curves."""
    shown = [trials(result)]
    return [*shown, points(result), ends(result)] if curves_of(result) else shown


def table(result: Row) -> str:
    """Return the whole result as Markdown."""
    lines = [circumstances(result)]
    for rows in tables(result):
        lines += ["", *rows]
    return "\n".join(lines)


def in_results(files: report.Files) -> list[str]:
    """Return the results of all models as paragraphs of their page in docs/results."""
    paragraphs = []
    for name, data in files.items():
        load = "load {:.1f} before, {:.1f} at the end".format(*data["machine"]["load"])
        origin = under_table((name,), [data["machine"]], load)
        paragraphs.append(circumstances(data))
        for rows in tables(data):
            paragraphs += ["\n".join(rows), origin]
    return paragraphs


# ---- the plot


def plot(result: Row, path: Path) -> None:
    """Write `draw` to a file; InputError without matplotlib."""
    figure = report.figure(5.5, 3.6)
    draw(figure, curves_of(result))
    report.save(figure, path, dpi=110)


def draw(figure: Any, curves: Sequence[Row]) -> None:
    """Draw perplexity against the tokens that were seen."""
    axes = figure.subplots()
    for row in curves:
        seen = [point for point in row["points"] if point["tokens"]]
        axes.errorbar(
            [point["tokens"] for point in seen],
            [point["perplexity"][0] for point in seen],
            yerr=np.transpose([_bar(*point["perplexity"]) for point in seen]),
            marker="o",
            markersize=3,
            label=label(row),
        )
    untouched = next(row["points"][0] for row in curves if row["mechanism"] == NONE)
    axes.axhline(untouched["perplexity"][0], color="black", linestyle="--", label="untouched")
    axes.set(xlabel="tokens seen", ylabel="perplexity", xscale="log", yscale="log")
    axes.legend(fontsize=6)


def _bar(value: float, nats: float) -> tuple[float, float]:
    return value * (1 - math.exp(-nats)), value * (math.exp(nats) - 1)
