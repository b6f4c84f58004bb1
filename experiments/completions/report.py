"""The figures of `experiment completions` for people: tables and a plot.

Everything is per emitted token, a median over prompts with the smallest and the largest. Measured:

    online      prefill and decode, the client's drafting included
    everything  a first short completion: launch, set-up and all batches, left-overs too; but for
                the hint, which a client gets once for all its sessions and which is said apart

Derived, and marked with +: what a token would cost if the same session and its pool went on for N
tokens in completions like this one,

    fixed / N + (everything - fixed) / emitted,

where fixed is what a session pays once: launch, set-up, and of the batches what the completion did
not use. (The model's context ends a completion before 512 tokens.) A stock run that ended early is
derived, too: its missing steps are taken to cost what its others did.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.benchmarks.op_report import count_text
from experiments.common import report, saved
from experiments.common.report import QUIET, Column, Text, rows_table, spread
from experiments.completions.plan import MODES, PARTS, SYSTEMS

Record = dict[str, Any]
Figure = Callable[[Record], float]

AMORTISED = (64, 512)  # tokens
OVER = [f"+ over {n} tokens" for n in AMORTISED]
# What the project asks for: seconds per token of the stock path, in ours with drafts.
WANTED_ONLINE = {"local": 4.0, "lan": 8.0, "wan": 8.0}
WANTED_EVERYTHING = {"local": 20.0, "lan": 30.0, "wan": 15.0}


# ---- figures of one run


def _scaled(record: Record, part: str, unit: str) -> float:
    """Return the cost of a part; of a stock run that ended early, as if it had gone on."""
    value = _size(record["costs"][part], unit)
    asked = record["asked"]
    if asked["stock_tokens"] is not None and part == "decode":
        value *= (asked["tokens"] - 1) / (asked["stock_tokens"] - 1)
    return value


def _size(cost: dict[str, Any], unit: str) -> float:
    return float(report.both_ways(cost) if unit == "bytes" else cost[unit])


def emitted(record: Record) -> int:
    """Return the number of emitted tokens; of a stock run that ended early, of those that it stands
    for.
    """
    asked = record["asked"]
    return int(record["emitted"] if asked["stock_tokens"] is None else asked["tokens"])


def online(record: Record, unit: str) -> float:
    """Return the cost of prefill and decode, per emitted token."""
    parts = ("prefill", "decode")
    return sum(_scaled(record, part, unit) for part in parts) / emitted(record)


def everything(record: Record, unit: str) -> float:
    """Return the cost of all that the session took, per emitted token."""
    return sum(_scaled(record, part, unit) for part in PARTS) / emitted(record)


def amortised(record: Record, unit: str, tokens: int) -> float:
    """Derive the cost per token when the session goes on for so many tokens."""
    costs = record["costs"]
    left_over = _size(costs["material"], unit) - _size(costs["used_material"], unit)
    fixed = _size(costs["launch"], unit) + _size(costs["set_up"], unit) + left_over
    return fixed / tokens + everything(record, unit) - fixed / emitted(record)


def tokens_per_step(record: Record) -> float:
    """Return the tokens of each decode step; the prefill emits the first token. The end may cut the
    last step.
    """
    return float(record["emitted"] - 1) / record["steps"] if record["steps"] else 1.0


# ---- over runs


def groups(data: dict[str, Any]) -> dict[tuple[str, int], list[Record]]:
    """Return the runs that emitted anything, by network and length of the completions. A whole
    stock run stands before one that ended early.
    """
    by_place: dict[tuple[str, int], dict[tuple[str, ...], Record]] = {}
    for record in data["runs"]:
        asked = record["asked"]
        chosen = by_place.setdefault((asked["network"], asked["tokens"]), {})
        key = (asked["prompt"], asked["mode"], asked["system"])
        if 0 < record["emitted"] >= chosen.get(key, record)["emitted"]:
            chosen[key] = record
    return {group: list(chosen.values()) for group, chosen in by_place.items() if chosen}


def choose(records: Sequence[Record], system: str, mode: str | None = None) -> list[Record]:
    return [
        r for r in records if r["asked"]["system"] == system and mode in (None, r["asked"]["mode"])
    ]


def ratios(records: Sequence[Record], ours: Sequence[Record], figure: Figure) -> list[float]:
    """Divide the stock path's figure by the figure of some runs of ours, prompt by prompt."""
    stock = {r["asked"]["prompt"]: figure(r) for r in choose(records, "stock")}
    return [stock[p] / figure(r) for r in ours if (p := r["asked"]["prompt"]) in stock]


def by_mode(records: Sequence[Record]) -> list[list[Record]]:
    """Return the runs of each system and mode that there are any of, in the order of the tables."""
    chosen = (choose(records, system, mode) for system in SYSTEMS for mode in MODES)
    return [runs for runs in chosen if runs]


# ---- the tables


def table(data: dict[str, Any]) -> str:
    """Return all groups as Markdown, with what the runs were made on."""
    lines = [*_circumstances(data), ""]
    for (network, tokens), records in groups(data).items():
        lines += [
            f"network {network}, completions of {tokens} tokens; seconds per emitted token, "
            "median (smallest to largest); + is derived",
            "",
        ]
        for rows in _tables(records):
            lines += [*rows, ""]
        lines += [*_hint(records), *criteria(records, network), ""]
    failures = [text for record in data["runs"] for text in record["failures"]]
    lines.append("outcomes: " + ("; ".join(failures) or "as in plaintext, near-ties apart"))
    return "\n".join(lines)


def in_results(data: dict[str, Any], name: str) -> list[str]:
    """Return the tables of one network's runs, which are the result `name`, in the words of
    docs/results, where they come from under each.
    """
    (records,) = groups(data).values()
    others = [run["others"] for run in data["runs"]]
    load = f"load of other work {min(others):.2f} to {max(others):.2f} cores"
    under = saved.under_table([name], (run["machine"] for run in data["runs"]), load)
    paragraphs = []
    for rows in _tables(records):
        text = "\n".join(rows).replace("ours-", "ours, ")
        paragraphs.append(re.sub(r"\+(ended after \d+ tokens)", r"\1 ᵃ", text))
        paragraphs.append(under)
    return paragraphs


def _circumstances(data: dict[str, Any]) -> list[str]:
    runs = data["runs"]
    machines = {f"{r['machine']['cores']} cores, {r['machine']['processor']}" for r in runs}
    commits = {r["commit"] for r in runs}
    loud = sum(r["others"] > QUIET for r in runs)
    others, load_start, load_end = (
        spread((r[name] for r in runs), "{:.2f}".format)
        for name in ("others", "load_start", "load_end")
    )
    lines = [
        f"{len(runs)} runs on {'; '.join(sorted(machines))}; commits {', '.join(sorted(commits))}; "
        f"{min(r['date'] for r in runs)[:10]} to {max(r['date'] for r in runs)[:10]}; "
        f"{len(data['failed'])} runs broke off and count nowhere",
        f"other work on the machine, in cores: {others}; load average at the start {load_start}, "
        f"at the end {load_end}",
    ]
    if loud:
        lines.append(
            f"NOT QUIET: {loud} runs had more than {QUIET} cores of other work beside "
            "them; their seconds say little"
        )
    return lines


def _tables(records: Sequence[Record]) -> list[list[str]]:
    """Return the tables of one group: seconds and traffic per token, ratios of seconds, texts; a
    row for each system and mode.
    """
    rows = by_mode(records)
    return [_seconds(rows), _traffic(rows), _ratios(records, rows), _texts(rows)]


def _per_token(unit: str) -> list[Figure]:
    """Return the figures per token: online, everything, and everything over longer sessions."""
    later = [partial(amortised, unit=unit, tokens=n) for n in AMORTISED]
    return [partial(online, unit=unit), partial(everything, unit=unit), *later]


Chosen = Sequence[Record]  # the runs of a system in a mode


def _column(head: str, figure: Figure, text: Text) -> Column[Chosen]:
    """Return a column of a figure's median and range over runs."""
    return Column(head, lambda chosen: spread(map(figure, chosen), text))


def _runs(chosen: Chosen) -> str:
    return str(len(chosen))


def _seconds(rows: Sequence[Chosen]) -> list[str]:
    heads = ["online", "everything, first completion", *OVER]
    figures = zip(heads, _per_token("seconds"), strict=True)
    columns = [
        Column("system", _name_and_end),
        Column("runs", _runs),
        *(_column(head, figure, seconds_short) for head, figure in figures),
        _column("tokens a step", tokens_per_step, "{:.2f}".format),
        _column("steps", lambda r: r["steps"], "{:.0f}".format),
    ]
    return rows_table(columns, rows)


def _traffic(rows: Sequence[Chosen]) -> list[str]:
    online, everything = _per_token("messages")[:2]
    figures = zip(["MB online", "everything", *OVER], _per_token("bytes"), strict=True)
    columns = [
        Column("per emitted token", _name_and_end),
        Column("runs", _runs),
        *(_column(head, figure, _mb) for head, figure in figures),
        _column("messages online", online, count_text),
        _column("everything", everything, count_text),
        _column(
            "peak MiB of a worker",
            lambda r: max(r["peak_memory"].values()) / 2**20,
            "{:.0f}".format,
        ),
    ]
    return rows_table(columns, rows)


def _ratios(records: Sequence[Record], rows: Sequence[Sequence[Record]]) -> list[str]:
    cells = []
    for chosen in rows:
        several = [ratios(records, chosen, figure) for figure in _per_token("seconds")]
        if chosen[0]["asked"]["system"] != "stock" and several[0]:
            cells.append(
                [_name(chosen), str(len(several[0])), *(spread(x, _times) for x in several)]
            )
    return report.table(
        ["stock's seconds in ours, by prompt", "pairs", "online", "everything", *OVER], cells
    )


def _times(x: float) -> str:
    return f"{x:.1f}" if x < 100 else f"{x:.0f}"


def _texts(rows: Sequence[Chosen]) -> list[str]:
    columns = [
        Column("text", _name),
        Column("runs", _runs),
        _column("repeated tokens", lambda r: r["repetition"], "{:.0%}".format),
        _column("tokens", lambda r: r["emitted"], "{:.0f}".format),
        Column("as in plaintext", _as_in_plaintext),
    ]
    return rows_table(columns, rows)


def _name(chosen: Sequence[Record]) -> str:
    return "{system}, {mode}".format(**chosen[0]["asked"])


def _name_and_end(chosen: Sequence[Record]) -> str:
    short = [n for r in chosen if (n := r["asked"]["stock_tokens"]) is not None]
    return _name(chosen) + (f", +ended after {min(short)} tokens" if short else "")


def _mb(size: float) -> str:
    return f"{size / 1e6:.2f}"


def _as_in_plaintext(chosen: Sequence[Record]) -> str:
    count = sum(r["emitted"] for r in chosen)
    if "same_as_plaintext" in chosen[0]:
        same = sum(r["same_as_plaintext"] for r in chosen)
        return f"{same} of {count} until a draw falls otherwise"
    ties, largest = sum(r["near_ties"] for r in chosen), max(r["largest_margin"] for r in chosen)
    return f"{count - ties} of {count}; {ties} near-ties, {largest:.3f} below at most"


def hints(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the costs of the parts of the hint, each of the run that fetched it: hidden progress
    takes one table more.
    """
    return [cost for r in records if _size(cost := r["costs"]["hint"], "bytes") > 1e6]


def _hint(records: Sequence[Record]) -> list[str]:
    fetched = hints(records)
    if not fetched:
        return []
    size, seconds = (sum(_size(cost, unit) for cost in fetched) for unit in ("bytes", "seconds"))
    return [
        f"hint, once for a client and a model, not in these tables: {_mb(size)} MB, "
        f"{seconds_short(seconds)} s",
        "",
    ]


def criteria(records: Sequence[Record], network: str) -> list[str]:
    """Return what the project asks of drafted runs on this network, and whether it holds."""
    lines = []
    for name, figure, bound in (
        ("online", online, WANTED_ONLINE[network]),
        ("with everything", everything, WANTED_EVERYTHING[network]),
    ):
        in_seconds = ratios(
            records, choose(records, "ours-drafted"), partial(figure, unit="seconds")
        )
        if in_seconds:
            middle = statistics.median(in_seconds)
            lines.append(
                report.criterion(
                    name, f"at least {bound:g} times less", f"{middle:.1f}", holds=middle >= bound
                )
            )
    return lines


# ---- the plot


# Okabe and Ito's palette, told apart by shape as well.
STYLES = {"online": ("#0072B2", "o"), "everything": ("#D55E00", "s")}
LABELS = {"stock": "stock", "ours-standard": "ours,\nstandard", "ours-drafted": "ours,\ndrafted"}
FIGURES = {"online": online, "everything": everything}


def plot(data: dict[str, Any], path: Path) -> None:
    """Draw seconds per token of every run, by system and network; InputError without matplotlib."""
    there = groups(data)
    figure = report.figure(1.2 + 3.6 * len(there), 4.4)
    axes = figure.subplots(1, len(there), sharey=True, squeeze=False)
    for axis, ((network, tokens), records) in zip(axes[0], there.items(), strict=True):
        draw(axis, records)
        axis.set_title(f"{network}, {tokens} tokens", fontsize=10)
    axes[0][0].set_ylabel("seconds per emitted token\n(bars and numbers: medians)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False
    )
    report.save(figure, path, dpi=150)


def draw(axes: Any, records: Sequence[Record]) -> None:
    """Draw a dot for every run, greedy and sampled alike; a bar at their median, with its number
    above all of them.
    """
    systems = [s for s in SYSTEMS if choose(records, s)]
    for i, system in enumerate(systems):
        chosen = choose(records, system)
        for j, (name, figure) in enumerate(FIGURES.items()):
            color, marker = STYLES[name]
            middle = i + 0.36 * j - 0.18
            values = [figure(r, "seconds") for r in chosen]
            places = [middle + 0.12 * ((k + 0.5) / len(chosen) - 0.5) for k in range(len(chosen))]
            label = "online" if name == "online" else "everything, first completion"
            axes.plot(
                places,
                values,
                marker,
                color=color,
                markersize=4.5,
                alpha=0.6,
                markeredgewidth=0,
                label=label if i == 0 else None,
            )
            median = statistics.median(values)
            axes.hlines(median, middle - 0.15, middle + 0.15, color=color, linewidth=2)
            axes.annotate(
                seconds_short(median),
                (middle, max(values)),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=color,
            )
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_xlim(-0.5, len(systems) - 0.5)
    axes.set_xticks(range(len(systems)), [LABELS[s] for s in systems])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3, axis="y", which="both", linewidth=0.5)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def seconds_short(x: float) -> str:
    """Write seconds with two or three digits."""
    return f"{x:.0f}" if x >= 10 else f"{x:.1f}" if x >= 1 else f"{x:.2f}"
