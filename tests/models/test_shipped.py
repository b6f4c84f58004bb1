"""The model card states what the shipped files are."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from models.hf import load_config
from models.training import train
from models.training.corpus import read_manifest
from models.training.snippets import SHIPPED, read_snippets

CARD = (SHIPPED / "README.md").read_text(encoding="utf-8")


def cells(row: str) -> list[str]:
    """Return the cells of the card's row of this name: private, public."""
    (line,) = re.findall(rf"^\| {row} \| (.*) \|$", CARD, re.MULTILINE)
    return str(line).split(" | ")


@pytest.mark.parametrize(
    ("column", "name", "schedule"),
    [(0, "private", train.PRIVATE_SCHEDULE), (1, "public", train.PUBLIC_SCHEDULE)],
)
def test_the_table_is_that_of_the_files(column: int, name: str, schedule: train.Schedule) -> None:
    config = load_config(SHIPPED / name)
    file = SHIPPED / name / "model.safetensors"
    parameters = sum(int(np.prod(t.shape)) for t in load_file(file).values())
    said = {row: cells(row)[column] for row in ("architecture", "parameters", "context")}
    assert said == {
        "architecture": f"GPT-2, {config.n_layer} layers, width {config.n_embd}, "  # type: ignore[attr-defined]
        f"{config.n_head} heads",  # type: ignore[attr-defined]
        "parameters": f"{parameters / 1e6:.2f} million",
        "context": f"{config.n_positions} tokens",  # type: ignore[attr-defined]
    }
    assert cells("file, float16")[column] == f"{file.stat().st_size / 1e6:.1f} MB"
    assert f"{schedule.steps:,} steps of {schedule.batch} windows" in cells("trained with")[column]


def test_quality_is_that_of_the_results() -> None:
    results = (SHIPPED.parents[1] / "docs" / "results" / "completions.md").read_text(
        encoding="utf-8"
    )
    rows = re.findall(r"^\| (private|public)[ ,].*\| ([\d.]+) \| ([\d.]+) \|$", results, re.M)
    assert [row[0] for row in rows] == ["private", "public"]
    assert cells("held-out perplexity per token") == [row[1] for row in rows]
    assert cells("held-out bits per byte") == [row[2] for row in rows]
    (rate,) = re.findall(r"min\(p, q\), (0\.\d+) at temp", " ".join(results.split()))
    assert f"accepts {100 * float(rate):.0f} % of the public" in " ".join(CARD.split())


def test_the_training_data_are_counted() -> None:
    files = read_manifest(SHIPPED / "corpus.json")
    held_out = [file for file in files if file.held_out]
    size, kept = (sum(file.size for file in part) / 1e6 for part in (files, held_out))
    assert f"\n{len(files)} files, {size:.1f} MB. {len(held_out)} of them ({kept:.1f} MB," in CARD
    assert f"has {len(read_snippets())} excerpts" in CARD
    python = json.loads((SHIPPED / "corpus.json").read_text(encoding="utf-8"))["python"]
    assert f"CPython {python}" in CARD


def test_what_the_card_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", CARD)
    assert len(links) >= 4
    for link in links:
        assert (SHIPPED / link).is_file(), link
