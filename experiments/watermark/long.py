"""How long texts are found: chunks of 50 tokens, 1,024 candidates, texts of up to 200 tokens,
prompts by their entropy, and 40 % of tokens replaced ("A Watermark for Black-Box Language Models",
figures 1 and 2, tables 2 and 3).

Texts, keys, prompts and scores are as in `experiment watermark`, as published (without a history).
Prompts are put into four groups of one size by the entropy of their unmarked texts, nats a token in
the mean; the paper's buckets are 0.25 nats wide, of far more prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import commands
from experiments.common.cells import Cells, with_rows
from experiments.common.report import Column, rows_table
from experiments.watermark import edits, metrics, scores
from experiments.watermark.plan import AARONSON, GREEN, WatermarkPlan, add_plan, plan_of
from experiments.watermark.report import name_of, percent
from experiments.watermark.study import Base, Study, figures
from experiments.watermark.texts import Author, Method
from spu_llm.app.printing import show_table
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.scores import log_p

TOKENS, LENGTHS, GROUPS, REPLACED = 200, (50, 100, 200), 4, 0.4
# With gamma numbers the sum orders texts of as many distinct n-grams as the likelihood ratio does
# (Theorem 4.4), so that the ratio is a score of its own for uniform ones alone.
METHODS = (
    Method("flat", 2),
    Method("flat", 16),
    Method("flat", 1024),
    AARONSON,
    GREEN[1],
    *(Method("flat", m, 50, family=family) for m in (2, 16) for family in ("uniform", "gamma")),
)

Row = dict[str, Any]


# ---- cells


def cell(study: Study, method: Method, temperature: float) -> Row:
    """Write texts of one method at one temperature; return what is measured of them."""
    base, plan = study.base(temperature), study.plan
    label = f"{temperature} long {method}"
    authors = study.authors(method, label)
    study.say(f"temperature {temperature}: {name_of(asdict(method))}")
    written = study.written(method, authors, temperature)
    texts = [study.again(tokens) for tokens in written.tokens]
    lengths = [n for n in LENGTHS if n < plan.tokens] + [plan.tokens]
    prgs = [Prg.from_seed(plan.seed, f"long replaced {j}") for j in range(len(texts))]
    replaced = [
        study.again(edits.replaced(REPLACED)(tokens, study.vocab, prg))
        for tokens, prg in zip(written.tokens.tolist(), prgs, strict=True)
    ]
    row: Row = {"temperature": temperature, **asdict(method), "texts": len(texts), "scores": {}}
    kinds = (
        scores.KINDS[method.name][0],
        *(("ratio",) if method.k > 1 and method.family == "uniform" else ()),
    )
    for kind in kinds:
        of, nulls = _scored(study, base, method, kind, authors, texts, lengths)
        after, _ = _scored(study, base, method, kind, authors, replaced, lengths[-1:])
        row["scores"][kind] = {
            "by_length": {str(n): figures(of[:, [i]], nulls[i]) for i, n in enumerate(lengths)},
            "by_entropy": by_entropy(entropy_of(base), of, nulls),
            "replaced": figures(after, nulls[-1]),
        }
    return row


def _scored(
    study: Study,
    base: Base,
    method: Method,
    kind: str,
    authors: Sequence[Author],
    texts: Sequence[list[int]],
    lengths: Sequence[int],
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return scores [text, length], and those of unmarked texts [prompt, sample and key] for each
    length.
    """
    family = method.scheme.family
    if kind != "ratio":
        of = scores.scores_of(method, kind, authors, texts, lengths, base.nulls, study.vocab)
        return of, [base.nulls.scores(kind, n, family) for n in lengths]

    def ratio(pairs: scores.Pairs, length: int) -> float:
        return -log_p(scores.distinct(pairs, length), family, "lrt", method.m, method.k)

    marked = [
        scores.of_candidates(author.keys[0], text)
        for author, text in zip(authors, texts, strict=True)
    ]
    others = base.nulls.pairs(False)
    return (
        np.array([[ratio(pairs, n) for n in lengths] for pairs in marked]),
        [np.array([[ratio(pairs, n) for pairs in row] for row in others]) for n in lengths],
    )


def entropy_of(base: Base) -> np.ndarray:
    """Return the nats a token of each prompt's unmarked texts, in the mean [prompt]."""
    return np.mean([sample.entropy.mean(axis=1) for sample in base.samples], axis=0)


def by_entropy(
    entropy: np.ndarray, of: np.ndarray, nulls: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Return for each group of prompts, from the least entropy on, its nats a token and the AUC of
    all lengths together.
    """
    rows = []
    for group in np.array_split(np.argsort(entropy, kind="stable"), GROUPS):
        others = np.concatenate([one[group] for one in nulls], axis=1)
        rows.append(
            {
                "nats": [round(float(x), 3) for x in (entropy[group].min(), entropy[group].max())],
                "auc": metrics.by_prompt(metrics.auc, of[group], others),
            }
        )
    return rows


def method_of(row: Row) -> Method:
    return Method(**{name: row[name] for name in asdict(METHODS[0])})


def measure(
    private: Path,
    public: Path,
    plan: WatermarkPlan,
    say: Callable[[str], None],
    keep: Callable[[Row], None] = lambda result: None,
    done: Sequence[Row] = (),
    ray: str | None = None,
) -> Row:
    """Measure all cells; `keep` is given the result so far after each. done: rows of an earlier
    run. ray: the address of the cluster that measures.
    """
    result: Row = {"plan": asdict(plan), "rows": list(done)}
    return with_rows(result, all_cells(private, public, plan), say, keep, ray)


def all_cells(
    private: Path, public: Path, plan: WatermarkPlan
) -> Cells[Study, tuple[float, Method]]:
    """Return the study's cells: temperature and method."""
    private, public = private.absolute(), public.absolute()
    return Cells(
        [(temperature, method) for temperature in plan.temperatures for method in METHODS],
        load=partial(Study, private, public, plan),
        row=lambda study, one, say: cell(study, one[1], one[0]),
        key=lambda one: one,
        key_of=lambda row: (row["temperature"], method_of(row)),
        reads=(private, public),
    )


# ---- the report


def _scores(result: Row) -> list[tuple[Row, str, Row]]:
    """Return a line for each row and score."""
    return [(row, kind, of) for row in result["rows"] for kind, of in row["scores"].items()]


def _name(line: tuple[Row, str, Row]) -> str:
    row, kind, _ = line
    return name_of(row) + (", likelihood ratio" if kind == "ratio" else "")


def rows(result: Row) -> list[str]:
    """Return a table of AUC by length, of pAUC and of replaced tokens."""
    lengths = list(next(of for _, _, of in _scores(result))["by_length"])

    def at(length: str, figure: str) -> Callable[[tuple[Row, str, Row]], str]:
        return lambda line: percent(line[2]["by_length"][length][figure])

    columns: list[Column[tuple[Row, str, Row]]] = [
        Column("method", _name),
        Column("temperature", lambda line: f"{line[0]['temperature']:g}"),
        *(Column(f"AUC, %, at {length} tokens", at(length, "auc")) for length in lengths),
        Column(f"pAUC, %, at {lengths[-1]}", at(lengths[-1], "pauc")),
        Column(
            f"AUC, %, {REPLACED:.0%} replaced", lambda line: percent(line[2]["replaced"]["auc"])
        ),
    ]
    return rows_table(columns, _scores(result))


def entropy_rows(result: Row) -> list[str]:
    """Return a table of AUC by the entropy of prompts, all lengths together."""

    def of_group(i: int) -> Callable[[tuple[Row, str, Row]], str]:
        def text(line: tuple[Row, str, Row]) -> str:
            group = line[2]["by_entropy"][i]
            low, high = group["nats"]
            return f"{percent(group['auc'])}; {low:.2f} to {high:.2f}"

        return text

    columns: list[Column[tuple[Row, str, Row]]] = [
        Column("AUC, %; nats a token", _name),
        Column("temperature", lambda line: f"{line[0]['temperature']:g}"),
        *(Column(f"quarter {i + 1}", of_group(i)) for i in range(GROUPS)),
    ]
    return rows_table(columns, _scores(result))


def table(result: Row) -> str:
    """Return the whole result as Markdown."""
    return "\n".join([*rows(result), "", *entropy_rows(result)])


def in_results(result: Row, origin: str) -> list[str]:
    """Return the whole result as paragraphs of its page in docs/results."""
    return ["\n".join(rows(result)), origin, "\n".join(entropy_rows(result)), origin]


# ---- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Each cell is written at once, and the same command goes on."
    add_plan(parser, "of a method", TOKENS)
    commands.add_cluster(parser)
    commands.add_common(parser)


def command(options: argparse.Namespace) -> None:
    commands.check_folders(options)
    plan = plan_of(options, 60)
    pair = commands.pair(options)
    result = commands.resumed(options, plan, lambda *how: measure(*pair, plan, *how))
    show_table(table(result))
