"""Tables and plots of the gateway's load and faults, from their results alone."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.common import report
from experiments.common.report import Column, three
from experiments.gateway.checking import jain, percentile, slope, told_apart
from experiments.gateway.plan import (
    LEAST_FAIRNESS,
    LEAST_GROWTH_MINUTES,
    MOST_FAULT_S,
    MOST_GROWTH_MIB,
    NEAR,
    WARM_UP,
)

Row = dict[str, Any]
_MIB = 2**20
# Okabe and Ito's palette: told apart by readers who do not see all colours.
_COLOURS = {"gateway": "#0072B2", "provider": "#D55E00"}

# ---- load


def answered(result: Row) -> list[Row]:
    """Return the requests that were answered."""
    return [row for row in result["rows"] if row["how"] == "answered"]


def is_near(row: Row) -> bool:
    """Tell whether an answer differs from float32's where two tokens were as good as equal."""
    return row["margin"] is not None and 0 < row["margin"] <= NEAR


def is_wrong(row: Row) -> bool:
    """Tell whether an answer is not the model's own to its chat."""
    return row["margin"] is None or row["margin"] > NEAR or not row["counts"]


def by_conversation(result: Row) -> dict[int, list[Row]]:
    """Return the answered requests of each conversation."""
    rows = answered(result)
    numbers = range(result["plan"]["conversations"])
    return {n: [row for row in rows if row["conversation"] == n] for n in numbers}


def fairness(result: Row) -> float:
    """Return Jain's index of answers by conversation."""
    return jain([len(rows) for rows in by_conversation(result).values()])


def supervisors(result: Row) -> list[tuple[float, float]]:
    """Return hours and MiB of both supervisors together, after the warm-up, while the plan's
    minutes last.
    """
    last = 60 * result["plan"]["minutes"]
    return [
        (one["at"] / 3600, (one["gateway"]["supervisor"] + one["provider"]["supervisor"]) / _MIB)
        for one in result["samples"]
        if WARM_UP * last <= one["at"] <= last
    ]


def growth(result: Row) -> float:
    """Return the slope of both supervisors' memory after the warm-up, MiB an hour."""
    return slope(supervisors(result))


def measures_growth(result: Row) -> bool:
    """Tell whether a slope is held against its bound: not that of a few minutes."""
    return bool(result["plan"]["minutes"] * (1 - WARM_UP) >= LEAST_GROWTH_MINUTES)


def most_processes(result: Row) -> int:
    """Return the number of workers that both parties may have at most: those of requests, of chats
    that are kept, of the next chat, and of one that ends.
    """
    return 2 * int(result["plan"]["at_once"] + result["plan"]["keep"] + 2)


def _workers(result: Row) -> int:
    return max(
        (sum(one[p]["processes"] - 1 for p in _COLOURS) for one in result["samples"]), default=0
    )


def failures_of_load(result: Row) -> list[str]:
    """Return what does not hold of a run under load."""
    rows, ids = result["rows"], [row["id"] for row in answered(result)]
    wrong = [row for row in answered(result) if is_wrong(row)]
    checks: list[tuple[object, str]] = [
        (not ids, "no request was answered"),
        (result["asked"] - len(rows), "requests have no end"),
        (len(rows) - len(ids), "requests were not answered"),
        (len(ids) - len(set(ids)), "answers share an id"),
        (abs(result["counted"] - len(ids)), "answers are counted otherwise by the gateway"),
        (len(wrong), "answers are not the model's to their chats"),
        (sum(map(len, result["left"])), "processes outlive their command"),
        (max(0, _workers(result) - most_processes(result)), "workers are too many"),
        (fairness(result) < LEAST_FAIRNESS, f"fairness is {fairness(result):.3f}"),
    ]
    if measures_growth(result):
        more = growth(result)
        checks.append((more > MOST_GROWTH_MIB, f"memory grows by {more:.1f} MiB an hour"))
    return [
        words if isinstance(count, bool) else f"{count} {words}" for count, words in checks if count
    ]


def load_table(result: Row) -> str:
    """Return both tables of a run under load, and its criteria."""
    heads = {f"{result['plan']['minutes']:g} minutes": result}
    criteria = [f"criteria hold: {'no' if failures_of_load(result) else 'yes'}"]
    return "\n".join(
        [
            *report.figures_table("load", _FIGURES, heads),
            "",
            *report.rows_table(_CONVERSATION, list(by_conversation(result).items())),
            "",
            *criteria,
        ]
    )


def load_in_results(result: Row, origin: str) -> list[str]:
    """Return both tables of a run under load, each with where it comes from."""
    tables = load_table(result).split("\n\n")[:2]
    return [text for table in tables for text in (table, origin)]


def _seconds(values: Iterable[float]) -> str:
    some = list(values)
    if not some:
        return "-"
    points = (percentile(some, at) for at in (50, 95, 100))
    return ", ".join(three(point) for point in points)


def _mib(get: Callable[[Row], float]) -> Callable[[Row], str]:
    def cell(result: Row) -> str:
        values = [get(one) / _MIB for one in result["samples"]]
        return f"{statistics.median(values):.0f}, {max(values):.0f}" if values else "-"

    return cell


def _queue(result: Row) -> str:
    lengths = [one["requests"] for one in result["samples"] if one["requests"] is not None]
    return f"{statistics.median(lengths):.0f}, {max(lengths)}" if lengths else "-"


def _streams(result: Row) -> list[float]:
    return [row["first_text"] for row in answered(result) if row["first_text"] is not None]


def _grown(result: Row) -> str:
    points = supervisors(result)
    if len(points) < 2:
        return "-"
    held = "" if measures_growth(result) else "; too short for the criterion"
    return f"{growth(result):+.1f} ({points[0][1]:.0f} to {points[-1][1]:.0f} MiB{held})"


_FIGURES: list[Column[Row]] = [
    Column(
        "programs, chats of each", lambda r: f"{r['plan']['conversations']}, {r['plan']['chats']}"
    ),
    Column("at once, kept", lambda r: f"{r['plan']['at_once']}, {r['plan']['keep']}"),
    Column("requests: asked, answered", lambda r: f"{r['asked']}, {len(answered(r))}"),
    Column("lost, or ended by an error", lambda r: str(r["asked"] - len(answered(r)))),
    Column("counted by the gateway", lambda r: str(r["counted"])),
    Column(
        "ids that two answers share",
        lambda r: str(len(answered(r)) - len({row["id"] for row in answered(r)})),
    ),
    Column(
        "answers: float32's own text",
        lambda r: str(sum(row["margin"] == 0 and row["counts"] for row in answered(r))),
    ),
    Column(
        f"another one, within a margin of {NEAR:g}",
        lambda r: str(sum(is_near(row) for row in answered(r))),
    ),
    Column("not to this chat", lambda r: str(sum(map(is_wrong, answered(r))))),
    Column(
        "pairs of answers that differ",
        lambda r: f"{100 * told_apart([row['text'] for row in answered(r)]):.1f}%",
    ),
    Column(
        "went on in an earlier session",
        lambda r: str(sum(row["turn"] > 0 and row["cached_tokens"] > 8 for row in answered(r))),
    ),
    Column("requests there: median, most", _queue),
    Column(
        "seconds to an answer: median, 95%, longest",
        lambda r: _seconds(row["seconds"] for row in answered(r)),
    ),
    Column("seconds to a stream's first text", lambda r: _seconds(_streams(r))),
    Column("Jain's index of answers by program", lambda r: f"{fairness(r):.4f}"),
    Column(
        "supervisors' MiB: gateway, median and most", _mib(lambda one: one["gateway"]["supervisor"])
    ),
    Column("provider", _mib(lambda one: one["provider"]["supervisor"])),
    Column("both: MiB an hour", _grown),
    Column("workers' MiB: gateway's", _mib(lambda one: one["gateway"]["workers"])),
    Column("provider's", _mib(lambda one: one["provider"]["workers"])),
    Column("workers at most", lambda r: str(_workers(r))),
    Column("cores of other work", lambda r: f"{r['others']:.2f}"),
]
_CONVERSATION: list[Column[tuple[int, list[Row]]]] = [
    Column("program", lambda of: str(of[0] + 1)),
    Column("answers", lambda of: str(len(of[1]))),
    Column(
        "seconds to an answer: median, 95%, longest",
        lambda of: _seconds(row["seconds"] for row in of[1]),
    ),
]

# ---- faults

_FOLDERS = re.compile(r"/(?:[^\s/]+/){2,}")  # of this machine


def is_proper(row: Row, which: str) -> bool:
    """Tell whether a request ended as it may under this fault, and in time."""
    how, may = row[which]["how"], row["ends"]
    told = how in ("answered", "error") or (how == may == "broken")
    return told and (how == "answered" or row[which]["after"] <= MOST_FAULT_S)


def failures_of_faults(result: Row) -> list[str]:
    """Return what does not hold of faults."""
    failures = []
    for row in result["rows"]:
        for which in ("streamed", "whole"):
            if not is_proper(row, which):
                end = row[which]
                failures.append(f"{row['fault']}: {which}: {end['how']} after {end['after']} s")
        if row["next"]["how"] != "answered":
            failures.append(f"{row['fault']}: the next request: {row['next']['message']}")
        if row["failure"]:
            failures.append(f"{row['fault']}: {row['failure']}")
    if result["left"]:
        failures.append(f"{len(result['left'])} processes outlive their command")
    return failures


def _end(which: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        end = row[which]
        if end["how"] == "answered":
            return "answered"
        if end["how"] != "error":
            words = "the connection breaks" if end["how"] == "broken" else end["how"]
        else:
            status = "in the stream" if end["status"] == 200 else str(end["status"])
            message = _FOLDERS.sub("…/", end["message"])
            words = f"{status}: {report.cell(message[:120])}"
        if end["after"] is None:
            return words
        # A fault that comes before the request can end it before it strikes.
        return f"{words}; {max(0.0, end['after']):.1f} s"

    return cell


def _next(row: Row) -> str:
    one = row["next"]
    return f"answered, {one['seconds']:.1f} s" if one["how"] == "answered" else one["how"]


_FAULTS: list[Column[Row]] = [
    Column("fault", lambda row: row["fault"]),
    Column("streamed", _end("streamed")),
    Column("whole", _end("whole")),
    Column("the next request", _next),
]


def faults_table(result: Row) -> str:
    """Return the table of faults, and what was left out."""
    lines = report.rows_table(_FAULTS, result["rows"])
    lines += ["", *(f"left out, for lack of mounts: {name}" for name in result["left_out"])]
    return "\n".join(lines)


# ---- the plot


def plot(result: Row, path: Path) -> None:
    """Draw memory and answers over time, and waiting times by program; InputError without
    matplotlib.
    """
    figure = report.figure(12, 3.4)
    memory, answers, waiting = figure.subplots(1, 3)
    minutes = [one["at"] / 60 for one in result["samples"]]
    for party, colour in _COLOURS.items():
        for part, style in (("supervisor", "-"), ("workers", ":")):
            values = [one[party][part] / _MIB for one in result["samples"]]
            memory.plot(minutes, values, style, color=colour, label=f"{party}, {part}")
    memory.set_yscale("log")
    memory.set(title="memory, MiB", xlabel="minutes")
    memory.legend(fontsize=7)
    answers.plot(minutes, [one["answered"] for one in result["samples"]], label="answered")
    waits = [one["requests"] for one in result["samples"]]
    answers.plot(minutes, waits, label="wait or are answered")
    answers.set(title="requests", xlabel="minutes")
    answers.legend(fontsize=7)
    of = by_conversation(result)
    seconds: Sequence[list[float]] = [[row["seconds"] for row in rows] for rows in of.values()]
    waiting.boxplot(seconds)
    waiting.set(title="seconds to an answer", xlabel="program")
    report.save(figure, path, 120)
