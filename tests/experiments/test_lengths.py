"""The study of lengths of drafts: how the next one is chosen, and what a token costs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.completions import lengths
from experiments.completions.lengths import CHOSEN, LENGTHS, SLOPES, Chooser, per_cost, steps_of
from models.draft import Proposer
from spu_llm.app.cli import main
from tests.kit.pair import Pair


class Fixed(Proposer):
    """Has one likely token everywhere."""

    vocab_size = 6

    def __init__(self, token: int) -> None:
        self._logits = np.zeros(6)
        self._logits[token] = 60.0

    def logits(self, tokens: list[int]) -> np.ndarray:
        return self._logits


def test_lengths_follow_what_stayed() -> None:
    good, bad = Chooser(0.65), Chooser(0.65)
    assert good.length() == bad.length() == 8
    for _ in range(20):
        good.saw(good.length(), good.length())
        bad.saw(0, bad.length())
    assert good.length() == 16 and bad.length() == 1
    for _ in range(40):
        good.saw(0, good.length())
    assert good.length() <= 2  # what was long ago is forgotten


def test_steps_are_those_of_the_length() -> None:
    right, wrong = Fixed(2), Fixed(3)
    none: frozenset[int] = frozenset()
    assert steps_of(right, right, [0], none, 12, 4, 0) == [(4, 5)] * 3
    assert steps_of(right, wrong, [0], none, 6, 4, 0) == [(4, 1)] * 5
    chosen = steps_of(right, right, [0], none, 60, Chooser(0.65), 0)
    assert [drafts for drafts, _ in chosen] == sorted(drafts for drafts, _ in chosen)
    assert chosen[0][0] == 8 and chosen[-1][0] == 16
    assert steps_of(right, right, [0], frozenset([2]), 12, 4, 0) == []


def test_a_token_has_its_share_of_all_steps() -> None:
    runs = [{"steps": [(16, 4), (16, 1)]}, {"steps": [(4, 5)]}]
    assert per_cost(runs, 0.8) == pytest.approx((1.8 + 1.8 + 1.2) / 10)


@pytest.mark.slow
def test_the_command_writes_all_texts(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    options = ["--model", str(pair.private), "--draft-model", str(pair.public), "--tokens", "6"]
    with pytest.raises(SystemExit) as end:
        main(["experiment", "lengths", *options, "--json", str(file)])
    assert end.value.code == 0
    result = json.loads(file.read_text())
    assert len(result["runs"]) == 10 * (len(LENGTHS) + len(SLOPES))
    assert {run["length"] for run in result["runs"]} == {CHOSEN, *LENGTHS}
    assert len(lengths.table(result).splitlines()) == 2 + len(SLOPES)
