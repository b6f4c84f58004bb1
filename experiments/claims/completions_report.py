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

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.op_report import count_text, mib_text
from experiments.claims.completions import SYSTEMS
from spu_llm.core.errors import InputError

Record = dict[str, Any]
Figure = Callable[[Record], float]

AMORTISED = (64, 512)  # tokens
QUIET = 0.2  # cores busy with other work, beside which seconds still count
# What the project asks for: seconds per token of the stock path, in ours with drafts.
WANTED_ONLINE = {"local": 4.0, "lan": 8.0, "wan": 8.0}
WANTED_EVERYTHING = 3.0


# ---- figures of one run


def _scaled(record: Record, part: str, unit: str) -> float:
    """Of a part; of a stock run that ended early, as if it had gone on."""
    value: float = _size(record["costs"][part], unit)
    asked = record["asked"]
    if asked["stock_tokens"] is not None and part == "decode":
        value *= (asked["tokens"] - 1) / (asked["stock_tokens"] - 1)
    return value


def _size(cost: dict[str, Any], unit: str) -> float:
    if unit == "bytes":
        return float(cost["client_to_provider"] + cost["provider_to_client"])
    return float(cost[unit])


def emitted(record: Record) -> int:
    """Tokens; of a stock run that ended early those that it stands for."""
    if record["asked"]["stock_tokens"] is not None:
        return int(record["asked"]["tokens"])
    return int(record["emitted"])


def online(record: Record, unit: str) -> float:
    """Prefill and decode, per emitted token."""
    parts = ("prefill", "decode")
    return sum(_scaled(record, part, unit) for part in parts) / emitted(record)


def everything(record: Record, unit: str) -> float:
    """All that the session took, per emitted token."""
    parts = ("launch", "set_up", "material", "planning", "prefill", "decode")
    return sum(_scaled(record, part, unit) for part in parts) / emitted(record)


def amortised(record: Record, unit: str, tokens: int) -> float:
    """Derived: per token, when the session goes on for so many."""
    costs = record["costs"]
    left_over = _size(costs["material"], unit) - _size(costs["used_material"], unit)
    fixed = _size(costs["launch"], unit) + _size(costs["set_up"], unit) + left_over
    return fixed / tokens + everything(record, unit) - fixed / emitted(record)


def tokens_per_step(record: Record) -> float:
    """Of the decode steps; the prefill emits the first token. The end may cut the last step."""
    return float(record["emitted"] - 1) / record["steps"] if record["steps"] else 1.0


# ---- over runs


def spread(values: Iterable[float], text: Callable[[float], str]) -> str:
    """Median, smallest and largest."""
    found = sorted(values)
    if not found:
        return ""
    middle = text(statistics.median(found))
    return middle if len(found) == 1 else f"{middle} ({text(found[0])} to {text(found[-1])})"


def groups(data: dict[str, Any]) -> list[tuple[str, int]]:
    """The networks and lengths that there are runs of."""
    asked = [record["asked"] for record in data["runs"]]
    return list(dict.fromkeys((a["network"], a["tokens"]) for a in asked))


def of_group(data: dict[str, Any], network: str, tokens: int) -> list[Record]:
    """The runs on a network of completions of some length that emitted anything. A whole stock run
    stands before one that ended early.
    """
    chosen: dict[tuple[str, ...], Record] = {}
    for record in data["runs"]:
        asked = record["asked"]
        key = (asked["prompt"], asked["mode"], asked["system"])
        if (asked["network"], asked["tokens"]) == (network, tokens) and record["emitted"]:
            before = chosen.get(key)
            if before is None or before["emitted"] <= record["emitted"]:
                chosen[key] = record
    return list(chosen.values())


def choose(records: Sequence[Record], system: str, mode: str | None = None) -> list[Record]:
    return [
        r for r in records
        if r["asked"]["system"] == system and mode in (None, r["asked"]["mode"])
    ]  # fmt: skip


def ratios(
    records: Sequence[Record], system: str, mode: str | None, figure: Figure
) -> list[float]:
    """The stock path's figure through ours, prompt by prompt."""
    stock = {r["asked"]["prompt"]: figure(r) for r in choose(records, "stock")}
    ours = choose(records, system, mode)
    return [stock[p] / figure(r) for r in ours if (p := r["asked"]["prompt"]) in stock]


def modes_of(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Systems with the modes that there are runs in, in the order of the table."""
    there = {(r["asked"]["system"], r["asked"]["mode"]) for r in records}
    order = [(s, m) for s in SYSTEMS for m in ("greedy", "sampled")]
    return [pair for pair in order if pair in there]


# ---- the tables


def table(data: dict[str, Any]) -> str:
    """All groups as Markdown, with what the runs were made on."""
    lines = [*_circumstances(data), ""]
    for network, tokens in groups(data):
        records = of_group(data, network, tokens)
        if records:
            lines += [*_seconds(records, network, tokens), "", *_traffic(records), ""]
            lines += [*_ratios(records), "", *_texts(records), "", *_hint(records)]
            lines += [*_criteria(records, network), ""]
    failures = [text for record in data["runs"] for text in record["failures"]]
    lines.append("outcomes: " + ("; ".join(failures) or "as in plaintext, near-ties apart"))
    return "\n".join(lines)


def _circumstances(data: dict[str, Any]) -> list[str]:
    runs = data["runs"]
    machines = {f"{r['machine']['cores']} cores, {r['machine']['processor']}" for r in runs}
    commits = {r["commit"] for r in runs}
    loud = sum(r["others"] > QUIET for r in runs)
    lines = [
        f"{len(runs)} runs on {'; '.join(sorted(machines))}; commits {', '.join(sorted(commits))}; "
        f"{min(r['date'] for r in runs)[:10]} to {max(r['date'] for r in runs)[:10]}; "
        f"{len(data['failed'])} runs broke off and count nowhere",
        f"other work on the machine, in cores: {spread((r['others'] for r in runs), _two)}; load "
        f"average at the start {spread((r['load_start'] for r in runs), _two)}, at the end "
        f"{spread((r['load_end'] for r in runs), _two)}",
    ]
    if loud:
        lines.append(f"NOT QUIET: {loud} runs had more than {QUIET} cores of other work beside "
                     "them; their seconds say little")  # fmt: skip
    return lines


def _mb(size: float) -> str:
    return f"{size / 1e6:.2f}"


def _two(x: float) -> str:
    return f"{x:.2f}"


def _head(*names: str) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _name(records: Sequence[Record], system: str, mode: str) -> str:
    short = [r["asked"]["stock_tokens"] for r in choose(records, system, mode)]
    ended = [n for n in short if n is not None]
    return f"{system}, {mode}" + (f", +ended after {min(ended)} tokens" if ended else "")


def _each(
    records: Sequence[Record], figures: Sequence[tuple[Figure, Callable[[float], str]]]
) -> list[str]:
    """A row for each system and mode: its name, its runs, and the spread of each figure."""
    lines = []
    for system, mode in modes_of(records):
        chosen = choose(records, system, mode)
        cells = [spread((figure(r) for r in chosen), text) for figure, text in figures]
        lines.append(_row([_name(records, system, mode), str(len(chosen)), *cells]))
    return lines


def _seconds(records: Sequence[Record], network: str, tokens: int) -> list[str]:
    ways: list[tuple[Figure, Callable[[float], str]]] = [
        (lambda r: online(r, "seconds"), seconds_short),
        (lambda r: everything(r, "seconds"), seconds_short),
        *((lambda r, n=n: amortised(r, "seconds", n), seconds_short) for n in AMORTISED),  # type: ignore[misc]
        (tokens_per_step, _two),
        (lambda r: float(r["steps"]), lambda x: f"{x:.0f}"),
    ]
    return [
        f"network {network}, completions of {tokens} tokens; seconds per emitted token, median "
        "(smallest to largest); + is derived",
        "",
        *_head("system", "runs", "online", "everything, first completion",
               *(f"+ over {n} tokens" for n in AMORTISED), "tokens a step", "steps"),
        *_each(records, ways),
    ]  # fmt: skip


def _traffic(records: Sequence[Record]) -> list[str]:
    ways: list[tuple[Figure, Callable[[float], str]]] = [
        (lambda r: online(r, "bytes"), _mb),
        (lambda r: everything(r, "bytes"), _mb),
        *((lambda r, n=n: amortised(r, "bytes", n), _mb) for n in AMORTISED),  # type: ignore[misc]
        (lambda r: online(r, "messages"), count_text),
        (lambda r: everything(r, "messages"), count_text),
        (lambda r: float(max(r["peak_memory"].values())), lambda size: mib_text(int(size))),
    ]
    return [
        *_head("per emitted token", "runs", "MB online", "everything",
               *(f"+ over {n} tokens" for n in AMORTISED), "messages online", "everything",
               "peak MiB of a worker"),
        *_each(records, ways),
    ]  # fmt: skip


def _ratios(records: Sequence[Record]) -> list[str]:
    lines = _head("stock's seconds in ours, by prompt", "pairs", "online", "everything",
                  *(f"+ over {n} tokens" for n in AMORTISED))  # fmt: skip
    ways: list[Figure] = [
        lambda r: online(r, "seconds"),
        lambda r: everything(r, "seconds"),
        *((lambda r, n=n: amortised(r, "seconds", n)) for n in AMORTISED),  # type: ignore[misc]
    ]
    for system, mode in modes_of(records):
        pairs = ratios(records, system, mode, ways[0])
        if system != "stock" and pairs:
            cells = [spread(ratios(records, system, mode, way), _times) for way in ways]
            lines.append(_row([f"{system}, {mode}", str(len(pairs)), *cells]))
    return lines


def _times(x: float) -> str:
    return f"{x:.1f}" if x < 100 else f"{x:.0f}"


def _texts(records: Sequence[Record]) -> list[str]:
    lines = _head("text", "runs", "repeated tokens", "tokens", "as in plaintext")
    for system, mode in modes_of(records):
        chosen = choose(records, system, mode)
        lines.append(_row([
            f"{system}, {mode}", str(len(chosen)),
            spread((r["repetition"] for r in chosen), lambda x: f"{x:.0%}"),
            spread((r["emitted"] for r in chosen), lambda x: f"{x:.0f}"),
            _as_in_plaintext(chosen),
        ]))  # fmt: skip
    return lines


def _as_in_plaintext(records: Sequence[Record]) -> str:
    count = sum(r["emitted"] for r in records)
    if "same_as_plaintext" in records[0]:
        same = sum(r["same_as_plaintext"] for r in records)
        return f"{same} of {count} until a draw falls otherwise"
    ties, largest = (f(r[k] for r in records) for f, k in
                     ((sum, "near_ties"), (max, "largest_margin")))  # fmt: skip
    return f"{count - ties} of {count}; {ties} near-ties, {largest:.3f} below at most"


def _hint(records: Sequence[Record]) -> list[str]:
    """Of the runs that fetched a part of it: hidden progress takes one table more."""
    found = [r["costs"]["hint"] for r in records]
    found = [cost for cost in found if _size(cost, "bytes") > 1e6]
    if not found:
        return []
    size, seconds = (sum(_size(cost, unit) for cost in found) for unit in ("bytes", "seconds"))
    return [
        f"hint, once for a client and a model, not in these tables: {_mb(size)} MB, "
        f"{seconds_short(seconds)} s",
        "",
    ]


def _criteria(records: Sequence[Record], network: str) -> list[str]:
    lines = []
    for name, figure, bound in (
        ("online", online, WANTED_ONLINE[network]),
        ("with everything", everything, WANTED_EVERYTHING),
    ):
        found = ratios(records, "ours-drafted", None, lambda r, f=figure: f(r, "seconds"))  # type: ignore[misc]
        if found:
            middle = statistics.median(found)
            holds = "holds" if middle >= bound else "does not hold"
            lines.append(f"criterion {name}, at least {bound:g} times less: {middle:.1f}: {holds}")
    return lines


# ---- the plot


# Okabe and Ito's palette, told apart by shape as well.
STYLES = {"online": ("#0072B2", "o"), "everything": ("#D55E00", "s")}
LABELS = {"stock": "stock", "ours-standard": "ours,\nstandard", "ours-drafted": "ours,\ndrafted"}
FIGURES = {"online": online, "everything": everything}


def plot(data: dict[str, Any], path: Path) -> None:
    """Seconds per token of every run, by system and network; InputError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from None
    there = groups(data)
    figure, axes = pyplot.subplots(
        1, len(there), figsize=(1.2 + 3.6 * len(there), 4.4), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, (network, tokens) in zip(axes[0], there, strict=True):
        draw(axis, of_group(data, network, tokens))
        axis.set_title(f"{network}, {tokens} tokens", fontsize=10)
    axes[0][0].set_ylabel("seconds per emitted token\n(bars and numbers: medians)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8,
                  frameon=False)  # fmt: skip
    figure.savefig(path, dpi=150, metadata={"Software": ""})
    pyplot.close(figure)


def draw(axes: Any, records: Sequence[Record]) -> None:
    """A dot for every run, greedy and sampled alike; a bar at their median, with its number above
    all of them.
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
            axes.plot(places, values, marker, color=color, markersize=4.5, alpha=0.6,
                      markeredgewidth=0, label=label if i == 0 else None)  # fmt: skip
            median = statistics.median(values)
            axes.hlines(median, middle - 0.15, middle + 0.15, color=color, linewidth=2)
            axes.annotate(seconds_short(median), (middle, max(values)), xytext=(0, 5),
                          textcoords="offset points", ha="center", fontsize=8, color=color)
    axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_xlim(-0.5, len(systems) - 0.5)
    axes.set_xticks(range(len(systems)), [LABELS[s] for s in systems])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3, axis="y", which="both", linewidth=0.5)
    axes.tick_params(axis="x", length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def seconds_short(x: float) -> str:
    """Two or three digits."""
    return f"{x:.0f}" if x >= 10 else f"{x:.1f}" if x >= 1 else f"{x:.2f}"
