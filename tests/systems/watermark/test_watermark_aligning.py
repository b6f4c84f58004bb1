"""A text against sessions: the recursion against all alignments, its distribution without a mark,
its power.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from protocols.verification.distribution import Sampling
from protocols.verification.marked import Marked
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark import aligning
from spu_llm.systems.watermark.aligning import (
    FOREIGN,
    LEAP,
    LOST,
    AlignmentPrior,
    log_evidence,
    rank,
)
from spu_llm.systems.watermark.sessions import Session, Shape
from tests.protocols.races import expected
from tests.systems.watermark.chains import FALSE_ALARM, key_of

BEFORE, FOREIGN_TOKEN, AFTER = -1, -2, -3


def stream_of(number: int) -> Prg:
    return Prg.from_seed(number, "session")


def place(row: int, shape: Shape) -> tuple[int, int]:
    """Forward, and row of it."""
    return (
        (0, 0)
        if row == 0
        else (1 + (row - 1) // (shape.drafts + 1), (row - 1) % (shape.drafts + 1))
    )


def step(one: int, other: int, shape: Shape, goes_on: float) -> float:
    """Return the chance that the row after `one` is `other`, if no token is missing."""
    (s, r), (s2, r2) = place(one, shape), place(other, shape)
    last = s == 0 or r == shape.drafts
    if s2 == s and r2 == r + 1:
        return 0.0 if last else goes_on
    return (1.0 if last else 1 - goes_on) if (s2, r2) == (s + 1, 0) else 0.0


def by_enumeration(ratios: np.ndarray, shape: Shape, distribution: AlignmentPrior) -> float:
    """Return the evidence as a sum over what each token may be: drawn by a row, or foreign, or
    outside.
    """
    tokens, rows = ratios.shape
    end = 0.5 / tokens
    total = 0.0
    for labels in itertools.product((BEFORE, FOREIGN_TOKEN, AFTER, *range(rows)), repeat=tokens):
        drawn = [i for i, label in enumerate(labels) if label >= 0]
        if not drawn:
            continue
        begins, at = drawn[0], labels[drawn[0]]
        weight = (0.5 * (begins == 0) + 0.5 / tokens) * (0.5 * (at == 0) + 0.5 / rows)
        weight *= ratios[begins, at]
        over = False
        for i, label in enumerate(labels):
            if i < begins:
                weight *= label == BEFORE
            elif i > begins:
                if label == AFTER:
                    weight *= 1.0 if over else end
                    over = True
                elif over or label == BEFORE:
                    weight = 0.0
                elif label == FOREIGN_TOKEN:
                    weight *= FOREIGN
                else:
                    goes_on = float(distribution.goes_on[i - 1])
                    two = sum(
                        step(at, m, shape, goes_on) * step(m, label, shape, goes_on)
                        for m in range(rows)
                    )
                    chance = (1 - LOST - LEAP) * step(at, label, shape, goes_on) + LOST * two
                    chance += LEAP / rows * (label > at)
                    weight *= (1 - FOREIGN - end) * chance * ratios[i, label]
                    at = label
            if not weight:
                break
        total += weight
    return total


def ratios_of(stream: Prg, shape: Shape, tokens: Sequence[int]) -> np.ndarray:
    """Return ratios from numbers that are drawn one after the other, as the provider draws them."""
    drawn = stream.uniform((shape.rows, shape.vocab))
    known = np.array(tokens) < shape.vocab
    cells = (drawn[:, np.where(known, tokens, 0)].T * 2**16).astype(int)
    return np.where(known[:, None], aligning.table()[cells], 0.0)


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (Shape(7, 1, 3), [3, 6, 0, 3]),
        (Shape(4, 2, 2), [1, 1, 2]),
        (Shape(5, 0, 4), [4, 2, 2, 0]),
        (Shape(5, 3, 1), [0, 1]),
        (Shape(5, 1, 3), [5, 2, 7, 1]),
    ],
)
def test_the_recursion_is_the_sum_over_all_alignments(shape: Shape, tokens: list[int]) -> None:
    chances = np.array([0.3, 0.8, 0.5, 0.9])[: len(tokens)]
    distributions = [AlignmentPrior(chances), *AlignmentPrior.unknown(len(tokens))[:1]]
    evidence = log_evidence([stream_of(0), stream_of(1)], shape, tokens, distributions)
    for number, log in enumerate(evidence):
        ratios = ratios_of(stream_of(number), shape, tokens)
        sums = [by_enumeration(ratios, shape, distribution) for distribution in distributions]
        assert math.exp(log) == pytest.approx(sum(sums) / 2, rel=1e-9)
    sums = []
    for i in (None, *range(len(tokens))):
        ratios = ratios_of(stream_of(0), shape, tokens)
        ratios[i if i is not None else slice(0)] = 0
        sums.append(
            sum(by_enumeration(ratios, shape, distribution) for distribution in distributions)
        )
    surely = aligning.drawn(stream_of(0), shape, tokens, distributions)
    np.testing.assert_allclose(surely, 1 - np.array(sums[1:]) / sums[0], rtol=1e-9, atol=1e-12)
    # A distribution of alignments: weights add up to 1, less what would come after the last
    # forward.
    whole = by_enumeration(np.ones((len(tokens), shape.rows)), shape, distributions[0])
    assert 0.3 < whole <= 1 + 1e-12


def test_a_ratio_has_mean_one_and_grows() -> None:
    table = aligning.table()
    assert sum(aligning.WEIGHTS) == pytest.approx(1, abs=1e-12)
    assert table.mean() == pytest.approx(1, abs=1e-12) and (np.diff(table) > 0).all()


@pytest.mark.parametrize("block", [1 << 21, 1])
def test_how_much_is_worked_on_at_once_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    shape, tokens = Shape(9, 2, 30), [i * i % 9 for i in range(20)]
    streams = [stream_of(i) for i in range(5)]
    whole = log_evidence(streams, shape, tokens, AlignmentPrior.unknown(20))
    monkeypatch.setattr(aligning, "_CELLS", block)
    monkeypatch.setattr(aligning, "_BLOCK", 3)
    done: list[tuple[int, int]] = []
    evidence = log_evidence(
        streams, shape, tokens, AlignmentPrior.unknown(20), lambda *numbers: done.append(numbers)
    )
    np.testing.assert_allclose(evidence, whole, rtol=1e-9)
    assert done[-1] == (5, 5)


def test_without_a_mark_p_is_uniform_by_rank() -> None:
    """240 texts against 19 nonces each: ranks are uniform (chi-square, false-alarm rate 1e-6); 1 /
    evidence is below 0.1 in a tenth of all cases at most (the same rate, binomial).
    """
    shape, rng = Shape(30, 2, 14), np.random.default_rng(1)
    distributions = [AlignmentPrior(np.full(12, 0.5))]
    ranks, small, total = np.zeros(20, int), 0, 0
    for number in range(240):
        tokens = rng.integers(0, 30, 12).tolist()
        logs = log_evidence(
            [stream_of(20 * number + i) for i in range(20)], shape, tokens, distributions
        )
        ranks[round(20 * rank(logs[0], logs[1:])) - 1] += 1
        small += int((logs >= math.log(10)).sum())
        total += 20
    assert stats.chisquare(ranks).pvalue > FALSE_ALARM
    assert stats.binom.sf(small - 1, total, 0.1) > FALSE_ALARM


# ---- power

VOCAB, SHAPE = 64, Shape(64, 4, 120)
SOME = 0.3 * 0.7 ** np.arange(20)  # about three bits a token


def model(last: int) -> np.ndarray:
    """Logits after a token."""
    rows = np.full(VOCAB, -50.0)
    rows[np.random.default_rng(last).permutation(VOCAB)[: SOME.size]] = np.log(SOME)
    return rows


def written(stream: Prg, tokens: int) -> tuple[list[int], np.ndarray]:
    """Return a text of a session with this stream, and which tokens the client's model has drafted,
    or would have: its drafts are the private model's own likeliest ones.
    """
    rule, text, drafted = Marked(Sampling()), [0], []
    noise = rule.provider_input(0, VOCAB, stream)
    while len(text) <= tokens:
        drafts: list[int] = []
        for _ in range(len(noise) - 1):
            drafts.append(int(model([*text, *drafts][-1]).argmax()))
        rows = np.stack([model(t) for t in (text[-1], *drafts)])
        k, token = expected(rows + noise, np.array(drafts))
        for t in (*drafts[:k], token):
            drafted.append(t == int(model(text[-1]).argmax()))
            text.append(t)
        noise = rule.provider_input(SHAPE.drafts, VOCAB, stream)
    return text[1 : tokens + 1], np.array(drafted[:tokens])


def evidence(number: int, tokens: Sequence[int], drafts: np.ndarray | None = None) -> float:
    """Return log10 under a session's stream."""
    distributions = (
        AlignmentPrior.unknown(len(tokens)) if drafts is None else AlignmentPrior.guessed(drafts)
    )
    return float(log_evidence([stream_of(number)], SHAPE, tokens, distributions)[0]) / math.log(10)


def drafted(tokens: Sequence[int]) -> np.ndarray:
    """Return what the client's model would have drafted, as the text alone tells."""
    pairs = itertools.pairwise(tokens)
    return np.array([False, *(int(model(last).argmax()) == token for last, token in pairs)])


def test_texts_of_a_hundred_tokens_are_found() -> None:
    """Five sessions of three bits a token: the whole text by itself; with its drafts told by the
    text also excerpts, within other text, and with tokens replaced, left out and put in. No other
    session fits.
    """
    rng = np.random.default_rng(2)
    for number in range(5):
        text, drafts = written(stream_of(number), 100)
        assert evidence(number, text) > 6 and evidence(number + 5, text) < 2
        np.testing.assert_array_equal(drafts[1:], drafted(text)[1:])
        around = rng.integers(0, VOCAB, 60).tolist()
        mixed = [*around[:10], *text, *around[10:]]
        edited = [*text[:30], *text[31:50], 5, *text[50:70], 7, 8, *text[72:]]
        cases = (text, 12), (text[30:95], 6), (text[40:80], 3), (mixed, 9), (edited, 9)
        for actual, least in cases:
            assert evidence(number, actual, drafted(actual)) > least
            assert evidence(number + 5, actual, drafted(actual)) < 2
        surely = aligning.drawn(
            stream_of(number), SHAPE, mixed, AlignmentPrior.guessed(drafted(mixed))
        )
        assert surely[20:100].mean() > 0.9
        assert max(surely[:5].max(), surely[-15:].max()) < 0.5  # about where, not to the token


def test_drafts_that_are_none_of_the_clients_hide_no_mark() -> None:
    """By themselves they would; beside the distributions of unknown drafts they cost a tenth of a
    digit of p, and guesses that are right lose 0.7.
    """
    rng = np.random.default_rng(4)
    for number in range(3):
        text, drafts = written(stream_of(number), 100)
        garbage = rng.random(100) < 0.5

        def by(
            distributions: Sequence[AlignmentPrior], number: int = number, text: list[int] = text
        ) -> float:
            return float(
                log_evidence([stream_of(number)], SHAPE, text, distributions)[0]
            ) / math.log(10)

        unknown = by(AlignmentPrior.unknown(100))
        assert by(AlignmentPrior.mixed(garbage)) > unknown - 0.1 > 5
        assert by(AlignmentPrior.guessed(garbage)) < unknown - 2
        assert by(AlignmentPrior.mixed(drafts)) > by(AlignmentPrior.guessed(drafts)) - 0.7
        other = log_evidence([stream_of(number + 5)], SHAPE, text, AlignmentPrior.mixed(garbage))
        assert other[0] < 2 * math.log(10)


def test_tokens_that_the_vocabulary_lacks_say_nothing() -> None:
    """At the beginning, within and at the end of a marked text; alone they are no evidence."""
    text, drafts = written(stream_of(0), 100)
    strange = [VOCAB, *text[:50], VOCAB + 7, *text[50:], 10**6, VOCAB]
    guess = np.array([False, *drafts[:50], False, *drafts[50:], False, False])
    assert evidence(0, strange, guess) > 5 and evidence(5, strange, guess) < 2
    surely = aligning.drawn(stream_of(0), SHAPE, strange, AlignmentPrior.guessed(guess))
    assert np.isfinite(surely).all() and surely[10:90].mean() > 0.9
    nothing = evidence(0, [VOCAB] * 300)
    assert math.isfinite(nothing) and nothing < 0


def test_the_right_session_is_found_among_many() -> None:
    """With p over all of them: the mean of the evidence of 60, of two shapes."""
    key = key_of(1)
    sessions = [
        Session(bytes([i]) * 16, "2026-01-31T12:00:00Z", SHAPE if i % 3 else Shape(VOCAB, 2, 40))
        for i in range(60)
    ]
    text, _ = written(key.session(sessions[20].nonce), 100)
    done: list[tuple[int, int]] = []
    evidence = aligning.detect(
        key, sessions, text, AlignmentPrior.unknown(100), 19, lambda *numbers: done.append(numbers)
    )
    assert evidence.best == sessions[20] and evidence.log_p < math.log(1e-3)
    assert evidence.rank == 1.0 and evidence.references == 19  # 60 sessions, each at 1 / 20
    assert done[-1] == (79, 79) and done == sorted(done)
    alone = aligning.detect(key, [sessions[20]], text, AlignmentPrior.unknown(100), 19)
    assert alone.rank == 0.05 and alone.log_p < evidence.log_p
    other = aligning.detect(key_of(2), sessions, text, AlignmentPrior.unknown(100))
    assert other.log_p > math.log(1e-2) and other.rank is None
    nobody = aligning.detect(key, [], text, AlignmentPrior.unknown(100))
    assert nobody.best is None and nobody.log_p == 0
