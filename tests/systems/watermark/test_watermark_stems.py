"""Units that are stems: what they are made of, what they outlast, and that p stays calibrated."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from models.training.snippets import read_snippets
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.detecting import detect, marks_of, uniforms
from spu_llm.systems.watermark.embedding import Embedder
from spu_llm.systems.watermark.history import History
from spu_llm.systems.watermark.keys import KeyFile, Scheme
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.scores import log_p
from spu_llm.systems.watermark.stems import stem
from spu_llm.systems.watermark.units import Content, StemUnits, WordUnits, units_of
from tests.systems.watermark.chains import FALSE_ALARM, key_of

KINDS = (
    "river",
    "garden",
    "market",
    "window",
    "harbour",
    "castle",
    "forest",
    "village",
    "mountain",
)
THINGS = ("bank", "stone", "mill", "door", "path", "gate", "wall", "roof", "bell", "yard", "well")
NOUNS = [f"{kind}{thing}" for kind in KINDS for thing in THINGS]
BETWEEN = (" of the ", " and a ", " in the ", " with her ", " to my ")


@pytest.mark.parametrize(
    "words",
    [
        ("walk", "walks", "walked", "walking"),
        ("make", "makes", "making"),
        ("run", "runs", "running"),
        ("study", "studies", "studied", "studying"),
        ("pass", "passes", "passed", "passing"),
        ("happy", "happily"),
        ("class", "classes"),
        ("agree", "agrees", "agreeing"),
    ],
)
def test_forms_of_a_word_have_one_stem(words: tuple[str, ...]) -> None:
    assert len({stem(word) for word in words}) == 1


def test_other_words_have_other_stems() -> None:
    words = [
        "walk",
        "talk",
        "bus",
        "bushes",
        "thing",
        "ring",
        "sing",
        "seed",
        "need",
        "2031",
        "был",
    ]
    assert len({stem(word) for word in words}) == len(words)


def test_units_are_stems_of_words_with_a_meaning() -> None:
    text = "The Rivers, and her  garden's walls\u00ad: 12 gates!"
    units = StemUnits().placed(text)
    assert [unit.value.decode() for unit in units] == ["river", "garden", "wall", "12", "gat"]
    assert [text[unit.start : unit.end] for unit in units][0] == "Rivers"
    assert isinstance(units_of("stems", None), StemUnits)


def file_of(number: int, units: str, ngram: int) -> KeyFile:
    return KeyFile(key_of(number, units), Scheme(ngram, units=units))


@pytest.mark.parametrize("ngram", [1, 2])
def test_p_values_of_unmarked_stems_are_uniform(ngram: int) -> None:
    """Under a key each; a false alarm once in a million seeds, which are fixed."""
    p = []
    for number, snippet in enumerate(read_snippets() * 4):
        file = file_of(number, "stems", ngram)
        numbers = uniforms(marks_of(file, StemUnits().placed(snippet.text)))
        p.append(math.exp(log_p(numbers, file.scheme.family)))
    assert len(p) > 200 and stats.kstest(p, "uniform").pvalue > FALSE_ALARM


class Nouns:
    """Writes a noun with an article or so before it, each of NOUNS as likely."""

    def __init__(self, prg: Prg) -> None:
        self._prg = prg

    def sample(self, prefix: Content, n: int, max_tokens: int) -> list[Drawn]:
        points = self._prg.uniform((n, 2))
        return [
            Drawn(BETWEEN[int(a * len(BETWEEN))] + NOUNS[int(b * len(NOUNS))], False)
            for a, b in points
        ]


def written(number: int, units: str, ngram: int, *, on: bool = True) -> str:
    file = file_of(number, units, ngram)
    prg = Prg.from_seed(number, f"nouns {units} {ngram}")
    embedder = Embedder(
        (file.key,), file.scheme, Nouns(prg), units_of(units, None), 16, 1, (History(on),), prg
    )
    text = embedder.text("", 60).content
    assert isinstance(text, str)
    return text


def evidence(text: str, number: int, units: str, ngram: int) -> float:
    """Return -log10 p of a text."""
    file = file_of(number, units, ngram)
    verdict = detect([file], [units_of(units, None)], text, locate=False)
    return -verdict.log_p / math.log(10)


def other_endings_and_function_words(text: str) -> str:
    """Return a text with every noun in the plural and other words between them."""
    nouns = [word for word in text.split() if word in NOUNS]
    return " ".join(f"{'from our' if i % 2 else 'by this'} {w}s" for i, w in enumerate(nouns))


def test_stems_outlast_what_words_do_not() -> None:
    for number in range(3):
        by_words, by_stems = written(number, "words", 4), written(number, "stems", 2)
        assert evidence(by_words, number, "words", 4) > 4
        assert evidence(by_stems, number, "stems", 2) > 4
        assert evidence(other_endings_and_function_words(by_words), number, "words", 4) < 3
        edited = other_endings_and_function_words(by_stems)
        assert evidence(edited, number, "stems", 2) == pytest.approx(
            evidence(by_stems, number, "stems", 2)
        )
        # Nobody else's key finds it.
        assert evidence(by_stems, number + 10, "stems", 2) < 4


def test_one_stem_a_seed_outlasts_another_order() -> None:
    text = written(5, "stems", 1, on=False)
    turned = " ".join(reversed(text.split()))
    before = evidence(text, 5, "stems", 1)
    assert before > 4 and evidence(turned, 5, "stems", 1) == pytest.approx(before)
    # Each stem counts once, so the text says less than one of pairs; and with a history, in which
    # losers' stems count as used, the stems are soon used up.
    assert before < evidence(written(5, "stems", 2), 5, "stems", 2)
    assert evidence(written(5, "stems", 1), 5, "stems", 1) < before


def test_words_keep_their_signs() -> None:
    assert len(WordUnits().of("a walk, walked")) == 4
