"""The study of fakes: its secrets, a model at a temperature, and how results are shown."""

from __future__ import annotations

from dataclasses import asdict, replace

import jax
import numpy as np
import pytest

from experiments.common import commands
from experiments.common.saved import DATA
from experiments.confidential import fakes
from experiments.confidential.fakes import CELLS, FakesCell, FakesPlan, Warm, misspelt, secrets
from models.hf import load_model
from models.scoring import Scorer
from models.tokenizer import Tokenizer
from spu_llm.api.defaults import shipped
from spu_llm.core.errors import InputError


@pytest.mark.parametrize(
    ("word", "wrong"), [("import", "ipmort"), ("boom", "boom"), ("ooops", "oopos")]
)
def test_a_misspelt_word_has_the_same_letters(word: str, wrong: str) -> None:
    assert misspelt(word) == wrong and sorted(word) == sorted(wrong)


def test_secrets_are_of_their_kind_and_length() -> None:
    tokenizer = Tokenizer.load(shipped("public"))
    for cell in (FakesCell("", "capital"), FakesCell("", "number"), FakesCell("", tokens=4)):
        for prompt in secrets(tokenizer, cell, 4, 0):
            (span,) = prompt.marked.redacted
            (target,) = prompt.targets
            secret = prompt.marked.text[span.start : span.stop]
            assert len(prompt.tokens) - target.stop >= 4  # text behind it
            if cell.tokens:
                assert len(target) == cell.tokens
            else:
                assert fakes.KINDS[cell.kind].fullmatch(secret)
    words, wrong = (secrets(tokenizer, FakesCell("", misspelt=bad), 4, 0) for bad in (False, True))
    # The same pieces of text, but for the secret.
    for one, other in zip(words, wrong, strict=True):
        (span,) = one.marked.redacted
        word = one.marked.text[span.start : span.stop]
        assert misspelt(word) != word and misspelt(word) in other.marked.text


def test_a_model_at_a_temperature() -> None:
    """Log-probabilities are those of its logits, divided by the temperature."""
    directory, context = shipped("public"), [5, 6, 7]
    plain = Scorer(*load_model(directory), 16).begin(context).next.astype(np.float64)
    warm = Warm(directory, 16, 2.0).begin(context).next
    wanted = jax.nn.log_softmax(plain / 2)
    np.testing.assert_allclose(warm, wanted, atol=1e-4)


def test_cells_differ_from_words_in_one_thing() -> None:
    words = CELLS[0]
    for cell in CELLS[1:4]:
        same = replace(cell, name=words.name)
        changed = [name for name, value in asdict(same).items() if value != asdict(words)[name]]
        assert len(changed) == 1


def test_the_committed_file_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that it lacks is measured alone, and its row stands in its place."""
    rows = commands.earlier(DATA / "fakes.json", FakesPlan())
    asked = []

    def row_of(plan: FakesPlan, cell: FakesCell, eps: float, say: object) -> fakes.Row:
        asked.append((plan, cell, eps))
        return rows[4]

    monkeypatch.setattr(fakes, "row_of", row_of)
    for done in (rows, [row for row in rows if row is not rows[4]]):
        assert fakes.measure(FakesPlan(), lambda words: None, done=done)["rows"] == rows
    assert asked == [(FakesPlan(), CELLS[1], fakes.EPSILONS[1])]
    with pytest.raises(InputError, match="no cells of this very plan"):
        commands.earlier(DATA / "fakes.json", FakesPlan(seed=1))


def test_the_table_has_a_line_for_each_cell() -> None:
    rows = [
        {**asdict(cell), "eps": eps, "lengths": [2, 4], "fakes": [0, 10], "seconds": [0.5, 1.5]}
        for cell in CELLS
        for eps in fakes.EPSILONS
    ]
    lines = fakes.table({"rows": rows}).splitlines()
    assert len(lines) == 2 + len(CELLS)
    assert lines[2] == "| words | 3.0 | 5 ± 10 | 5 ± 10 | 5 ± 10 | 50% |"
