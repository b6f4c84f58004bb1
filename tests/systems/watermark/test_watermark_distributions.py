"""Marked text has the distribution of unmarked text, exactly: chi-square tests against the
distribution of a chain, each with a false alarm once in a million seeds, which are fixed. What the
paper gets wrong, or does without, is seen by the same tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from spu_llm.core.errors import InputError
from spu_llm.core.prg import Prg
from spu_llm.systems.watermark.cdfs import Family
from spu_llm.systems.watermark.embedding import Embedder
from spu_llm.systems.watermark.history import History
from spu_llm.systems.watermark.keys import Scheme, Seed, token_unit
from spu_llm.systems.watermark.race_marks import MarkedNoise, race_text
from spu_llm.systems.watermark.sampler import Drawn
from spu_llm.systems.watermark.selecting import added, choose, own
from spu_llm.systems.watermark.units import TokenUnits
from tests.systems.watermark.chains import FALSE_ALARM, Chain, key_of, p_value

MU = {0: 0.5, 1: 0.3, 2: 0.2}
UNIFORM = Family()
TRIALS = 700


def embedder(
    number: int,
    keys: int,
    m: int,
    k: int,
    *,
    on: bool = True,
    family: Family = UNIFORM,
    chain: Chain | None = None,
    ngram: int = 3,
) -> Embedder:
    """Return a fresh key."""
    prg = Prg.from_seed(number, f"texts {keys} {m} {k} {on}")
    return Embedder(
        tuple(key_of(number, f"level {i}") for i in range(keys)),
        Scheme(ngram, family),
        chain or Chain(prg),
        TokenUnits(),
        m,
        k,
        tuple(History(on) for _ in range(keys)),
        prg,
    )


def test_one_token_has_the_distribution_of_the_model() -> None:
    prg = Prg.from_seed(0, "mu")
    drawn, plain, uniforms = [], [], {1: [], 2: [], 3: []}
    for trial in range(6000):
        key = key_of(trial)
        points = np.searchsorted([0.5, 0.8], prg.uniform((5,)), side="right")
        tokens, counts = np.unique(points, return_counts=True)
        grams = [[(bytes([t]),)] for t in tokens]
        chosen = choose(key, grams, counts.tolist(), UNIFORM, prg)
        numbers = [key.seed(gram[0]).uniform for gram in grams]
        drawn.append(int(tokens[chosen.index]))
        plain.append(int(tokens[int(np.argmax(numbers))]))
        uniforms.setdefault(int(counts[chosen.index]), []).append(numbers[chosen.index])
    assert p_value(drawn, MU) > FALSE_ALARM
    # Without the exponent m / c: another distribution, which is told.
    assert p_value(plain, MU) < FALSE_ALARM
    assert p_value(plain, {0: 0.414, 1: 0.333, 2: 0.253}) > FALSE_ALARM
    # Lemma A.2: Beta(m / c, 1), mean 1 / (1 + c / m); 6 standard errors.
    for count, mean in {1: 0.8333, 2: 0.7143, 3: 0.6250}.items():
        values = np.array(uniforms[count])
        assert abs(values.mean() - mean) < 6 * values.std() / np.sqrt(len(values)) + 5e-5


@pytest.mark.parametrize(
    ("keys", "m", "k", "family"),
    [
        (1, 3, 2, UNIFORM),
        (1, 4, 1, Family("normal")),
        (1, 3, 2, Family("chi2")),
        (1, 3, 2, Family("gamma", 2)),
        (2, 2, 2, UNIFORM),
    ],
)
def test_texts_have_the_distribution_of_the_model(
    keys: int, m: int, k: int, family: Family
) -> None:
    """Four tokens in chunks: their joint distribution, candidates that share n-grams included."""
    distribution = Chain(Prg.from_seed(0, "")).text_distribution(4)
    drawn = [
        embedder(trial, keys, m, k, family=family).text((0,), 4).content for trial in range(1200)
    ]
    assert p_value(drawn, distribution) > FALSE_ALARM


def test_two_texts_of_a_key_are_independent_with_a_history() -> None:
    distribution = {
        (*a, *b): p * q
        for (a, p), (b, q) in itertools.product(
            Chain(Prg.from_seed(0, "")).text_distribution(2).items(), repeat=2
        )
    }

    def pairs(on: bool) -> list[tuple[int, ...]]:
        collected = []
        for trial in range(900):
            marks = embedder(trial, 1, 4, 1, on=on, ngram=2)
            collected.append((*marks.text((0,), 2).content, *marks.text((0,), 2).content))
        return collected

    assert p_value(pairs(True), distribution) > FALSE_ALARM
    assert p_value(pairs(False), distribution) < FALSE_ALARM


@pytest.mark.parametrize(("m", "agreeing"), [(2, 0.625), (16, 0.860)])
def test_calls_of_one_key_agree_too_often_without_a_history(m: int, agreeing: float) -> None:
    def share(on: bool, trials: int) -> float:
        same = 0
        for trial in range(trials):
            prg = Prg.from_seed(trial, f"agree {m} {on}")
            marks = embedder(
                trial, 1, m, 1, on=on, chain=Chain(prg, (0.5, 0.5), np.full((2, 2), 0.5))
            )
            same += marks.text((0,), 1).content == marks.text((0,), 1).content
        return same / trials

    def spread(p: float, trials: int) -> float:
        return 5 * float(np.sqrt(p * (1 - p) / trials))

    assert abs(share(False, TRIALS) - agreeing) < spread(agreeing, TRIALS) + 5e-4
    assert abs(share(True, TRIALS) - 0.5) < spread(0.5, TRIALS)


def test_shared_seeds_need_one_owner() -> None:
    """Two texts with a seed each and one in common, p = (.7, .3), m = 4: .726 without owners."""

    def share(owners: Callable[..., list[list[Seed]]]) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("spu_llm.systems.watermark.selecting.own", owners)
            first = 0
            for trial in range(6000):
                prg = Prg.from_seed(trial, "shared")
                count = int((prg.uniform((4,)) < 0.7).sum())
                grams = [[(b"shared",), (b"a",)], [(b"shared",), (b"b",)]]
                counts = [count, 4 - count]
                present = [i for i in (0, 1) if counts[i]]
                chosen = choose(
                    key_of(trial),
                    [grams[i] for i in present],
                    [counts[i] for i in present],
                    UNIFORM,
                    prg,
                )
                first += present[chosen.index] == 0
        return first / 6000

    deviation = float(np.sqrt(0.7 * 0.3 / 6000))
    assert abs(share(own) - 0.7) < 5 * deviation
    kept = share(lambda seeds, prg, used: [list(one) for one in seeds])
    assert abs(kept - 0.726) < 5 * deviation and kept - 0.7 > 2 * deviation


def test_the_copy_index_trick_is_exact_too() -> None:
    """§8: m copies, each hashed with its rank among equals, and a plain argmax."""
    drawn = []
    for trial in range(6000):
        points = np.searchsorted([0.5, 0.8], Prg.from_seed(trial, "copy").uniform((4,)))
        key, ranks = key_of(trial, "copy"), {0: 0, 1: 0, 2: 0}
        numbers = []
        for token in points.tolist():
            numbers.append(key.seed((bytes([token]), bytes([ranks[token]]))).uniform)
            ranks[token] += 1
        drawn.append(int(points[int(np.argmax(numbers))]))
    assert p_value(drawn, MU) > FALSE_ALARM


@pytest.mark.parametrize("on", [True, False])
def test_a_race_has_the_distribution_of_the_model(on: bool) -> None:
    chain = Chain(Prg.from_seed(0, ""))

    def text(trial: int, history: History) -> tuple[int, ...]:
        noise = MarkedNoise(key_of(trial), 2, 3, history, Prg.from_seed(trial, "private"))
        tokens, _ = race_text(chain.distribution, noise, (0,), 3, frozenset())
        noise.finish(tokens)
        return tokens

    drawn = [text(trial, History(True)) for trial in range(1200)]
    assert p_value(drawn, chain.text_distribution(3)) > FALSE_ALARM
    pairs = []
    for trial in range(1200):
        history = History(on)
        pairs.append((*text(trial, history)[:1], *text(trial, history)[:1]))
    distribution = {(a, b): MU[a] * MU[b] for a in MU for b in MU}
    # With one key the first token of every text would be the same.
    assert (p_value(pairs, distribution) > FALSE_ALARM) == on


def test_n_grams_begin_where_the_prompt_ends() -> None:
    """What the prompt was makes no difference to what marks a text."""
    marks = embedder(0, 1, 4, 2)
    a, b, c, d = (token_unit(i) for i in range(4))
    one, other, nothing = Drawn((0, 1), False), Drawn((2, 3), True), Drawn((), True)
    assert added(marks.units, 3, (), [one]) == {one: [(a,), (a, b)]}
    actual = added(marks.units, 3, (0, 1), [other, nothing, other])
    assert actual == {other: [(a, b, c), (b, c, d)], nothing: []}
    made = marks.text((0,), 6)
    assert [len(chunk.seeds) for chunk in made.chunks] == [1, 1, 1]
    # The first token has an n-gram of one, whatever the prompt.
    first = key_of(0, "level 0").seed((token_unit(int(made.content[0])),))
    assert first.name in marks.histories[0]


def test_what_embeds_nothing_and_what_is_refused() -> None:
    alone = embedder(0, 1, 1, 2)
    made = alone.text((0,), 4)
    assert len(made.content) == 4 and all(chunk.distinct == 1 for chunk in made.chunks)
    with pytest.raises(InputError, match="1 to 4096 candidates"):
        embedder(0, 2, 65, 1)
    with pytest.raises(InputError, match="next token alone"):
        Embedder((key_of(0),), Scheme(3), Chain(Prg.from_seed(0, "")), TokenUnits(), None, 1)
    with pytest.raises(InputError, match="different ones"):
        Embedder((key_of(0), key_of(0)), Scheme(3), Chain(Prg.from_seed(0, "")), TokenUnits())
