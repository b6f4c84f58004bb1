"""How the study of confidential prompting is shown: tables, the criteria, and the figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common import report
from experiments.common.report import QUIET, Column, rows_table, spread

Record = dict[str, Any]
Group = tuple[str, int, list[Record]]  # model, users, runs
STYLES = {
    "no protection": ("#000000", "s"),
    "full isolation": ("#D55E00", "^"),
    "vault": ("#0072B2", "o"),
    "vault + obfuscation": ("#009E73", "D"),
}
MODES = {False: "two-party, standard", True: "two-party, drafted"}
SPENT = {
    "model": "projections, MLP",
    "send_query": "send q",
    "own_attention": "its own attention",
    "wait": "wait for the vaults",
    "merge": "merge",
}
FASTER, SMALLER = 2.0, 4.0  # what is asked of the vault with 8 users, against full isolation


# ---- figures of runs


def token_seconds(run: Record) -> float:
    """Return the seconds from one token to the next, the mean over callers."""
    return statistics.mean(run["token"])


def first_seconds(run: Record) -> float:
    """Return the seconds to the first token, the mean over callers."""
    return statistics.mean(run["first"])


def throughput(run: Record) -> float:
    """Return the tokens per second of all users, from asking to the last one; fakes are of no
    use.
    """
    return float(run["users"] * run["output"] / run["whole"])


def decoding(run: Record) -> float:
    """Return the tokens per second of all users while all of them decode."""
    return float(run["users"]) / token_seconds(run)


def step_parts(run: Record) -> dict[str, float]:
    """Return the seconds of a step at the vault's engine, by what they go to; `other`: the head,
    logits to the vaults, their draws and the tokens back.
    """
    spent = run["spent"]
    parts = {name: spent[name] / spent["steps"] for name in SPENT}
    return parts | {"other": max(0.0, token_seconds(run) - sum(parts.values()))}


def choose(runs: Sequence[Record], **fields: Any) -> list[Record]:
    """Return the runs with these fields."""
    return [run for run in runs if all(run[name] == value for name, value in fields.items())]


def values_of(runs: Sequence[Record], name: str) -> list[Any]:
    """Return what runs have under this name, in order of appearance."""
    return list(dict.fromkeys(run[name] for run in runs))


def ratios(
    runs: Sequence[Record], over: Sequence[Record], figure: Callable[[Record], float]
) -> list[float]:
    """Divide a figure of runs by the figure of the runs in `over`, turn by turn."""
    others = {run["turn"]: figure(run) for run in over}
    return [figure(run) / others[run["turn"]] for run in runs if run["turn"] in others]


# ---- the tables


def table(result: Record) -> str:
    """Return all parts as Markdown, with what they were measured on."""
    lines = [*_circumstances(result), ""]
    for rows in _tables(result):
        lines += [*rows, ""]
    lines += criteria(result)
    lines.append("outcomes: " + ("; ".join(result["failures"]) or "all texts are the same"))
    return "\n".join(lines)


def in_results(result: Record, origin: str) -> list[str]:
    """Return all parts as paragraphs of its page in docs/results."""
    of = [
        f"{name}: {shape['layers']} layers of width {shape['width']}, "
        f"{report.bytes_text(shape['weights'])} of weights"
        for name, shape in result["models"].items()
    ]
    tables = [text for rows in _tables(result) for text in ("\n".join(rows), origin)]
    holds = "\n".join(f"- {line}" for line in criteria(result))
    return [f"Models: {'; '.join(of)}.", *tables, holds]


def _tables(result: Record) -> list[list[str]]:
    """Return the tables that there are runs for."""
    tables = (
        by_users(result),
        totals(result),
        breakdown(result),
        by_length(result),
        by_fakes(result),
        memory(result),
        two_party(result),
    )
    return [rows for rows in tables if rows]


def _circumstances(result: Record) -> list[str]:
    here, runs = result["machine"], result["runs"]
    lines = [
        f"{len(runs)} runs on {here['cores']} cores, {here['processor']}, commit "
        f"{here['commit']}, {here['date'][:10]}; median (smallest to largest) of runs in turns; "
        "ms per token and to the first token are means over users"
    ]
    for name, shape in result["models"].items():
        lines.append(
            f"{name} model: {shape['layers']} layers of width {shape['width']}, "
            f"{report.bytes_text(shape['weights'])} of weights"
        )
    if others := [run["others"] for run in [*runs, *result["two-party"]]]:
        lines.append(f"other work on the machine, in cores: {spread(others, '{:.2f}'.format)}")
        if loud := sum(x > QUIET for x in others):
            lines.append(
                f"NOT QUIET: {loud} runs had more than {QUIET} cores of other work beside "
                "them; their seconds say little"
            )
    return lines


def _ms(runs: Sequence[Record], figure: Callable[[Record], float] = token_seconds) -> str:
    return spread([1e3 * figure(run) for run in runs], report.three)


def _by_system(runs: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    for name in STYLES:
        yield name, choose(runs, system=name)


def _groups(result: Record, *parts: str) -> Iterator[Group]:
    """Yield the runs of the named parts by model and number of users."""
    runs = [run for run in result["runs"] if run["part"] in parts]
    for model in values_of(runs, "model"):
        for part in parts:
            of = choose(runs, model=model, part=part)
            for users in values_of(of, "users"):
                yield model, users, choose(of, users=users)


class _Chosen(NamedTuple):
    """Runs of a system with so many users, and the vault's beside them."""

    model: str
    users: int
    system: str
    runs: list[Record]
    vault: list[Record]


def by_users(result: Record) -> list[str]:
    """Return a table of milliseconds per token, also divided by the vault's turn by turn, and of
    milliseconds to the first token.
    """
    columns: list[Column[_Chosen]] = [
        Column("model", lambda of: of.model),
        Column("users", lambda of: str(of.users)),
        Column("system", lambda of: of.system),
        Column("ms per token", lambda of: _ms(of.runs)),
        Column(
            "in the vault's, by turn",
            lambda of: spread(ratios(of.runs, of.vault, token_seconds), "{:.2f}".format),
        ),
        Column("ms to the first token", lambda of: _ms(of.runs, first_seconds)),
    ]
    rows = (
        _Chosen(model, users, name, chosen, dict(_by_system(runs))["vault"])
        for model, users, runs in _groups(result, "users", "sizes")
        for name, chosen in _by_system(runs)
    )
    return rows_table(columns, rows)


def totals(result: Record) -> list[str]:
    """Return a table of the tokens per second of all users."""

    def rates(system: str) -> Column[Group]:
        def text(of: Group) -> str:
            runs = choose(of[2], system=system)
            return "; ".join(
                spread(map(rate, runs), report.three) for rate in (decoding, throughput)
            )

        return Column(system, text)

    columns: list[Column[Group]] = [
        Column("tokens per second, all users: decoding; with prefill", lambda of: of[0]),
        Column("users", lambda of: str(of[1])),
        *map(rates, STYLES),
    ]
    return rows_table(columns, _groups(result, "users", "sizes"))


def breakdown(result: Record) -> list[str]:
    """Return a table of what a step of the vault's engine goes to."""

    def part(name: str, head: str) -> Column[list[Record]]:
        def text(runs: list[Record]) -> str:
            return spread([1e3 * step_parts(run)[name] for run in runs], report.three)

        return Column(head, text)

    columns: list[Column[list[Record]]] = [
        Column("ms of a step, of", lambda runs: runs[0]["model"]),
        Column("users", lambda runs: str(runs[0]["users"])),
        Column("system", lambda runs: runs[0]["system"]),
        *starmap(part, SPENT.items()),
        part("other", "other"),
    ]
    rows = (
        choose(runs, system=name)
        for _, _, runs in _groups(result, "users", "sizes")
        for name in ("vault", "vault + obfuscation")
    )
    return rows_table(columns, filter(None, rows))


def by_length(result: Record) -> list[str]:
    """Return a table of one user's milliseconds per token and to the first token."""
    runs = choose(result["runs"], part="lengths")

    def of_system(system: str) -> Column[tuple[int, int]]:
        def text(lengths: tuple[int, int]) -> str:
            chosen = choose(runs, output=lengths[0], input=lengths[1], system=system)
            return f"{_ms(chosen)}; {_ms(chosen, first_seconds)}"

        return Column(system, text)

    columns: list[Column[tuple[int, int]]] = [
        Column("ms per token; to the first: output tokens", lambda lengths: str(lengths[0])),
        Column("input", lambda lengths: str(lengths[1])),
        *map(of_system, STYLES),
    ]
    return rows_table(columns, product(values_of(runs, "output"), values_of(runs, "input")))


def by_fakes(result: Record) -> list[str]:
    """Return a table of milliseconds per token against lambda, also divided turn by turn by the
    milliseconds with the fewest fakes; and of milliseconds to the first token.
    """
    runs = choose(result["runs"], part="lambda")

    def times(of: list[Record]) -> str:
        fewest = choose(runs, fakes=runs[0]["fakes"])
        return spread(ratios(of, fewest, token_seconds), "{:.2f}".format)

    columns: list[Column[list[Record]]] = [
        Column("λ", lambda of: str(of[0]["fakes"])),
        Column("ms per token", _ms),
        Column("in those of the first λ, by turn", times),
        Column("ms to the first token", lambda of: _ms(of, first_seconds)),
    ]
    return rows_table(columns, (choose(runs, fakes=fakes) for fakes in values_of(runs, "fakes")))


def total_of(record: Record, kind: str) -> int:
    """Return the bytes of all processes, as the kernel counts under `kind`."""
    return sum(role[kind] for role in record["roles"].values())


def memory(result: Record) -> list[str]:
    """Return a table of the bytes of all processes of a system."""

    def total(kind: str) -> Callable[[Record], str]:
        return lambda record: report.bytes_text(total_of(record, kind))

    columns: list[Column[Record]] = [
        Column("model", lambda record: record["model"]),
        Column("users", lambda record: str(record["users"])),
        Column("system", lambda record: record["system"]),
        Column("processes", lambda record: str(total_of(record, "processes"))),
        Column("resident", total("rss")),
        Column("shared pages divided (PSS)", total("pss")),
        Column("without shared pages", total("own")),
        Column("weights", lambda record: report.bytes_text(record["needed"]["weights"])),
        Column(
            "prompts' keys and values", lambda record: report.bytes_text(record["needed"]["rows"])
        ),
    ]
    return rows_table(columns, result["memory"])


def per_token(record: Record) -> dict[str, float]:
    """Return the seconds of a two-party token: decoded, without prefill and correlated randomness;
    and of everything.
    """
    return {
        "decode": record["seconds"]["decode"] / max(1, record["output"] - 1),
        "everything": record["elapsed_seconds"] / record["output"],
    }


def two_party(result: Record) -> list[str]:
    """Return a table of the seconds per token of one user's completion, and how many of its tokens
    are plaintext's.
    """
    columns: list[Column[Record]] = [
        Column("mode", lambda record: MODES[record["drafted"]]),
        Column("tokens", lambda record: f"{record['input']} in, {record['output']} out"),
        Column("s per token, decoding", lambda record: report.three(per_token(record)["decode"])),
        Column(
            "s per token, everything", lambda record: report.three(per_token(record)["everything"])
        ),
        Column("s to the first token", lambda record: report.three(record["first_token_seconds"])),
        Column(
            "tokens as in plaintext, from the first on",
            lambda record: f"{record['same']} of {record['output']}",
        ),
    ]
    return rows_table(columns, result["two-party"])


def criteria(result: Record) -> list[str]:
    """Return what the project asks of the vault with the plan's `at` users, and whether it holds,
    model by model.
    """
    lines, users = [], result["plan"]["at"]
    for model in result["models"]:
        runs = choose(result["runs"], model=model, users=users)
        part = "sizes" if choose(runs, part="sizes") else "users"
        of = dict(_by_system(choose(runs, part=part)))
        several = ratios(of["full isolation"], of["vault"], token_seconds)
        if several:
            lines.append(
                report.criterion(
                    f"{model}, {users} users",
                    f"{FASTER:g} times less per token than full isolation",
                    spread(several, "{:.2f}".format),
                    holds=statistics.median(several) >= FASTER,
                )
            )
        held = {m["system"]: m for m in choose(result["memory"], model=model)}
        if {"full isolation", "vault"} <= set(held):
            for kind, name in (("pss", "of memory (PSS)"), ("own", "without shared pages")):
                alone, vault = (total_of(held[s], kind) for s in ("full isolation", "vault"))
                lines.append(
                    report.criterion(
                        f"{model}, {users} users",
                        f"{SMALLER:g} times less {name}",
                        f"{alone / vault:.2f}",
                        holds=alone >= SMALLER * vault,
                    )
                )
    return lines


# ---- the plot


def plot(result: Record, path: Path) -> None:
    """Draw Figures 8 to 12 and 14, of the parts that there are; InputError without matplotlib."""
    runs = result["runs"]
    drawn = [
        draw
        for draw, there in (
            (draw_users, choose(runs, part="users")),
            (draw_throughput, choose(runs, part="users")),
            (draw_breakdown, choose(runs, part="users")),
            (draw_sizes, choose(runs, part="sizes")),
            (draw_lengths, choose(runs, part="lengths")),
            (draw_fakes, choose(runs, part="lambda")),
            (draw_memory, result["memory"]),
        )
        if there
    ]
    if not drawn:
        return
    columns = min(3, len(drawn))
    lines = -(-len(drawn) // columns)
    figure = report.figure(1 + 4.2 * columns, 3.8 * lines)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for draw, at in zip(drawn, axes, strict=False):
        draw(at, result)
        at.grid(alpha=0.3, axis="y")
        at.legend(fontsize=6)
    for at in axes[len(drawn) :]:
        at.set_axis_off()
    report.save(figure, path, dpi=110)


def _medians(
    runs: Sequence[Record], by: str, figure: Callable[[Record], float]
) -> tuple[list[Any], list[float]]:
    xs = values_of(runs, by)
    return xs, [statistics.median(map(figure, choose(runs, **{by: x}))) for x in xs]


def _lines(axes: Any, runs: Sequence[Record], by: str, figure: Callable[[Record], float]) -> None:
    for name, (color, marker) in STYLES.items():
        if chosen := choose(runs, system=name):
            xs, ys = _medians(chosen, by, figure)
            axes.plot(xs, ys, marker=marker, color=color, label=name, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(values_of(runs, by), [str(x) for x in values_of(runs, by)])


def draw_users(axes: Any, result: Record) -> None:
    """Draw Figure 8: latency against users, with the two-party mode's one user."""
    _lines(axes, choose(result["runs"], part="users"), "users", lambda r: 1e3 * token_seconds(r))
    for record, style in zip(result["two-party"], ("--", ":"), strict=False):
        axes.axhline(
            1e3 * per_token(record)["decode"],
            color="#CC79A7",
            linestyle=style,
            label=f"{MODES[record['drafted']]}, 1 user",
        )
    axes.set_yscale("log")
    axes.set(xlabel="users at a time", ylabel="ms per token")
    axes.set_title("latency against users (Figure 8)", fontsize=9)


def draw_throughput(axes: Any, result: Record) -> None:
    """Draw Figure 11: throughput against users."""
    _lines(axes, choose(result["runs"], part="users"), "users", decoding)
    axes.set(xlabel="users at a time", ylabel="tokens per second, all users", ylim=(0, None))
    axes.set_title("throughput while decoding (Figure 11)", fontsize=9)


def draw_breakdown(axes: Any, result: Record) -> None:
    """Draw Figure 12: what a step of the vault's engine goes to."""
    runs = choose(result["runs"], part="users", system="vault")
    users = values_of(runs, "users")
    bottom = [0.0] * len(users)
    for part in (*SPENT, "other"):
        heights = [
            statistics.median(1e3 * step_parts(run)[part] for run in choose(runs, users=n))
            for n in users
        ]
        axes.bar(range(len(users)), heights, 0.6, bottom=bottom, label=part.replace("_", " "))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(users)), [str(n) for n in users])
    axes.set(xlabel="users at a time", ylabel="ms of a step")
    axes.set_title("a step of the vault's engine (Figure 12)", fontsize=9)


def _bars(axes: Any, labels: Sequence[str], heights: Mapping[str, Sequence[float]]) -> None:
    for i, (name, values) in enumerate(heights.items()):
        places = [at + 0.2 * i - 0.3 for at in range(len(values))]
        axes.bar(places, values, 0.2, color=STYLES[name][0], label=name)
    axes.set_xticks(range(len(labels)), labels)


def draw_sizes(axes: Any, result: Record) -> None:
    """Draw Figure 9: latency against the model."""
    runs = choose(result["runs"], part="sizes")
    models = values_of(runs, "model")
    heights = {
        name: _medians(of, "model", lambda r: 1e3 * token_seconds(r))[1]
        for name, of in _by_system(runs)
        if of
    }
    labels = [f"{m}, {report.bytes_text(result['models'][m]['weights'])}" for m in models]
    _bars(axes, labels, heights)
    axes.set_yscale("log")
    axes.set(xlabel=f"model; {runs[0]['users']} users", ylabel="ms per token")
    axes.set_title("latency against the model (Figure 9)", fontsize=9)


def draw_lengths(axes: Any, result: Record) -> None:
    """Draw Figure 10: latency against input and output length."""
    runs = choose(result["runs"], part="lengths")
    pairs = [(o, i) for o in values_of(runs, "output") for i in values_of(runs, "input")]
    heights = {
        name: [
            statistics.median(1e3 * token_seconds(r) for r in choose(of, output=o, input=i))
            for o, i in pairs
        ]
        for name, of in _by_system(runs)
        if of
    }
    _bars(axes, [f"{i}\nto {o}" for o, i in pairs], heights)
    axes.set(xlabel="input to output tokens; 1 user", ylabel="ms per token")
    axes.set_title("latency against lengths (Figure 10)", fontsize=9)


def draw_fakes(axes: Any, result: Record) -> None:
    """Draw the latency of Figure 14: against the number of fake prompts."""
    runs = choose(result["runs"], part="lambda")
    xs, ys = _medians(runs, "fakes", lambda r: 1e3 * token_seconds(r))
    color, marker = STYLES["vault + obfuscation"]
    axes.plot(xs, ys, marker=marker, color=color, label="vault, 1 user", markersize=4)
    axes.set(xlabel="fake prompts λ", ylabel="ms per token", ylim=(0, None))
    axes.set_title("latency against λ (Figure 14)", fontsize=9)


def draw_memory(axes: Any, result: Record) -> None:
    """Draw the memory of all processes together, shared pages divided."""
    records = result["memory"]
    models = values_of(records, "model")
    heights = {
        name: [total_of(m, "pss") / 1e6 for m in choose(records, system=name)] for name in STYLES
    }
    _bars(axes, models, heights)
    axes.set(xlabel=f"model; {records[0]['users']} users", ylabel="MB of all processes (PSS)")
    axes.set_title("memory", fontsize=9)
