"""What RESULTS.md says of the shipped pair."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from experiments import render
from experiments.claims import shipped
from tests.experiments.test_results import MACHINE, mistakes_of
from tests.models.test_training import FIGURES


def test_tables_of_an_evaluation(tmp_path: Path) -> None:
    figures = json.loads(json.dumps(asdict(FIGURES))) | {"machine": MACHINE}
    sentence, quality, under, speed, again = shipped.in_results(figures, "*From here.*")
    assert sentence == (
        "38,003 held-out tokens: acceptance rate, the sum of min(p, q), 0.738 at temperature 1; "
        "the same most likely token at 80.0%."
    )
    assert quality.endswith("| public | 58.40 | 1.900 |")
    assert "| simulated, greedy | 1.50 |" in speed
    assert under == again == "*From here.*"
    assert mistakes_of("shipped", figures, tmp_path) == []
    (_, _, origin, *_) = render.TABLES["shipped"].paragraphs({"shipped": figures})
    assert "; load 0.1 before, 0.4 at the end (no seconds in it); [data](data/shipped.json)" in origin
