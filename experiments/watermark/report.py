"""How the study of watermarks is shown: tables 1, 4 and 5 of "A Watermark for Black-Box Language
Models" (Bahri, Wieting, Alon, Metzler), and what the paper has no table of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import report
from experiments.common.report import Column, rows_table
from experiments.watermark import metrics
from experiments.watermark.plan import DRAFTS, FORGED, JUDGED, MARK, ORDER, PROMPT_TOKENS, cell_of
from experiments.watermark.study import unpacked

Row = dict[str, Any]
Detected = tuple[str, Row, Row]  # name, row, and scores of a method
AUC, LEAST_BITS = 0.97, 1.0  # the criterion: at 100 tokens, of text with so many bits a token
NAMES = {
    "random": "unmarked",
    "greedy": "greedy",
    "aaronson": "Aaronson",
    "kuditipudi": "Kuditipudi",
    "white-box": "all tokens (white box), k = 1",
    "race": "race, one sample",
    "plain-race": "race, not marked",
}
SCORES = {"fisher": "corrected", "plain": "as published"}  # Aaronson's two
LENGTHS = ("25", "50", "75", "100", "150")
REPLACED = (10, 20, 30, 50)


def name_of(row: Row) -> str:
    """Name a row by its method and parameters."""
    name, m, k = row["name"], row["m"], row["k"]
    if name == "kirchenbauer":
        text = f"Kirchenbauer, δ = {row['delta']:g}"
    elif name == "flat":
        text = f"flat, k = {k}, m = {m}"
        text += "" if row["family"] == "uniform" else f", F {row['family']}"
    elif name == "recursive":
        text = f"recursive, k = {k}, m = {m ** row['keys']} ({row['keys']} keys)"
    else:
        text = NAMES[name]
    return text + (", history" if row["history"] else "")


def at(result: Row, temperature: float) -> list[Row]:
    """Return rows of methods, in the order of tables; of F only the default."""
    rows = {cell_of(row).method: row for row in result["rows"] if row["temperature"] == temperature}
    return [rows[method] for method in ORDER if method in rows]


def temperatures(result: Row) -> list[float]:
    return list(dict.fromkeys(row["temperature"] for row in result["rows"]))


def of_method(result: Row, temperature: float, name: str, **wanted: Any) -> list[Row]:
    return [
        row
        for row in result["rows"]
        if row["temperature"] == temperature
        and row["name"] == name
        and all(row[field] == value for field, value in wanted.items())
    ]


def detected(rows: Sequence[Row]) -> Iterator[tuple[str, Row, Row]]:
    """Yield (name, row, detection), one for each score."""
    for row in rows:
        for kind, scores in row.get("detection", {}).items():
            score = f", {SCORES[kind]}" if row["name"] == "aaronson" else ""
            yield name_of(row) + score, row, scores


# ---- tables


def table(result: Row) -> str:
    """Return the whole result as Markdown."""
    lines = [circumstances(result), ""]
    for rows in _tables(result):
        lines += [*rows, ""]
    return "\n".join([*lines, *(f"- {line}" for line in criteria(result))])


def in_results(result: Row, origin: str) -> list[str]:
    """Return the whole result as paragraphs of its page in docs/results."""
    tables = [text for rows in _tables(result) for text in ("\n".join(rows), origin)]
    holds = "\n".join(f"- {line}" for line in criteria(result))
    return [circumstances(result), *tables, holds]


def _tables(result: Row) -> list[list[str]]:
    tables = []
    for temperature in temperatures(result):
        tables += [distortion(result, temperature), detection(result, temperature)]
    tables += [by_length(result), by_score(result)]
    tables += [edited(result, temperature) for temperature in temperatures(result)]
    tables += [parts(result), history(result), forged(result), guesses(result), drafted(result)]
    return [rows for rows in tables if len(rows) > 2]


def circumstances(result: Row) -> str:
    plan = result["plan"]
    rows = [row for row in result["rows"] if row["name"] == "random"]
    said = []
    for row in rows:
        of = row["calibration"]["sum"]
        said.append(
            f"at temperature {row['temperature']:g} {row['bits'][0]:.2f} bits a token, and "
            f"{100 * of['at_1'][0]:.2f} % ({100 * of['at_1'][1]:.2f} to {100 * of['at_1'][2]:.2f}) "
            f"of {of['count']} scores with p of 0.01 or less"
        )
    return (
        f"{plan['texts']} prompts of {PROMPT_TOKENS} tokens, {plan['samples']} unmarked texts of "
        f"each, {plan['null_keys']} keys for each of these. Unmarked text: {'; '.join(said)}. "
        "95 % intervals by prompt in brackets."
    )


def percent(interval: Sequence[float], digits: int = 1) -> str:
    """Write a share and its interval, in per cent."""
    value, low, high = (100 * x for x in interval)
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def around(interval: Sequence[float], digits: int) -> str:
    """Write a figure and its interval, which may be on either side of zero."""
    value, low, high = interval
    return f"{value:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def _shift(interval: Sequence[float]) -> str:
    """Write nats per token as per cent of perplexity."""
    value, low, high = (100 * math.expm1(x) for x in interval)
    return f"{value:+.1f} % ({low:+.1f} to {high:+.1f})"


def distortion(result: Row, temperature: float) -> list[str]:
    """Return a table of what a mark changes of a text, and of two texts of a prompt."""
    columns = [
        Column(f"temperature {temperature:g}", name_of),
        Column("texts", lambda row: str(row["texts"])),
        Column("bits a token", lambda row: f"{row['bits'][0]:.2f}"),
        Column("perplexity", lambda row: report.three(math.exp(row["nats"][0]))),
        Column(
            "against unmarked", lambda row: "–" if row["name"] == "random" else _shift(row["shift"])
        ),
        Column("nats above entropy, in bits a token", lambda row: around(row["excess_bits"], 3)),
        Column(
            "same first chunk in two texts, %", lambda row: percent(row["agreement"]["chunk"], 0)
        ),
        Column("same 10 tokens, %", lambda row: percent(row["agreement"]["text"], 0)),
        Column("tokens alike from the start", lambda row: f"{row['agreement']['common'][0]:.1f}"),
    ]
    return rows_table(columns, at(result, temperature))


def _both(score: Row | None) -> str:
    """Write AUC and pAUC, in per cent; a dash where there is no score."""
    if score is None:
        return "–"
    return f"{100 * score['auc'][0]:.1f} / {100 * score['pauc'][0]:.1f}"


def _auc(score: Row | None) -> str:
    """Write AUC, in per cent; a dash where there is no score."""
    return "–" if score is None else f"{100 * score['auc'][0]:.1f}"


def _full(scores: Row) -> Row:
    """Return the scores of the whole texts."""
    lengths = scores["by_length"]
    full: Row = lengths[str(min(JUDGED, int(max(lengths, key=int))))]
    return full


def _median_p(name: str, row: Row, scores: Row) -> str:
    if row["name"] in ("kirchenbauer", "kuditipudi") or "as published" in name:
        return "–"
    return f"{scores['median']:.1f}"


def detection(result: Row, temperature: float) -> list[str]:
    """Return Table 1: how well each method is detected."""

    def after(edit: str) -> Callable[[Detected], Row]:
        return lambda of: of[2]["edited"][edit]

    ten, half = after("replaced 10 %"), after("paraphrased 50 %")
    columns: list[Column[Detected]] = [
        Column(f"temperature {temperature:g}", lambda of: of[0]),
        Column("AUC, 25 tokens", lambda of: _auc(of[2]["by_length"].get("25"))),
        Column("50", lambda of: _auc(of[2]["by_length"].get("50"))),
        Column(f"{JUDGED}", lambda of: percent(_full(of[2])["auc"])),
        Column(f"pAUC, {JUDGED}", lambda of: percent(_full(of[2])["pauc"])),
        Column("AUC / pAUC, all three pooled", lambda of: _both(of[2]["pooled"])),
        Column("median -log10 p", lambda of: _median_p(*of)),
        Column("AUC / pAUC, 10 % replaced", lambda of: _both(ten(of))),
        Column("AUC, paraphrased", lambda of: percent(half(of)["auc"])),
    ]
    return rows_table(columns, detected(at(result, temperature)))


def by_length(result: Row) -> list[str]:
    """Return Table 5's other side: how much text detection takes."""

    def at_length(n: str) -> Column[tuple[str, Row]]:
        return Column(n, lambda of: _both(of[1]["by_length"].get(n)))

    columns: list[Column[tuple[str, Row]]] = [
        Column("AUC / pAUC, % at T", lambda of: of[0]),
        *map(at_length, LENGTHS),
    ]
    rows = (
        (f"{name}, temperature {temperature:g}", scores)
        for temperature in temperatures(result)
        for name, row, scores in detected(at(result, temperature))
        if not row["history"]
    )
    return rows_table(columns, rows)


def by_score(result: Row) -> list[str]:
    """Return a table of families and scores on the same texts."""
    columns: list[Column[tuple[str, Row]]] = [
        Column(f"flat, {JUDGED} tokens", lambda of: of[0]),
        Column("F", lambda of: of[1]["family"]),
        Column("score", lambda of: of[1]["score"]),
        Column("AUC, %", lambda of: percent(of[1]["auc"])),
        Column("TPR at FPR 1 %, %", lambda of: percent(of[1]["tpr"], 0)),
        Column("median -log10 p", lambda of: f"{of[1]['median']:.2f}"),
    ]
    rows = (
        (f"k = {row['k']}, m = {row['m']}, temperature {row['temperature']:g}", one)
        for row in result["rows"]
        for one in row.get("scores", ())
    )
    return rows_table(columns, rows)


def edited(result: Row, temperature: float) -> list[str]:
    """Return a table of detection after each edit, for methods that have all edits."""
    of = [
        (name, scores["edited"])
        for name, _, scores in detected(at(result, temperature))
        if len(scores["edited"]) > 2
    ]

    def after(name: str, edited: Row) -> Column[str]:
        def text(edit: str) -> str:
            return f"{_auc(edited[edit])} / {percent(edited[edit]['tpr'], 0)}"

        return Column(name, text)

    columns: list[Column[str]] = [
        Column(f"AUC / TPR at FPR 1 %, %, temperature {temperature:g}", str),
        *(after(*one) for one in of),
    ]
    return rows_table(columns, dict.fromkeys(edit for _, scores in of for edit in scores))


def parts(result: Row) -> list[str]:
    """Return a table of how well a marked third in an unmarked text is detected."""
    columns: list[Column[tuple[str, Row]]] = [
        Column("a marked part in unmarked text", lambda of: of[0]),
        Column("tokens", lambda of: "{} of {}".format(*of[1]["tokens"])),
        Column("AUC by p of the whole, %", lambda of: percent(of[1]["whole"]["auc"])),
        Column("TPR at FPR 1 %, %", lambda of: percent(of[1]["whole"]["tpr"], 0)),
        Column("AUC by its parts, %", lambda of: percent(of[1]["parts"]["auc"])),
        Column("TPR at FPR 1 %, %", lambda of: percent(of[1]["parts"]["tpr"], 0)),
        Column("of its tokens in a part that is named, %", lambda of: percent(of[1]["recall"], 0)),
        Column("of named tokens its own, %", lambda of: f"{100 * of[1]['precision']:.0f}"),
    ]
    rows = (
        (f"{name}, temperature {temperature:g}", scores["part"])
        for temperature in temperatures(result)
        for name, _, scores in detected(at(result, temperature))
        if "part" in scores
    )
    return rows_table(columns, rows)


def _forgeries(result: Row) -> Iterator[tuple[str, Row]]:
    for row in result["rows"]:
        if row["name"] == "forgery":
            which = "history" if row["history"] else "no history"
            yield f"temperature {row['temperature']:g}, {which}", row


def history(result: Row) -> list[str]:
    """Return a table of what a history costs: texts of one key, one after another."""
    columns: list[Column[tuple[str, Row]]] = [
        Column(f"one key, flat, k = 1, m = {MARK.m}", lambda of: of[0]),
        Column("texts", lambda of: f"from {of[1]['first'] + 1} on"),
        Column("tokens that the key decides, %", lambda of: f"{100 * of[1]['marked']:.1f}"),
        Column("median -log10 p", lambda of: f"{of[1]['median']:.1f}"),
        Column("AUC, %", lambda of: percent(of[1]["auc"])),
        Column("TPR at FPR 1 %, %", lambda of: percent(of[1]["tpr"], 0)),
    ]
    rows = ((name, of) for name, row in _forgeries(result) for of in row["rounds"])
    return rows_table(columns, rows)


def forged(result: Row) -> list[str]:
    """Return a table of the p-values of what forgers write."""
    lines: list[list[str]] = []
    told: list[str] = []
    for name, row in _forgeries(result):
        for of in row["forged"]:
            most = max(one["seen"] for one in row["forged"])
            if of["control"] and (row["history"] or of["seen"] < most):
                continue
            source = "unmarked texts" if of["control"] else "marked texts"
            lengths = of["by_length"]
            told = [f"{n} tokens" for n in lengths]
            lines.append(
                [
                    f"{of['forger']}, {of['seen']} {source}",
                    name,
                    *(
                        f"{lengths[n]['median']:.1f} / {100 * lengths[n]['accepted']:.0f}"
                        for n in lengths
                    ),
                ]
            )
    heads = [f"median -log10 p / p of 0.001 or less, %, of {FORGED}", "key", *told]
    return report.table(heads, lines)


def guesses(result: Row) -> list[str]:
    """Return a table of whether a forger knows what the key says."""
    columns: list[Column[tuple[str, str, Row]]] = [
        Column("the larger of two numbers", lambda of: of[0]),
        Column("n-grams", lambda of: of[1]),
        Column("pairs", lambda of: str(of[2]["pairs"])),
        Column("right, %", lambda of: _guess(of[2])),
    ]
    rows = (
        (name, what, of) for name, row in _forgeries(result) for what, of in row["guesses"].items()
    )
    return rows_table(columns, rows)


def _guess(of: Row) -> str:
    if not of["pairs"]:
        return "–"
    half = 1.96 * math.sqrt(0.25 / of["pairs"])
    return f"{100 * of['right']:.1f} (chance 50 ± {100 * half:.1f})"


def drafted(result: Row) -> list[str]:
    """Return a table of tokens per step of races."""
    lines = []
    for temperature in temperatures(result):
        plain = of_method(result, temperature, "plain-race")
        if not plain:
            continue
        for row in [*plain, *of_method(result, temperature, "race")]:
            of = row["drafts"]
            median = row.get("detection", {}).get("fisher", {}).get("median")
            cells = [
                f"{name_of(row)}, temperature {temperature:g}",
                "–" if median is None else f"{median:.1f}",
                percent(of["accepted"]),
                f"{100 * of['overlap'][0]:.1f}",
            ]
            for n in map(str, DRAFTS):
                cells.append("{:.2f} ({:.2f} to {:.2f})".format(*of[n]))
                cells.append(around(_difference(row, plain[0], n), 2) if plain != [row] else "–")
            lines.append(cells)
    heads = [
        "race with drafts",
        "median -log10 p",
        "drafts that are the text's token, %",
        "sum min(p, q), %",
    ]
    for drafts in DRAFTS:
        heads += [f"tokens a step, {drafts} drafts", "against not marked"]
    return report.table(heads, lines)


def _difference(row: Row, plain: Row, drafts: str) -> metrics.Interval:
    one, other = (unpacked(of["drafts"][f"{drafts} by text"]) for of in (row, plain))
    counts = [
        np.full(len(steps), float(of["tokens"])) for steps, of in ((one, row), (other, plain))
    ]
    return metrics.difference_of_ratios(counts[0], one, counts[1], other)


# ---- criteria


def criteria(result: Row) -> list[str]:
    """Return what the project asks, and whether it holds, temperature by temperature."""
    lines = []
    for temperature in temperatures(result):
        unmarked = of_method(result, temperature, "random")
        if not unmarked or unmarked[0]["bits"][0] < LEAST_BITS:
            continue
        where = f"temperature {temperature:g} ({unmarked[0]['bits'][0]:.2f} bits a token)"
        for row in of_method(result, temperature, "flat", m=MARK.m, k=1):
            by = row["detection"]["sum"]["by_length"]
            value = by[str(JUDGED)]["auc"] if str(JUDGED) in by else None
            if value:
                lines.append(
                    report.criterion(
                        f"AUC, {where}",
                        f"{AUC:g} at {JUDGED} tokens, {name_of(row)}",
                        "{:.3f} ({:.3f} to {:.3f})".format(*value),
                        holds=value[0] >= AUC,
                    )
                )
            if row["history"]:
                low, high = row["shift"][1:]
                lines.append(
                    report.criterion(
                        f"perplexity, {where}",
                        f"its shift's interval has 0 in it, {name_of(row)}",
                        _shift(row["shift"]),
                        holds=low <= 0 <= high,
                    )
                )
        lines += _same_speed(result, temperature, where)
    return lines


def _same_speed(result: Row, temperature: float, where: str) -> list[str]:
    plain = of_method(result, temperature, "plain-race")
    marked = of_method(result, temperature, "race", history=True)
    if not (plain and marked):
        return []
    differences = [_difference(marked[0], plain[0], str(n)) for n in DRAFTS]
    said = "; ".join(f"{n} drafts {around(x, 2)}" for n, x in zip(DRAFTS, differences, strict=True))
    holds = all(low <= 0 <= high for _, low, high in differences)
    return [
        report.criterion(
            f"tokens a step, {where}",
            "those of the unmarked race, with the mark of the race",
            said,
            holds=holds,
        )
    ]


# ---- the plot

SHOWN = {
    ("flat", 16, 1): ("flat, k = 1, m = 16", "#0072B2", "o"),
    ("flat", 2, 1): ("flat, k = 1, m = 2", "#56B4E9", "o"),
    ("flat", 4, 10): ("flat, k = 10, m = 4", "#009E73", "s"),
    ("recursive", 2, 1): ("recursive, m = 4", "#66C2A5", "s"),
    ("race", 0, 1): ("race / Aaronson, corrected", "#D55E00", "^"),
    ("kirchenbauer", 0, 1): ("Kirchenbauer, δ = 2", "#CC79A7", "D"),
    ("kuditipudi", 0, 1): ("Kuditipudi", "#777777", "x"),
}


def plot(result: Row, path: Path) -> None:
    """Write `draw` to a file; InputError without matplotlib."""
    figure = report.figure(12, 4.0)
    draw(figure, result)
    report.save(figure, path, dpi=110)


def draw(figure: Any, result: Row) -> None:
    """Draw AUC against length where text is least free, true positives against replaced tokens
    where it is most, and what is paid in perplexity.
    """
    left, middle, right = figure.subplots(1, 3)
    coldest, warmest = min(temperatures(result)), max(temperatures(result))
    for style, scores, _ in shown(result, coldest):
        name, colour, marker = style
        lengths = sorted(map(int, scores["by_length"]))
        value = np.array([scores["by_length"][str(n)]["auc"] for n in lengths])
        left.errorbar(
            lengths,
            100 * value[:, 0],
            np.maximum(0, 100 * np.abs(value[:, 1:].T - value[:, 0])),
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1,
            capsize=2,
            label=name,
        )
    for style, scores, _ in shown(result, warmest):
        name, colour, marker = style
        points = [
            (n, scores["edited"][f"replaced {n} %"])
            for n in REPLACED
            if f"replaced {n} %" in scores["edited"]
        ]
        if len(points) > 1:
            middle.plot(
                [n for n, _ in points],
                [100 * of["tpr"][0] for _, of in points],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1,
                label=name,
            )
    for temperature, filled in ((warmest, True), (coldest, False)):
        for style, scores, row in shown(result, temperature):
            _, colour, marker = style
            shift, low, high = (100 * math.expm1(x) for x in row["shift"])
            right.errorbar(
                [100 * scores["by_length"]["50"]["auc"][0]]
                if "50" in scores["by_length"]
                else [50],
                [shift],
                [[max(0, shift - low)], [max(0, high - shift)]],
                color=colour,
                marker=marker,
                markersize=5,
                capsize=2,
                linewidth=1,
                markerfacecolor=colour if filled else "white",
            )
    right.axhline(0, color="black", linewidth=0.8)
    left.set(xlabel="tokens", ylabel="AUC, %", title=f"temperature {coldest:g}")
    middle.set(
        xlabel="tokens replaced, %",
        ylabel="true positives at 1 % false ones, %",
        title=f"temperature {warmest:g}, {JUDGED} tokens",
        ylim=(0, 103),
    )
    right.set(
        xlabel="AUC at 50 tokens, %",
        ylabel="perplexity against unmarked, %",
        title=f"full: temperature {warmest:g}, hollow: {coldest:g}",
    )
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.title.set_fontsize(9)


def shown(result: Row, temperature: float) -> Iterator[tuple[tuple[str, str, str], Row, Row]]:
    """Yield (style, detection, row) of methods that plots show, as published."""
    for row in at(result, temperature):
        style = SHOWN.get((row["name"], row["m"], row["k"]))
        if style and not row["history"] and row["delta"] in (0.0, 2.0):
            yield style, next(iter(row["detection"].values())), row
