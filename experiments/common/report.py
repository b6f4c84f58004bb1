"""Parts that reports share: Markdown tables, quantities as text, and figures for plots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Generic, TypeVar

from spu_llm.core.errors import InputError

R = TypeVar("R")
Files = Mapping[str, dict[str, Any]]  # results by name
Text = Callable[[float], str]
# Kinds of files that a figure is written to, and the metadata without which equal ones are equal.
PLOTS: dict[str, dict[str, str | None]] = {
    ".png": {"Software": ""},
    ".svg": {"Creator": "", "Date": None},
    ".pdf": {"Creator": "", "Producer": "", "CreationDate": None},
}
QUIET = 0.2  # cores busy with other work, beside which seconds still count


def line(cells: Iterable[str]) -> str:
    """Write a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [line(heads), "|---" * len(heads) + "|", *map(line, rows)]


@dataclass(frozen=True)
class Column(Generic[R]):
    """A figure of records, as text: a column of `rows_table`, a row of `figures_table`."""

    head: str
    cell: Callable[[R], str]


def rows_table(columns: Sequence[Column[R]], rows: Iterable[R]) -> list[str]:
    """Return the lines of a Markdown table of records, a row each; nothing where there are none."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    return table([column.head for column in columns], cells) if cells else []


def figures_table(head: str, figures: Iterable[Column[R]], records: Mapping[str, R]) -> list[str]:
    """Return the lines of a Markdown table with a row for each figure, a column for each record."""
    rows = ([figure.head, *map(figure.cell, records.values())] for figure in figures)
    return table([head, *records], rows)


def cell(text: str) -> str:
    """Write any text as a cell of a Markdown table: on one line, with `|` escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def criterion(name: str, bound: str, value: str, *, holds: bool) -> str:
    """Write a criterion, its value, and whether it holds, on one line."""
    return f"criterion {name}, {bound}: {value}: {'holds' if holds else 'does not hold'}"


def three(x: float) -> str:
    """Write a number to three significant digits."""
    return f"{Decimal(f'{x:.3g}').normalize():f}"


def bytes_text(count: float) -> str:
    """Write a number of bytes to three significant digits, in MB, kB or B."""
    for unit, least in (("MB", 10**6), ("kB", 10**3)):
        if count >= least:
            return f"{three(count / least)} {unit}"
    return f"{round(count)} B"


def duration_text(seconds: float) -> str:
    """Write seconds to three significant digits, in s or ms."""
    return f"{three(seconds)} s" if seconds >= 1 else f"{three(1e3 * seconds)} ms"


def spread(values: Iterable[float], text: Text) -> str:
    """Return median, smallest and largest, as text."""
    ordered = sorted(values)
    if not ordered:
        return ""
    middle = text(statistics.median(ordered))
    return middle if len(ordered) == 1 else f"{middle} ({text(ordered[0])} to {text(ordered[-1])})"


def both_ways(cost: Mapping[str, Any]) -> Any:
    """Add up the bytes of both directions."""
    return cost["client_to_provider"] + cost["provider_to_client"]


def figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of this size (inches); InputError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path, dpi: int) -> None:
    """Write a figure to a file of one of the kinds in PLOTS, by its name's end, without the
    library's version and the time, so that equal figures give equal files.
    """
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "spu-llm"}):
        figure.savefig(path, dpi=dpi, metadata=PLOTS[path.suffix.lower()])
