"""Report of `bench verify`: failures, the criterion, a table, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.op_report import count_text, mib_text, seconds_text
from experiments.common import report

BLOCK_ERROR = 0.05  # largest of SPU's block's rows, in standard deviations
SHARE = 0.25  # of a block's seconds: what verification from logits may take

# Table 2 of the POST paper: Vicuna-7B, 32,000 tokens, 64 vCPU; seconds by network, draft length.
PAPER_VOCAB = 32000
PAPER = {
    ("lan", 4): {"block": 7.11, "naive": 14.78, "post": 1.19},
    ("lan", 8): {"block": 8.67, "naive": 28.26, "post": 1.45},
    ("wan", 4): {"block": 20.32, "naive": 24.44, "post": 3.04},
    ("wan", 8): {"block": 22.49, "naive": 46.62, "post": 4.12},
}


def failures(
    rows: Sequence[dict[str, Any]], blocks: Sequence[dict[str, Any]], network: str
) -> list[str]:
    """Describe the failures: mistakes of verification, errors of SPU's block above BLOCK_ERROR."""
    reasons = [
        f"{row['variant']} from {row['source']}, {row['draft_length']} drafts, {network}: {text}"
        for row in rows
        for text in row["mistakes"]
    ]
    for block in blocks:
        for name in ("norms", "slice"):
            for measured in (block["measured"], block["measured_local"]):
                if not measured[name]["error"] < BLOCK_ERROR:
                    reasons.append(
                        f"SPU's block, {block['draft_length']} drafts: {name}: off by "
                        f"{measured[name]['error']:.3f} standard deviations"
                    )
    return list(dict.fromkeys(reasons))


def criterion(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tell, per draft length, whether verification by `token` from logits takes at most SHARE of
    the seconds of SPU's block. The result is empty when one of the two was not measured.
    """
    return [
        {name: row[name] for name in ("draft_length", "ratio", "ratio_with_offline")}
        | {"holds": row["ratio"] <= SHARE}
        for row in rows
        if (row["variant"], row["source"]) == ("token", "logits") and row["ratio"] is not None
    ]


# ---- the table


HEADS = (
    "drafts",
    "what",
    "from",
    "seconds",
    "/block ˢ",
    "paper: s",
    "bytes C→P",
    "bytes P→C",
    "messages",
    "delays",
    "ahead: s",
    "ahead: C→P",
    "ahead: P→C",
    "ahead: messages",
    "peak MiB C, P",
    "grown",
)
# Of several results in one table: what online bytes and messages, which are exact, leave to say.
TOGETHER = (
    "drafts",
    "what",
    "from",
    "seconds",
    "/block ˢ",
    "paper: s",
    "ahead: s",
    "ahead: C→P",
    "ahead: P→C",
    "ahead: messages",
    "peak MiB C, P",
)


def table(result: dict[str, Any]) -> str:
    """Format one network's medians as Markdown."""
    first = result["memory_after_warm_up"]
    lines = [
        f"network {result['network']}: verification of drafts over {result['vocab']:,} tokens; "
        f"medians of {result['repeat']} runs, both parties on {result['machine']['cores']} cores.",
        "`ahead` is the material of one call, made before; `delays` are messages one after the "
        "other; `/block` is to SPU's decoder block, scaled (ˢ) from a slice, in brackets with what "
        "is made ahead, which SPU makes on the way; the paper's seconds (Table 2) are Vicuna-7B's "
        "on 64 vCPU.",
        f"resident after warm-up: {mib_text(first['client'])} MiB client, "
        f"{mib_text(first['provider'])} MiB provider; `grown` is since the row began, material "
        "included (little where an earlier row left room).",
        "",
        *report.table(HEADS, _rows(result)),
    ]
    lines += ["", *(f"note: {text}" for text in _notes(result))]
    lines += ["", "outcomes: " + ("; ".join(result["failures"]) or "all as in plaintext")]
    return "\n".join(lines)


def together(results: Sequence[dict[str, Any]]) -> list[str]:
    """Format the medians of several networks and vocabularies as one table."""
    places = [HEADS.index(head) for head in TOGETHER]
    rows = [
        [result["network"], f"{result['vocab']:,}", *(cells[i] for i in places)]
        for result in results
        for cells in _rows(result)
    ]
    return report.table(["network", "tokens", *TOGETHER], rows)


def _rows(result: dict[str, Any]) -> list[list[str]]:
    """Return, for each draft length, the rows of the block and of all variants, under `HEADS`."""
    cells = []
    for count in dict.fromkeys(row["draft_length"] for row in result["rows"]):
        blocks = [block for block in result["blocks"] if block["draft_length"] == count]
        chosen = [row for row in result["rows"] if row["draft_length"] == count]
        cells += [_block_cells(block, result) for block in blocks]
        cells += [_cells(row, result) for row in chosen]
    return cells


def _paper(result: dict[str, Any], count: int, name: str) -> str:
    seconds = PAPER.get((result["network"], count), {}).get(name)
    return f"{seconds:.2f}" if seconds and result["vocab"] == PAPER_VOCAB else ""


def _cells(row: dict[str, Any], result: dict[str, Any]) -> list[str]:
    offline = row["offline"]
    return [
        str(row["draft_length"]),
        row["variant"],
        row["source"],
        seconds_text(row["seconds"]),
        _shares(row) if row["ratio"] else "",
        _paper(result, row["draft_length"], row["variant"]),
        count_text(row["client_to_provider"]),
        count_text(row["provider_to_client"]),
        count_text(row["messages"]),
        str(row["delays"]),
        seconds_text(offline["seconds"]),
        count_text(offline["client_to_provider"]),
        count_text(offline["provider_to_client"]),
        count_text(offline["messages"]),
        *_memory(row),
    ]


def _shares(row: dict[str, Any]) -> str:
    return f"{report.three(row['ratio'])} ({report.three(row['ratio_with_offline'])})"


def _block_cells(block: dict[str, Any], result: dict[str, Any]) -> list[str]:
    count = block["draft_length"]
    return [
        str(count),
        "SPU's decoder block",
        f"1/{block['slices']} of it",
        f"{seconds_text(block['seconds'])} ˢ",
        "1",
        _paper(result, count, "block"),
        *(
            f"≥ {count_text(block[name])}"
            for name in ("client_to_provider", "provider_to_client", "messages")
        ),
        *[""] * 5,
        *_memory(block["measured_local"]["slice"]),
    ]


def _memory(measured: dict[str, Any]) -> list[str]:
    """Return both parties' memory in MiB: the peaks, and their growth since the row began."""
    return [
        ", ".join(map(mib_text, measured[name].values()))
        for name in ("peak_memory", "memory_growth")
    ]


def _notes(result: dict[str, Any]) -> list[str]:
    """Describe how SPU's block was measured, and whether the criterion holds."""
    if not result["blocks"]:
        return ["SPU's decoder block was not measured"]
    slices = result["blocks"][0]["slices"]
    remarks = [
        f"SPU's decoder block, of LLaMA-7B's shape: norms + {slices} x (slice - norms) on the "
        f"local network, with a slice of 1/{slices} of heads and feed-forward, run once. What this "
        "network adds to the slice is added unscaled: a whole block takes longer. Bytes, messages "
        "and memory are the slice's."
    ]
    for one in result["criterion"]:
        holds = "holds" if one["holds"] else "does not hold"
        remarks.append(
            f"criterion, token from logits at most {SHARE} of SPU's block: "
            f"{one['draft_length']} drafts: {one['ratio']:.4f}: {holds} (with what is made ahead: "
            f"{one['ratio_with_offline']:.4f})"
        )
    return remarks


# ---- the plot


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw seconds of every variant as grouped bars, a panel per network; InputError without
    matplotlib.
    """
    figure = report.figure(1.5 + 4 * len(results), 4)
    grid = figure.subplots(1, len(results), squeeze=False, sharey=True)
    for result, axes in zip(results, grid[0], strict=True):
        _bars(axes, result)
        axes.set_title(f"{result['network']}, {result['vocab']:,} tokens", fontsize=10)
    grid[0][0].set_ylabel("seconds")
    grid[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    report.save(figure, path, dpi=120)


def _bars(axes: Any, result: dict[str, Any]) -> None:
    """Draw a group of bars per draft length: the block, then the variants; the paper's figures are
    strokes.
    """
    rows, blocks = result["rows"], result["blocks"]
    bars = {("block", "", block["draft_length"]): block for block in blocks}
    bars |= {(row["variant"], row["source"], row["draft_length"]): row for row in rows}
    kinds = list(dict.fromkeys((name, source) for name, source, _ in bars))
    lengths = list(dict.fromkeys(row["draft_length"] for row in rows))
    width = 0.8 / len(kinds)
    names = dict.fromkeys(name for name, _ in kinds if name != "block")
    colors = {"block": "0.6"} | {name: f"C{i}" for i, name in enumerate(names)}
    for i, (name, source) in enumerate(kinds):
        label = f"{name} from {source}" if source else "SPU's decoder block"
        places = [group + i * width for group in range(len(lengths))]
        seconds = [bars[name, source, count]["seconds"] for count in lengths]
        faint = 0.55 if source == "probabilities" else 1.0
        axes.bar(places, seconds, width, label=label, color=colors[name], alpha=faint)
    marks = [
        (group + i * width, float(paper))
        for group, count in enumerate(lengths)
        for i, (name, _) in enumerate(kinds)
        if (paper := _paper(result, count, name))
    ]
    if marks:
        axes.scatter(*zip(*marks, strict=True), marker="_", color="black", label="paper, 64 vCPU")
    axes.set_xticks([g + 0.4 - width / 2 for g in range(len(lengths))])
    axes.set_xticklabels([f"{count} drafts" for count in lengths])
    axes.set_yscale("log")
    axes.grid(alpha=0.3, axis="y")
    axes.tick_params(labelsize=8)
