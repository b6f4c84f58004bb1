"""The README's headline and figure: an emitted token in complete generations, on one network.

Medians over all runs of a system, greedy and sampled alike, as
`experiments.completions.report.plot` has them.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common import report
from experiments.common.report import both_ways
from experiments.completions.report import FIGURES, choose, groups, hints, online

# Okabe and Ito's palette: told apart by readers who do not see all colours.
WAYS = {
    "stock": ("GPT-2 whole in SPU", "#555555"),
    "ours-standard": ("spu-llm, one token a step", "#0072B2"),
    "ours-drafted": ("spu-llm, drafted", "#D55E00"),
}
PLACES = {"local": "over loopback", "lan": "on an emulated LAN", "wan": "on an emulated WAN"}


def main_group(data: dict[str, Any]) -> tuple[str, int]:
    """Return the network and length that there are most runs of; of several such the last, slowest
    one.
    """
    there = groups(data)
    return max(reversed(there), key=lambda group: len(there[group]))


def draw_traffic(axes: Sequence[Any], data: dict[str, Any]) -> None:
    """Draw bytes and messages of an emitted token, and with a third of `axes` seconds: a bar for
    each system, online solid, the rest of everything hatched; lines beside a bar: ranges of
    seconds.
    """
    network, tokens = main_group(data)
    records = groups(data)[network, tokens]
    systems = [s for s in WAYS if choose(records, s)]
    panels: list[tuple[str, str, float]] = [
        ("MB per token", "bytes", 1e6),
        ("messages per token", "messages", 1.0),
        (f"seconds per token, {network}", "seconds", 1.0),
    ]
    for panel, (title, unit, scale) in zip(axes, panels, strict=False):
        for y, system in enumerate(systems):
            color = WAYS[system][1]
            chosen = choose(records, system)
            heights = [[figure(r, unit) / scale for r in chosen] for figure in FIGURES.values()]
            inner, outer = map(statistics.median, heights)
            panel.barh(y, inner, 0.62, color=color)
            panel.barh(
                y, outer - inner, 0.62, left=inner, color="white", edgecolor=color, hatch="////"
            )
            lines, right = [], outer
            for values, word, edge in zip(
                heights, ("online", "in all"), (y - 0.37, y + 0.37), strict=True
            ):
                text = f"{_figure(statistics.median(values))} {word}"
                if unit == "seconds":
                    panel.hlines(edge, min(values), max(values), color=color, linewidth=1.5)
                    text += f" ({_figure(min(values))} to {_figure(max(values))})"
                    right = max(right, max(values))
                lines.append(text)
            panel.annotate(
                "\n".join(lines),
                (right, y),
                (5, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        panel.set_title(title, loc="left")
        panel.set_yticks(range(len(systems)), [WAYS[s][0] for s in systems])
        panel.tick_params(left=False)
        panel.set_xticks([])
        panel.invert_yaxis()
        panel.margins(x=0.8 if unit == "seconds" else 0.5)
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    for panel in axes[1:]:
        panel.set_yticklabels([])
    axes[-1].set_xlabel(
        "medians; solid: online; hatched: the rest of a session, but for the hint", loc="right"
    )


def plot_traffic(data: dict[str, Any], path: Path, *, timed: bool) -> None:
    """Write `draw_traffic` to a file, on white, so that it can stand on any page; in an SVG, text
    stays text. `timed`: whether seconds are shown.
    """
    from matplotlib import rc_context

    style: Any = {"font.size": 11, "svg.fonttype": "none", "svg.hashsalt": "spu-llm"}
    style["figure.constrained_layout.w_pad"] = 0.12  # inches: another font may run wider
    with rc_context(style):
        count = 3 if timed else 2
        figure = report.figure(2 + 4 * count, 2.6)
        draw_traffic(figure.subplots(1, count), data)
        figure.savefig(path, metadata={"Date": None})


def headline(data: dict[str, Any], *, timed: bool) -> str:
    """Describe a token in sentences, as Markdown; `timed`: whether seconds are shown."""
    network, tokens = main_group(data)
    records = groups(data)[network, tokens]

    def of(figure: str, unit: str, system: str = "ours-drafted") -> str:
        """Return the median over all runs of a system."""
        values = [FIGURES[figure](r, unit) for r in choose(records, system)]
        return _figure(statistics.median(values) / (1e6 if unit == "bytes" else 1.0))

    def sent(figure: str, system: str = "ours-drafted") -> str:
        return f"{of(figure, 'messages', system)} messages and {of(figure, 'bytes', system)} MB"

    drafted, stock = (choose(records, system) for system in ("ours-drafted", "stock"))
    texts = [
        f"A token of a completion of {tokens} by the demo's private model, drafted, against the "
        "same GPT-2 compiled whole by SPU (medians over complete two-party runs: "
        f"{len(drafted)} drafted, {len(stock)} stock):",
        f"- **{sent('online')} a token online**, against {sent('online', 'stock')}; with "
        f"everything from launch to end {sent('everything')}, against "
        f"{sent('everything', 'stock')}.",
    ]
    if timed:
        seconds = [online(r, "seconds") for r in drafted]
        texts.append(
            f"- **{of('online', 'seconds')} s a token online {PLACES[network]}** "
            f"({_figure(min(seconds))} to {_figure(max(seconds))}), against "
            f"{of('online', 'seconds', 'stock')} s; with everything "
            f"{of('everything', 'seconds')} s, against "
            f"{of('everything', 'seconds', 'stock')} s (two cores for both parties together)."
        )
    fetching = [r["asked"]["network"] for r in data["runs"] if hints([r])]
    if fetching:
        # Each network's client fetches it once: here, or where else it was measured.
        place = network if network in fetching else fetching[0]
        fetched = hints([r for r in data["runs"] if r["asked"]["network"] == place])
        size, seconds = sum(map(both_ways, fetched)) / 1e6, sum(h["seconds"] for h in fetched)
        texts.append(
            f"- Before its first completion a client fetches a hint of the model, {size:.0f} MB, "
            "which it keeps. These figures are without it; spread over the tokens of that one "
            f"completion it is {_figure(size / tokens)} MB and, fetched {PLACES[place]}, "
            f"{_figure(seconds / tokens)} s more for each."
        )
    first, *bullets = (
        textwrap.fill(
            text,
            100,
            subsequent_indent="  " if text.startswith("-") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for text in texts
    )
    return "\n".join([first, "", *bullets])


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
