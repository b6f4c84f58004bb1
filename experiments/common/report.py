"""What reports for people share: Markdown tables, where one comes from, and figures that plots are
drawn into.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spu_llm.core.errors import InputError


def line(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [line(heads), "|---" * len(heads) + "|", *map(line, rows)]


def criterion(name: str, bound: str, value: str, *, holds: bool) -> str:
    """A criterion in one line."""
    return f"criterion {name}, {bound}: {value}: {'holds' if holds else 'does not hold'}"


def origin(machine: Mapping[str, Any], file: str, note: str = "") -> str:
    """Where a table of RESULTS.md comes from, as it stands under the table: from the study's record
    of its machine, and its JSON. `note`: a word on what load means for it.
    """
    before, last = machine["load"]
    load = f"load {before:.1f} before, {last:.1f} at the end" + (f" ({note})" if note else "")
    return (
        f"*Commit {machine['commit']}, {machine['date'][:10]}; {machine['cores']} cores, "
        f"{machine['memory_gib']:.0f} GiB; {load}; [data]({file}).*"
    )


def both_ways(cost: Mapping[str, Any]) -> Any:
    """Bytes of both directions together."""
    return cost["client_to_provider"] + cost["provider_to_client"]


def figure(width: float, height: float) -> Any:
    """An empty matplotlib figure of this size (inches); InputError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path, dpi: int) -> None:
    """Without the library's version, so that equal figures are equal files."""
    figure.savefig(path, dpi=dpi, metadata={"Software": ""})
