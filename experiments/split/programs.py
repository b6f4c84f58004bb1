"""How `spu-llm split score --json` is shown: Pass@r and Fusi, task by task."""

from __future__ import annotations

import statistics
from typing import Any

from experiments.common.report import Column, rows_table

Row = dict[str, Any]


def in_results(result: Row, origin: str) -> list[str]:
    """Return a committed result as paragraphs of its page in docs/results."""
    return ["\n".join(_means(result)), origin, "\n".join(_tasks(result)), origin]


def _means(result: Row) -> list[str]:
    rows = [(f"Pass@{r}", mean) for r, mean in result["pass_at"].items()]
    rows += [("Fusi", result["fusi"])] if result["fusi"] else []
    columns: list[Column[tuple[str, Row]]] = [
        Column("mean over tasks", lambda of: of[0]),
        Column("%", lambda of: f"{100 * of[1]['mean']:.1f}"),
        Column("95 %", lambda of: f"{100 * of[1]['low']:.1f} to {100 * of[1]['high']:.1f}"),
    ]
    return rows_table(columns, rows)


def _tasks(result: Row) -> list[str]:
    columns: list[Column[Row]] = [
        Column("task", lambda row: row["task_id"]),
        Column("right", lambda row: f"{row['right']} of {len(row['completions'])}"),
        Column("Fusi, %", lambda row: _mean(row["fusi"], 100)),
        Column("CodeBLEU-like", lambda row: _mean(row["codebleu_like"], 1)),
    ]
    return rows_table(columns, result["per_task"])


def _mean(values: list[float] | None, times: float) -> str:
    return "–" if values is None else f"{times * statistics.fmean(values):.1f}"
