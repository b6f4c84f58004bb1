"""Add-or-remove: references that are dealt out by their own words, so that one more or less moves
one text's sum by one clipped term, and nothing else at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tokenizer import Tokenizer
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.dp_text.accounting import ADD_OR_REMOVE
from spu_llm.systems.dp_text.generator import MOST_PASSES, Generator, batches, dealt
from spu_llm.systems.dp_text.lanes import folded
from spu_llm.systems.dp_text.mechanism import clipped_sum, grid_clip
from spu_llm.systems.dp_text.methods import Method, Next, invisible_ink
from spu_llm.systems.dp_text.parameters import Parameters
from spu_llm.systems.dp_text.prompts import Prompts, prompts_for
from tests.kit.models import PRIVATE, endless, save_tokenizer, tiny_params

TEXTS, B, T, CLIP = 3, 2, 2, 0.25
REFERENCES = [f"number {i} of them" for i in range(9)]
Deal = Callable[[Sequence[str], int, int], list[list[str]]]


def by_place(references: Sequence[str], batch: int) -> list[Counter[str]]:
    """Count a text's references at each place in B, nulls left out."""
    return [Counter(filter(None, references[place::batch])) for place in range(batch)]


@given(st.lists(st.text(max_size=6), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 4))
def test_all_others_stay_where_they_are(references: list[str], texts: int, batch: int) -> None:
    """In their texts, and in their places there; nobody is lost, and nobody comes twice."""
    before = dealt(references, texts, batch)
    assert len(before) == texts and all(len(text) % batch == 0 for text in before)
    everybody = sum((Counter(filter(None, text)) for text in before), Counter[str]())
    assert everybody == Counter(filter(None, references))
    after = dealt(references[1:], texts, batch)
    moved = [i for i in range(texts) if before[i] != after[i]]
    assert len(moved) <= 1
    for i in moved:
        places = zip(by_place(before[i], batch), by_place(after[i], batch), strict=True)
        gone = [one - other for one, other in places if one != other]
        assert gone == [Counter([references[0]])] != [Counter([""])]


def test_no_text_goes_through_any_number_of_passes() -> None:
    """Equal references belong to one place, and each needs a pass of its own."""
    assert len(dealt(["same"] * MOST_PASSES, TEXTS, B)) == TEXTS
    with pytest.raises(InputError, match="65 passes of --batch"):
        dealt(["same"] * (MOST_PASSES + 1), TEXTS, B)
    assert dealt([], TEXTS, B) == [[]] * TEXTS


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return prompts_for(Tokenizer.load(directory), "def read(path):", 64, T, 24)


@pytest.fixture(scope="module")
def weights() -> Any:
    return folded(PRIVATE, endless(tiny_params(PRIVATE, 1)))


def sums(weights: Any, prompts: Prompts, texts: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Return S [token, vocab] of each text, whose tokens are always the same."""
    plain = invisible_ink(Parameters(B, CLIP, 1.0, T, adjacency=ADD_OR_REMOVE))
    collected: list[np.ndarray] = []

    def begin(present: np.ndarray, prg: Prg) -> Next:
        def token(public: np.ndarray, private: np.ndarray) -> int:
            collected.append(clipped_sum(public, private, present, CLIP))
            return 7

        return token

    method = Method(plain.name, B, T, plain.event, begin, {}, any_number=plain.any_number)
    generator = Generator(method, PRIVATE, weights, prompts)
    for text in texts:
        generator.text(text, Prg.from_os())
    return [np.array(collected[i : i + T]) for i in range(0, len(collected), T)]


def changes(weights: Any, prompts: Prompts, deal: Deal) -> list[float]:
    """Return how far a text's sum moves at most, for each text that moves, as any one reference
    goes.
    """
    before = sums(weights, prompts, deal(REFERENCES, TEXTS, B))
    most = []
    for i in range(len(REFERENCES)):
        after = sums(weights, prompts, deal(REFERENCES[:i] + REFERENCES[i + 1 :], TEXTS, B))
        moved = [float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True)]
        most.append([by for by in moved if by])
    assert all(len(by) == 1 for by in most), most
    return [by[0] for by in most]


def test_a_reference_moves_one_text_by_its_own_term(weights: Any, prompts: Prompts) -> None:
    """Exactly, in the bits of S, with several passes of B through the model."""
    assert max(len(text) for text in dealt(REFERENCES, TEXTS, B)) > B
    moved = changes(weights, prompts, dealt)
    assert len(moved) == len(REFERENCES) and max(moved) <= grid_clip(CLIP)


def test_batches_by_place_in_the_file_move_together(weights: Any, prompts: Prompts) -> None:
    """Where one goes, all after it move up: this is caught."""

    def in_order(references: Sequence[str], texts: int, batch: int) -> list[list[str]]:
        return (batches(references, 3) + [[]] * texts)[:texts]

    with pytest.raises(AssertionError):
        changes(weights, prompts, in_order)


def test_a_text_of_more_than_its_batch(weights: Any, prompts: Prompts, tmp_path: Path) -> None:
    """Each adds its own term; by another method that is refused."""
    many = sums(weights, prompts, [REFERENCES])[0]
    several = sums(weights, prompts, [[one] for one in REFERENCES])
    # Terms of the second place of a pass are rows of another place here, so not bit by bit.
    np.testing.assert_allclose(many, sum(several), atol=1e-5)
    fixed = Generator(invisible_ink(Parameters(B, CLIP, 1.0, T)), PRIVATE, weights, prompts)
    with pytest.raises(ValueError, match="9 references in a batch of 2"):
        fixed.text(REFERENCES, Prg.from_os())
