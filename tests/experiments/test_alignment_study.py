"""The study of alignment by task set: its texts, its figures, and whole alignments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.common.task_sets import TASKS, task_set
from experiments.completions import alignment
from models.text_format import TextFormat
from spu_llm.api.defaults import shipped
from spu_llm.app.cli import main


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_a_task_set_is_split_by_document(name: str) -> None:
    one, again = task_set(name), task_set(name)
    assert one == again
    assert len(one.held_out) >= 3 and len(one.learnt) > 2 * len(one.held_out)
    names = {document.name for document in one.learnt}
    assert len(names) == len(one.learnt) and not names & {d.name for d in one.held_out}
    assert sum(len(document.text) for document in one.learnt) > 300_000


def test_prompts_are_apart_and_whole() -> None:
    text = TextFormat.of_model(shipped("private"))
    prompts = alignment.prompts_of(text, "C headers", 10)
    assert len({tuple(prompt) for prompt in prompts}) == 10
    assert {len(prompt) for prompt in prompts} == {alignment.PROMPT}


def test_what_is_learnt_has_about_the_asked_size() -> None:
    """As many tokens again are the model's own."""
    text = TextFormat.of_model(shipped("private"))
    learnt = alignment.learnt_text(text, "descriptions", 40_000)
    assert 17_000 < len(text.tokenizer.encode(learnt)) < 23_000


def test_a_rate_is_of_all_places() -> None:
    runs = [{"places": 10, "overlap": 5.0}, {"places": 30, "overlap": 27.0}]
    mean, error = alignment.rate(runs, "overlap")
    assert mean == 0.8
    # Both texts lie 3 from their share, in opposite directions.
    np.testing.assert_allclose(error, np.sqrt(2 * (3**2 + 3**2)) / 40)
    assert alignment.rate(runs[:1], "overlap") == (0.5, 0.0)


def record(task: str, points: int) -> dict[str, Any]:
    def texts(overlap: float) -> dict[str, Any]:
        one = {"tokens": 41, "steps": 16, "places": 50, "overlap": overlap, "likeliest": 10}
        return {"4": [one], "8": [one], "16": [one]}

    curve = [{"tokens": 1000 * i, "acceptance": 0.5 + i / 100} for i in range(points)]
    return {"asked": {"pair": "T5", "task": task, "top_k": 5}, "curve": curve} | {
        "before": texts(25.0),
        "after": texts(30.0),
    }


def test_tables_have_each_pair_and_task() -> None:
    lines = alignment.table([record("Python", 3), record("C headers", 9)])
    cells = [part.strip() for part in lines[2].split("|")[1:-1]]
    assert cells[:6] == ["T5", "Python", "5", "2,000", "0.50 ± 0.00", "0.60 ± 0.00"]
    # (1 - 0.6^5) / 0.4
    assert cells[8] == "2.50 → 2.50 (2.31)" and len(lines) == 4
    heads, _, short, long = alignment.curves([record("Python", 3), record("C headers", 9)])
    assert heads.endswith("point 8 |") and short.endswith("– |")
    assert long.endswith("| 0.580 (8) |") and "0.500 (0)" in short


@pytest.mark.slow
def test_the_command_aligns_and_counts(tmp_path: Path) -> None:
    """And goes on where it was: what is there is not made again."""
    file, work = tmp_path / "a.json", tmp_path / "work"
    given = ["--tasks", "C headers", "--answers", "10000", "--epochs", "1", "--prompts", "2"]
    options = ["experiment", "alignment", *given, "--work", str(work), "--json", str(file)]
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            main(options)
        assert end.value.code == 0
    (made,) = json.loads(file.read_text())["runs"]
    assert made["asked"]["pair"] == "GPT-2" and made["curve"][-1]["tokens"] > 5000
    for when in ("before", "after"):
        assert all(len(texts) == 2 for texts in made[when].values())
        assert 0 < alignment.rate(made[when]["8"], "overlap")[0] < 1
