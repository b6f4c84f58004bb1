"""The figures of `experiment cost` for people: a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.op_report import count_text, mib_text, seconds_text
from spu_llm.errors import InputError

MOST = 8  # kinds of material that are listed


def table(result: dict[str, Any]) -> str:
    """One network's figures as Markdown."""
    machine, linear = result["machine"], result["linear"]
    lines = [
        f"network {result['network']}, both parties on {machine['cores']} cores; greedy, per "
        f"generated token. Drafted: {result['draft_length']} drafts a step, "
        f"{result['tokens_per_step']:.2f} tokens a step ({result['accepted']:.0%} of the drafts "
        "accepted), measured in plaintext on held-out prompts.",
        "",
        "| per token | seconds | speed-up | with offline: seconds | speed-up | bytes C→P "
        "| bytes P→C | messages | offline: seconds | bytes | messages |",
        "|---" * 11 + "|",
        *(_line(_per_token(row)) for row in result["rows"]),
        "",
        "| positions | seconds | of stock's step | messages | per block | one after the other "
        "| SPU segments | bytes C→P | bytes P→C | offline: seconds | bytes |",
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


def _per_token(row: dict[str, Any]) -> list[str]:
    ahead = row["offline"]
    return [
        row["name"],
        seconds_text(row["seconds"]),
        f"{row['speedup']:.1f}",
        seconds_text(row["seconds_with_offline"]),
        f"{row['speedup_with_offline']:.1f}",
        count_text(row["client_to_provider"]),
        count_text(row["provider_to_client"]),
        count_text(row["messages"]),
        seconds_text(ahead["seconds"]),
        count_text(ahead["client_to_provider"] + ahead["provider_to_client"]),
        count_text(ahead["messages"]),
    ]


def _stock_step(result: dict[str, Any]) -> list[str]:
    row = result["rows"][0]
    return [
        "1 (stock)", seconds_text(row["step_seconds"]), "1", count_text(row["messages"]),
        count_text(result["stock_messages_per_block"]), "", "1",
        count_text(row["client_to_provider"]), count_text(row["provider_to_client"]), "", "",
    ]  # fmt: skip


def _step(step: dict[str, Any]) -> list[str]:
    ahead = step["offline"]
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
        seconds_text(ahead["seconds"]),
        count_text(ahead["client_to_provider"] + ahead["provider_to_client"]),
    ]


def _material(result: dict[str, Any]) -> list[str]:
    """What the longest part of the making ahead goes into, for a drafted step."""
    (step,) = [s for s in result["lengths"] if s["positions"] == result["draft_length"] + 1]
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
    """Seconds per token and per step in one file; InputError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    draw_tokens(left, results)
    draw_lengths(right, results)
    figure.savefig(path, dpi=120, metadata={"Software": ""})
    pyplot.close(figure)


def draw_tokens(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    """Seconds per token, a group of bars per network: online, and faint with what is made ahead."""
    names = [row["name"] for row in results[0]["rows"]]
    width = 0.8 / (2 * len(names) - 1)  # the stock path makes nothing ahead
    for i, name in enumerate(names):
        rows = [result["rows"][i] for result in results]
        color = "0.6" if i == 0 else f"C{i - 1}"
        ways = [("seconds", "speedup", 1.0), ("seconds_with_offline", "speedup_with_offline", 0.4)]
        for j, (seconds, speedup, alpha) in enumerate(ways[: 1 if i == 0 else 2]):
            places = [group + (max(0, 2 * i - 1) + j) * width for group in range(len(results))]
            label = name if j == 0 else f"{name}, with offline"
            heights = [row[seconds] for row in rows]
            axes.bar(places, heights, width, color=color, alpha=alpha, label=label)
            for x, row in zip(places, rows if i else [], strict=False):
                text = f"{row[speedup]:.1f}x"
                axes.annotate(text, (x, row[seconds]), ha="center", va="bottom", fontsize=7)
    axes.set_yscale("log")
    axes.margins(y=0.1)
    axes.set_xticks([group + 0.4 - width / 2 for group in range(len(results))])
    axes.set_xticklabels([result["network"] for result in results])
    axes.set_ylabel("seconds per generated token")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncol=3)


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
