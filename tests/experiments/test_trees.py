"""The study of trees of drafts: walks through a text that the noise has decided."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.completions import trees
from experiments.completions.trees import Tree, steps, written
from models.draft import Proposer
from protocols.verification.distribution import Sampling, Streams
from protocols.verification.race import Race
from spu_llm.app.cli import main
from spu_llm.core.prg import Prg
from tests.kit.pair import Pair

OWN = Streams(Prg.from_seed(1, "drafts"), Prg.from_seed(1, "sampling"))
GREEDY = Race(Sampling(0.0), False)


class Fixed(Proposer):
    """Has the same two likeliest tokens everywhere: `first`, then `second`."""

    vocab_size = 6

    def __init__(self, first: int, second: int) -> None:
        self._logits = np.zeros(6)
        self._logits[[first, second]] = 2.0, 1.0

    def logits(self, tokens: list[int]) -> np.ndarray:
        return self._logits


def test_a_tree_walks_by_its_longest_chain() -> None:
    text = written(Fixed(3, 1), GREEDY, [0], 9, OWN)
    assert text == [3] * 9
    # All drafts are right: of 8 tokens after the first one, 3 or 2 a step.
    for tree, expected in ((Tree(1, 2), 3), (Tree(1, 1), 4), (Tree(2, 2), 3)):
        assert steps(tree, text, [0], Fixed(3, 1), GREEDY, OWN) == expected
    # Only the second chain begins right, and goes on wrong.
    wrong = Fixed(5, 3)
    assert steps(Tree(1, 4), text, [0], wrong, GREEDY, OWN) == 8
    assert steps(Tree(2, 2), text, [0], wrong, GREEDY, OWN) == 4


def test_rates_are_of_all_texts() -> None:
    runs = [
        {"temperature": t, "prompt": 0, "tokens": 21, "steps": 10, **vars(tree)}
        for t in trees.TEMPERATURES
        for tree in trees.TREES
    ]
    lines = trees.table({"runs": runs}).splitlines()
    assert len(lines) == 2 + 2 * len(trees.POSITIONS)
    assert lines[2] == "| 0 | 4 | 2.00 | 2.00 | 2.00 |"


@pytest.mark.slow
def test_the_command_writes_all_walks(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "trees.json"
    options = ["--model", str(pair.private), "--draft-model", str(pair.public), "--tokens", "6"]
    with pytest.raises(SystemExit) as end:
        main(["experiment", "trees", *options, "--json", str(file)])
    assert end.value.code == 0
    runs = json.loads(file.read_text())["runs"]
    assert len(runs) == len(trees.TREES) * len(trees.TEMPERATURES) * 10
    assert all(1 <= run["steps"] < run["tokens"] for run in runs)
