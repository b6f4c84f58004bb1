"""Detection is calibrated on real unmarked text, finds marks through edits, and says where.

Unmarked: the shipped held-out excerpts, under keys that have nothing to do with them. Tests of
uniformity raise a false alarm once in a million seeds, which are fixed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from models.tokenizer import Tokenizer
from models.training.snippets import read_snippets
from spu_llm.api.defaults import shipped
from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark import scores
from spu_llm.systems.watermark.cdfs import Family
from spu_llm.systems.watermark.detecting import (
    Marked,
    as_json,
    as_p,
    detect,
    marks_of,
    spans_of,
    uniforms,
    windows,
)
from spu_llm.systems.watermark.keys import KeyFile, Scheme
from spu_llm.systems.watermark.page import page
from spu_llm.systems.watermark.selecting import choose
from spu_llm.systems.watermark.theory import gamma_power
from spu_llm.systems.watermark.units import TokenUnits, Units, WordUnits
from tests.systems.watermark.chains import FALSE_ALARM, key_of

SNIPPETS = [snippet.text for snippet in read_snippets()]
WORDS = WordUnits()
VOCABULARY = [f"w{i}" for i in range(400)]


def file_of(number: int, family: Family | None = None, **scheme: object) -> KeyFile:
    return KeyFile(key_of(number), Scheme(4, family or Family(), **{"units": "words", **scheme}))


def null_p(
    score: str, family: Family, units: Units, texts: Sequence[str], *, first: int = 0, **more: int
) -> list[float]:
    """Return p of each text under a key of its own."""
    collected = []
    for number, text in enumerate(texts, first):
        marks = marks_of(file_of(number, family), units.placed(text))
        collected.append(math.exp(scores.log_p(uniforms(marks), family, score, **more)))
    return collected


@pytest.mark.parametrize(
    ("score", "family"),
    [
        ("sum", Family("uniform")),
        ("lrt", Family("normal")),
        *(
            pytest.param(score, family, marks=pytest.mark.slow)
            for score, family in (
                ("sum", Family("normal")),
                ("sum", Family("chi2")),
                ("sum", Family("gamma", 10)),
                ("fisher", Family("uniform")),
            )
        ),
    ],
)
def test_p_values_of_unmarked_text_are_uniform(score: str, family: Family) -> None:
    texts = SNIPPETS * (1 if score == "lrt" else 2)
    p = null_p(score, family, WORDS, texts, m=4, k=3)
    assert stats.kstest(p, "uniform").pvalue > FALSE_ALARM


def test_so_are_those_of_tokens_and_of_joined_keys() -> None:
    tokens = TokenUnits(Tokenizer.load(shipped("private")))
    p = null_p("sum", Family("normal"), tokens, SNIPPETS)
    assert stats.kstest(p, "uniform").pvalue > FALSE_ALARM
    more = null_p("sum", Family("normal"), tokens, SNIPPETS, first=500)
    pairs = zip(p, more, strict=True)
    joined = [math.exp(scores.combined([math.log(a), math.log(b)])) for a, b in pairs]
    assert stats.kstest(joined, "uniform").pvalue > FALSE_ALARM


def test_repeats_count_once() -> None:
    """Counted as often as they come, n-grams of a text that repeats itself are no evidence of so
    many: p-values are far from uniform then.
    """
    texts, family = [" ".join([text[:150]] * 6) for text in SNIPPETS * 3], Family("normal")
    assert stats.kstest(null_p("sum", family, WORDS, texts), "uniform").pvalue > FALSE_ALARM
    every = []
    for number, text in enumerate(texts):
        key, units = key_of(number), WORDS.of(text)
        numbers = np.array(
            [key.seed(tuple(units[max(0, i - 3) : i + 1])).uniform for i in range(len(units))]
        )
        every.append(math.exp(scores.log_p(numbers, family)))
    assert stats.kstest(every, "uniform").pvalue < FALSE_ALARM


# ---- texts of random words, marked word by word


def marked_text(number: int, words: int, m: int = 16) -> list[str]:
    """Return each of m words that are as likely as any, chosen by a key (flat, k = 1)."""
    key, prg = key_of(number), Prg.from_seed(number, "words")
    text: list[str] = []
    units: list[bytes] = []
    for _ in range(words):
        drawn = [VOCABULARY[int(x * 400)] for x in prg.uniform((m,))]
        distinct = sorted(set(drawn))
        head = units[max(0, len(units) - 3) :]
        grams = [[(*head, word.encode())] for word in distinct]
        counts = [drawn.count(word) for word in distinct]
        chosen = distinct[choose(key, grams, counts, Family(), prg).index]
        text.append(chosen)
        units.append(chosen.encode())
    return text


def plain_words(number: int, words: int) -> list[str]:
    return [VOCABULARY[int(x * 400)] for x in Prg.from_seed(number, "plain").uniform((words,))]


def log10_p(words: list[str], number: int) -> float:
    verdict = detect([file_of(number)], [WORDS], " ".join(words), locate=False)
    return verdict.log_p / math.log(10)


def test_marks_outlast_edits() -> None:
    """Replacing a share q of the words leaves (1 - q)^4 of the n-grams and z in proportion; after a
    word that was put in or taken out three n-grams are spoilt, and all after are as they were.
    """
    whole = marked_text(1, 200)
    assert log10_p(whole, 1) < -20 and log10_p(whole, 2) > -4

    def z_of(words: list[str]) -> float:
        numbers = uniforms(marks_of(file_of(1), WORDS.placed(" ".join(words))))
        return float((numbers.sum() - len(numbers) / 2) / math.sqrt(len(numbers) / 12))

    prg = Prg.from_seed(5, "edits")
    for share in (0.1, 0.2, 0.3):
        kept = []
        for _ in range(12):
            spoilt = prg.uniform((200,)) < share
            words = [f"x{i}" if spoilt[i] else word for i, word in enumerate(whole)]
            kept.append(z_of(words) / z_of(whole))
        # Four standard errors of twelve texts.
        assert abs(np.mean(kept) - (1 - share) ** 4) < 4 * np.std(kept) / math.sqrt(12) + 0.02
    inserted = [w for i, word in enumerate(whole) for w in ([word, "x"] if i % 20 == 9 else [word])]
    deleted = [word for i, word in enumerate(whole) if i % 20 != 9]
    cropped = whole[70:130]
    assert max(log10_p(inserted, 1), log10_p(deleted, 1)) < -15 and log10_p(cropped, 1) < -6
    # Other spaces, lines and capitals are the same words.
    other = "\n".join(whole).upper()
    assert detect([file_of(1)], [WORDS], other).log_p == pytest.approx(
        log10_p(whole, 1) * math.log(10)
    )


def test_where_a_text_is_marked() -> None:
    before, inside, after = plain_words(1, 300), marked_text(1, 80), plain_words(2, 300)
    text = " ".join([*before, *inside, *after])
    verdict = detect([file_of(1)], [WORDS], text)
    (one,) = verdict.keys
    assert one.spans and one.log_p_anywhere < math.log(1e-6)
    start, end = len(" ".join(before)), len(" ".join([*before, *inside]))
    actual = set(itertools.chain(*(range(span.start, span.end) for span in one.spans)))
    truth = set(range(start, end))
    assert len(actual & truth) > 0.7 * len(truth) and len(actual & truth) > 0.6 * len(actual)
    # Two parts are two spans.
    twice = " ".join([*inside, *before, *marked_text(1, 160)[80:], *after])
    spans = detect([file_of(1)], [WORDS], twice).keys[0].spans
    assert len(spans) >= 2 and spans[0].start < 400 and spans[-1].start > 1500


def test_windows_seldom_find_what_is_not_there() -> None:
    """At alpha = .05 at most that share of unmarked texts has a span (binomial)."""
    actual = 0
    for number in range(300):
        numbers = np.maximum(Prg.from_seed(number, "null").uniform((150,)), 2.0**-53)
        marks = [Marked(i, i + 1, float(u)) for i, u in enumerate(numbers)]
        spans, anywhere = spans_of(marks, 0.05)
        assert bool(spans) == (anywhere <= math.log(0.05))
        actual += bool(spans)
    assert stats.binom.sf(actual - 1, 300, 0.05) > FALSE_ALARM
    assert windows(0) == [] and windows(1) == [(0, 1)] and (0, 150) in windows(150)
    assert all(0 <= a < b <= 150 for a, b in windows(150))
    assert spans_of([Marked(0, 1, None)] * 20) == ([], 0.0)


def test_likelihood_ratios() -> None:
    """k = 1: m u^(m-1); -Gamma(1/k): Theorem 4.4's; others against winners that are drawn."""
    u = scores.grid()
    assert scores.log_ratios(Family("normal"), 4, 1) == pytest.approx(np.log(4 * u**3))
    draws = Family("gamma", 5).draws(u)
    assert scores.log_ratios(Family("gamma", 5), 3, 5) == pytest.approx(math.log(3) / 5 + 2 * draws)
    for family in (Family("uniform"), Family("normal")):
        ratio = np.exp(scores.log_ratios(family, 4, 5))
        assert ratio.mean() == pytest.approx(1.0, abs=0.02)
        numbers = Prg.from_seed(1, "winners").uniform((4000, 4, 5))
        best = family.draws(np.maximum(numbers, 2.0**-53)).sum(axis=2).argmax(axis=1)
        winners = numbers[np.arange(4000), best].reshape(-1)
        told = float((ratio * u).mean())
        assert abs(winners.mean() - told) < 5 * winners.std() / math.sqrt(20000) + 2e-3
        published = np.exp(scores.log_ratios_published(family, 4, 5))
        marked = numbers[:20][np.arange(20), best[:20]].reshape(-1)
        for score in ("lrt", "lrt-published"):
            assert scores.log_p(marked, family, score, 4, 5) < math.log(1e-3)
        inner = slice(200, -200)  # kernels reach over the ends of U(0, 1)
        assert np.abs(published[inner] / ratio[inner] - 1).max() < 0.15
    with pytest.raises(InputError, match="2 candidates"):
        scores.log_ratios(Family(), 1, 1)


def test_tails_of_likelihood_ratios() -> None:
    """sum log u of uniforms is -Gamma: the saddle point beside the exact distribution, and drawn
    ones.
    """
    ratios = scores.log_ratios(Family(), 3, 1)
    for count in (1, 2, 5, 60):
        for quantile in (0.5, 0.9, 0.999, 1e-3):
            cut = stats.gamma.ppf(1 - quantile, count)
            total = count * math.log(3) - 2 * cut
            actual = math.exp(scores.ratio_tail(ratios, total, count))
            assert actual == pytest.approx(1 - quantile, rel=0.06, abs=1e-3)
    assert scores.ratio_tail(ratios, 1e9, 5) < -30 and scores.ratio_tail(ratios, -1e9, 5) == 0.0


def test_theorem_4_4_is_what_is_reached() -> None:
    """T = 100, k = 10, m = 2, F = -Gamma(1/10): TPR .3162 at 1 % by real keys and choices."""
    family, caught, texts = Family("gamma", 10), 0, 300
    for trial in range(texts):
        key, prg = key_of(trial), Prg.from_seed(trial, "power")
        numbers: list[float] = []
        for chunk in range(10):
            grams = [[(bytes([chunk, c, i]),) for i in range(10)] for c in range(2)]
            winner = grams[choose(key, grams, [1, 1], family, prg).index]
            numbers += [key.seed(gram).uniform for gram in winner]
        caught += scores.log_p(np.array(numbers), family) <= math.log(0.01)
    power = gamma_power(0.01, 100, 10, 2)
    assert abs(caught / texts - power) < 5 * math.sqrt(power * (1 - power) / texts)


def test_verdicts_are_joined_and_told() -> None:
    text = " ".join(marked_text(1, 120))
    files = [file_of(1), file_of(2)]
    verdict = detect(files, [WORDS, WORDS], text)
    logs = [one.log_p for one in verdict.keys]
    assert verdict.log_p == pytest.approx(scores.combined(logs)) and verdict.marked
    told = detect(files[:1], [WORDS], text, told=[math.exp(logs[1])])
    assert told.log_p == pytest.approx(verdict.log_p)
    said = as_json(verdict)
    assert said["marked"] is True and len(said["keys"]) == 2  # type: ignore[arg-type]
    assert as_p(-2000.0) == "2.6e-869" or as_p(-2000.0).endswith("e-869")
    assert not detect([file_of(3)], [WORDS], "!").marked
    for wrong in (
        lambda: detect([files[0]] * 2, [WORDS] * 2, text),
        lambda: detect(files[:1], [WORDS], text, told=[0.0]),
        lambda: detect(files[:1], [WORDS], text, alpha=1.0),
        lambda: detect(files[:1], [WORDS], text, score="best"),
    ):
        with pytest.raises(InputError):
            wrong()


def test_a_page_shows_the_text_as_it_is() -> None:
    import html
    import re

    text = "<script>&\n" + " ".join(marked_text(1, 60)) + "\n\t é <b>"
    verdict = detect([file_of(1)], [WORDS], text)
    made = page(text, verdict)
    assert "<script>" not in made and "<u>" in made and made.count("<u>") == made.count("</u>")
    (shown,) = re.findall(r"<pre>(.*)</pre>", made, re.DOTALL)
    assert html.unescape(re.sub(r"<[^>]*>", "", shown)) == text
    # An order of writing that is turned round would disguise what stands there.
    disguised = page(text + " \u202eb", detect([file_of(1)], [WORDS], text + " \u202eb"))
    assert "\u202e" not in disguised and "&lt;U+202E&gt;" in disguised
