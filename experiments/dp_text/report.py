"""How the study of differentially private text is shown: table 2, the criterion, and figure 1 of
"InvisibleInk" (Vinod, Pillutla, Thakurta).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.common import report
from experiments.common import saved as saved_results
from experiments.common.report import Column, Files, rows_table

Row = dict[str, Any]
OURS = ("invisibleink", "full-vocabulary")
UNREAD = ("public-only", "null-references", "augpe")  # no batches of references
STYLES = {
    "invisibleink": ("InvisibleInk", "#0072B2", "o"),
    "full-vocabulary": ("InvisibleInk, full vocabulary", "#56B4E9", "o"),
    "amin": ("Amin et al., corrected", "#D55E00", "^"),
    "amin-published": ("Amin et al., as published", "#E69F00", "^"),
    "adapmixed": ("AdaPMixED, corrected", "#009E73", "s"),
    "adapmixed-published": ("AdaPMixED, as published", "#66C2A5", "s"),
    "augpe": ("AugPE", "#CC79A7", "D"),
    "null-references": ("null references", "#777777", "x"),
    "public-only": ("public only", "#000000", "_"),
    "real texts": ("real texts", "#555555", "_"),
}
BASELINES = ("amin", "amin-published", "adapmixed", "adapmixed-published", "augpe")
FEWER = 8.0  # model calls, against the best baseline, at its utility
NOT_RUN = ("INF", "TLE")


def has_run(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["state"] == "run"]


def named(row: Row) -> str:
    """Name a row by its method and what else tells it from others but epsilon. The temperature is
    named where it is not the paper's.
    """
    return untempered(row) + _unusual(row)


def _unusual(row: Row) -> str:
    usual = 1.0 if row["top_k"] is None else 1.2
    temperature = row.get("temperature", usual)  # real texts have none
    return "" if temperature == usual else f", τ = {temperature:g}"


def untempered(row: Row) -> str:
    """Name a row by what tells it from others but epsilon and the temperature."""
    name = STYLES[row["method"]][0]
    if row["method"] in ("invisibleink", *UNREAD):
        name += ", all tokens" if row["top_k"] is None else f", k = {row['top_k']}"
    if row["batch"] is not None and row["method"] not in UNREAD:
        name += f", B = {row['batch']}"
    if (iterations := row.get("iterations")) is not None:
        name += f", {iterations} iteration{'s' if iterations > 1 else ''}"
    return name


# ---- tables


def table(result: Row) -> str:
    """Return the whole result as Markdown."""
    lines = [circumstances(result), ""]
    for rows in _tables(result):
        lines += [*rows, ""]
    return "\n".join([*lines, *criteria(result)])


def in_results(result: Row, origin: str) -> list[str]:
    """Return the whole result as paragraphs of its page in docs/results."""
    tables = [text for rows in _tables(result) for text in ("\n".join(rows), origin)]
    holds = "\n".join(f"- {line}" for line in criteria(result))
    return [circumstances(result), *tables, holds]


def with_seconds(files: Files) -> list[str]:
    """Return the paragraphs of one result, or of several of the same texts, whose seconds are the
    processor's, which other work on the machine hardly changes. Settings are the first one's.
    """
    results = list(files.values())
    rows = [row for result in results for row in result["rows"]]
    whole = {**results[0], "rows": [row for i, row in enumerate(rows) if row not in rows[:i]]}
    loads = [result["machine"]["load"] for result in results]
    before, end = max(load[0] for load in loads), max(load[1] for load in loads)
    load = f"load {before:.1f} before, {end:.1f} at the end, seconds of one core's work"
    machines = [result["machine"] for result in results]
    return in_results(whole, saved_results.under_table(list(files), machines, load))


def over_batches(result: Row, origin: str) -> list[str]:
    """Return the paragraphs of a result whose subject is B: table 13, with the mean length of a
    text beside MAUVE, since a budget that ends early cuts texts short.
    """
    tables = [
        table_2(
            result,
            "MAUVE, % (tokens of a text)",
            lambda row: f"{around(row['mauve'], 100, 1)} ({row['length'][0]:.1f})",
        ),
        table_2(result, "perplexity gap", lambda row: around(row["perplexity_gap"], 1, 0)),
    ]
    shown = [text for rows in tables for text in ("\n".join(rows), origin)]
    holds = "\n".join(f"- {line}" for line in references_help(has_run(result["rows"])))
    return [circumstances(result), *shown, holds]


def _tables(result: Row) -> list[list[str]]:
    return [
        table_2(result, "MAUVE, %", lambda row: around(row["mauve"], 100, 1)),
        table_2(result, "perplexity gap", lambda row: around(row["perplexity_gap"], 1, 0)),
        texts(result),
        saved(result),
    ]


def circumstances(result: Row) -> str:
    of, plan, real = result["corpus"], result["plan"], result["real"]
    given, others = of["sides"]["references"], of["sides"]["real"]
    parts = of.get("parts", "files")
    return (
        f"{of['origin']}, version {of['python']}, {of['licence']}, of {given['tokens'][0]:g} to "
        f"{plan['tokens']} tokens: {given['texts']} references from {given['files']} {parts} "
        f"(median {given['tokens'][2]:g} tokens), {others['texts']} other texts from "
        f"{others['files']} {parts} as real ones (median {others['tokens'][2]:g} tokens, "
        f"{real['names'][0]:.2f} names, perplexity {real['perplexity'][0]:.0f} in the mean). "
        f"{plan['texts']} texts of a cell, T = {plan['tokens']}, delta = {result['delta']:g}, "
        "replace-by-null; 99 % intervals (±)."
    )


def around(value: Sequence[float], times: float, digits: int) -> str:
    """Show a figure with half its interval; a dash where it could not be measured."""
    if math.isnan(value[0]):
        return "–"
    return f"{times * value[0]:.{digits}f} ± {times * value[1]:.{digits}f}"


def groups(result: Row) -> Iterator[tuple[str, list[Row]]]:
    """Yield a name and the rows that differ in epsilon alone."""
    by_name: dict[str, list[Row]] = {}
    for row in result["rows"]:
        by_name.setdefault(named(row), []).append(row)
    yield from by_name.items()


def table_2(result: Row, what: str, figure: Callable[[Row], str]) -> list[str]:
    """Return a table of a figure by method and epsilon; one value over all columns where nothing is
    spent.
    """
    epsilons = result["plan"]["epsilons"]
    lines = []
    for name, rows in groups(result):
        by = {
            row["epsilon"]: figure(row) if row["state"] == "run" else row["state"] for row in rows
        }
        cells = [by[None]] * len(epsilons) if None in by else [by.get(e, "") for e in epsilons]
        calls = next((row["calls"] for row in has_run(rows)), None)
        lines.append([name, report.three(calls) if calls else "–", *cells])
    return report.table([what, "calls per token", *(f"ε = {e:g}" for e in epsilons)], lines)


def texts(result: Row) -> list[str]:
    """Return a table of what else is measured, at the largest epsilon."""
    largest = max(result["plan"]["epsilons"])
    columns: list[Column[Row]] = [
        Column(f"texts at ε = {largest:g}", named),
        Column("tokens", lambda row: around(row["length"], 1, 1)),
        Column("distance of lengths (KS)", lambda row: f"{row['length_distance']:.2f}"),
        Column("names", lambda row: around(row["names"], 1, 2)),
        Column("empty", lambda row: str(row["empty"])),
        Column("texts that read a reference, at most", lambda row: str(row.get("reads", "–"))),
    ]
    rows = [row for row in has_run(result["rows"]) if row["epsilon"] in (None, largest)]
    if any("processor_s" in row for row in rows):
        columns.append(Column("processor's ms for each token", _milliseconds))
    return rows_table(columns, rows)


def _milliseconds(row: Row) -> str:
    return report.three(1000 * row["processor_s"]) if "processor_s" in row else "–"


def saved(result: Row) -> list[str]:
    """Return a table of the nats per token that references save of real texts."""

    def at(epsilon: float | None) -> Column[dict[float | None, Row]]:
        if epsilon is None:
            return Column("saved, not clipped", lambda of: around(of[None]["saved"], 1, 3))
        return Column(
            f"saved at ε = {epsilon:g}",
            lambda of: f"{around(of[epsilon]['saved'], 1, 3)} (C = {of[epsilon]['clip']:.2f})",
        )

    columns: list[Column[dict[float | None, Row]]] = [
        Column("nats per token of real texts: B", lambda of: str(of[None]["batch"])),
        Column("public model", lambda of: around(of[None]["public"], 1, 3)),
        *map(at, [*result["plan"]["epsilons"], None]),
    ]
    rows = (
        {row["epsilon"]: row for row in result["worth"] if row["batch"] == batch}
        for batch in result["plan"]["batches"]
    )
    return rows_table(columns, rows)


# ---- the criterion


def criteria(result: Row) -> list[str]:
    """Return what the project asks, epsilon by epsilon; and whether references help beyond
    chance.
    """
    rows = has_run(result["rows"])
    lines = []
    for epsilon in result["plan"]["epsilons"]:
        ours, others = (
            [
                r
                for r in rows
                if r["epsilon"] == epsilon
                and (r["method"] in OURS) == side
                and r["method"] != "null-references"
            ]
            for side in (True, False)
        )
        if ours and others:
            lines.append(_against(epsilon, ours, others))
    return [*lines, *references_help(rows)]


def references_help(rows: Sequence[Row]) -> list[str]:
    """Return for each figure how many cells are better than the public model on the same
    candidates, at the same temperature; no line without such cells.
    """
    lines = []
    public = {
        (row["method"], row["epsilon"], *_drawn_as(row)): row
        for row in rows
        if row["method"] in ("public-only", "null-references")
    }
    private = [
        (row, public.get(("null-references", row["epsilon"], *_drawn_as(row)), alone))
        if row["method"] == "invisibleink"
        else (row, alone)
        for row in rows
        if row["method"] in (*OURS, *BASELINES)
        and (alone := public.get(("public-only", None, *_drawn_as(row)))) is not None
    ]
    # Top-k+ has more candidates than the public model with the same k.
    control = "on the same candidates (1 call, no reference)"
    if any((r["method"], of["method"]) == ("invisibleink", "public-only") for r, of in private):
        control = "with the same k (1 call, no reference, fewer candidates than InvisibleInk's)"
    for name, figure, better in (
        ("MAUVE is higher", "mauve", 1),
        ("the perplexity gap is smaller", "perplexity_gap", -1),
    ):
        signs = [better * differs(*pair, figure) for pair in private]
        above = [row for (row, _), sign in zip(private, signs, strict=True) if sign > 0]
        if private:
            lines.append(
                f"against the public model {control}, {name} "
                f"by more than the interval of the difference in {len(above)} of {len(private)} "
                f"cells"
                + (f" ({_listed(above)})" if above else "")
                + f", the other way round in {signs.count(-1)}"
            )
    return lines


def _drawn_as(row: Row) -> tuple[int | None, float]:
    return row["top_k"], row["temperature"]


def _against(epsilon: float, ours: Sequence[Row], others: Sequence[Row]) -> str:
    best = max(others, key=utility)
    as_good = [row for row in ours if utility(row) >= utility(best)]
    what = f"{named(best)}, {100 * utility(best):.1f} % at {report.three(best['calls'])} calls"
    if not as_good:
        top = max(ours, key=utility)
        words = f"none as good ({named(top)}: {100 * utility(top):.1f} %)"
        return report.criterion(f"ε = {epsilon:g}", _bound(what), words, holds=False)
    cheapest = min(as_good, key=lambda row: row["calls"])
    ratio = best["calls"] / cheapest["calls"]
    words = (
        f"{named(cheapest)}, {100 * utility(cheapest):.1f} % at "
        f"{report.three(cheapest['calls'])} calls: {report.three(ratio)} times fewer"
    )
    return report.criterion(f"ε = {epsilon:g}", _bound(what), words, holds=ratio >= FEWER)


def _bound(best: str) -> str:
    return f"the best baseline's MAUVE ({best}) at {FEWER:g} times fewer calls"


def utility(row: Row) -> float:
    """Return the MAUVE of a row."""
    return float(row["mauve"][0])


def differs(row: Row, other: Row, figure: str = "mauve") -> int:
    """Return 1 above, -1 below, 0 within the interval of the difference of two figures."""
    difference = row[figure][0] - other[figure][0]
    if not abs(difference) > math.hypot(row[figure][1], other[figure][1]):
        return 0
    return 1 if difference > 0 else -1


def _listed(rows: Sequence[Row]) -> str:
    return "; ".join(f"{named(row)} at ε = {row['epsilon']:g}" for row in rows)


# ---- the plot


def plot(result: Row, path: Path) -> None:
    """Draw Figure 1, a panel for each epsilon; InputError without matplotlib."""
    epsilons = result["plan"]["epsilons"]
    figure = report.figure(1 + 3.4 * len(epsilons), 4.2)
    panels = figure.subplots(1, len(epsilons), squeeze=False, sharey=True)[0]
    for axes, epsilon in zip(panels, epsilons, strict=True):
        draw(axes, result, epsilon)
    finish(figure, panels)
    report.save(figure, path, dpi=110)


def finish(figure: Any, panels: Sequence[Any]) -> None:
    """Add one legend for all panels, below them."""
    panels[0].set_ylabel("MAUVE, %")
    styles: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        styles |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(styles.values()), list(styles), loc="outside lower center", ncols=5, fontsize=7
    )


def draw(axes: Any, result: Row, epsilon: float) -> None:
    """Draw MAUVE against calls for each token."""
    rows = has_run(result["rows"])
    for method, (name, colour, marker) in STYLES.items():
        of = [row for row in rows if row["method"] == method]
        if method in ("public-only", "real texts"):
            for row, style in zip(of, ("--", ":", "-."), strict=False):
                axes.axhline(
                    100 * utility(row), color=colour, linestyle=style, linewidth=1, label=named(row)
                )
            continue
        at = [row for row in of if row["epsilon"] == epsilon]
        # Rows of several top-k have the same calls: side by side, the first ones hollow.
        several = dict.fromkeys(map(_drawn_as, at))
        for number, drawn_as in enumerate(several):
            part, k = [row for row in at if _drawn_as(row) == drawn_as], drawn_as[0]
            axes.errorbar(
                [row["calls"] * 1.08**number for row in part],
                [100 * utility(row) for row in part],
                [100 * row["mauve"][1] for row in part],
                color=colour,
                marker=marker,
                capsize=2,
                linewidth=1,
                markersize=4.5,
                markerfacecolor="white" if number == 0 and len(several) > 1 else colour,
                label=name + ("" if k is None else f", k = {k}") + _unusual(part[0]),
            )
    axes.set_xscale("log", base=2)
    ticks = sorted({1, *(2 ** round(math.log2(row["calls"])) for row in rows if row["calls"])})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 105)
    axes.set(xlabel="model calls per token")
    axes.set_title(f"ε = {epsilon:g} (Figure 1)", fontsize=9)
    axes.grid(alpha=0.3, axis="y")
