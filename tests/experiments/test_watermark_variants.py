"""The study of the watermark's variants: edits, what they keep, shared n-grams, and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.watermark import essays, variants
from experiments.watermark.essays import MARKS, Mark
from experiments.watermark.texts import UNITS
from experiments.watermark.variants import BEAMS, REWRITINGS, SAMPLES, Endless, Watched, Way
from spu_llm.app import cli
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.units import Content, StemUnits

TEXT = "The rivers of the north carry stones; and a garden grows between the walls. " * 8


def run(command: list[str]) -> None:
    options = cli.command_line().parse_args(command)
    options.run(options)


def test_edits_of_words_change_what_they_say() -> None:
    dropped, endings, replaced = (
        edit(TEXT, Prg.from_seed(0, name)) for name, edit in essays.EDITS.items()
    )
    stems = StemUnits().of(TEXT)
    assert StemUnits().of(dropped) == stems and len(dropped) < len(TEXT)
    assert StemUnits().of(endings) == stems and endings != TEXT
    assert len(replaced.split()) == len(TEXT.split()) and StemUnits().of(replaced) != stems
    same = [a == b for a, b in zip(replaced.split(), TEXT.split(), strict=True)]
    assert 0.6 < np.mean(same) < 0.9
    assert essays.words_replaced("...", Prg.from_seed(0, "")) == "..."


def test_what_an_edit_keeps_is_counted() -> None:
    before = "one big river carries seven stones"
    assert essays.kept(before, before) == (1, 1, 1)
    length, grams, stems = essays.kept(before, "big river carries seven")
    assert length == 4 / 6 and grams == 1 and stems == 4 / 5
    assert essays.kept(before, "the rivers carried a stone")[1:] == (0, 3 / 5)
    assert essays.kept("the", "") == (0, 0, 0)
    assert essays.repeated(before) == 0
    assert essays.repeated("a b c d a b c d") == pytest.approx(1 / 5)


def test_shared_n_grams_are_counted_but_for_the_first() -> None:
    class Three:
        def sample(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
            return [Drawn(content, False) for content in ((1, 2), (1, 3), (1, 2))]

    watched = Watched(Three())
    watched.sample((9, 9, 5), 3, 2)
    # After 5: (5, 1), (5, 1, 2) and (5, 1), (5, 1, 3), of which one is there already.
    assert variants._shared(watched, 2, (5, 1, 2)) == 1 / 4
    assert len(UNITS.of((5, 1))) == 2


def test_texts_of_the_study_do_not_end() -> None:
    p = Endless(1.0, never=(0, 2)).distribution(np.zeros(4, np.float32))
    assert p.tolist() == [0, 0.5, 0, 0.5]


def test_marks_and_ways_have_a_name_each() -> None:
    titles = [one.title for one in (*MARKS, *variants.WAYS)]
    assert len(set(titles)) == len(titles)
    assert Way(REWRITINGS, 16, 20, 0.5).asked == 1 and Way(BEAMS, 4, 1).asked == 4
    assert {mark.scheme.units for mark in MARKS} == {"tokens", "words", "stems"}
    for cell in (MARKS[-1], variants.WAYS[-1]):
        part = variants.ESSAYS if isinstance(cell, Mark) else variants.CANDIDATES
        assert variants.cell_of({"part": part, **cell.__dict__, "other": 1}) == cell


def test_essays_without_a_template_are_refused() -> None:
    from spu_llm.api.defaults import shipped

    with pytest.raises(InputError, match="no chat template"):
        essays.Essays(shipped("public"), essays.EssaysPlan(), print)


@pytest.mark.parametrize(
    ("option", "value"), [("--texts", "1"), ("--essays", "1"), ("--essay-tokens", "5")]
)
def test_too_little_is_refused(option: str, value: str) -> None:
    with pytest.raises(InputError, match=option):
        run(["experiment", "watermark-variants", option, value])


@pytest.mark.slow
def test_ways_of_candidates_and_their_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the shipped models, four short texts; a run goes on, and essays have tables of their
    own.
    """
    ways = (Way(SAMPLES, 4, 1), Way(BEAMS, 4, 10), Way(REWRITINGS, 8, 20, 0.5))
    monkeypatch.setattr(variants, "WAYS", ways)
    file = tmp_path / "variants.json"
    command = ["experiment", "watermark-variants", "--texts", "4", "--tokens", "40"]
    command += ["--json", str(file)]
    run(command)
    result = json.loads(file.read_text())
    samples, beams, rewritings = result["rows"]
    # Beams are far likelier than the model's own text; a sample's rewritings share n-grams.
    assert beams["bits"][0] < 0.7 * samples["bits"][0] and beams["excess_bits"][2] < 0
    assert rewritings["shared"][0] > samples["shared"][0]
    assert samples["excess_bits"][1] < 0.5 and samples["distinct"][0] > 1.5
    lines = variants.candidates_rows(result)
    assert len(lines) == 2 + len(ways) and "rewritings of one sample" in lines[-1]
    assert variants.essay_tables(result) == [[], [], []]
    assert variants.in_results(result, "*origin*") == ["\n".join(lines), "*origin*"]

    def nothing(*of_cell: Any) -> dict[str, Any]:
        raise AssertionError("a cell that is there is not made again")

    monkeypatch.setattr(variants.Variants, "row", nothing)
    run(command)
    assert json.loads(file.read_text())["rows"] == result["rows"]
