"""What docs/results says of the shipped pair."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from experiments import render
from experiments.common import saved
from experiments.completions import shipped
from tests.experiments.committed_results import MACHINE, MEASURED, mistakes_of
from tests.models.training_figures import FIGURES


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
    (_, _, under, *_) = render.TABLES["shipped"].paragraphs({"shipped": figures})
    assert f"; load 0.1 before, 0.4 at the end (no seconds in it); {saved.link('shipped')}" in under


def test_what_a_demo_took() -> None:
    demo = {
        "token_ids": [7] * 32,
        "steps": 9,
        "accepted": 22,
        "drafted": 63,
        "first_token_seconds": 39.611,
        "elapsed_seconds": 126.705,
        "seconds": {"decode": 8.695},
        "bytes": {
            kind: {"client_to_provider": 5e7 * n, "provider_to_client": 6e6}
            for kind, n in (("online", 2), ("offline", 11))
        },
        "machine": MACHINE,
        "config": {"request.draft_length": 7},
    }
    text, under = render.TABLES["demo"].paragraphs({"demo": demo})
    assert text == (
        "First token after 39.6 s, 32 tokens after 126.7 s in 9 steps of 8 positions (22 of 63 "
        "drafts accepted), 8.7 s of them decoding; 106 MB online, 556 MB ahead."
    )
    assert MEASURED.search(under)
