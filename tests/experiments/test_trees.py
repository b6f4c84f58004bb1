"""The study of trees of drafts: walks through a text that the noise has decided."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.completions import trees
from experiments.completions.trees import Tree, walk, written
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
    text = written(Fixed(3, 1), GREEDY, [0], 12, OWN)
    assert text == [3] * 12
    assert written(Fixed(3, 1), GREEDY, [0], 12, OWN, frozenset([3])) == [3]
    # All drafts are right: tokens after the first one, of nine that are wanted and three behind.
    for tree, expected in (
        (Tree(1, 2), [3, 3, 3]),
        (Tree(1, 4), [5, 5]),
        (Tree(1, 1), [2, 2, 2, 2]),
        (Tree(2, 2), [3, 3, 3]),
    ):
        assert walk(tree, text, 9, [0], Fixed(3, 1), GREEDY, OWN) == expected
    # Only the second chain begins right, and goes on wrong.
    wrong = Fixed(5, 3)
    assert walk(Tree(1, 4), text, 9, [0], wrong, GREEDY, OWN) == [1] * 8
    assert walk(Tree(2, 2), text, 9, [0], wrong, GREEDY, OWN) == [2] * 4


def test_a_tree_of_siblings_writes_until_there_is_enough() -> None:
    model = Fixed(3, 1)
    each = trees.write(Tree(2, 3), 30, [0], model, model, OWN)
    # Drafts of the model itself all stay: three, and the token after them.
    assert each == [4] * 8
    assert trees.write(Tree(1, 3), 30, [0], model, model, OWN, frozenset(range(6))) == []


def test_rates_are_of_all_texts() -> None:
    """Each cell has the runs of its shape and temperature alone."""
    runs = [
        {"temperature": t, "prompt": i, "tokens": 10 * tree.chains + tree.drafts + 50 * k}
        | {"rule": rule, "steps": 10, **vars(tree)}
        for i in range(2)
        for k, (rule, t) in enumerate([("race", 0.0), ("race", 0.7), ("token", 0.7)])
        for tree in trees.TREES
    ]
    lines = trees.table({"runs": runs}).splitlines()
    assert len(lines) == 2 + 3 * len(trees.POSITIONS)
    assert lines[2] == "| race | 0 | 4 | 1.40 | 2.20 | 4.10 |"
    assert lines[-4] == "| race | 0.7 | 16 | 7.60 | 7.80 | 9.40 |"
    assert lines[-1] == "| token | 0.7 | 16 | 12.60 | 12.80 | 14.40 |"


@pytest.mark.slow
def test_the_command_writes_all_walks(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "trees.json"
    options = ["--model", str(pair.private), "--draft-model", str(pair.public), "--tokens", "6"]
    with pytest.raises(SystemExit) as end:
        main(["experiment", "trees", *options, "--json", str(file)])
    assert end.value.code == 0
    runs = json.loads(file.read_text())["runs"]
    assert len(runs) == len(trees.TREES) * (len(trees.TEMPERATURES) + 1) * 10
    assert all(0 <= run["steps"] <= run["tokens"] for run in runs)
