"""The figures of `experiment cost` for people: a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.op_report import count_text, mib_text, seconds_text
from spu_llm.core.errors import InputError

MOST = 8  # kinds of material that are listed


def table(result: dict[str, Any]) -> str:
    """One network's figures as Markdown."""
    machine, linear = result["machine"], result["linear"]
    lines = [
        f"network {result['network']}, both parties on {machine['cores']} cores; greedy, per step. "
        "Ahead: what a step takes of its batches; without the cache's tiles and the set-up.",
        "",
        "| positions | seconds | of stock's step | messages | per block | one after the other "
        "| SPU segments | bytes C→P | bytes P→C | ahead: seconds | bytes |",
        "|---" * 11 + "|",
        _line(_stock_step(result)),
        *(_line(_step(step)) for step in result["lengths"]),
        "",
        f"a further position: {result['marginal_seconds']:.3f} s",
        "linear layers, embedding and head at one position: stock "
        f"{seconds_text(linear['stock_seconds'])} s, {count_text(linear['stock_bytes'])} bytes, on "
        "the way; ours "
        f"{seconds_text(linear['ours_seconds'])} s, {count_text(linear['ours_bytes'])} bytes, "
        "made ahead",
        *(
            f"peak memory, {name}: client {mib_text(sizes['client'])} MiB, provider "
            f"{mib_text(sizes['provider'])} MiB"
            for name, sizes in result["peak_memory"].items()
        ),
        *(
            f"prefill, {name}: {cost['seconds']:.1f} s, {cost['messages']} messages"
            for name, cost in result["prefill"].items()
        ),
        "",
        *_material(result),
        "",
        *(_criterion(one) for one in result["criteria"]),
        "outcomes: " + ("; ".join(result["failures"]) or "as in plaintext"),
    ]
    return "\n".join(lines)


def _stock_step(result: dict[str, Any]) -> list[str]:
    step = result["stock_step"]
    return [
        "1 (stock)", seconds_text(step["seconds"]), "1", count_text(step["messages"]),
        count_text(result["stock_messages_per_block"]), "", "1",
        count_text(step["client_to_provider"]), count_text(step["provider_to_client"]), "", "",
    ]  # fmt: skip


def _step(step: dict[str, Any]) -> list[str]:
    offline = step["offline"]
    return [
        str(step["positions"]),
        seconds_text(step["seconds"]),
        f"{step['of_stock']:.3f}",
        count_text(step["messages"]),
        count_text(step["messages_per_block"]),
        str(step["chain"]),
        str(step["segments"]),
        count_text(step["client_to_provider"]),
        count_text(step["provider_to_client"]),
        seconds_text(offline["seconds"]),
        count_text(offline["client_to_provider"] + offline["provider_to_client"]),
    ]


def _material(result: dict[str, Any]) -> list[str]:
    """What the longest part of the making ahead goes into, for the longest step."""
    step = result["lengths"][-1]
    made = sorted(step["material"].items(), key=lambda item: -item[1]["seconds"])
    lines = [f"made ahead for a step of {step['positions']} positions, by kind:"]
    for name, cost in made[:MOST]:
        size = cost["client_to_provider"] + cost["provider_to_client"]
        lines.append(
            f"- {name}: {count_text(cost['units'])} units, {seconds_text(cost['seconds'])} s, "
            f"{count_text(size)} bytes"
        )
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _criterion(one: dict[str, Any]) -> str:
    relation = "at least" if one["least"] else "at most"
    holds = "holds" if one["holds"] else "does not hold"
    if "memory" in one["name"]:
        value, bound = f"{mib_text(one['value'])} MiB", f"{mib_text(one['bound'])} MiB"
    else:
        value, bound = f"{one['value']:.3g}", f"{one['bound']:g}"
    return f"criterion {one['name']}, {relation} {bound}: {value}: {holds}"


# ---- the plot


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds per step against its positions; InputError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from None
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    draw_lengths(axes, results)
    figure.savefig(path, dpi=120, metadata={"Software": ""})
    pyplot.close(figure)


def draw_lengths(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    """A step of ours against its positions, in steps of the stock path of one position."""
    for result in results:
        steps = result["lengths"]
        xs, ys = [s["positions"] for s in steps], [s["of_stock"] for s in steps]
        axes.plot(xs, ys, "o-", label=result["network"])
    axes.axhline(1.0, color="0.6", linestyle="--", label="stock, one position")
    axes.set_xticks([s["positions"] for s in results[0]["lengths"]])
    axes.set_xlabel("positions in one step of ours")
    axes.set_ylabel("seconds, in stock's of one position")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
